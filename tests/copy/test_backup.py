"""Backup of a store directory in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.copy.backup import backup_store
from mqtemplate.errors import CorruptRecordError, StoreError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.operations.doctor import examine
from mqtemplate.record.layout import (
    BODY_AT,
    BODY_CRC_AT,
    PREPARED_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
)
from tests.copy.recorded import RecordedRun, opened_state, small_settings, state_of
from tests.operations.brokers import fill
from tests.store.small_store import overwrite


def test_a_backup_of_a_directory_in_use_has_the_state_of_its_owner(tmp_path: Path) -> None:
    """Messages, pending ones, cancels and committed offsets: the same as in the original, which stays open."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path / "store", small_settings(), clock) as broker:
        RecordedRun(broker, clock, seed=1).run(30)

        summary = backup_store(tmp_path / "store", tmp_path / "backup", small_settings(), clock=clock)
        state = state_of(broker)

    assert opened_state(tmp_path / "backup", clock.now_ms()) == state
    assert (summary.message_count, summary.pending_count) == (len(state.delivered), len(state.pending))


def test_a_backup_while_messages_are_stored_has_all_that_were_acknowledged_before(tmp_path: Path) -> None:
    """A thread sends as fast as it can; the backup is one of its states, and the doctor finds no damage."""
    acknowledged = 0
    is_done = threading.Event()
    has_started = threading.Event()

    def send() -> None:
        nonlocal acknowledged
        while not is_done.is_set():
            broker.sends.send(Message("orders", b"%d" % acknowledged), MessageQueue("orders", broker.name, 0))
            acknowledged += 1
            if acknowledged == 200:
                has_started.set()

    with EmbeddedBroker(tmp_path / "store", small_settings()) as broker:
        broker.create_topic("orders", 1)
        sender = threading.Thread(target=send)
        sender.start()
        has_started.wait()
        before = acknowledged
        try:
            backup_store(tmp_path / "store", tmp_path / "backup", small_settings())
        finally:
            is_done.set()
            sender.join()

    report = examine(tmp_path / "backup", small_settings())
    assert not report.is_damaged, report
    assert report.warnings == []
    assert before <= report.message_counts["orders"] <= acknowledged


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(BODY_CRC_AT, id="checksum"),
        pytest.param(QUEUE_ID_AT, id="queue id"),
        pytest.param(QUEUE_OFFSET_AT + 7, id="queue offset"),
        pytest.param(SYS_FLAG_AT + 3, id="sys flag"),
        pytest.param(PREPARED_OFFSET_AT + 7, id="prepared transaction offset"),
        pytest.param(BODY_AT, id="body"),
        pytest.param(BODY_AT + 2, id="topic"),
        pytest.param(0, id="size"),
    ],
)
@pytest.mark.parametrize("number", [0, 4])
def test_a_record_that_is_damaged_in_the_original_changes_no_other_one(
    tmp_path: Path, damaged: int, number: int
) -> None:
    """The log is written from bytes that were verified; what was damaged before is an error of that message only."""
    with EmbeddedBroker(tmp_path / "store", small_settings()) as broker:
        broker.create_topic("orders", 1)
        queue = MessageQueue("orders", broker.name, 0)
        starts = [
            broker.sends.send(Message("orders", b"%d" % each, {"TAGS": "paid"}), queue).queue_offset
            for each in range(8)
        ]
        units = [broker.store.consume_queue("orders", 0).unit(at) for at in starts]
    path = tmp_path / "store" / "commitlog" / f"{0:020d}"
    at = units[number].physical_offset + damaged
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 0x54]))

    backup_store(tmp_path / "store", tmp_path / "backup", small_settings())

    with EmbeddedBroker(tmp_path / "backup", small_settings()) as broker:
        found = broker.store.consume_queue("orders", 0)
        assert found.max_offset == 8
        for each in range(8):
            unit = found.unit(each)
            if each != number:
                assert unit == units[each]
                assert broker.store.read(unit.physical_offset, unit.size).body == b"%d" % each
            else:
                with pytest.raises(CorruptRecordError):
                    broker.store.read(unit.physical_offset, unit.size)


def test_a_backup_is_never_written_over_something(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store") as broker:
        fill(broker)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("keep me")

    with pytest.raises(StoreError, match=r"used is not empty; give a folder that does not exist yet, or an empty one"):
        backup_store(tmp_path / "store", tmp_path / "used")
    with pytest.raises(StoreError, match=r"below is in .*store; give a folder for the backup that is not in the store"):
        backup_store(tmp_path / "store", tmp_path / "store" / "below")
    with pytest.raises(StoreError, match="does not exist; give the directory of a broker that was started"):
        backup_store(tmp_path / "missing", tmp_path / "backup")

    assert [path.name for path in (tmp_path / "used").iterdir()] == ["letter.txt"]
