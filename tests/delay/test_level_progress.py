"""Delay levels across restarts: released messages, positions and marks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.delay.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store.tables import read_table
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
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


def cancel(engine: DelayEngine, put: PutResult) -> None:
    record = engine.store.read(put.physical_offset, put.size)
    with engine.schedule.lock:
        engine.schedule.catch_up()
        assert engine.schedule.find(record) is not None
        engine.put(marker(record))
        engine.schedule.remove(record)
        assert engine.schedule.find(record) is None


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


@pytest.mark.feature("D9")
def test_an_older_progress_file_releases_no_message_again(open_engine: OpenEngine) -> None:
    """If only the ``.bak`` is left, the log shows what was released since."""
    engine = open_engine()
    for body in (b"first", b"second", b"third"):
        engine.send(body, DELAY=1)
        engine.advance(1 * SECOND)
        engine.store.take_checkpoint()
    engine.close()
    engine.store_files.delete(DELAY_OFFSET_FILE)
    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 2}

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.schedule.positions == {1: 3}
    assert engine.bodies() == [b"first", b"second", b"third"]


def test_rocketmqs_progress_of_levels_that_the_table_does_not_have_is_kept(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.send(b"", DELAY=18)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:0,18:0}}')

    engine = open_engine(levels="1s 5s")
    engine.advance(1 * SECOND)
    engine.store.take_checkpoint()

    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 1, "18": 0}


@pytest.mark.feature("D7")
def test_a_level_that_lost_its_queue_is_rebuilt_from_the_log(open_engine: OpenEngine, tmp_path: Path) -> None:
    """No later message of the level shows that its queue is missing; the progress file does."""
    engine = open_engine()
    engine.send(b"1s", DELAY=1)
    engine.send(b"10s", DELAY=3)
    engine.close()
    shutil.rmtree(tmp_path / "consumequeue" / SCHEDULE_TOPIC / "2")

    engine = open_engine()
    engine.advance(10 * SECOND)

    assert engine.bodies() == [b"1s", b"10s"]
    assert engine.schedule.positions == {1: 1, 3: 1}


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


def shortened(open_engine: OpenEngine) -> DelayEngine:
    """Return an engine whose table was shortened: the later messages of one queue are due first, and released."""
    engine = open_engine(levels="1m")
    engine.send(b"minute", DELAY=1)
    engine.change_table("1s")
    engine.send(b"second", DELAY=1)
    engine.send(b"again", DELAY=1)
    engine.advance(1 * SECOND)
    assert engine.bodies() == [b"second", b"again"]
    return engine


@pytest.mark.feature("D8", "D11")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [DelayEngine.close, DelayEngine.crash])
def test_messages_that_were_released_out_of_order_are_not_repeated(
    open_engine: OpenEngine, has_checkpoint: bool, ends: Callable[[DelayEngine], None]
) -> None:
    """After the checkpoint the copies in the log show it, before it the marks in the queue."""
    engine = shortened(open_engine)
    if has_checkpoint:
        engine.store.take_checkpoint()
    ends(engine)

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"minute"]


def lose_checkpoint_too(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue")
    (folder / "checkpoint").unlink()


def lose_queues(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue")


def lose_schedule_queues(folder: Path) -> None:
    shutil.rmtree(folder / "consumequeue" / SCHEDULE_TOPIC)


def damage_schedule_queue(folder: Path) -> None:
    [file] = (folder / "consumequeue" / SCHEDULE_TOPIC / "0").iterdir()
    data = bytearray(file.read_bytes())
    data[20:40] = bytes(20)
    file.write_bytes(data)


@pytest.mark.feature("X11")
@pytest.mark.parametrize("lose", [lose_checkpoint_too, lose_queues, lose_schedule_queues, damage_schedule_queue])
def test_lost_queues_are_rebuilt_with_their_marks_and_due_times(
    open_engine: OpenEngine, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """The queues had the marks, and the due times of an earlier table."""
    engine = shortened(open_engine)
    engine.store.take_checkpoint()
    engine.crash()
    lose(tmp_path)

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"minute"]
    assert engine.arrived()[-1].at_ms == engine.clock.now_ms() - 1 * SECOND


@pytest.mark.feature("X11")
def test_a_queue_that_lost_its_end_is_rebuilt_with_its_marks(open_engine: OpenEngine, tmp_path: Path) -> None:
    """The loss shows only because the log continues after the queue's last unit."""
    engine = shortened(open_engine)
    engine.store.take_checkpoint()
    engine.send(b"last", DELAY=1)
    engine.crash()
    [file] = (tmp_path / "consumequeue" / SCHEDULE_TOPIC / "0").iterdir()
    file.write_bytes(file.read_bytes()[:20].ljust(file.stat().st_size, b"\0"))

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"last", b"minute"]


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


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [DelayEngine.close, DelayEngine.crash])
def test_a_removal_survives_a_restart(
    open_engine: OpenEngine, has_checkpoint: bool, ends: Callable[[DelayEngine], None]
) -> None:
    """After the checkpoint the marker in the log shows it, before it the mark in the queue."""
    engine = open_engine()
    engine.send(b"kept", DELAY=1)
    cancel(engine, engine.send(b"cancelled", DELAY=1))
    if has_checkpoint:
        engine.store.take_checkpoint()
    ends(engine)

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"kept"]


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


