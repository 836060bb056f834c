"""The pending timers of a span of time: what is read for it, compared with reading all units of the timer log."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.delay.timers import pending_timers
from mqtemplate.delay.timers.pending_timers import ParkedTimers
from mqtemplate.pending import ScheduleChangeStatus
from tests.delay.delay_engine import DelayEngine
from tests.thirds import examples

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
FOREVER = 1 << 60

delays_ms = st.one_of(
    st.integers(0, 5 * SECOND),
    st.integers(0, 2 * HOUR),
    st.sampled_from([HOUR - 1, HOUR, HOUR + 1, 3 * HOUR, 3 * HOUR + 1]),  # the window is an hour
    st.integers(HOUR, 10 * HOUR),
)
steps = st.one_of(
    st.tuples(st.just("send"), st.lists(delays_ms, min_size=1, max_size=20)),
    st.tuples(st.just("cancel"), st.integers(0, 1_000)),
    st.tuples(st.just("reschedule"), st.tuples(st.integers(0, 1_000), delays_ms)),
    st.tuples(st.just("advance"), st.one_of(st.integers(0, 3 * SECOND), st.integers(0, 2 * HOUR))),
    st.tuples(st.just("outage"), st.integers(0, 2 * HOUR)),
    st.tuples(st.sampled_from(["close", "crash", "checkpoint", "list"]), st.none()),
)
spans = st.tuples(st.integers(-HOUR, 12 * HOUR), st.one_of(st.integers(0, 12 * HOUR), st.just(FOREVER)))


class Program:
    """Runs steps of a test on an engine that may be closed, killed and opened again."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._clock = VirtualClock()
        self._capacity = capacity
        self._handles: list[str] = []
        self._open()

    def _open(self) -> None:
        self.engine = DelayEngine(self._folder, clock=self._clock)

    def run(self, name: str, value: object) -> None:
        getattr(self, f"_{name}")(*([] if value is None else [value]))

    def _send(self, delays: list[int]) -> None:
        for delay_ms in delays:
            body = b"id-%d" % len(self._handles)
            self._handles.append(self.engine.send_for(body, TIMER_DELAY_MS=delay_ms))

    def _cancel(self, number: int) -> None:
        if self._handles:
            self.engine.control.cancel(self._handles[number % len(self._handles)])

    def _reschedule(self, change: tuple[int, int]) -> None:
        if self._handles:
            handle = self._handles[change[0] % len(self._handles)]
            self.engine.control.reschedule(handle, self._clock.now_ms() + change[1])

    def _advance(self, milliseconds: int) -> None:
        self.engine.advance(milliseconds)

    def _outage(self, milliseconds: int) -> None:
        self._clock.move_ms(milliseconds)

    def _checkpoint(self) -> None:
        self.engine.store.take_checkpoint()

    def _list(self) -> None:
        self.listed(0, FOREVER)

    def _close(self) -> None:
        self.engine.close()
        self._open()

    def _crash(self) -> None:
        self.engine.crash()
        self._open()

    def listed(self, after_ms: int, before_ms: int) -> list[tuple[int, ...]]:
        """Return what is read for a span of time. Check that each piece keeps its floor."""
        if self.engine.timer._pending is not None:
            self.engine.timer._pending._parked._capacity = self._capacity
        pieces = list(self.engine.timer.pending(after_ms, before_ms))
        floors = [piece.floor_ms for piece in pieces]
        lowest = [int(piece.rows["due_ms"].min()) for piece in pieces]
        assert floors == sorted(floors)
        assert all(floor <= min(lowest[index:]) for index, floor in enumerate(floors))
        return sorted(row for piece in pieces for row in piece.rows.tolist())

    def all_units(self, after_ms: int, before_ms: int) -> list[tuple[int, ...]]:
        """Return the same by reading all units."""
        rows = self.engine.timer.pending_between(0, self.engine.store.end_offset)
        return sorted(row for row in rows.tolist() if after_ms <= row[0] < before_ms)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_timers, "_FIRST_PIECE_COUNT", 2)
    monkeypatch.setattr(pending_timers, "_PIECE_COUNT", 5)


@pytest.mark.feature("14.2")
@pytest.mark.usefixtures("short_pieces")
@settings(deadline=None, max_examples=examples(60))
@given(
    program=st.lists(steps, min_size=1, max_size=14),
    asked=st.lists(spans, min_size=1, max_size=4),
    capacity=st.sampled_from([1, 2, 7, 1_000]),
)
def test_a_span_has_the_same_messages_as_all_units(
    tmp_path_factory: pytest.TempPathFactory,
    program: list[tuple[str, object]],
    asked: list[tuple[int, int]],
    capacity: int,
) -> None:
    """After any sends, cancels, moves, rolls, outages and restarts; also with an index that has a part of the units."""
    run = Program(tmp_path_factory.mktemp("store"), capacity)
    for name, value in program:
        run.run(name, value)

    now_ms = run.engine.clock.now_ms()
    for after_ms, length_ms in [(-now_ms, FOREVER), *asked]:
        span = max(0, now_ms + after_ms), now_ms + after_ms + length_ms
        assert run.listed(*span) == run.all_units(*span)
    run.engine.close()


