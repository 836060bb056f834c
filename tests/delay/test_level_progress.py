"""Delay levels across restarts: released messages, positions and marks."""

from __future__ import annotations

import pytest

from mqtemplate.delay.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store.tables import read_table
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.foreign_records import foreign_copy, foreign_level_message

SECOND, MINUTE = 1_000, 60_000


def marker(record: StoredRecord) -> RecordDraft:
    """Return the marker that replaces a cancelled message."""
    kept = {name: decode_properties(record.properties_bytes)[name] for name in ("REAL_TOPIC", "REAL_QID")}
    due = {"TIMER_DELIVER_MS": "1000", "TIMER_OUT_MS": "0", "TIMER_DEL_UNIQKEY": "-", "__STEERED": "1"}
    return linked(record, TIMER_TOPIC, kept | due)


def linked(record: StoredRecord, topic: str, properties: dict[str, str]) -> RecordDraft:
    source = record.physical_offset
    return RecordDraft(topic, 0, record.body, encode_properties(properties), prepared_transaction_offset=source + 1)


# --- progress ---------------------------------------------------------------------------------------


@pytest.mark.feature("D9")
@pytest.mark.parametrize("text", [b"{", b"[]", b'{"offsetTable":7}', b'{"offsetTable":{"1":-1}}', b"\xff"])
def test_an_unreadable_file_is_rebuilt_from_the_log(open_engine: OpenEngine, text: bytes) -> None:
    """The copies in the log show what was released. No message is released again."""
    engine = open_engine()
    engine.send(b"done", DELAY=1)
    engine.send(b"pending", DELAY=3)
    engine.advance(1 * SECOND)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, text)

    engine = open_engine()

    assert engine.schedule.positions == {1: 1, 3: 0}
    engine.advance(60 * SECOND)
    assert engine.bodies() == [b"done", b"pending"]


@pytest.mark.feature("F20")
def test_progress_before_the_start_of_the_queue_is_corrected(open_engine: OpenEngine) -> None:
    """RocketMQ's file may be older than the queue. The minimum offset is used instead."""
    engine = open_engine(queue_file_size=200)
    puts = [engine.send(b"%d" % number, DELAY=1) for number in range(25)]
    queue = engine.store.consume_queue(SCHEDULE_TOPIC, 0)
    queue.delete_before(puts[20].physical_offset)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:3}}')

    engine = open_engine(queue_file_size=200)

    assert engine.schedule.positions == {1: 20}
    engine.advance(1 * SECOND)
    assert engine.bodies() == [b"20", b"21", b"22", b"23", b"24"]


# --- progress out of order --------------------------------------------------------------------------


@pytest.mark.feature("D29")
def test_progress_is_written_once_the_copies_are_on_disk(open_engine: OpenEngine) -> None:
    """RocketMQ flushes its progress file, but not the copies."""
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.advance(1 * SECOND)
    assert engine.store.group_commit.flushed < engine.store.end_offset

    engine.schedule.persist()

    assert engine.store.group_commit.flushed == engine.store.end_offset
    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 1}


@pytest.mark.feature("D30")
def test_closing_in_the_middle_of_a_backlog_neither_loses_nor_repeats_messages(open_engine: OpenEngine) -> None:
    """A step is complete before its progress is written. No result is pending in another thread."""
    engine = open_engine()
    bodies = [b"%d" % number for number in range(1_500)]
    for body in bodies:
        engine.send(body, DELAY=1)
    engine.clock.move_ms(1 * SECOND)
    engine.schedule.step()
    count = len(engine.bodies())
    assert 0 < count < 1_500
    engine.close()

    engine = open_engine()
    assert engine.schedule.positions == {1: count}
    engine.release_due()

    assert engine.bodies() == bodies


# --- cancelled messages ---------------------------------------------------------------------------------------


def test_a_copy_without_its_marker_replaces_the_message(open_engine: OpenEngine) -> None:
    """A kill in the middle of a reschedule may leave the copy without the marker."""
    engine = open_engine()
    put = engine.send(b"moved", DELAY=1)
    record = engine.store.read(put.physical_offset, put.size)
    engine.put(linked(record, "orders", decode_properties(record.properties_bytes) | {"__STEERED": "1"}))
    engine.crash()

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"moved"]


def test_a_marker_with_another_offset_removes_nothing(open_engine: OpenEngine) -> None:
    """The offset in a marker may belong to a record that was never in this queue."""
    engine = open_engine()
    put = engine.send(b"kept", DELAY=1)
    record = engine.store.read(put.physical_offset, put.size)
    engine.put(marker(record._replace(physical_offset=record.physical_offset + 1)))
    engine.crash()

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"kept"]


# --- after RocketMQ ---------------------------------------------------------------------------------


@pytest.mark.feature("D7", "D13")
def test_a_message_that_rocketmq_dropped_goes_to_the_dead_letters(open_engine: OpenEngine) -> None:
    """RocketMQ skips a message whose real topic or queue is invalid."""
    engine = open_engine()
    for number in range(3):
        other = {"REAL_QID": "none"} if number == 1 else {}
        engine.put(foreign_level_message(b"%d" % number, 1, 1 * SECOND, UNIQ_KEY=f"A{number}", **other))
    first, _, third = engine.delayed_records()
    engine.store.take_checkpoint()
    engine.clock.move_ms(1 * SECOND)
    engine.put(foreign_copy(first))
    engine.put(foreign_copy(third))
    engine.crash()

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.bodies() == [b"0", b"2"]
    assert engine.bodies(UNDELIVERABLE_TOPIC) == [b"1"]
