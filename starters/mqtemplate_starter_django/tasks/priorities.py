"""Priorities: a topic for each level, and threads that the waiting task with the highest priority gets first.

The broker delivers each queue in order. So tasks of different levels are in different topics, and all listeners of a
backend share the threads of a process.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LEVELS = {"highest": 51, "high": 1, "normal": 0, "low": -50, "lowest": -100}
"""Name of a level -> its lowest priority, the most urgent level first."""


def level_of(priority: int) -> str:
    """Return the level of a priority from -100 to 100."""
    return next(name for name, lowest in LEVELS.items() if priority >= lowest)


class PrioritySlots:
    """A number of tasks that may run at once. A free slot goes to the highest priority that waits, then in order.

    Args:
        number: Number of slots.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[int, int]] = []  # a heap: negative priority, number of the call
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def slot(self, priority: int) -> Iterator[None]:
        """Wait for a slot, and free it after the block."""
        with self._changed:
            place = (-priority, next(self._numbers))
            heapq.heappush(self._waiting, place)
            self._changed.wait_for(lambda: self._free > 0 and self._waiting[0] == place)
            heapq.heappop(self._waiting)
            self._free -= 1
            self._changed.notify_all()  # another slot may be free for the next one
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()
