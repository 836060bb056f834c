"""The timers that are due next, in exact order: the few open slots, as columns of numbers."""

from __future__ import annotations

import heapq
from bisect import bisect_right

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.delay.release import DueRecord

_RECORD_KINDS = ("i8", "i8", "i4", "i8", "?", "?")
NEAR_DTYPE = np.dtype([*zip(DueRecord._fields, _RECORD_KINDS, strict=True), ("position", "i8"), ("is_gone", "?")])
"""The fields of `DueRecord`, the position of the unit in the timer log, and whether the message was removed: 39 bytes.

For a parked message ``due_ms`` is the time at which it is rolled."""
_RECORD_FIELDS = list(DueRecord._fields)


class NearTerm:
    """A queue of timers, ordered by due time, then by physical offset.

    - Slots are added as sorted arrays, not as objects: a slot of a million messages takes 50 MB.
    - Messages that arrive while their slot is open (late ones) are in a small heap.
    - ``take`` returns the next messages, ``drop`` forgets them. In between, the caller releases them.
    - ``take_dropped`` returns the positions of the dropped units.
    """

    def __init__(self) -> None:
        self._rows = np.empty(0, NEAR_DTYPE)
        self._due_ms = np.empty(0, np.int64)  # that column, contiguous: searching it is faster
        self._at = 0  # the rows before it are dropped
        self._gone_count = 0  # removed rows from there on
        self._late: list[DueRecord] = []
        # Physical offset -> position of the pending messages in the heap. A removed message stays in the heap only.
        self._late_positions: dict[int, int] = {}
        self._taken_late: list[DueRecord] = []  # late messages between `take` and `drop`
        self._dropped: list[np.ndarray] = []  # positions of dropped units

    # --- adding --------------------------------------------------------------------------------

    def add_slot(self, rows: np.ndarray) -> None:
        """Add the messages of one slot, in any order. A message that is in it twice counts once."""
        if not len(rows):
            return
        if self._at < len(self._rows):
            kept = self._rows[self._at :]
            rows = np.concatenate([kept[~kept["is_gone"]], rows])
        rows = rows[np.lexsort((rows["physical_offset"], rows["due_ms"]))]
        # RocketMQ may link one record twice, when it repeats a batch: the same due time, so adjacent after sorting.
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = rows["physical_offset"][1:] != rows["physical_offset"][:-1]
        self._set_rows(rows if is_first.all() else rows[is_first])

    def _set_rows(self, rows: np.ndarray) -> None:
        self._rows, self._at, self._gone_count = rows, 0, 0
        self._due_ms = np.ascontiguousarray(rows["due_ms"])

    def add_late(self, rows: np.ndarray) -> None:
        """Add messages whose slots are open already."""
        for item, position in zip(rows[_RECORD_FIELDS].tolist(), rows["position"].tolist(), strict=True):
            heapq.heappush(self._late, DueRecord._make(item))
            self._late_positions[item[1]] = position

    # --- taking --------------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int:
        """Due time of the first message; `NEVER_MS` if there is none."""
        self._put_back()
        first_ms = int(self._due_ms[self._at]) if self._at < len(self._rows) else NEVER_MS
        return min(first_ms, self._late[0].due_ms) if self._late else first_ms

    def due_count(self, now_ms: int, max_count: int) -> int:
        """Return the number of due messages up to *max_count*, late ones left out."""
        return int(np.searchsorted(self._due_ms[self._at : self._at + max_count], now_ms, side="right"))

    def take(self, now_ms: int, max_count: int) -> list[DueRecord]:
        """Return up to *max_count* due messages, the earliest first. They stay in the queue until `drop`."""
        self._put_back()
        rows = self._rows[self._at : self._at + self.due_count(now_ms, max_count)]
        if self._gone_count:
            rows = rows[~rows["is_gone"]]
        taken = list(map(DueRecord._make, rows[_RECORD_FIELDS].tolist()))
        while self._late and self._late[0].due_ms <= now_ms and len(self._taken_late) < max_count:
            self._taken_late.append(heapq.heappop(self._late))
            self._skip_removed()
        return list(heapq.merge(taken, self._taken_late))[:max_count] if self._taken_late else taken

    def drop(self, taken: list[DueRecord]) -> None:
        """Forget the leading messages that the last `take` returned."""
        # *taken* may be shorter than that result. Both are sorted, so its last message shows how many are late ones.
        late_count = bisect_right(self._taken_late, taken[-1]) if taken else 0
        if late_count:
            positions = [self._late_positions.pop(item.physical_offset) for item in self._taken_late[:late_count]]
            self._dropped.append(np.array(positions, np.int64))
            del self._taken_late[:late_count]
        self._put_back()
        self._advance(len(taken) - late_count)

    def _advance(self, count: int) -> None:
        """Drop *count* rows that were not removed, and the removed rows among and right after them."""
        start = self._at
        while self._gone_count and self._at < len(self._rows):
            if self._rows["is_gone"][self._at]:
                self._gone_count -= 1
            elif count:
                count -= 1
            else:
                break
            self._at += 1
        if not self._gone_count:  # the usual case takes one step
            self._at += count
        passed = self._rows[start : self._at]
        self._dropped.append(passed["position"][~passed["is_gone"]])
        if self._at >= len(self._rows):
            self._set_rows(np.empty(0, NEAR_DTYPE))

    def take_dropped(self) -> np.ndarray:
        """Return the positions of the units that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return np.concatenate([np.empty(0, np.int64), *dropped])

    def _put_back(self) -> None:
        """Return late messages to the heap that were taken but not dropped, as after a full disk."""
        for item in self._taken_late:
            heapq.heappush(self._late, item)
        self._taken_late.clear()

    def _skip_removed(self) -> None:
        while self._late and self._late[0].physical_offset not in self._late_positions:
            heapq.heappop(self._late)

    # --- single messages -----------------------------------------------------------------------

    def contains(self, due_ms: int, physical_offset: int) -> bool:
        """Return True if a message with this ``due_ms`` field is in the queue."""
        return physical_offset in self._late_positions or self._find(due_ms, physical_offset) is not None

    def remove(self, due_ms: int, physical_offset: int) -> None:
        """Remove a message, if it is in the queue. Not allowed between `take` and `drop`."""
        self._put_back()
        index = self._find(due_ms, physical_offset)
        if index is not None:
            self._rows["is_gone"][index] = True
            self._gone_count += 1
            self._advance(0)
        elif physical_offset in self._late_positions:
            del self._late_positions[physical_offset]
            self._skip_removed()

    def _find(self, due_ms: int, physical_offset: int) -> int | None:
        """Return the row of a message. Rows with one due time are in the order of their physical offsets."""
        due = self._due_ms[self._at :]
        start, end = (int(np.searchsorted(due, due_ms, side)) + self._at for side in ("left", "right"))
        index = start + int(np.searchsorted(self._rows["physical_offset"][start:end], physical_offset))
        if index == end or self._rows["physical_offset"][index] != physical_offset or self._rows["is_gone"][index]:
            return None
        return index

    def physical_offsets(self) -> np.ndarray:
        """Return the physical offsets of all messages in the queue, ascending."""
        rows = self._rows[self._at :]
        late = np.fromiter(self._late_positions, np.int64, len(self._late_positions))
        return np.sort(np.concatenate([rows["physical_offset"][~rows["is_gone"]], late]))
