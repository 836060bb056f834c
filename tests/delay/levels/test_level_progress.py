"""Delay levels over restarts: what is handed over, and where that stands written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.delay import DEAD_LETTER_TOPIC, DelayLevels
from mqtemplate.delay.levels.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import encode_properties
from mqtemplate.store import PutResult
from mqtemplate.store.files.json_files import read_table
from mqtemplate.store.layout import DONE_SIZE_MARK
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import foreign_copy, foreign_level_message

SECOND, MINUTE = 1_000, 60_000


def change_table(engine: DelayEngine, text: str) -> None:
    """At run time: for the front door, and for the service."""
    engine.levels = DelayLevels.parse(text)


def marker(record: StoredRecord) -> RecordDraft:
    """What takes the place of a waiting message that was cancelled."""
    kept = {name: record.properties[name] for name in ("REAL_TOPIC", "REAL_QID")}
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


@pytest.mark.feature("F9", "F10", "F12")
def test_progress_is_kept_in_upstreams_file(open_engine: OpenEngine) -> None:
    """Level -> next queue offset; written at a checkpoint and at the end."""
    engine = open_engine()
    engine.send(b"", DELAY=2)
    engine.send(b"", DELAY=2)
    engine.send(b"", DELAY=4)
    engine.advance(5 * SECOND)
    engine.store.take_checkpoint()

    table = read_table(engine.store_files, DELAY_OFFSET_FILE)
    assert table["offsetTable"] == {"2": 2, "4": 0}
    assert set(table["dataVersion"]) == {"counter", "stateVersion", "timestamp"}

    engine.close()
    assert open_engine().schedule.positions == {2: 2, 4: 0}


@pytest.mark.feature("F12")
def test_upstreams_file_with_bare_numbers_as_keys_is_read(open_engine: OpenEngine) -> None:
    """As found on the disk of a real broker."""
    engine = open_engine()
    engine.send(b"", DELAY=2)
    for _ in range(3):
        engine.send(b"", DELAY=3)
    engine.close()
    engine.store_files.write_bytes(
        DELAY_OFFSET_FILE,
        b'{\n\t"dataVersion":{"counter":18,"stateVersion":0,"timestamp":1795254125147},\n\t"offsetTable":{2:1,3:1}\n}',
    )

    engine = open_engine()

    assert engine.schedule.positions == {2: 1, 3: 1}
    engine.advance(10 * SECOND)
    assert len(engine.bodies()) == 2


@pytest.mark.feature("D9")
@pytest.mark.parametrize("text", [b"{", b"[]", b'{"offsetTable":7}', b'{"offsetTable":{"1":-1}}', b"\xff"])
def test_a_file_that_cannot_be_read_is_made_anew_from_the_log(open_engine: OpenEngine, text: bytes) -> None:
    """The log knows better anyway; nothing is delivered again."""
    engine = open_engine()
    engine.send(b"done", DELAY=1)
    engine.send(b"waits", DELAY=3)
    engine.advance(1 * SECOND)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, text)

    engine = open_engine()

    assert engine.schedule.positions == {1: 1, 3: 0}
    engine.advance(60 * SECOND)
    assert engine.bodies() == [b"done", b"waits"]


@pytest.mark.feature("F20")
def test_progress_beyond_the_queues_ends_is_corrected(open_engine: OpenEngine) -> None:
    """Before its minimum: the minimum; behind its maximum: the maximum."""
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{"1":77}}')

    assert open_engine().schedule.positions == {1: 1}


@pytest.mark.feature("G11")
def test_without_progress_a_level_starts_at_its_first_message(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send(b"first", DELAY=1)
    engine.crash()

    engine = open_engine()
    assert engine.schedule.positions == {1: 0}
    engine.advance(1 * SECOND)
    assert engine.bodies() == [b"first"]


def test_a_lost_progress_file_does_not_deliver_again(open_engine: OpenEngine) -> None:
    """Upstream would hand over the whole backlog once more; the copies in the log tell."""
    engine = open_engine()
    engine.send(b"done", DELAY=1)
    engine.send(b"waits", DELAY=3)
    engine.advance(1 * SECOND)
    engine.close()
    engine.store_files.delete(DELAY_OFFSET_FILE)
    engine.store_files.delete(DELAY_OFFSET_FILE + ".bak")

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.bodies() == [b"done", b"waits"]


def test_a_kill_right_behind_the_hand_over_does_not_repeat_it(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send(b"once", DELAY=1)
    engine.store.take_checkpoint()
    engine.advance(1 * SECOND)
    engine.crash()

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.bodies() == [b"once"]


@pytest.mark.feature("D9")
def test_an_older_progress_file_does_not_deliver_again(open_engine: OpenEngine) -> None:
    """Where only the ``.bak`` is left, the log tells what was handed over since."""
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


def test_upstreams_progress_of_levels_that_the_table_does_not_have_is_kept(open_engine: OpenEngine) -> None:
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
def test_a_level_without_a_queue_is_looked_for_in_the_log(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Its queue's folder was lost, and no later message of that level shows it."""
    engine = open_engine()
    engine.send(b"1s", DELAY=1)
    engine.send(b"10s", DELAY=3)
    engine.close()
    shutil.rmtree(tmp_path / "consumequeue" / SCHEDULE_TOPIC / "2")

    engine = open_engine()
    engine.advance(10 * SECOND)

    assert engine.bodies() == [b"1s", b"10s"]
    assert engine.schedule.positions == {1: 1, 3: 1}