def release_like_rocketmq(engine: DelayEngine, count: int) -> None:
    """Append the copies of the first messages of level 1 as RocketMQ does, without our service."""
    for record in engine.delayed_records()[:count]:
        engine.put(foreign_copy(record))


@pytest.mark.feature("D8")
@pytest.mark.parametrize("is_ours", [True, False])
def test_messages_that_rocketmq_released_are_not_repeated(open_engine: OpenEngine, is_ours: bool) -> None:
    """Its progress file is up to ten seconds old. Its copies do not name their sources."""
    engine = open_engine()
    for number in range(5):
        body = b"%d" % number
        unique = {"UNIQ_KEY": f"A{number}"}
        if is_ours:
            engine.send(body, DELAY=1, **unique)
        else:
            engine.put(foreign_level_message(body, 1, 1 * SECOND, **unique))
    engine.store.take_checkpoint()
    engine.clock.move_ms(1 * SECOND)
    release_like_rocketmq(engine, 3)
    engine.crash()

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.bodies() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.feature("D9")
def test_without_rocketmqs_file_its_copies_show_what_was_released(open_engine: OpenEngine) -> None:
    """RocketMQ itself would release its whole backlog again."""
    engine = open_engine()
    for number in range(5):
        engine.put(foreign_level_message(b"%d" % number, 1, number * SECOND, UNIQ_KEY=f"A{number}"))
        engine.clock.move_ms(1 * SECOND)
    release_like_rocketmq(engine, 3)
    engine.close()
    for name in (DELAY_OFFSET_FILE, f"{DELAY_OFFSET_FILE}.bak"):
        engine.store_files.delete(name)

    engine = open_engine()

    assert engine.schedule.positions == {1: 3}
    engine.advance(60 * SECOND)
    assert engine.bodies() == [b"0", b"1", b"2", b"3", b"4"]


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


@pytest.mark.feature("D11")
def test_a_message_that_rocketmq_released_early_is_not_repeated(open_engine: OpenEngine) -> None:
    """After a delay was shortened, RocketMQ releases a message at once if its due time is later than the new delay."""
    engine = open_engine(levels="10m")
    engine.send(b"10m", DELAY=1, UNIQ_KEY="A1")
    engine.send(b"20m", DELAY=1, UNIQ_KEY="A2")
    engine.store.take_checkpoint()
    release_like_rocketmq(engine, 1)
    engine.crash()

    engine = open_engine(levels="1s")
    engine.advance(20 * MINUTE)

    assert engine.bodies() == [b"10m", b"20m"]