@pytest.mark.feature("14.2")
def test_a_span_reads_the_units_of_its_own_slots_and_the_parked_ones_that_are_due_in_it(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither earlier slots nor the slots of other parked messages: the cost does not grow with the messages before."""
    for number in range(3_000):
        engine.send(b"", TIMER_DELAY_MS=MINUTE + number * 9_973 % (10 * HOUR))
    now_ms = engine.clock.now_ms()
    span = now_ms + 5 * HOUR, now_ms + 5 * HOUR + 10 * MINUTE
    list(engine.timer.pending(*span))  # the first call reads each unit once
    read: list[int] = []
    log = engine.timer._files.log  # type: ignore[union-attr]
    gather, units_of_slots = log.gather, log.units_of_slots
    monkeypatch.setattr(log, "gather", lambda positions: read.append(len(positions)) or gather(positions))
    monkeypatch.setattr(
        log, "units_of_slots", lambda slots, ms: read.append(int(slots["num"].sum())) or units_of_slots(slots, ms)
    )

    rows = np.concatenate([piece.rows for piece in engine.timer.pending(*span)])

    assert len(rows) == len([n for n in range(3_000) if 0 <= MINUTE + n * 9_973 % (10 * HOUR) - 5 * HOUR < 10 * MINUTE])
    assert sum(read) <= len(rows)


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("capacity", [1, 4, 50, 1_000])
def test_the_index_of_parked_units_is_limited(engine: DelayEngine, capacity: int) -> None:
    """It has the units that are due first from the asked time on, and is built again for another time."""
    delays = [2 * HOUR + number * MINUTE for number in range(100)]
    random.Random(7).shuffle(delays)
    for delay_ms in delays:
        engine.send(b"", TIMER_DELAY_MS=delay_ms)
    engine.release_due()
    files, reader = engine.timer._files, engine.timer._reader
    assert files is not None
    index = ParkedTimers(files.log, reader, capacity)
    now_ms = engine.clock.now_ms()

    def count(from_ms: int, before_ms: int) -> int:
        found = 0
        while from_ms < before_ms:
            while not index.read_on(from_ms, 0):
                pass
            positions, from_ms = index.between(from_ms, before_ms, 10)
            found += len(positions)
        assert sum(len(run.due_ms) for run in index._runs) <= max(capacity, 1)
        return found

    for hours in (0, 3, 2, 3, 1):
        assert count(now_ms + hours * HOUR, FOREVER) == len([ms for ms in delays if ms >= hours * HOUR])
    assert count(now_ms + 2 * HOUR, now_ms + 3 * HOUR) == 60


@pytest.mark.feature("14.2")
def test_a_message_that_is_rolled_while_its_span_is_read_is_found_once(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units are read without the lock. Then the message leaves its parking slot for the slot of its due time."""
    for number in range(20):
        engine.send_for(b"%d" % number, TIMER_DELAY_MS=90 * MINUTE + number * SECOND)
    engine.release_due()
    view = engine.timer._pending
    assert view is not None
    read_units = view._units

    def roll_then_return(span: object) -> np.ndarray:
        units = read_units(span)  # type: ignore[arg-type]
        monkeypatch.undo()
        engine.advance(HOUR)
        return units

    before = listed(engine)
    monkeypatch.setattr(view, "_units", roll_then_return)
    meanwhile = listed(engine)

    assert len(before) == 20
    assert meanwhile == before
    assert listed(engine) == before


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("method", ["_next_span", "_units"])
def test_a_message_that_is_rolled_and_not_on_the_wheel_again_is_found(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """One step of the service appends the rolled copy. Only the next step puts it on the wheel."""
    engine.send_for(b"far", TIMER_DELAY_MS=90 * MINUTE)
    engine.release_due()
    view = engine.timer._pending
    assert view is not None
    read = getattr(view, method)

    def roll_then_read(*args: object) -> object:
        monkeypatch.undo()
        engine.clock.move_ms(HOUR)
        engine.timer.step()
        assert engine.timer._enqueue_lag() == 1
        return read(*args)

    before = listed(engine)
    monkeypatch.setattr(view, method, roll_then_read)
    meanwhile = listed(engine)

    assert len(before) == 1
    assert meanwhile == before


@pytest.mark.feature("14.2")
def test_messages_that_are_rolled_to_make_room_on_the_wheel_are_found(engine: DelayEngine) -> None:
    """After an outage overdue parked messages have to leave the wheel before a new one can enter it."""
    parked = [engine.send_for(b"parked-%d" % number, TIMER_DELAY_MS=3 * HOUR) for number in range(600)]
    engine.release_due()
    engine.clock.move_ms(2 * HOUR)
    engine.send_for(b"new", TIMER_DELAY_MS=MINUTE)

    assert engine.timer.count_pending() == 601
    assert engine.control.cancel(parked[-1]).status is ScheduleChangeStatus.CANCELLED


def listed(engine: DelayEngine) -> list[int]:
    """Return the due times of all pending messages."""
    rows = (piece.rows["due_ms"].tolist() for piece in engine.timer.pending(0, FOREVER))
    return sorted(itertools.chain.from_iterable(rows))
