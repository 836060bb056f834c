"""Timers of the I/O loop: a heap that also forgets cancelled timers."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Timer:
    """A callback at a time. Any thread may cancel it, also several times."""

    __slots__ = ("_callback", "_timers", "due_ms")

    def __init__(self, due_ms: float, callback: Callable[[], None], timers: Timers) -> None:
        self.due_ms = due_ms
        self._callback: Callable[[], None] | None = callback
        self._timers = timers

    @property
    def is_cancelled(self) -> bool:
        """True if the timer was cancelled or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Drop the callback, so that the objects it refers to are freed at once."""
        if self._callback is not None:
            self._callback = None
            self._timers.count_cancelled()

    def run(self) -> None:
        """Call the callback, unless the timer was cancelled or has run."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Timers:
    """Timers in the order of their times. Thread-safe.

    Most timers are cancelled, since most responses arrive in time. When more than half of the entries are cancelled,
    the heap is rebuilt without them. So its size follows the pending requests, not the requests within the longest
    timeout.
    """

    _MIN_CANCELLED = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        """Return the number of entries, including cancelled ones."""
        return len(self._heap)

    def add(self, due_ms: float, callback: Callable[[], None]) -> Timer:
        """Return a new timer."""
        timer = Timer(due_ms, callback, self)
        with self._lock:
            heapq.heappush(self._heap, (due_ms, next(self._order), timer))
        return timer

    def next_due_ms(self) -> float | None:
        """Return the time of the first timer, or None if there is none."""
        with self._lock:
            while self._heap and self._heap[0][2].is_cancelled:
                heapq.heappop(self._heap)
                self._cancelled -= 1
            return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[Timer]:
        """Remove and return the timers that are due, the earliest first."""
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_ms:
                timer = heapq.heappop(self._heap)[2]
                if timer.is_cancelled:
                    self._cancelled -= 1
                else:
                    due.append(timer)
        return due

    def count_cancelled(self) -> None:
        """Count one more cancelled timer, and rebuild the heap if it has too many of them."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled > self._MIN_CANCELLED and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
                heapq.heapify(self._heap)
                self._cancelled = 0
