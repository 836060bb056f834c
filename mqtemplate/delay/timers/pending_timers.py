"""View of the pending timers: those on the wheel that are not released, cancelled or recalled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.offset_set import contains
from mqtemplate.delay.pending_rows import NO_ROWS, PENDING_DTYPE, PendingEntry, PendingPiece
from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.intake import NO_TIME_MS, TimerTopicReader
from mqtemplate.delay.timers.parked import ParkedTimers
from mqtemplate.delay.timers.recalls import TimerRecalls
from mqtemplate.delay.timers.settings import slot_of
from mqtemplate.delay.timers.timer_log import TimerLogDamageError
from mqtemplate.delay.timers.timer_unit import TIMER_UNIT_DTYPE, Magic, are_valid, slots_of
from mqtemplate.delay.timers.timer_wheel import SLOT_DTYPE
from mqtemplate.record.codec import StoredRecord

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
