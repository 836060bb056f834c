"""What is to be done at a time: a heap that forgets what was cancelled."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Timer:
    """One thing to do at a time; `cancel` may be called from any thread, again and again."""

    __slots__ = ("_callback", "_timers", "due_ms")

    def __init__(self, due_ms: float, callback: Callable[[], None], timers: Timers) -> None:
        self.due_ms = due_ms
        self._callback: Callable[[], None] | None = callback
        self._timers = timers

    @property
    def is_cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        """Do not do it; what the callback held may be freed at once."""
        if self._callback is not None:
            self._callback = None
            self._timers.one_cancelled()

    def run(self) -> None:
        """Do it, unless it was cancelled or done."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Timers:
    """Timers by the time they are due. Thread-safe.

    Most are cancelled, since most answers come in time: once they are more than half, the heap is made anew without
    them, so its size follows what is outstanding and not what was asked within the longest time-out.
    """

    _FEW = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        """Entries of the heap, those cancelled too."""
        return len(self._heap)

    def add(self, due_ms: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(due_ms, callback, self)
        with self._lock:
            heapq.heappush(self._heap, (due_ms, next(self._order), timer))
        return timer

    def next_due_ms(self) -> float | None:
        """When the first is due."""
        with self._lock:
            self._drop_cancelled()
            return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[Timer]:
        """Take out what is due, the earliest first."""
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now_ms:
                timer = heapq.heappop(self._heap)[2]
                if timer.is_cancelled:
                    self._cancelled -= 1
                else:
                    due.append(timer)
        return due

    def one_cancelled(self) -> None:
        """A timer in the heap was cancelled."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled > self._FEW and self._cancelled * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][2].is_cancelled:
            heapq.heappop(self._heap)
            self._cancelled -= 1
