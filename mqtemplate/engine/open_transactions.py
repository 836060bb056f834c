"""The table of open transactions, in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_STALE_ENTRIES = 1_000


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """A half message whose transaction has no end.

    Attributes:
        due_ms: Time of the next transaction check, of `Clock.steady_ms`.
        earlier: Queue offsets at which the half message was stored before.
    """

    queue_offset: int
    physical_offset: int
    size: int
    due_ms: int
    earlier: tuple[int, ...] = ()


class OpenTransactions:
    """The open transactions, by the queue offset of their half message. Not thread-safe.

    - A half message that was stored again is also found by its earlier queue offsets: producers may know only those.
    - The heap of due times may have stale entries; an entry counts only if it has the due time of the transaction.
    """

    def __init__(self) -> None:
        self._by_offset: dict[int, OpenTransaction] = {}  # ascending
        self._by_earlier_offset: dict[int, OpenTransaction] = {}
        self._due: list[tuple[int, int]] = []  # due time, queue offset
        self._deferred: set[int] = set()

    def __len__(self) -> int:
        """Return the number of open transactions."""
        return len(self._by_offset)

    def __iter__(self) -> Iterator[int]:
        """Return the queue offsets, ascending."""
        return iter(self._by_offset)

    def add(self, half: OpenTransaction) -> None:
        """Add a transaction. Its queue offset must be above all others."""
        self._by_offset[half.queue_offset] = half
        self._by_earlier_offset.update(dict.fromkeys(half.earlier, half))
        heapq.heappush(self._due, (half.due_ms, half.queue_offset))

    def find(self, queue_offset: int) -> OpenTransaction | None:
        """Return the transaction that has, or had, this queue offset; None if it has ended."""
        return self._by_offset.get(queue_offset) or self._by_earlier_offset.get(queue_offset)

    def remove(self, half: OpenTransaction) -> None:
        """Remove a transaction that has ended."""
        del self._by_offset[half.queue_offset]
        self._deferred.discard(half.queue_offset)
        for offset in half.earlier:
            del self._by_earlier_offset[offset]

    def schedule(self, half: OpenTransaction, due_ms: int) -> None:
        """Set the time of the next check."""
        half.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, half.queue_offset))

    def defer(self, half: OpenTransaction, due_ms: int) -> None:
        """Set the time of the next check, unless a producer of the group connects before."""
        self.schedule(half, due_ms)
        self._deferred.add(half.queue_offset)

    def schedule_deferred(self, now_ms: int) -> None:
        """Make all deferred transactions due now."""
        for queue_offset in self._deferred:
            self.schedule(self._by_offset[queue_offset], now_ms)
        self._deferred.clear()

    def take_due(self, now_ms: int) -> OpenTransaction | None:
        """Remove and return the next due entry; None if no check is due."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, queue_offset = heapq.heappop(self._due)
            half = self._by_offset.get(queue_offset)
            if half is not None and half.due_ms == due_ms:
                return half
        return None

    def next_due_ms(self) -> int | None:
        """Return the time of the next check; it may be that of a stale entry."""
        if len(self._due) > 2 * len(self._by_offset) + _MAX_STALE_ENTRIES:
            self._due = sorted((half.due_ms, half.queue_offset) for half in self._by_offset.values())
        return self._due[0][0] if self._due else None
