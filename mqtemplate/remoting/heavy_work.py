"""Addresses whose requests take much processor time: together they have one thread, and a part of its time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_BUSY_S = 0.1
"""With more processor time than this within about a second in all threads, the threads are busy."""
_HEAVY_S = 0.005
"""While they are busy, an address with more than this is a heavy one."""
_HALF_LIFE_S = 1.0
_LONGEST_REST_S = 0.05


class ProcessorTime:
    """Processor time that the work of each address took lately; it counts half after each second.

    It is kept by address: a client could open a new connection for each request.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._used: dict[str, tuple[float, float]] = {}  # address -> seconds, time to which they belong
        self._total = 0.0, now_s()
        self._lock = threading.Lock()

    def add(self, address: str, seconds: float) -> None:
        """Count the processor time of a piece of work."""
        now_s = self._now_s()
        with self._lock:
            self._used[address] = self._lately(address) + seconds, now_s
            self._total = self._now(self._total) + seconds, now_s
            if len(self._used) > 1_000:
                self._used = {each: entry for each, entry in self._used.items() if self._now(entry) > _HEAVY_S / 100}

    def is_heavy(self, address: str) -> bool:
        """Return True if the threads are busy, and the work of *address* took a part in that."""
        return self._now(self._total) > _BUSY_S and self._lately(address) > _HEAVY_S

    def _lately(self, address: str) -> float:
        return self._now(self._used.get(address, (0.0, 0.0)))

    def _now(self, entry: tuple[float, float]) -> float:
        seconds, since_s = entry
        return seconds * math.exp2((since_s - self._now_s()) / _HALF_LIFE_S)


class HeavyWork:
    """Bounds the part of the interpreter that heavy addresses take from the I/O thread, for all pools of a server.

    The threads share the interpreter with the I/O thread: each busy one more takes an equal part of its time. So the
    heavy work of all pools runs one piece at a time. After a piece during which the I/O thread had requests of its
    own, its thread rests for as long as the piece took.

    Args:
        thread_time: Returns the processor time of the current thread, in seconds.
    """

    def __init__(
        self,
        *,
        processor_time: ProcessorTime | None = None,
        thread_time: Callable[[], float] = time.thread_time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inline_requests = 0  # it is enough if it is about right
        self._processor_time = processor_time or ProcessorTime()
        self._thread_time = thread_time
        self._rest = rest
        self._one_at_a_time = threading.Lock()

    def is_heavy(self, address: str) -> bool:
        """Return True if the work of *address* is heavy now."""
        return self._processor_time.is_heavy(address)

    @property
    def inline_requests(self) -> int:
        """Number of requests that the I/O thread has processed itself."""
        return self._inline_requests

    def count_inline(self, requests: int = 1) -> None:
        """Count requests that the I/O thread processes itself."""
        self._inline_requests += requests

    def move_to_thread(self) -> None:
        """Count one request less: its processor has passed it to another thread."""
        self._inline_requests -= 1

    def run(self, work: Callable[[], None], address: str, *, is_heavy: bool) -> None:
        """Run a piece of work, and count its processor time. Heavy work waits for that of the other pools."""
        if not is_heavy:
            self._run(work, address)
            return
        with self._one_at_a_time:
            requests = self._inline_requests
            seconds = self._run(work, address)
            if self._inline_requests > requests:
                self._rest(min(seconds, _LONGEST_REST_S))

    def _run(self, work: Callable[[], None], address: str) -> float:
        start_s = self._thread_time()
        try:
            work()
        finally:
            seconds = self._thread_time() - start_s
            self._processor_time.add(address, seconds)
        return seconds
