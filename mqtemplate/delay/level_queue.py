"""The consume queue of one delay level, read in order of due time although units are stored in order of arrival."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS, PENDING_DTYPE
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import CQ_UNIT_DTYPE, DONE_SIZE_MARK, PRE_BLANK_SIZE_MARK

_SCAN_COUNT = 65_536
"""Units in one read of the queue."""


class QueueSegment:
    """Adjacent units of the queue whose due times ascend.

    Attributes:
        start: Queue offset of the first unit.
        end: Queue offset after the last unit.
        cursor: Queue offset of the first pending unit; ``start <= cursor <= end``.
        done_count: Number of units from the cursor on that are not pending.
        marked_to: All units before this queue offset are marked as done on disk.
        due_ms: Due time of the unit at the cursor.
    """

    __slots__ = ("cursor", "done_count", "due_ms", "end", "marked_to", "start")

    def __init__(self, start: int) -> None:
        self.start = self.end = self.cursor = self.marked_to = start
        self.done_count = 0
        self.due_ms = NEVER_MS

    @property
    def pending_count(self) -> int:
        """Number of units that are pending."""
        return self.end - self.cursor - self.done_count


class DueUnits(NamedTuple):
    """Units from a segment's cursor on that are due, in order.

    Attributes:
        rows: Array of `PENDING_DTYPE`. The size of a unit that is not pending is 0.
    """

    segment: QueueSegment
    rows: np.ndarray


class ProgressMarks(NamedTuple):
    """Units that are done although units before them are pending, so the queue's position does not cover them.

    Attributes:
        cursors: Segments, each with its cursor.
        removed: Queue offsets of single units.
    """

    cursors: Sequence[tuple[QueueSegment, int]]
    removed: frozenset[int]


class LevelQueue:
    """The pending messages of one level.

    Equal delays make due times ascend, and the first unit is due first. After a change of the level table, or a step of
    the clock under another broker, due times ascend in segments only. Then the first unit of each segment is compared.

    - Segments adjoin. All units before the first segment are done. `catch_up` reads the units after the last one.
    - A unit is done if it is before its segment's cursor, was removed, or is marked as done on disk.
    - Not thread-safe: the `ScheduleMessageService` holds its lock.

    Args:
        position: Queue offset of the first unit that may be pending.

    Attributes:
        due_ms: Due time of the next message; `NEVER_MS` if none is pending.
    """

    def __init__(self, queue: ConsumeQueue, position: int) -> None:
        self._queue = queue
        self._segments: list[QueueSegment] = []
        self._read_to = min(position, queue.max_offset)
        self._last_due_ms = 0
        self._removed: set[int] = set()
        self.due_ms = NEVER_MS

    @property
    def position(self) -> int:
        """Queue offset of the first unit that is not done."""
        return self._segments[0].cursor if self._segments else self._read_to

    @property
    def pending_count(self) -> int:
        """Number of pending messages."""
        return sum([segment.pending_count for segment in self._segments])

    @property
    def unread_count(self) -> int:
        """Number of units that were not read yet."""
        return max(0, self._queue.max_offset - self._read_to)

    # --- reading new units ---------------------------------------------------------------------

    def catch_up(self) -> int:
        """Read new units. Return how many pending messages were deleted with their files since the last call."""
        queue = self._queue
        lost = self._forget_before(queue.min_offset) if queue.min_offset > self.position else 0
        if self._read_to < queue.max_offset:
            first_new = max(len(self._segments) - 1, 0)
            for _, units in unit_pieces(queue, self._read_to):
                self._append(units)
            self._refresh(self._segments[first_new:])
        return lost

    def _append(self, units: np.ndarray) -> None:
        due_ms = units["tags_code"].astype(np.int64)
        falls = (np.flatnonzero(due_ms[1:] < due_ms[:-1]) + 1).tolist()
        done = is_marked(units)
        continues_last = bool(self._segments) and int(due_ms[0]) >= self._last_due_ms
        for start, end in pairwise([0, *falls, len(units)]):
            if start or not continues_last:
                self._segments.append(QueueSegment(self._read_to + start))
            self._segments[-1].end = self._read_to + end
            self._segments[-1].done_count += int(np.count_nonzero(done[start:end]))
        self._last_due_ms = int(due_ms[-1])
        self._read_to += len(units)

    def _forget_before(self, min_offset: int) -> int:
        """Drop the units that were deleted from the queue. Return how many of them were pending."""
        before = self.pending_count + max(min_offset - self._read_to, 0)
        queue = self._queue
        self._segments = [segment for segment in self._segments if segment.end > min_offset]
        self._read_to = max(self._read_to, min_offset)
        for segment in self._segments:
            if segment.cursor < min_offset:
                segment.cursor = min_offset
                done = [self._is_done(units, start) for start, units in unit_pieces(queue, min_offset, segment.end)]
                segment.done_count = int(sum(map(np.count_nonzero, done)))
        self._removed = {queue_offset for queue_offset in self._removed if queue_offset >= min_offset}
        self._refresh(self._segments)
        return before - self.pending_count

    # --- due units -----------------------------------------------------------------------------

    def due(self, now_ms: int, max_count: int) -> Iterator[DueUnits]:
        """Yield for each segment up to *max_count* units that are due at *now_ms*."""
        if self.due_ms > now_ms:
            return
        for segment in self._segments:
            if segment.due_ms <= now_ms:
                units = read_units(self._queue, segment.cursor, min(segment.cursor + max_count, segment.end))
                rows = _rows_of(units)
                rows["size"][self._is_done(units, segment.cursor)] = 0
                yield DueUnits(segment, rows[: int(np.searchsorted(rows["due_ms"], now_ms, "right"))])

    def advance(self, units: DueUnits, count: int) -> None:
        """Count the first *count* of *units* as done."""
        units.segment.cursor += count
        units.segment.done_count -= int(np.count_nonzero(units.rows["size"][:count] == 0))
        self._refresh([units.segment])

    def _refresh(self, segments: Sequence[QueueSegment]) -> None:
        """Move cursors to pending units, update due times, and drop finished segments at the front."""
        for segment in segments:
            if segment.done_count:
                self._skip_done(segment)
            segment.due_ms = self.due_ms_at(segment.cursor) if segment.cursor < segment.end else NEVER_MS
        while self._segments and self._segments[0].cursor == self._segments[0].end:
            del self._segments[0]
        self.due_ms = min([segment.due_ms for segment in self._segments], default=NEVER_MS)

    def due_ms_at(self, queue_offset: int) -> int:
        """Return the due time of the unit at *queue_offset*; 0 if it was deleted."""
        units = self._queue.unit_tuples(queue_offset, 1)
        return units[0][2] if units else 0  # 0 is due at once, and then `catch_up` counts the message as lost

    def _skip_done(self, segment: QueueSegment) -> None:
        for start, units in unit_pieces(self._queue, segment.cursor, segment.end):
            done = self._is_done(units, start)
            count = len(done) if done.all() else int(np.argmin(done))
            segment.cursor += count
            segment.done_count -= count
            if count < len(done) or not segment.done_count:
                return

    def _is_done(self, units: np.ndarray, start: int) -> np.ndarray:
        """Return for each of *units*, the first of which is at *start*, whether it was removed or is marked."""
        done = is_marked(units)
        if self._removed:
            queue_offsets = range(start, start + len(units))
            done |= np.fromiter(map(self._removed.__contains__, queue_offsets), np.bool_, len(units))
        return done

    # --- single messages -----------------------------------------------------------------------

    def find(self, queue_offset: int, physical_offset: int) -> int | None:
        """Return the due time of the unit at *queue_offset* if it is pending and belongs to this record, else None."""
        segment = self._segment_of(queue_offset)
        if segment is None or queue_offset < segment.cursor or queue_offset in self._removed:
            return None
        units = self._queue.units(queue_offset, 1)
        if len(units) != 1 or int(units["physical_offset"][0]) != physical_offset or is_marked(units)[0]:
            return None
        return int(units["tags_code"][0])

    def remove(self, queue_offset: int) -> None:
        """Count a pending unit as done."""
        segment = self._segment_of(queue_offset)
        assert segment is not None, "the unit is pending"
        self._removed.add(queue_offset)
        segment.done_count += 1
        if queue_offset == segment.cursor:
            self._refresh([segment])

    def _segment_of(self, queue_offset: int) -> QueueSegment | None:
        index = bisect_right(self._segments, queue_offset, key=lambda segment: segment.start) - 1
        return self._segments[index] if index >= 0 and queue_offset < self._segments[index].end else None

    # --- all pending messages ------------------------------------------------------------------

    def spans(self, after_ms: int) -> list[tuple[int, int, int]]:
        """Return for each segment with units due at *after_ms* or later: due time, first queue offset, end offset."""
        found = []
        for segment in self._segments:
            units = range(segment.cursor, segment.end)
            start = segment.cursor + bisect_left(units, after_ms, key=self.due_ms_at)
            if start < segment.end:
                found.append((self.due_ms_at(start), start, segment.end))
        return found

    def rows(self, start: int, end: int) -> np.ndarray:
        """Return the pending messages at queue offsets *start* up to *end*, as `PENDING_DTYPE`."""
        start, end = max(start, self.position), min(end, self._read_to)
        units = read_units(self._queue, start, end)
        is_pending = ~self._is_done(units, start)
        first = max(bisect_right(self._segments, start, key=lambda segment: segment.start) - 1, 0)
        for segment in self._segments[first:]:
            if segment.start >= end:
                break
            is_pending[max(segment.start - start, 0) : max(segment.cursor - start, 0)] = False
        return _rows_of(units[is_pending])

    def rows_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        """Return the pending messages whose records are in this part of the commit log, as `PENDING_DTYPE`."""
        first_at = self._queue.first_at
        return self.rows(first_at("physical_offset", physical_start), first_at("physical_offset", physical_end))

    # --- progress ------------------------------------------------------------------------------

    def marks(self) -> ProgressMarks:
        """Return the units after the position that are done but not marked on disk."""
        cursors = [(segment, segment.cursor) for segment in self._segments[1:] if segment.cursor > segment.marked_to]
        position = self.position
        self._removed = {queue_offset for queue_offset in self._removed if queue_offset >= position}
        return ProgressMarks(cursors, frozenset(self._removed))

    def mark(self, marks: ProgressMarks) -> None:
        """Mark these units on disk and flush. It needs no lock: no other thread calls it."""
        for segment, cursor in marks.cursors:
            mark_all(self._queue, segment.marked_to, cursor)
            segment.marked_to = cursor
        for queue_offset in marks.removed:
            self.mark_cancelled(queue_offset)
        if marks.cursors or marks.removed:
            self._queue.flush()

    def mark_cancelled(self, queue_offset: int) -> None:
        """Mark one unit now; the next flush makes it durable. Marking it again is harmless."""
        if queue_offset >= self._queue.min_offset:
            self._queue.mark_done(queue_offset)

    def forget(self, marks: ProgressMarks) -> None:
        """With the lock: stop storing these units in memory. They are marked on disk."""
        self._removed -= marks.removed


def unit_pieces(queue: ConsumeQueue, start: int, end: int = NEVER_MS) -> Iterator[tuple[int, np.ndarray]]:
    """Yield units from *start* up to *end*, piece by piece, each with the queue offset of its first unit."""
    while len(units := queue.units(start, min(end - start, _SCAN_COUNT))):
        yield start, units
        start += len(units)


def read_units(queue: ConsumeQueue, start: int, end: int) -> np.ndarray:
    """Read units from *start* up to *end* across files; none if the first was deleted."""
    pieces = [units for _, units in unit_pieces(queue, start, end)]
    if len(pieces) == 1:
        return pieces[0]  # no copy: the usual case
    return np.concatenate([np.empty(0, CQ_UNIT_DTYPE), *pieces])


def _rows_of(units: np.ndarray) -> np.ndarray:
    """Return units as `PENDING_DTYPE`."""
    rows = np.zeros(len(units), PENDING_DTYPE)
    rows["due_ms"] = units["tags_code"]
    rows["physical_offset"] = units["physical_offset"]
    rows["size"] = units["size"]
    return rows


def mark_all(queue: ConsumeQueue, start: int, end: int) -> None:
    """Mark the existing units from *start* up to *end* as done."""
    start = max(start, queue.min_offset)
    for index in np.flatnonzero(~is_marked(read_units(queue, start, end))).tolist():
        queue.mark_done(start + index)


def is_marked(units: np.ndarray) -> np.ndarray:
    """Return for each unit whether it has no message to release: marked as done, or blank before the first message."""
    sizes = units["size"]
    return np.asarray((sizes == DONE_SIZE_MARK) | (sizes == PRE_BLANK_SIZE_MARK))
