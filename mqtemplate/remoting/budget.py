"""What all connections together may hold."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Budget:
    """Counts bytes that come and go, from any thread.

    Args:
        limit: What may be held, all in all.
        on_exceeded: Called by whoever adds, with each addition, as long as more is held.

    Attributes:
        held: Bytes, now.
    """

    __slots__ = ("_limit", "_lock", "_on_exceeded", "held")

    def __init__(self, limit: int, on_exceeded: Callable[[], None]) -> None:
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._lock = threading.Lock()
        self.held = 0

    @property
    def is_exceeded(self) -> bool:
        return self.held > self._limit

    def add(self, grown: int) -> None:
        """Count *grown* more, or less."""
        with self._lock:
            self.held += grown
        if grown > 0 and self.is_exceeded:
            self._on_exceeded()
