"""View of the pending timers: those on the wheel that are not released, cancelled or recalled.

The parked ones have an index of their own; RocketMQ's delete markers name those that it recalled.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS, NO_ROWS, PENDING_DTYPE, PendingEntry, PendingPiece, contains
from mqtemplate.delay.settings import slot_of
from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import NO_TIME_MS, TimerKey, TimerTopicReader, timer_key
from mqtemplate.delay.timers.timer_log import (
    TIMER_UNIT_DTYPE,
    TIMER_UNIT_SIZE,
    Magic,
    TimerLog,
    TimerLogDamageError,
    are_valid,
    slots_of,
)
from mqtemplate.delay.timers.timer_wheel import SLOT_DTYPE
from mqtemplate.record.codec import StoredRecord

_CAPACITY = 2_000_000  # units: 48 MB


class _ParkedTimers(NamedTuple):
    """Parked units in order of due time: three arrays of one length."""

    due_ms: np.ndarray
    position: np.ndarray
    slot_ms: np.ndarray

    def cut(self, start: int, end: int) -> _ParkedTimers:
        return _ParkedTimers(self.due_ms[start:end], self.position[start:end], self.slot_ms[start:end])

    def where(self, chosen: np.ndarray) -> _ParkedTimers:
        return _ParkedTimers(self.due_ms[chosen], self.position[chosen], self.slot_ms[chosen])

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
        self._runs: list[_ParkedTimers] = []

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

        The span ends earlier if it has more than *max_count* units; units of one millisecond stay together.
        """
        before_ms = min(before_ms, self._until_ms)
        runs = [run.cut(run.count_before(from_ms), run.count_before(before_ms)) for run in self._runs]
        if sum(len(run.due_ms) for run in runs) > max_count:
            first = np.sort(np.concatenate([run.due_ms[:max_count] for run in runs]))
            before_ms = int(first[max_count - 1]) + 1
            runs = [run.cut(0, run.count_before(before_ms)) for run in runs]
        positions = np.concatenate([np.empty(0, np.int64), *(run.position for run in runs)])
        return np.sort(positions[positions >= self._log.start]), before_ms

    def _parked(self, position: int, units: np.ndarray, read_ms: int) -> _ParkedTimers:
        """Return the parked ones of adjacent units that the index has to cover."""
        indexes = np.flatnonzero(units["magic"] & (Magic.ROLL | Magic.DELETE | Magic.DONE) == Magic.ROLL)
        units = units[indexes]
        slots_ms, times = slots_of(units), self._reader.due_times(units)
        times = np.where(times == NO_TIME_MS, slots_ms, times)
        run = _ParkedTimers(times, position + indexes * TIMER_UNIT_SIZE, slots_ms)
        is_covered = (times >= self._from_ms) & (times < self._until_ms)
        run = run.where(is_covered & (slots_ms >= read_ms) & are_valid(units))
        return run.where(np.argsort(run.due_ms, kind="stable"))

    def _add(self, run: _ParkedTimers, read_ms: int) -> None:
        while self._runs and len(self._runs[-1].due_ms) < 2 * len(run.due_ms):
            run = _merged([self._runs.pop(), run], read_ms)
        if len(run.due_ms):
            self._runs.append(run)
        if sum(len(each.due_ms) for each in self._runs) > self._capacity:
            self._limit(_merged(self._runs, read_ms))

    def _limit(self, run: _ParkedTimers) -> None:
        """Keep the first half of what the index may have. The rest is read again when a caller needs it."""
        if len(run.due_ms) > self._capacity:
            self._until_ms = int(run.due_ms[self._capacity // 2]) + 1
            run = _ParkedTimers(*(column.copy() for column in run.cut(0, run.count_before(self._until_ms))))
        self._runs = [run]


def _merged(runs: list[_ParkedTimers], read_ms: int) -> _ParkedTimers:
    """Return one run of several, without the units of closed slots."""
    run = _ParkedTimers(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))
    run = run.where(run.slot_ms >= read_ms)
    return run.where(np.argsort(run.due_ms, kind="stable"))


RECALLED_DTYPE = np.dtype([("physical_offset", "i8"), ("position", "i8"), ("final_ms", "i8")])
"""One message, the position of its unit in the timer log, and the slot in which it will be deleted."""
_UNIQ_KEY = re.compile(rb"UNIQ_KEY\x01([^\x02]*)")


class TimerRecalls:
    """Predicts which pending messages a delete marker of RocketMQ will delete.

    - A marker and its message have one due time, so both reach one final slot, wherever they are parked before.
    - Our own markers do not count: their messages were removed when the markers were appended.
    - Without markers, only units are read, each once. With markers, the records of their final slots and of parked
      units without a due time are read once.
    - Not thread-safe: the `TimerMessageStore` holds its lock.
    """

    def __init__(self, files: TimerFiles, reader: TimerTopicReader) -> None:
        self._wheel = files.wheel
        self._log = files.log
        self._reader = reader
        self._precision_ms = files.settings.precision_ms
        self._start = -1  # position of the first unit of an open slot or later; -1 before the first call
        self._markers_end = 0  # the markers before this position are in `_keys`
        self._keys: dict[int, set[TimerKey]] = {}  # final slot -> messages that markers name there
        self._recalled = np.empty(0, RECALLED_DTYPE)
        self._recalled_end = 0  # the messages before this position were compared with all of `_keys`

    def is_recalled(self, final_ms: int, record: StoredRecord, read_ms: int) -> bool:
        """Return True if a marker names *record*, whose final slot is *final_ms*."""
        ids = self._markers(read_ms).get(final_ms)
        return ids is not None and timer_key(record) in ids

    def recalled(self, read_ms: int) -> np.ndarray:
        """Return all recalled messages, as `RECALLED_DTYPE` by physical offset. Some may be gone for another reason.

        Args:
            read_ms: The first slot that is not closed.
        """
        keys = self._markers(read_ms)
        if keys:
            pieces = [self._find(keys, *piece) for piece in self._units(self._recalled_end, read_ms, 0)]
            self._recalled_end = self._log.end
            self._recalled = np.concatenate([self._recalled, *pieces])
        self._recalled = self._recalled[self._recalled["final_ms"] >= read_ms]
        return self._recalled

    # --- reading -------------------------------------------------------------------------------

    def _markers(self, read_ms: int) -> dict[int, set[TimerKey]]:
        """Read the markers that were added since the last call. Return the messages that markers name, by slot."""
        if self._start < 0:
            first = self._wheel.first_position(read_ms)
            self._start = self._markers_end = self._recalled_end = self._log.end if first is None else first
        self._keys = {final_ms: ids for final_ms, ids in self._keys.items() if final_ms >= read_ms}
        for _, units in self._units(self._markers_end, read_ms, Magic.DELETE):
            self._add_markers(units[are_valid(units)])
        self._markers_end = self._log.end
        return self._keys

    def _units(self, start: int, read_ms: int, bit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield positions and units that are not done and not in a closed slot, piece by piece.

        Args:
            bit: `Magic.DELETE` for markers, 0 for messages.
        """
        for position, units in self._log.pieces(start, self._log.end):
            indexes = np.flatnonzero(units["magic"] & (Magic.DELETE | Magic.DONE) == bit)
            if len(indexes):  # most pieces have no markers
                indexes = indexes[slots_of(units[indexes]) >= read_ms]
                yield position + indexes * TIMER_UNIT_SIZE, units[indexes]

    def _add_markers(self, markers: np.ndarray) -> None:
        rows = zip(
            markers["physical_offset"].tolist(),
            markers["record_size"].tolist(),
            self._final_slots(markers).tolist(),
            strict=True,
        )
        for physical_offset, size, final_ms in rows:
            named = self._reader.delete_keys(physical_offset, size)
            known = self._keys.setdefault(final_ms, set())
            if not named <= known:  # a rolled marker names nothing new
                known |= named
                # The new marker may name any earlier message: compare all of them again.
                self._recalled, self._recalled_end = self._recalled[:0], self._start

    def _find(self, keys: dict[int, set[TimerKey]], positions: np.ndarray, units: np.ndarray) -> np.ndarray:
        """Return the recalled ones of some units, as `RECALLED_DTYPE`."""
        valid = are_valid(units)
        positions, units = positions[valid], units[valid]
        final_slots = self._final_slots(units)
        may_be_named = np.isin(final_slots, list(keys))
        found = np.empty(int(may_be_named.sum()), RECALLED_DTYPE)
        found["physical_offset"] = units["physical_offset"][may_be_named]
        found["position"] = positions[may_be_named]
        found["final_ms"] = final_slots[may_be_named]
        return np.asarray(found[self._have_keys(found, units["record_size"][may_be_named].tolist(), keys)])

    def _final_slots(self, units: np.ndarray) -> np.ndarray:
        """Return the slots from which messages are released, parked or not."""
        slots_ms = slots_of(units)
        is_parked = units["magic"] & Magic.ROLL != 0
        slots_ms[is_parked] = slot_of(self._reader.due_times(units[is_parked]), self._precision_ms)
        return slots_ms

    def _have_keys(self, rows: np.ndarray, sizes: list[int], keys: dict[int, set[TimerKey]]) -> np.ndarray:
        """Return for each of these records, given in the order of the log, whether a marker of its slot names it."""
        found = np.zeros(len(rows), np.bool_)
        wanted = {msg_id.encode() for slot_ms in np.unique(rows["final_ms"]).tolist() for _, msg_id in keys[slot_ms]}
        offsets, final_slots = rows["physical_offset"].tolist(), rows["final_ms"].tolist()
        for first, end, data in self._reader.groups(offsets, sizes):
            for index in range(first, end):
                at = offsets[index] - offsets[first]
                # A search in the raw bytes is fast, but also finds keys in bodies. So the few hits are read as records.
                if not wanted.isdisjoint(_UNIQ_KEY.findall(data, at, at + sizes[index])):
                    found[index] = self._reader.unique_key(offsets[index], sizes[index]) in keys[final_slots[index]]
        return found


_FIRST_PIECE_COUNT = 512  # a page needs few messages; each further piece has twice as many
_PIECE_COUNT = 16_384


class _Span(NamedTuple):
    """A part of a span of time.

    Attributes:
        slots: The slots of the messages that are due before *end_ms* and not parked, as `SLOT_DTYPE`.
        parked: Positions of the units of parked messages that are due before *end_ms*.
        log_end: End of the timer log when *slots* and *parked* were read.
    """

    end_ms: int
    slots: np.ndarray
    parked: np.ndarray
    log_end: int


class PendingTimers:
    """Reads pending timers from the files and from the backlog. It changes neither.

    The lock is the one of the `TimerMessageStore`. The caller holds it, except for `pieces`.

    Args:
        catch_up: Puts all messages of the timer topic on the wheel.
    """

    def __init__(
        self, backlog: TimerBacklog, reader: TimerTopicReader, lock: threading.RLock, catch_up: Callable[[], None]
    ) -> None:
        self._backlog = backlog
        self._log = backlog.files.log
        self._reader = reader
        self._precision_ms = backlog.files.settings.precision_ms
        self._lock = lock
        self._catch_up = catch_up
        self._parked = ParkedTimers(self._log, reader)
        self._parked_lock = threading.Lock()  # taken before the other lock
        self._recalls = TimerRecalls(backlog.files, reader)
        # Number of pending messages, minus the backlog's balance; recalled messages count. None before the first count.
        self._base_count: int | None = None

    # --- one message ---------------------------------------------------------------------------

    def find(self, record: StoredRecord) -> PendingEntry | None:
        """Return the entry of a record of the timer topic; None if it is not pending."""
        found = self._log.find(record.physical_offset)
        if found is None:
            return None
        unit, backlog = found[1], self._backlog
        if unit.magic & (Magic.DONE | Magic.DELETE) or unit.slot_ms < backlog.read_ms:
            return None
        deliver_ms = self._reader.deliver_time(record) or 0
        final_ms = slot_of(deliver_ms, self._precision_ms) if unit.magic & Magic.ROLL else unit.slot_ms
        if self._recalls.is_recalled(final_ms, record, backlog.read_ms):
            return None
        if unit.slot_ms in backlog.open:
            is_pending = backlog.is_near(unit, record)
        else:
            is_pending = not backlog.is_done(np.array([tuple(unit)], TIMER_UNIT_DTYPE))[0]
        return PendingEntry(deliver_ms, unit.slot_ms) if is_pending else None

    # --- many messages -------------------------------------------------------------------------

    def pieces(self, after_ms: int, before_ms: int) -> Iterator[PendingPiece]:
        """Yield what is pending in a span of time; see `DelayStore.pending`."""
        from_ms, max_count = after_ms, _FIRST_PIECE_COUNT
        while from_ms < before_ms:
            span = self._next_span(from_ms, before_ms, max_count)
            try:
                units = self._units(span)
            except TimerLogDamageError:
                # Without the lock, a unit may be half marked. If it is still damaged with the lock, the error is real.
                with self._lock:
                    units = self._units(span)
            with self._lock:
                # A message that was rolled since is missing among the units, unless it is added here. The service
                # puts its copy on the wheel only in the step after the one that rolled it.
                self._catch_up()
                added = [units for _, units in self._log.pieces(span.log_end, self._log.end)]
                rows = self._rows(np.concatenate([units, *added]))
            rows = rows[(rows["due_ms"] >= from_ms) & (rows["due_ms"] < span.end_ms)]
            if len(rows):
                yield PendingPiece(from_ms, rows)
            from_ms, max_count = span.end_ms, min(2 * max_count, _PIECE_COUNT)

    def _next_span(self, from_ms: int, before_ms: int, max_count: int) -> _Span:
        """Return the next part of a span of time, with not many more than *max_count* messages, or one slot."""
        with self._parked_lock:
            while True:
                with self._lock:
                    read_ms = self._backlog.read_ms
                    if not self._parked.read_on(from_ms, read_ms):
                        continue
                    # Late messages are in the slot at `read_ms`, which may be after the span.
                    slots = self._next_slots(from_ms, max(before_ms, read_ms + 1), max_count)
                    end_ms = before_ms
                    if len(slots):
                        # The messages of a slot are due after its time, and not later than the next slot's time.
                        end_ms = min(before_ms, (int(slots["time"][-1]) + 1) * self._precision_ms + 1)
                    parked, end_ms = self._parked.between(from_ms, end_ms, max_count)
                    if len(slots):
                        slots = slots[slots["time"] * self._precision_ms < max(end_ms, read_ms + 1)]
                    return _Span(end_ms, slots, parked, self._log.end)

    def _next_slots(self, from_ms: int, before_ms: int, max_count: int) -> np.ndarray:
        """Return the next live slots: at least one, and not many more messages than *max_count*; none at the end."""
        start_ms = max(slot_of(from_ms, self._precision_ms), self._backlog.read_ms)
        slots = next(self._backlog.files.wheel.live(start_ms, before_ms), None)
        if slots is None:
            return np.empty(0, SLOT_DTYPE)
        count = int(np.searchsorted(np.cumsum(np.maximum(slots["num"], 1)), max_count)) + 1
        return slots[:count]

    def _units(self, span: _Span) -> np.ndarray:
        """Return the units of a span, done or not.

        Raises:
            TimerLogDamageError: A unit is damaged.
        """
        units = self._log.units_of_slots(span.slots, self._precision_ms)
        # A parked message may be due long after its slot.
        parked = self._log.gather(span.parked[span.parked >= self._log.start])
        if not are_valid(parked).all():
            raise TimerLogDamageError("timerlog: the unit of a parked message is damaged")
        return np.concatenate([units[units["magic"] & Magic.ROLL == 0], parked])

    def rows_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        """Return what is pending in a part of the commit log, as `PENDING_DTYPE`, for retention.

        RocketMQ's delete markers and the messages they name are included: they still have to meet.
        """
        pieces = [NO_ROWS]
        for _, units in self._log.pieces(self._log.position_after(physical_start), self._log.end):
            chosen = units[units["physical_offset"] < physical_end]
            pieces.append(self._rows(chosen, with_markers=True))
            if len(chosen) < len(units):
                break
        return np.concatenate(pieces)

    def _rows(self, units: np.ndarray, *, with_markers: bool = False) -> np.ndarray:
        """Return the pending ones of some units, as `PENDING_DTYPE`.

        Args:
            with_markers: Include RocketMQ's delete markers, and the messages they name.
        """
        units = self._pending_units(units, Magic.DONE if with_markers else Magic.DONE | Magic.DELETE)
        if not with_markers:
            recalled = self._recalls.recalled(self._backlog.read_ms)
            units = units[~contains(recalled["physical_offset"], units["physical_offset"])]
        rows = np.empty(len(units), PENDING_DTYPE)
        rows["physical_offset"] = units["physical_offset"]
        rows["size"] = units["record_size"]
        rows["topic_hash"] = units["topic_hash"]
        times = self._reader.due_times(units)
        rows["due_ms"] = np.where(times == NO_TIME_MS, slots_of(units), times)
        return rows

    def _pending_units(self, units: np.ndarray, excluded_bits: int) -> np.ndarray:
        """Return the units without these bits whose messages are pending; recalled ones are included."""
        backlog = self._backlog
        units = units[(slots_of(units) >= backlog.read_ms) & (units["magic"] & excluded_bits == 0)]
        is_pending = ~backlog.is_done(units)
        # An open slot is in the near term, except its delete markers that are not parked.
        is_open = np.isin(slots_of(units), list(backlog.open))
        is_open &= units["magic"] & (Magic.DELETE | Magic.ROLL) != Magic.DELETE
        if is_open.any():
            is_pending &= ~is_open | contains(backlog.near_offsets(), units["physical_offset"])
        return np.asarray(units[is_pending])

    def count(self) -> int:
        """Return the number of pending messages. The first call reads all units: 0.05 microseconds each (measured)."""
        backlog = self._backlog
        if self._base_count is None:
            self._base_count = self._count(units for _, units in self._log.pieces(0, self._log.end)) - backlog.balance
        positions = self._recalls.recalled(backlog.read_ms)["position"]
        recalled = self._log.gather(positions[positions >= self._log.start])
        return self._base_count + backlog.balance - self._count([recalled])

    def _count(self, pieces: Iterable[np.ndarray]) -> int:
        return sum([len(self._pending_units(units, Magic.DONE | Magic.DELETE)) for units in pieces])

    # --- files ---------------------------------------------------------------------------------

    def delete_before(self, physical_start: int) -> int:
        """Delete timer log files without pending messages whose records are before *physical_start*.

        Returns:
            The number of deleted files.
        """
        log, kept = self._log, self._log.start
        for end in log.file_ends():
            last = log.read(log.last_position(end))
            if last is None or last.physical_offset >= physical_start:
                break
            if any(len(self._rows(units, with_markers=True)) for _, units in log.pieces(kept, end)):
                break
            kept = end
        return log.delete_before(kept)