def test_progress_of_a_level_that_nobody_ever_used_is_forgotten(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.close()
    engine.store_files.write_bytes(DELAY_OFFSET_FILE, b'{"offsetTable":{1:0,18:5}}')

    assert open_engine().schedule.positions == {1: 0}


@pytest.mark.feature("F20")
def test_progress_before_the_queues_begin_is_corrected(open_engine: OpenEngine) -> None:
    """RocketMQ's file may be older than the queue."""
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


# --- progress out of turn ---------------------------------------------------------------------------


def shortened(open_engine: OpenEngine) -> DelayEngine:
    """Two levels' worth of messages in one queue: the later ones are due earlier, and are handed over."""
    engine = open_engine(levels="1m")
    engine.send(b"minute", DELAY=1)
    change_table(engine, "1s")
    engine.send(b"second", DELAY=1)
    engine.send(b"again", DELAY=1)
    engine.advance(1 * SECOND)
    assert engine.bodies() == [b"second", b"again"]
    return engine


@pytest.mark.feature("D10", "D11")
def test_the_file_keeps_the_first_that_is_not_done(open_engine: OpenEngine) -> None:
    """It never goes past one that waits, and never back."""
    engine = shortened(open_engine)

    engine.store.take_checkpoint()
    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 0}

    engine.advance(1 * MINUTE)
    engine.store.take_checkpoint()
    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 3}


@pytest.mark.feature("D8", "D11")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [DelayEngine.close, DelayEngine.crash])
def test_what_was_handed_over_out_of_turn_is_not_repeated(
    open_engine: OpenEngine, has_checkpoint: bool, ends: Callable[[DelayEngine], None]
) -> None:
    """Behind the checkpoint the copies tell, before it the marks in the queue."""
    engine = shortened(open_engine)
    if has_checkpoint:
        engine.store.take_checkpoint()
    ends(engine)

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"minute"]


@pytest.mark.feature("D29")
def test_marks_are_made_at_the_checkpoint(open_engine: OpenEngine) -> None:
    """Before it a power failure might take the copies and leave the marks, and the messages were lost."""
    engine = shortened(open_engine)
    units = engine.store.consume_queue(SCHEDULE_TOPIC, 0).units
    assert DONE_SIZE_MARK not in units(0, 3)["size"]

    engine.store.take_checkpoint()

    assert units(0, 3)["size"].tolist()[1:] == [DONE_SIZE_MARK, DONE_SIZE_MARK]
    assert units(0, 3)["size"][0] > DONE_SIZE_MARK


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
def test_queues_that_were_lost_are_rebuilt_with_what_is_done(
    open_engine: OpenEngine, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """The marks went with them, and the due times of a table that is no more."""
    engine = shortened(open_engine)
    engine.store.take_checkpoint()
    engine.crash()
    lose(tmp_path)

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"minute"]
    assert engine.arrived()[-1].at_ms == engine.clock.now_ms() - 1 * SECOND


