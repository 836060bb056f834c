"""Units of released messages are marked while their slot is open: RocketMQ would release the messages again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.timer_log import DONE_RECORD_SIZE, Magic
from mqtemplate.record.properties import decode_properties
from mqtemplate.store.settings import FlushDiskType
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine

HOUR_MS = 3_600_000


def backlog_of(engine: DelayEngine) -> TimerBacklog:
    assert engine.timer._backlog is not None
    return engine.timer._backlog


def released_by_rocketmq(engine: DelayEngine) -> list[str]:
    """Return the message ids that RocketMQ would release from the slots, according to the files on disk.

    RocketMQ starts at the checkpoint's slot, ignores the bits of a unit, and skips units with a record of one byte.
    """
    files = backlog_of(engine).files
    ids = []
    for _, units in files.log.pieces(0, files.log.end):
        slots_ms = units["write_time_ms"] + units["delay_ms"]
        chosen = (slots_ms >= files.checkpoint.last_read_time_ms) & (units["record_size"] != DONE_RECORD_SIZE)
        for physical_offset in units["physical_offset"][chosen].tolist():
            record = engine.store.read_at(physical_offset)
            assert record is not None
            ids.append(decode_properties(record.properties_bytes).get("UNIQ_KEY", ""))
    return ids


def send_three(engine: DelayEngine) -> None:
    for at_ms in (100, 400, 900):
        engine.send_for(b"%d" % at_ms, TIMER_DELAY_MS=5_000 - engine.clock.now_ms() % 1_000 + at_ms)


def advance_to_the_middle(engine: DelayEngine) -> None:
    """Move the clock into the middle of the slot in which the three are due."""
    engine.advance(5_500 - engine.clock.now_ms() % 1_000)


def test_released_messages_are_marked_by_the_checkpoint(engine: DelayEngine) -> None:
    send_three(engine)
    advance_to_the_middle(engine)
    before = backlog_of(engine).files.log.read(0)

    engine.store.take_checkpoint()

    assert engine.bodies() == [b"100", b"400"]
    assert before is not None
    assert not before.magic & Magic.DONE
    assert released_by_rocketmq(engine) == ["900"]


def test_a_message_that_arrived_in_its_open_slot_is_marked_like_the_others(engine: DelayEngine) -> None:
    send_three(engine)
    advance_to_the_middle(engine)
    engine.send_for(b"late", TIMER_DELAY_MS=100)
    engine.send_for(b"later", TIMER_DELAY_MS=300)
    engine.advance(200)

    engine.store.take_checkpoint()

    assert engine.bodies() == [b"100", b"400", b"late"]
    assert released_by_rocketmq(engine) == ["900", "later"]


def test_a_parked_message_is_marked_when_it_is_rolled(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.send_for(b"far", TIMER_DELAY_MS=2 * HOUR_MS)
    engine.release_due()
    while len(engine.timer_records()) == 1:
        due_ms = engine.release_due()
        assert due_ms is not None
        engine.clock.set_ms(due_ms)
    engine.send_for(b"near", TIMER_DELAY_MS=100)
    engine.release_due()

    engine.store.take_checkpoint()

    assert released_by_rocketmq(engine) == ["far", "near"]  # its new copy


def test_no_unit_is_marked_before_the_copy_is_on_disk(engine: DelayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    send_three(engine)
    engine.store.take_checkpoint()
    advance_to_the_middle(engine)
    monkeypatch.setattr(engine.store.group_commit, "wait", lambda end, timeout_ms: False)

    engine.timer.persist()
    kept = released_by_rocketmq(engine)
    monkeypatch.undo()
    engine.timer.persist()

    assert kept == ["100", "400", "900"]
    assert released_by_rocketmq(engine) == ["900"]


def test_an_open_slot_without_changes_is_not_marked_again(engine: DelayEngine) -> None:
    send_three(engine)
    advance_to_the_middle(engine)
    engine.store.take_checkpoint()
    counter = backlog_of(engine).files.checkpoint.counter

    engine.advance(10)
    engine.store.take_checkpoint()

    assert len(backlog_of(engine).unmarked()) == 0
    assert backlog_of(engine).files.checkpoint.counter == counter


def test_a_closed_slot_needs_no_marks(engine: DelayEngine) -> None:
    """The checkpoint has the first slot that is not closed. RocketMQ starts there."""
    send_three(engine)
    engine.release_due()
    engine.advance(20_000)

    assert len(backlog_of(engine).unmarked()) == 0
    engine.store.take_checkpoint()
    units = backlog_of(engine).files.log.read(0), backlog_of(engine).files.log.read(104)
    assert [unit.magic for unit in units if unit] == [1, 1]


def test_rocketmqs_markers_stay_valid_while_their_slot_is_open(engine: DelayEngine) -> None:
    due_ms = engine.clock.now_ms() // 1_000 * 1_000 + 5_900
    engine.send_for(b"deleted", TIMER_DELIVER_MS=due_ms)
    engine.send_for(b"first", TIMER_DELIVER_MS=due_ms - 800)
    engine.send(b"0", UNIQ_KEY="marker", TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY="deleted")
    advance_to_the_middle(engine)

    engine.store.take_checkpoint()

    assert engine.bodies() == [b"first"]
    assert released_by_rocketmq(engine) == ["deleted", "marker"]


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_messages_that_a_killed_broker_released_are_marked_by_the_next(
    open_engine: OpenEngine, tmp_path: Path, flush: FlushDiskType
) -> None:
    """The commit log shows what was released after the last checkpoint. The slot is still open."""
    engine = open_engine(flush=flush)
    send_three(engine)
    engine.release_due()
    engine.store.take_checkpoint()
    advance_to_the_middle(engine)
    engine.crash()

    engine = open_engine(flush=flush)
    engine.advance(1)
    engine.store.take_checkpoint()

    assert released_by_rocketmq(engine) == ["900"]
    engine.advance(20_000)
    assert engine.bodies() == [b"100", b"400", b"900"]


@pytest.mark.parametrize("clean", [False, True])
def test_a_restart_with_marked_units_releases_the_same_messages(
    open_engine: OpenEngine, tmp_path: Path, clean: bool
) -> None:
    """The last unit of the log is marked, and the wheel is rebuilt from units of which many are marked."""
    engine = open_engine()
    for number in range(250):
        engine.send_for(b"%03d" % number, TIMER_DELAY_MS=5_999 - engine.clock.now_ms() % 1_000 - 4 * number)
    advance_to_the_middle(engine)
    engine.store.take_checkpoint()
    last = backlog_of(engine).files.log
    unit = last.read(last.last_position())
    if clean:
        engine.close()
        (tmp_path / "timerwheel").unlink()
    else:
        engine.crash()

    engine = open_engine()
    assert engine.timer.count_pending() == 125
    engine.advance(20_000)

    assert unit is not None
    assert unit.record_size == DONE_RECORD_SIZE
    assert engine.bodies() == [b"%03d" % number for number in range(249, -1, -1)]


def test_units_of_a_deleted_file_are_not_marked(engine: DelayEngine) -> None:
    """Retention may delete a timer log file between a release and the next checkpoint."""
    for number in range(150):
        at_ms = 100 if number < 120 else 900
        engine.send_for(b"%03d" % number, TIMER_DELAY_MS=5_000 - engine.clock.now_ms() % 1_000 + at_ms)
    advance_to_the_middle(engine)

    deleted = engine.timer.delete_before(engine.timer_records()[110].physical_offset)
    engine.store.take_checkpoint()

    assert deleted == 1
    log = backlog_of(engine).files.log
    marked = [bool(unit.magic & Magic.DONE) for at in range(log.start, log.end, 52) if (unit := log.read(at))]
    assert marked == [True] * 20 + [False] * 30


def test_the_marks_of_a_large_slot_are_written_in_pieces(open_engine: OpenEngine) -> None:
    """Other threads need the lock in between."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() // 1_000 * 1_000 + 60_000
    for number in range(10_000):
        engine.send(b"", TIMER_DELIVER_MS=due_ms - (1 if number % 2 else 800))
    engine.advance(due_ms - 400 - engine.clock.now_ms())

    engine.store.take_checkpoint()

    log = backlog_of(engine).files.log
    done = np.concatenate([units["magic"] & Magic.DONE != 0 for _, units in log.pieces(0, log.end)])
    assert done.tolist() == [number % 2 == 0 for number in range(10_000)]
