"""What falls due next, in exact order: the few slots that are open now, as columns of numbers."""

from __future__ import annotations

import heapq
from bisect import bisect_right

import numpy as np

from mqtemplate.delay.release import WaitingRecord

NEAR_DTYPE = np.dtype(
    [
        ("due_ms", "i8"),
        ("physical_offset", "i8"),
        ("size", "i4"),
        ("enqueue_ms", "i8"),
        ("position", "i8"),
        ("rolls", "?"),
        ("is_poison", "?"),
        ("is_gone", "?"),
    ]
)
"""The fields of `WaitingRecord`, where its unit stands in the timer log, whether it was taken out: 39 bytes a message.
For one that is parked ``due_ms`` is when it is set on again."""
_RECORD_FIELDS = list(WaitingRecord._fields)


class NearTerm:
    """An ordered queue of timers: by due time, then in the order they came.

    - Slots come as sorted arrays, not as objects, so that a slot of a million messages is 50 MB.
    - Messages that arrive while their slot is open already lie in a small heap beside.
    - ``take`` shows the next ones, ``drop`` forgets them; in between they are handed over.
    - Of what was dropped the units' positions are kept until `take_left`.
    """

    def __init__(self) -> None:
        self._rows = np.empty(0, NEAR_DTYPE)
        self._due_ms = np.empty(0, np.int64)  # the column of that name, for searching
        self._at = 0  # the rows before it are dropped
        self._gone_count = 0  # of those behind it
        self._late: list[WaitingRecord] = []
        # of those in the heap that wait, with their positions; the others were taken out
        self._late_offsets: dict[int, int] = {}
        self._in_hand: list[WaitingRecord] = []  # late-comers between `take` and `drop`
        self._left: list[np.ndarray] = []  # positions of what was dropped

    def __len__(self) -> int:
        return len(self._rows) - self._at - self._gone_count + len(self._late_offsets)

    # --- coming in -----------------------------------------------------------------------------

    def add_slot(self, rows: np.ndarray) -> None:
        """Take the messages of one slot in, in any order; a message that is in it twice counts once."""
        if not len(rows):
            return
        if self._at < len(self._rows):
            kept = self._rows[self._at :]
            rows = np.concatenate([kept[~kept["is_gone"]], rows])
        order = np.lexsort((rows["physical_offset"], rows["due_ms"]))
        rows = rows[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = rows["physical_offset"][1:] != rows["physical_offset"][:-1]
        self._put(rows if is_first.all() else rows[is_first])

    def _put(self, rows: np.ndarray) -> None:
        self._rows, self._at, self._gone_count = rows, 0, 0
        self._due_ms = np.ascontiguousarray(rows["due_ms"])

    def add(self, item: WaitingRecord, position: int) -> None:
        """Take one late-comer in, whose unit stands at *position*."""
        heapq.heappush(self._late, item)
        self._late_offsets[item.physical_offset] = position

    # --- going out -----------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int | None:
        """When the first is due."""
        self._put_back()
        dues = []
        if self._at < len(self._rows):
            dues.append(int(self._due_ms[self._at]))
        if self._late:
            dues.append(self._late[0].due_ms)
        return min(dues, default=None)

    def due_count(self, now_ms: int, at_most: int) -> int:
        """How many of those that came with their slot are due; counts no further than *at_most*."""
        return int(np.searchsorted(self._due_ms[self._at : self._at + at_most], now_ms, side="right"))

    def take(self, now_ms: int, max_count: int) -> list[WaitingRecord]:
        """Up to *max_count* messages that are due, the earliest first. They stay until `drop`."""
        self._put_back()
        rows = self._rows[self._at : self._at + self.due_count(now_ms, max_count)]
        if self._gone_count:
            rows = rows[~rows["is_gone"]]
        taken = list(map(WaitingRecord._make, rows[_RECORD_FIELDS].tolist()))
        while self._late and self._late[0].due_ms <= now_ms and len(self._in_hand) < max_count:
            self._in_hand.append(heapq.heappop(self._late))
            self._skip_withdrawn()
        return list(heapq.merge(taken, self._in_hand))[:max_count] if self._in_hand else taken

    def drop(self, taken: list[WaitingRecord]) -> None:
        """Forget messages: the first of those that `take` gave."""
        late_count = bisect_right(self._in_hand, taken[-1]) if taken else 0
        if late_count:
            positions = [self._late_offsets.pop(item.physical_offset) for item in self._in_hand[:late_count]]
            self._left.append(np.array(positions, np.int64))
            del self._in_hand[:late_count]
        self._put_back()
        self._advance(len(taken) - late_count)

    def _advance(self, count: int) -> None:
        """Pass over so many messages that are not gone, and those that are."""
        begin = self._at
        while self._gone_count and self._at < len(self._rows):
            if self._rows["is_gone"][self._at]:
                self._gone_count -= 1
            elif count:
                count -= 1
            else:
                break
            self._at += 1
        if not self._gone_count:
            self._at += count
        passed = self._rows[begin : self._at]
        self._left.append(passed["position"][~passed["is_gone"]])
        if self._at >= len(self._rows):
            self._put(np.empty(0, NEAR_DTYPE))

    def take_left(self) -> np.ndarray:
        """Where the units stand of all that was dropped since the last call."""
        left, self._left = self._left, []
        return np.concatenate([np.empty(0, np.int64), *left])

    def _put_back(self) -> None:
        for item in self._in_hand:
            heapq.heappush(self._late, item)
        self._in_hand.clear()

    def _skip_withdrawn(self) -> None:
        while self._late and self._late[0].physical_offset not in self._late_offsets:
            heapq.heappop(self._late)

    # --- looking, and taking one out -----------------------------------------------------------

    def contains(self, due_ms: int, physical_offset: int) -> bool:
        """Whether a message waits here; *due_ms* is when it leaves the slot."""
        return physical_offset in self._late_offsets or self._find(due_ms, physical_offset) is not None

    def remove(self, due_ms: int, physical_offset: int) -> None:
        """Take a message out that `contains` knows. Between `take` and `drop` nobody may."""
        self._put_back()
        index = self._find(due_ms, physical_offset)
        if index is not None:
            self._rows["is_gone"][index] = True
            self._gone_count += 1
            self._advance(0)
        elif physical_offset in self._late_offsets:
            del self._late_offsets[physical_offset]
            self._skip_withdrawn()

    def _find(self, due_ms: int, physical_offset: int) -> int | None:
        """The row of a message. Rows of one due time stand in the order of their places."""
        due = self._due_ms[self._at :]
        begin, end = (int(np.searchsorted(due, due_ms, side)) + self._at for side in ("left", "right"))
        index = begin + int(np.searchsorted(self._rows["physical_offset"][begin:end], physical_offset))
        if index == end or self._rows["physical_offset"][index] != physical_offset or self._rows["is_gone"][index]:
            return None
        return index

    def physical_offsets(self) -> np.ndarray:
        """Of all that wait here, sorted."""
        rows = self._rows[self._at :]
        late = np.fromiter(self._late_offsets, np.int64, len(self._late_offsets))
        return np.sort(np.concatenate([rows["physical_offset"][~rows["is_gone"]], late]))
