"""Parked timers by due time: their slots on the wheel say when they are rolled, not when they are due."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.delay.timers.intake import NO_TIME_MS, TimerTopicReader
from mqtemplate.delay.timers.timer_log import TimerLog
from mqtemplate.delay.timers.timer_unit import TIMER_UNIT_SIZE, Magic, are_valid, slots_of

_CAPACITY = 2_000_000  # units: 48 MB


class _Run(NamedTuple):
    """Parked units in order of due time: three arrays of one length."""

    due_ms: np.ndarray
    position: np.ndarray
    slot_ms: np.ndarray

    def cut(self, start: int, end: int) -> _Run:
        return _Run(self.due_ms[start:end], self.position[start:end], self.slot_ms[start:end])

    def where(self, chosen: np.ndarray) -> _Run:
        return _Run(self.due_ms[chosen], self.position[chosen], self.slot_ms[chosen])

    def count_before(self, time_ms: int) -> int:
        return int(np.searchsorted(self.due_ms, time_ms))


class ParkedTimers:
    """Index of the parked units of the timer log, by due time.

    - Nothing is read before the first call. Then each unit of the log is read once: 0.1 microseconds (measured).
    - The index has 24 bytes for each parked unit. With more than *capacity*, it has those that are due first from the
      given time on, and is built again for another time.
    - Units that are done or rolled may be in the index. The caller compares them with the backlog.
    - Not thread-safe.
    """

    def __init__(self, log: TimerLog, reader: TimerTopicReader, capacity: int = _CAPACITY) -> None:
        self._log = log
        self._reader = reader
        self._capacity = capacity
        self._end = 0  # position in the log; the units before it were read
        self._from_ms, self._until_ms = 0, NEVER_MS  # the due times that the index covers
        # From long to short. Two of about one length are merged, so there are few, and each unit is merged rarely.
        self._runs: list[_Run] = []

    def read_on(self, from_ms: int, read_ms: int) -> bool:
        """Read a bounded number of units. Return True if the index covers *from_ms* up to the end of the log.

        Args:
            read_ms: The first slot that is not closed. Units of earlier slots are left out.
        """
        if not self._from_ms <= from_ms < self._until_ms:
            self._end, self._from_ms, self._until_ms = 0, from_ms, NEVER_MS
            self._runs.clear()
        piece = next(self._log.pieces(self._end, self._log.end), None)
        if piece is None:
            return True
        position, units = piece
        self._add(self._parked(position, units, read_ms), read_ms)
        self._end = position + len(units) * TIMER_UNIT_SIZE
        return self._end >= self._log.end

    def between(self, from_ms: int, before_ms: int, max_count: int) -> tuple[np.ndarray, int]:
        """Return the positions of units due in a span of time, ascending, and the end of the span that they cover.

        The span ends earlier if it has more than *max_count* units; those of one millisecond stay together.
        """
        before_ms = min(before_ms, self._until_ms)
        runs = [run.cut(run.count_before(from_ms), run.count_before(before_ms)) for run in self._runs]
        if sum(len(run.due_ms) for run in runs) > max_count:
            first = np.sort(np.concatenate([run.due_ms[:max_count] for run in runs]))
            before_ms = int(first[max_count - 1]) + 1
            runs = [run.cut(0, run.count_before(before_ms)) for run in runs]
        positions = np.concatenate([np.empty(0, np.int64), *(run.position for run in runs)])
        return np.sort(positions[positions >= self._log.start]), before_ms

    def _parked(self, position: int, units: np.ndarray, read_ms: int) -> _Run:
        """Return the parked ones of adjacent units that the index has to cover."""
        indexes = np.flatnonzero(units["magic"] & (Magic.ROLL | Magic.DELETE | Magic.DONE) == Magic.ROLL)
        units = units[indexes]
        slots_ms, times = slots_of(units), self._reader.due_times(units)
        times = np.where(times == NO_TIME_MS, slots_ms, times)
        run = _Run(times, position + indexes * TIMER_UNIT_SIZE, slots_ms)
        is_covered = (times >= self._from_ms) & (times < self._until_ms)
        run = run.where(is_covered & (slots_ms >= read_ms) & are_valid(units))
        return run.where(np.argsort(run.due_ms, kind="stable"))

    def _add(self, run: _Run, read_ms: int) -> None:
        while self._runs and len(self._runs[-1].due_ms) < 2 * len(run.due_ms):
            run = _merged([self._runs.pop(), run], read_ms)
        if len(run.due_ms):
            self._runs.append(run)
        if sum(len(each.due_ms) for each in self._runs) > self._capacity:
            self._limit(_merged(self._runs, read_ms))

    def _limit(self, run: _Run) -> None:
        """Keep the first half of what the index may have. The rest is read again when a caller needs it."""
        if len(run.due_ms) > self._capacity:
            self._until_ms = int(run.due_ms[self._capacity // 2]) + 1
            run = _Run(*(column.copy() for column in run.cut(0, run.count_before(self._until_ms))))
        self._runs = [run]


def _merged(runs: list[_Run], read_ms: int) -> _Run:
    """Return one run of several, without the units of closed slots."""
    run = _Run(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))
    run = run.where(run.slot_ms >= read_ms)
    return run.where(np.argsort(run.due_ms, kind="stable"))
