"""Times in which handlers of a listener ran: a message that is pending then waits for a handler."""

from __future__ import annotations

from collections import deque

GAP_NS = 5_000_000
"""Calls with a shorter pause between them count as one time: between two calls a thread fetches and commits."""
_MAX_TIMES = 256


class BusyTimes:
    """The union of the times of some calls, in order. It has no lock: the caller holds one.

    A call is added when it returns. A message that waited for a thread is handled by a thread whose last call was added
    right before, so that the calls that are still running are not needed.

    Attributes:
        start_ns, end_ns: The newest time. A caller that must be quick may move its end, as `extend` does.
    """

    __slots__ = ("_times", "end_ns", "start_ns")

    def __init__(self) -> None:
        self.start_ns = self.end_ns = 0
        self._times: deque[tuple[int, int]] = deque(maxlen=_MAX_TIMES)  # earlier times, oldest first

    def extend(self, start_ns: int, end_ns: int) -> bool:
        """Add a call that adjoins the newest time; return False if it does not."""
        if start_ns > self.end_ns + GAP_NS or start_ns < self.start_ns:
            return False
        self.end_ns = max(self.end_ns, end_ns)
        return True

    def add(self, start_ns: int, end_ns: int) -> None:
        """Add a call after a pause, or a long one that started before the newest time."""
        if start_ns > self.end_ns:
            if self.end_ns:
                self._times.append((self.start_ns, self.end_ns))
            self.start_ns, self.end_ns = start_ns, end_ns
            return
        while self._times and self._times[-1][1] + GAP_NS >= start_ns:
            start_ns = min(start_ns, self._times.pop()[0])
        self.start_ns, self.end_ns = min(start_ns, self.start_ns), max(end_ns, self.end_ns)

    def overlap_ms(self, from_ms: int, to_ms: int) -> int:
        """Return how much of a span of time some handler ran."""
        from_ns, to_ns = from_ms * 1_000_000, to_ms * 1_000_000
        total = max(0, min(self.end_ns, to_ns) - max(self.start_ns, from_ns))
        for start_ns, end_ns in reversed(self._times):
            if end_ns <= from_ns:
                break
            total += max(0, min(end_ns, to_ns) - max(start_ns, from_ns))
        return total // 1_000_000
