"""What was handed over from a slot that is still open says so in its unit: RocketMQ would hand it over again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.timer_unit import DONE_RECORD_SIZE, MAGIC_DONE
from mqtemplate.record.properties import decode_properties
from mqtemplate.store import FlushDiskType
from tests.delay.conftest import OpenRoom
from tests.delay.waiting_room import WaitingRoom

HOUR_MS = 3_600_000


def backlog_of(room: WaitingRoom) -> TimerBacklog:
    assert room.timer._backlog is not None
    return room.timer._backlog


def left_to_rocketmq(room: WaitingRoom) -> list[str]:
    """The ids that RocketMQ would find in the slots that it had to empty, by what is written now.

    It begins at the checkpoint's slot, asks no bit of a unit, and drops the ones of whose record it reads one byte.
    """
    files = backlog_of(room).files
    ids = []
    for _, units in files.log.pieces(0, files.log.end):
        slots_ms = units["write_time_ms"] + units["delay_ms"]
        chosen = (slots_ms >= files.checkpoint.last_read_time_ms) & (units["record_size"] != DONE_RECORD_SIZE)
        for physical_offset in units["physical_offset"][chosen].tolist():
            record = room.store.read_at(physical_offset)
            assert record is not None
            ids.append(decode_properties(record.properties_bytes).get("UNIQ_KEY", ""))
    return ids


def send_three(room: WaitingRoom) -> None:
    for at_ms in (100, 400, 900):
        room.send_for(b"%d" % at_ms, TIMER_DELAY_MS=5_000 - room.clock.now_ms() % 1_000 + at_ms)


def to_the_middle(room: WaitingRoom) -> None:
    """Halfway into the slot that the three are due in."""
    room.advance(5_500 - room.clock.now_ms() % 1_000)


def test_what_is_handed_over_is_marked_at_the_checkpoint(room: WaitingRoom) -> None:
    send_three(room)
    to_the_middle(room)
    before = backlog_of(room).files.log.read(0)

    room.store.take_checkpoint()

    assert room.bodies() == [b"100", b"400"]
    assert before is not None
    assert not before.magic & MAGIC_DONE
    assert left_to_rocketmq(room) == ["900"]


def test_a_late_comer_is_marked_like_those_that_came_before_their_slot(room: WaitingRoom) -> None:
    send_three(room)
    to_the_middle(room)
    room.send_for(b"late", TIMER_DELAY_MS=100)
    room.send_for(b"later", TIMER_DELAY_MS=300)
    room.advance(200)

    room.store.take_checkpoint()

    assert room.bodies() == [b"100", b"400", b"late"]
    assert left_to_rocketmq(room) == ["900", "later"]


def test_what_is_parked_is_marked_when_it_is_set_on_again(open_room: OpenRoom) -> None:
    room = open_room()
    room.send_for(b"far", TIMER_DELAY_MS=2 * HOUR_MS)
    room.confirm()
    while len(room.waiting_timers()) == 1:
        due_ms = room.confirm()
        assert due_ms is not None
        room.clock.set_ms(due_ms)
    room.send_for(b"near", TIMER_DELAY_MS=100)
    room.confirm()

    room.store.take_checkpoint()

    assert left_to_rocketmq(room) == ["far", "near"]  # its new copy


def test_nothing_is_marked_before_its_copy_is_on_the_disk(room: WaitingRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    send_three(room)
    room.store.take_checkpoint()
    to_the_middle(room)
    monkeypatch.setattr(room.store.group_commit, "wait", lambda end, timeout_ms: False)

    room.timer.persist()
    kept = left_to_rocketmq(room)
    monkeypatch.undo()
    room.timer.persist()

    assert kept == ["100", "400", "900"]
    assert left_to_rocketmq(room) == ["900"]


def test_an_open_slot_in_which_nothing_happens_is_not_marked_again(room: WaitingRoom) -> None:
    send_three(room)
    to_the_middle(room)
    room.store.take_checkpoint()
    counter = backlog_of(room).files.checkpoint.counter

    room.advance(10)
    room.store.take_checkpoint()

    assert len(backlog_of(room).marks()) == 0
    assert backlog_of(room).files.checkpoint.counter == counter


def test_a_slot_that_is_over_needs_no_marks(room: WaitingRoom) -> None:
    """The checkpoint says that it is: who opens the folder begins behind it."""
    send_three(room)
    room.confirm()
    room.advance(20_000)

    assert len(backlog_of(room).marks()) == 0
    room.store.take_checkpoint()
    units = backlog_of(room).files.log.read(0), backlog_of(room).files.log.read(104)
    assert [unit.magic for unit in units if unit] == [1, 1]


def test_rocketmqs_markers_stay_in_force_while_their_slot_is_open(room: WaitingRoom) -> None:
    due_ms = room.clock.now_ms() // 1_000 * 1_000 + 5_900
    room.send_for(b"unwanted", TIMER_DELIVER_MS=due_ms)
    room.send_for(b"first", TIMER_DELIVER_MS=due_ms - 800)
    room.send(b"0", UNIQ_KEY="marker", TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY="unwanted")
    to_the_middle(room)

    room.store.take_checkpoint()

    assert room.bodies() == [b"first"]
    assert left_to_rocketmq(room) == ["unwanted", "marker"]


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_what_a_killed_broker_had_handed_over_is_marked_by_the_next(
    open_room: OpenRoom, tmp_path: Path, flush: FlushDiskType
) -> None:
    """The log says what happened after the last checkpoint, and the slot is still open."""
    room = open_room(flush=flush)
    send_three(room)
    room.confirm()
    room.store.take_checkpoint()
    to_the_middle(room)
    room.crash()

    room = open_room(flush=flush)
    room.advance(1)
    room.store.take_checkpoint()

    assert left_to_rocketmq(room) == ["900"]
    room.advance(20_000)
    assert room.bodies() == [b"100", b"400", b"900"]


@pytest.mark.parametrize("clean", [False, True])
def test_marked_units_bring_a_restart_to_no_other_end(open_room: OpenRoom, tmp_path: Path, clean: bool) -> None:
    """The last unit of the log is a marked one, and the wheel has to be made anew from units of which many are."""
    room = open_room()
    for number in range(250):
        room.send_for(b"%03d" % number, TIMER_DELAY_MS=5_999 - room.clock.now_ms() % 1_000 - 4 * number)
    to_the_middle(room)
    room.store.take_checkpoint()
    last = backlog_of(room).files.log
    unit = last.read(last.last_position())
    if clean:
        room.close()
        (tmp_path / "timerwheel").unlink()
    else:
        room.crash()

    room = open_room()
    assert room.timer.count_waiting() == 125
    room.advance(20_000)

    assert unit is not None
    assert unit.record_size == DONE_RECORD_SIZE
    assert room.bodies() == [b"%03d" % number for number in range(249, -1, -1)]


def test_a_file_that_went_takes_its_marks_along(room: WaitingRoom) -> None:
    """Between a hand-over and the next checkpoint retention may delete the timer log's file."""
    for number in range(150):
        at_ms = 100 if number < 120 else 900
        room.send_for(b"%03d" % number, TIMER_DELAY_MS=5_000 - room.clock.now_ms() % 1_000 + at_ms)
    to_the_middle(room)

    gone = room.timer.delete_before(room.waiting_timers()[110].physical_offset)
    room.store.take_checkpoint()

    assert gone == 1
    log = backlog_of(room).files.log
    marked = [bool(unit.magic & MAGIC_DONE) for at in range(log.begin, log.end, 52) if (unit := log.read(at))]
    assert marked == [True] * 20 + [False] * 30


def test_the_marks_of_a_large_slot_are_written_piece_by_piece(open_room: OpenRoom) -> None:
    """Others need the lock in between; what is handed over meanwhile is marked the next time."""
    room = open_room()
    due_ms = room.clock.now_ms() // 1_000 * 1_000 + 60_000
    for number in range(10_000):
        room.send(b"", TIMER_DELIVER_MS=due_ms - (1 if number % 2 else 800))
    room.advance(due_ms - 400 - room.clock.now_ms())

    room.store.take_checkpoint()

    log = backlog_of(room).files.log
    done = np.concatenate([units["magic"] & MAGIC_DONE != 0 for _, units in log.pieces(0, log.end)])
    assert done.tolist() == [number % 2 == 0 for number in range(10_000)]
