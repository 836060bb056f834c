"""One level's queue in order of due time, though its units lie in the order they were stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.delay_store import WAITING_DTYPE
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.layout import CQ_UNIT_DTYPE, DONE_SIZE_MARK, PRE_BLANK_SIZE_MARK

_SCAN_COUNT = 65_536
"""Units that one look at the queue takes."""
NEVER_MS = (1 << 63) - 1
"""The due time of what is not there."""


class Segment:
    """A stretch of the queue whose due times ascend.

    Attributes:
        begin: Its first queue offset.
        end: One past its last.
        cursor: The first one not handed over; ``begin <= cursor <= end``.
        done_count: How many from the cursor on need no handing over.
        marked_to: Up to here the units say themselves that they are done.
        due_ms: When the unit at the cursor is due.
    """

    __slots__ = ("begin", "cursor", "done_count", "due_ms", "end", "marked_to")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = self.cursor = self.marked_to = begin
        self.done_count = 0
        self.due_ms = NEVER_MS

    @property
    def waiting_count(self) -> int:
        return self.end - self.cursor - self.done_count


class DueUnits(NamedTuple):
    """Units from a segment's cursor on that are due, in order.

    Attributes:
        due_ms: When each is.
        sizes: Bytes of the records; 0 for a unit that needs no handing over.
    """

    segment: Segment
    due_ms: np.ndarray
    physical_offsets: np.ndarray
    sizes: np.ndarray


class Marks(NamedTuple):
    """Units that are done, but not in turn, so that their queue's position does not tell it.

    Attributes:
        cursors: Segments, and up to where each is done.
        withdrawn: Queue offsets of single units.
    """

    cursors: Sequence[tuple[Segment, int]]
    withdrawn: frozenset[int]


class LevelQueue:
    """What waits in one level.

    One delay for all means ascending due times, and then the first unit is the first due. When the level table changed,
    or a clock stepped under another broker, they ascend in segments only; then the first of each is looked at.

    - Segments adjoin; everything before the first is done, and behind the last is what `catch_up` has not seen.
    - A unit is done that lies before its segment's cursor, was withdrawn, or is marked so.
    - Not thread-safe: the `ScheduleMessageService` holds its lock.

    Args:
        position: The first queue offset that is not done.

    Attributes:
        due_ms: When the next message is due; `NEVER_MS` if none waits.
    """

    def __init__(self, queue: ConsumeQueue, position: int) -> None:
        self._queue = queue
        self._segments: list[Segment] = []
        self._seen_end = min(position, queue.max_offset)
        self._last_due_ms = 0
        self._withdrawn: set[int] = set()
        self.due_ms = NEVER_MS

    @property
    def position(self) -> int:
        """The first queue offset that is not done."""
        return self._segments[0].cursor if self._segments else self._seen_end

    @property
    def waiting_count(self) -> int:
        return sum([segment.waiting_count for segment in self._segments])

    # --- taking in -----------------------------------------------------------------------------

    def catch_up(self) -> int:
        """Take in new units; gives how many messages are gone from the log before they were handed over."""
        queue = self._queue
        lost = 0
        if queue.min_offset > self.position:
            lost = self._forget_before(queue.min_offset)
        if self._seen_end < queue.max_offset:
            first_new = max(len(self._segments) - 1, 0)
            while len(units := queue.units(self._seen_end, _SCAN_COUNT)):
                self._take_in(units)
            self._look_at(self._segments[first_new:])
        return lost

    def _take_in(self, units: np.ndarray) -> None:
        due_ms = units["tags_code"].astype(np.int64)
        falls = (np.flatnonzero(due_ms[1:] < due_ms[:-1]) + 1).tolist()
        done = is_marked(units)
        goes_on = bool(self._segments) and int(due_ms[0]) >= self._last_due_ms
        for start, end in pairwise([0, *falls, len(units)]):
            if start or not goes_on:
                self._segments.append(Segment(self._seen_end + start))
            self._segments[-1].end = self._seen_end + end
            self._segments[-1].done_count += int(np.count_nonzero(done[start:end]))
        self._last_due_ms = int(due_ms[-1])
        self._seen_end += len(units)

    def _forget_before(self, min_offset: int) -> int:
        """Leave behind what is gone from the log; gives how many messages of it were still waiting."""
        before = self.waiting_count + max(min_offset - self._seen_end, 0)
        self._segments = [segment for segment in self._segments if segment.end > min_offset]
        self._seen_end = max(self._seen_end, min_offset)
        for segment in self._segments:
            if segment.cursor < min_offset:
                segment.cursor = min_offset
                segment.done_count = self._count_done(min_offset, segment.end)
        self._withdrawn = {queue_offset for queue_offset in self._withdrawn if queue_offset >= min_offset}
        self._look_at(self._segments)
        return before - self.waiting_count

    def _count_done(self, begin: int, end: int) -> int:
        count = 0
        for start in range(begin, end, _SCAN_COUNT):
            units = read_units(self._queue, start, min(start + _SCAN_COUNT, end))
            count += int(np.count_nonzero(self._done(units, start)))
        return count

    # --- what is due ---------------------------------------------------------------------------

    def due(self, now_ms: int, max_count: int) -> Iterator[DueUnits]:
        """For each segment, up to *max_count* units that are due at *now_ms*."""
        if self.due_ms > now_ms:
            return
        for segment in self._segments:
            if segment.due_ms <= now_ms:
                units = read_units(self._queue, segment.cursor, min(segment.cursor + max_count, segment.end))
                due_ms = units["tags_code"].astype(np.int64)
                count = int(np.searchsorted(due_ms, now_ms, "right"))
                sizes = np.where(self._done(units, segment.cursor), 0, units["size"])
                physical_offsets = units["physical_offset"].astype(np.int64)
                yield DueUnits(segment, due_ms[:count], physical_offsets[:count], sizes[:count])

    def pass_over(self, units: DueUnits, count: int) -> None:
        """The first *count* of *units* are done."""
        units.segment.cursor += count
        units.segment.done_count -= int(np.count_nonzero(units.sizes[:count] == 0))
        self._look_at([units.segment])

    def _look_at(self, segments: Sequence[Segment]) -> None:
        """Bring their cursors to units that wait, note when those are due, and drop what is done at the front."""
        for segment in segments:
            if segment.done_count:
                self._skip_done(segment)
            segment.due_ms = self.due_ms_at(segment.cursor) if segment.cursor < segment.end else NEVER_MS
        while self._segments and self._segments[0].cursor == self._segments[0].end:
            del self._segments[0]
        self.due_ms = min([segment.due_ms for segment in self._segments], default=NEVER_MS)

    def due_ms_at(self, queue_offset: int) -> int:
        """When the unit at *queue_offset* is due; 0 if it is gone."""
        units = self._queue.unit_tuples(queue_offset, 1)
        return units[0][2] if units else 0  # `catch_up` sees to it

    def _skip_done(self, segment: Segment) -> None:
        while segment.done_count and segment.cursor < segment.end:
            units = self._queue.units(segment.cursor, min(segment.end - segment.cursor, _SCAN_COUNT))
            done = self._done(units, segment.cursor)
            count = len(done) if done.all() else int(np.argmin(done))
            segment.cursor += count
            segment.done_count -= count
            if count < len(done) or not len(done):
                return

    def _done(self, units: np.ndarray, begin: int) -> np.ndarray:
        """Which of *units*, the first of which lies at *begin*, need no handing over."""
        done = is_marked(units)
        if self._withdrawn:
            places = range(begin, begin + len(units))
            done |= np.fromiter(map(self._withdrawn.__contains__, places), np.bool_, len(units))
        return done

    # --- single messages -----------------------------------------------------------------------

    def is_waiting(self, queue_offset: int, physical_offset: int) -> bool:
        """Whether the unit at *queue_offset* is that of this record, and is still to be handed over."""
        segment = self._segment_of(queue_offset)
        if segment is None or queue_offset < segment.cursor or queue_offset in self._withdrawn:
            return False
        units = self._queue.units(queue_offset, 1)
        return len(units) == 1 and int(units["physical_offset"][0]) == physical_offset and not is_marked(units)[0]

    def withdraw(self, queue_offset: int) -> None:
        """Count a unit that waits as done."""
        segment = self._segment_of(queue_offset)
        assert segment is not None, "it waits"
        self._withdrawn.add(queue_offset)
        segment.done_count += 1
        if queue_offset == segment.cursor:
            self._look_at([segment])

    def _segment_of(self, queue_offset: int) -> Segment | None:
        index = bisect_right(self._segments, queue_offset, key=lambda segment: segment.begin) - 1
        return self._segments[index] if index >= 0 and queue_offset < self._segments[index].end else None

    # --- everything that waits -----------------------------------------------------------------

    def spans(self, after_ms: int) -> list[tuple[int, int, int]]:
        """For each segment the first unit due at *after_ms* or later: its due time, its offset, the segment's end."""
        found = []
        for segment in self._segments:
            begin = self._first_due(segment, after_ms)
            if begin < segment.end:
                found.append((self.due_ms_at(begin), begin, segment.end))
        return found

    def _first_due(self, segment: Segment, after_ms: int) -> int:
        low, high = segment.cursor, segment.end
        while low < high:
            middle = (low + high) // 2
            if self.due_ms_at(middle) < after_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def rows(self, begin: int, end: int) -> np.ndarray:
        """The units from *begin* up to *end* whose messages wait now, as `WAITING_DTYPE`."""
        begin, end = max(begin, self.position), min(end, self._seen_end)
        units = read_units(self._queue, begin, end)
        waits = ~self._done(units, begin)
        first = max(bisect_right(self._segments, begin, key=lambda segment: segment.begin) - 1, 0)
        for segment in self._segments[first:]:
            if segment.begin >= end:
                break
            waits[max(segment.begin - begin, 0) : max(segment.cursor - begin, 0)] = False
        units = units[waits]
        rows = np.zeros(len(units), WAITING_DTYPE)
        rows["due_ms"], rows["physical_offset"], rows["size"] = (
            units["tags_code"], units["physical_offset"], units["size"],
        )  # fmt: skip
        return rows

    def rows_between(self, physical_begin: int, physical_end: int) -> np.ndarray:
        """The same for the records in this part of the commit log."""
        first_at = self._queue.first_at
        return self.rows(first_at("physical_offset", physical_begin), first_at("physical_offset", physical_end))

    # --- progress ------------------------------------------------------------------------------

    def marks(self) -> Marks:
        """What is done behind the position, and not marked in the queue yet."""
        cursors = [(segment, segment.cursor) for segment in self._segments[1:] if segment.cursor > segment.marked_to]
        position = self.position
        self._withdrawn = {queue_offset for queue_offset in self._withdrawn if queue_offset >= position}
        return Marks(cursors, frozenset(self._withdrawn))

    def mark(self, marks: Marks) -> None:
        """Mark these in the queue, and return when that lasts. Needs no lock: nobody else marks."""
        for segment, cursor in marks.cursors:
            mark_all(self._queue, segment.marked_to, cursor)
            segment.marked_to = cursor
        for queue_offset in marks.withdrawn:
            self.mark_cancelled(queue_offset)
        if marks.cursors or marks.withdrawn:
            self._queue.flush()

    def mark_cancelled(self, queue_offset: int) -> None:
        """Mark one unit now; again does no harm, and has the next flush write it."""
        if queue_offset >= self._queue.min_offset:
            self._queue.mark_done(queue_offset)

    def forget(self, marks: Marks) -> None:
        """With the lock: these are marked, so they need not be known by heart."""
        self._withdrawn -= marks.withdrawn


def read_units(queue: ConsumeQueue, begin: int, end: int) -> np.ndarray:
    """Units from *begin* up to *end*, over the ends of files; none where the first is gone."""
    pieces = []
    while begin < end and len(units := queue.units(begin, end - begin)):
        pieces.append(units)
        begin += len(units)
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, CQ_UNIT_DTYPE)


def mark_all(queue: ConsumeQueue, begin: int, end: int) -> None:
    """Mark the units from *begin* up to *end* as done, as far as they are there."""
    begin = max(begin, queue.min_offset)
    for place in np.flatnonzero(~is_marked(read_units(queue, begin, end))).tolist():
        queue.mark_done(begin + place)


def is_marked(units: np.ndarray) -> np.ndarray:
    """Which units say themselves that there is nothing to hand over."""
    sizes = units["size"]
    return np.asarray((sizes == DONE_SIZE_MARK) | (sizes == PRE_BLANK_SIZE_MARK))
