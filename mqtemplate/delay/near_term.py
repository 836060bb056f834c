"""What falls due next, in exact order: the few slots that are open now, as columns of numbers."""

from __future__ import annotations

import heapq
from bisect import bisect_right

import numpy as np

from mqtemplate.delay.release import WaitingRecord

__all__ = ["NEAR_DTYPE", "NearTerm"]

NEAR_DTYPE = np.dtype(
    [
        ("due_ms", "i8"),
        ("physical_offset", "i8"),
        ("size", "i4"),
        ("enqueue_ms", "i8"),
        ("rolls", "?"),
        ("is_poison", "?"),
    ]
)
"""The fields of `WaitingRecord`, 30 bytes a message."""


class NearTerm:
    """An ordered queue of timers: by due time, then in the order they came.

    - Slots come as sorted arrays, not as objects, so that a slot of a million messages is 30 MB.
    - Messages that arrive while their slot is open already lie in a small heap beside.
    - ``take`` shows the next ones, ``drop`` forgets them; in between they are handed over.
    """

    def __init__(self) -> None:
        self._rows = np.empty(0, NEAR_DTYPE)
        self._at = 0
        self._late: list[WaitingRecord] = []
        self._in_hand: list[WaitingRecord] = []  # late-comers between `take` and `drop`

    def __len__(self) -> int:
        return len(self._rows) - self._at + len(self._late) + len(self._in_hand)

    def add_slot(self, rows: np.ndarray) -> None:
        """Take the messages of one slot in, in any order; a message that is in it twice counts once."""
        if not len(rows):
            return
        if self._at < len(self._rows):
            rows = np.concatenate([self._rows[self._at :], rows])
        order = np.lexsort((rows["physical_offset"], rows["due_ms"]))
        rows = rows[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = rows["physical_offset"][1:] != rows["physical_offset"][:-1]
        self._rows, self._at = (rows if is_first.all() else rows[is_first]), 0

    def add(self, item: WaitingRecord) -> None:
        """Take one late-comer in."""
        heapq.heappush(self._late, item)

    @property
    def next_due_ms(self) -> int | None:
        """When the first is due."""
        self._put_back()
        dues = []
        if self._at < len(self._rows):
            dues.append(int(self._rows["due_ms"][self._at]))
        if self._late:
            dues.append(self._late[0].due_ms)
        return min(dues, default=None)

    def due_count(self, now_ms: int, at_most: int) -> int:
        """How many of those that came with their slot are due; counts no further than *at_most*."""
        return int(np.searchsorted(self._rows["due_ms"][self._at : self._at + at_most], now_ms, side="right"))

    def take(self, now_ms: int, max_count: int) -> list[WaitingRecord]:
        """Up to *max_count* messages that are due, the earliest first. They stay until `drop`."""
        self._put_back()
        count = self.due_count(now_ms, max_count)
        taken = list(map(WaitingRecord._make, self._rows[self._at : self._at + count].tolist()))
        while self._late and self._late[0].due_ms <= now_ms and len(self._in_hand) < max_count:
            self._in_hand.append(heapq.heappop(self._late))
        return list(heapq.merge(taken, self._in_hand))[:max_count] if self._in_hand else taken

    def drop(self, taken: list[WaitingRecord]) -> None:
        """Forget messages: the first of those that `take` gave."""
        late_count = bisect_right(self._in_hand, taken[-1]) if taken else 0
        del self._in_hand[:late_count]
        self._put_back()
        self._at += len(taken) - late_count
        if self._at == len(self._rows):
            self._rows, self._at = np.empty(0, NEAR_DTYPE), 0

    def _put_back(self) -> None:
        for item in self._in_hand:
            heapq.heappush(self._late, item)
        self._in_hand.clear()
