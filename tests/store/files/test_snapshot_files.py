"""A snapshot of a store directory: a broker works on it, and the directory stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.store.files.folder_store_files import FolderStoreFiles, SnapshotStoreFiles
from mqtemplate.store.recovery import Recovery

HOUR_MS = 3_600_000


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the times and bytes of all files."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def snapshot_of(folder: Path, clock: VirtualClock) -> EmbeddedBroker:
    return EmbeddedBroker(clock=VirtualClock(clock.now_ms()), store_files=SnapshotStoreFiles(folder))


def fill(broker: EmbeddedBroker) -> None:
    for number in range(5):
        broker.sends.send(
            Message("orders", b"%d" % number, {Property.KEYS: f"key-{number}"}), MessageQueue("orders", "broker-a", 0)
        )
    broker.sends.send(Message("orders", b"later", {Property.TIMER_DELAY_MS: str(HOUR_MS)}))
    broker.sends.send(Message("orders", b"level", {Property.DELAY: "3"}))


def test_a_broker_on_a_snapshot_reads_what_its_owner_has_stored(tmp_path: Path) -> None:
    """The owner has the directory open, and has not even taken a checkpoint."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as owner:
        fill(owner)
        before = contents(tmp_path)
        with snapshot_of(tmp_path, clock) as broker:
            pulled = broker.reader.pull(MessageQueue("orders", broker.name, 0), 0).messages
            found = broker.reader.messages_by_key("orders", "key-3")
            pending = broker.delayed.pending(PendingQuery(topic="orders")).messages
        after = contents(tmp_path)

    assert [message.body for message in pulled] == [b"0", b"1", b"2", b"3", b"4"]
    assert [message.body for message in found] == [b"3"]
    assert [message.delay_level for message in pending] == [3, 0]
    assert after == before


def test_a_snapshot_does_not_change_while_its_owner_continues(tmp_path: Path) -> None:
    clock = VirtualClock()
    queue = MessageQueue("orders", "broker-a", 0)
    with EmbeddedBroker(tmp_path, clock=clock) as owner:
        fill(owner)
        with snapshot_of(tmp_path, clock) as broker:
            owner.sends.send(Message("orders", b"new"), queue)

            assert broker.reader.max_offset(queue) == 5
        with snapshot_of(tmp_path, clock) as broker:
            assert broker.reader.max_offset(queue) == 6


@pytest.mark.parametrize("count", [1, 2])
def test_an_owner_that_sends_while_a_snapshot_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The reader has found the end of the log, and before it looks there again, records follow."""
    clock = VirtualClock()
    queue = MessageQueue("orders", "broker-a", 0)
    judge, sends = Recovery._judge, iter([count, 1])

    def judge_later(recovery: Recovery, offset: int, reason: str) -> int | None:
        for number in range(next(sends, 0)):
            owner.sends.send(Message("orders", b"meanwhile %d" % number), queue)
        return judge(recovery, offset, reason)

    with EmbeddedBroker(tmp_path, clock=clock) as owner:
        fill(owner)
        monkeypatch.setattr(Recovery, "_judge", judge_later)
        with capture_logs() as logs, snapshot_of(tmp_path, clock) as broker:
            bodies = [message.body for message in broker.reader.pull(queue, 0, max_count=32).messages]

    assert bodies[:5] == [b"0", b"1", b"2", b"3", b"4"]
    assert bodies[5 : 5 + count] == [b"meanwhile %d" % number for number in range(count)]
    assert [each for each in logs if each["log_level"] in ("warning", "error")] == []


def test_a_record_that_its_owner_is_writing_ends_a_snapshot_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as owner:
        fill(owner)
        end = owner.engine.store.end_offset
        [log] = (tmp_path / "commitlog").iterdir()
        with log.open("r+b") as file:  # the head of the next record
            file.seek(end)
            file.write(bytes.fromhex("000000c8daa320a7") + b"half")
        with capture_logs() as logs, snapshot_of(tmp_path, clock) as broker:
            assert broker.reader.max_offset(MessageQueue("orders", "broker-a", 0)) == 5

    assert [each for each in logs if each["log_level"] in ("warning", "error")] == []


def test_what_happens_on_a_snapshot_stays_in_memory(tmp_path: Path) -> None:
    """Messages are sent and released there, files are rolled, and the tables are written."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as owner:
        fill(owner)
    before = contents(tmp_path)
    with snapshot_of(tmp_path, clock) as broker:
        broker.create_topic("another", 2)
        broker.sends.send(Message("orders", b"on the snapshot"))
        broker.clock.move_ms(2 * HOUR_MS)  # type: ignore[attr-defined]  # it is a virtual clock
        for _ in range(4):
            for service in broker.services():
                service.step()
        bodies = {
            message.body
            for queue in broker.queues("orders")
            for message in broker.reader.pull(queue, 0, max_count=32).messages
        }
        broker.groups.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)

    assert {b"later", b"level", b"on the snapshot"} <= bodies
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("name", "text"), [("empty", "is not a store"), ("missing", "does not exist")])
def test_another_folder_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(StoreError, match=text):
        SnapshotStoreFiles(tmp_path / name)

    assert list((tmp_path / "empty").iterdir()) == []


def test_the_owner_of_a_directory_is_found_without_taking_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with EmbeddedBroker(folder):
        owner = FolderStoreFiles(folder).locked_by()
        program = (
            "import sys; from pathlib import Path; "
            "from mqtemplate.store.files.folder_store_files import FolderStoreFiles; "
            "print(FolderStoreFiles(Path(sys.argv[1])).locked_by())"
        )
        seen = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)

    assert (owner, seen.stdout.strip()) == (str(os.getpid()), str(os.getpid()))
    assert FolderStoreFiles(folder).locked_by() is None
    assert FolderStoreFiles(tmp_path / "none").locked_by() is None