@pytest.mark.feature("X11")
def test_a_queue_that_lost_its_end_is_rebuilt_with_what_is_done(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Nobody sees that anything is missing, until the log goes on behind it."""
    engine = shortened(open_engine)
    engine.store.take_checkpoint()
    engine.send(b"behind", DELAY=1)
    engine.crash()
    [file] = (tmp_path / "consumequeue" / SCHEDULE_TOPIC / "0").iterdir()
    file.write_bytes(file.read_bytes()[:20].ljust(file.stat().st_size, b"\0"))

    engine = open_engine(levels="1s")
    engine.advance(1 * MINUTE)

    assert engine.bodies() == [b"second", b"again", b"behind", b"minute"]


@pytest.mark.feature("D29")
def test_progress_is_written_when_the_copies_are_on_the_disk(open_engine: OpenEngine) -> None:
    """Upstream's copies never wait for the disk, though its progress file does."""
    engine = open_engine()
    engine.send(b"", DELAY=1)
    engine.advance(1 * SECOND)
    assert engine.store.group_commit.flushed < engine.store.end_offset

    engine.schedule.persist()

    assert engine.store.group_commit.flushed == engine.store.end_offset
    assert read_table(engine.store_files, DELAY_OFFSET_FILE)["offsetTable"] == {"1": 1}


@pytest.mark.feature("D30")
def test_an_end_in_the_middle_of_a_backlog_loses_and_repeats_nothing(open_engine: OpenEngine) -> None:
    """A step is whole before the progress of it is written; there are no results that somebody waits for."""
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


# --- steering ---------------------------------------------------------------------------------------


def test_a_withdrawn_message_is_never_handed_over(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send(b"stays", DELAY=1)
    cancel(engine, engine.send(b"goes", DELAY=1))

    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"stays"]


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("ends", [DelayEngine.close, DelayEngine.crash])
def test_a_withdrawal_lasts(open_engine: OpenEngine, has_checkpoint: bool, ends: Callable[[DelayEngine], None]) -> None:
    """Behind the checkpoint the marker in the log tells, before it the mark in the queue."""
    engine = open_engine()
    engine.send(b"stays", DELAY=1)
    cancel(engine, engine.send(b"goes", DELAY=1))
    if has_checkpoint:
        engine.store.take_checkpoint()
    ends(engine)

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"stays"]


def test_a_copy_alone_takes_its_sources_place(open_engine: OpenEngine) -> None:
    """A kill may leave of a reschedule the copy, and not the marker behind it."""
    engine = open_engine()
    put = engine.send(b"moved", DELAY=1)
    record = engine.store.read(put.physical_offset, put.size)
    engine.put(linked(record, "orders", record.properties | {"__STEERED": "1"}))
    engine.crash()

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"moved"]


def test_a_marker_for_another_place_withdraws_nothing(open_engine: OpenEngine) -> None:
    """What a copy carries on may name something that was never in this queue."""
    engine = open_engine()
    put = engine.send(b"stays", DELAY=1)
    record = engine.store.read(put.physical_offset, put.size)
    engine.put(marker(record._replace(physical_offset=record.physical_offset + 1)))
    engine.crash()

    engine = open_engine()
    engine.advance(1 * SECOND)

    assert engine.bodies() == [b"stays"]


# --- after RocketMQ ---------------------------------------------------------------------------------


def hand_over_like_upstream(engine: DelayEngine, count: int) -> None:
    """Append the copies of the first messages of level 1, as RocketMQ does; our service does not see it."""
    for record in engine.delayed_records()[:count]:
        engine.put(foreign_copy(record))


@pytest.mark.feature("D8")
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_upstream_handed_over_is_not_repeated(open_engine: OpenEngine, is_ours: bool) -> None:
    """Its file is up to ten seconds older; its copies do not name their sources."""
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
    hand_over_like_upstream(engine, 3)
    engine.crash()

    engine = open_engine()
    engine.advance(60 * SECOND)

    assert engine.bodies() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.feature("D9")
def test_without_upstreams_file_its_copies_tell(open_engine: OpenEngine) -> None:
    """It would hand over its whole backlog once more."""
    engine = open_engine()
    for number in range(5):
        engine.put(foreign_level_message(b"%d" % number, 1, number * SECOND, UNIQ_KEY=f"A{number}"))
        engine.clock.move_ms(1 * SECOND)
    hand_over_like_upstream(engine, 3)
    engine.close()
    for name in (DELAY_OFFSET_FILE, f"{DELAY_OFFSET_FILE}.bak"):
        engine.store_files.delete(name)

    engine = open_engine()

    assert engine.schedule.positions == {1: 3}
    engine.advance(60 * SECOND)
    assert engine.bodies() == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.feature("D7", "D13")
def test_what_upstream_dropped_is_still_handed_over(open_engine: OpenEngine) -> None:
    """It passes over what it cannot bring to its topic; here that is one for the dead letters."""
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
    assert engine.bodies(DEAD_LETTER_TOPIC) == [b"1"]


@pytest.mark.feature("D11")
def test_a_message_that_upstream_hurried_is_not_repeated(open_engine: OpenEngine) -> None:
    """After its table was shortened it hands over at once what waits longer than the table says."""
    engine = open_engine(levels="10m")
    engine.send(b"10m", DELAY=1, UNIQ_KEY="A1")
    engine.send(b"20m", DELAY=1, UNIQ_KEY="A2")
    engine.store.take_checkpoint()
    hand_over_like_upstream(engine, 1)
    engine.crash()

    engine = open_engine(levels="1s")
    engine.advance(20 * MINUTE)

    assert engine.bodies() == [b"10m", b"20m"]
