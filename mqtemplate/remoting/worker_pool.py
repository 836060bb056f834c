"""Threads for requests that may block: connections take turns, so that one of them cannot hold the others."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR

from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.transport import SocketConnection

# --- addresses that take much processor time ------------------------------------------------------


_BUSY_S = 0.1
"""With more processor time than this within about a second in all threads, the threads are busy."""
_HEAVY_S = 0.005
"""While they are busy, an address with more than this is a heavy one."""
_HALF_LIFE_S = 1.0
_SHORTEST_REST_S = 0.001
"""A shorter rest is put off: it costs more than it gives the I/O thread."""
_LONGEST_REST_S = 0.05


class ProcessorTime:
    """Processor time that the work of each address took recently; it counts half after each second.

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
            self._used[address] = self._recent(address) + seconds, now_s
            self._total = self._now(self._total) + seconds, now_s
            if len(self._used) > 1_000:
                self._used = {each: entry for each, entry in self._used.items() if self._now(entry) > _HEAVY_S / 100}

    def is_heavy(self, address: str) -> bool:
        """Return True if the threads are busy, and the work of *address* took a part in that."""
        return self._now(self._total) > _BUSY_S and self._recent(address) > _HEAVY_S

    def _recent(self, address: str) -> float:
        return self._now(self._used.get(address, (0.0, 0.0)))

    def _now(self, entry: tuple[float, float]) -> float:
        seconds, since_s = entry
        return seconds * math.exp2((since_s - self._now_s()) / _HALF_LIFE_S)


class HeavyWork:
    """Bounds the part of the interpreter that heavy addresses take from the I/O thread, for all pools of a server.

    The threads share the interpreter with the I/O thread: each busy one more takes an equal part of its time. So the
    heavy work of all pools runs one piece at a time. If the I/O thread had requests of its own meanwhile, its thread
    rests for as long as the work took, with what it takes to pass it to the thread. Long work of any address rests
    between its parts, see `pause`.

    Args:
        thread_time: Returns the processor time of the current thread, in seconds.

    Attributes:
        processor_time: Tells which addresses are heavy now.
        inline_requests: Number of requests that the I/O thread has processed itself.
    """

    def __init__(
        self,
        *,
        processor_time: ProcessorTime | None = None,
        thread_time: Callable[[], float] = time.thread_time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inline_requests = 0  # it is enough if it is about right
        self.processor_time = processor_time or ProcessorTime()
        self._thread_time = thread_time
        self._rest = rest
        self._one_at_a_time = threading.Lock()
        self._owed_s = 0.0  # time to rest for, of work that was shorter than the shortest rest
        self._requests = 0  # at the last rest
        self._threads = threading.local()

    def count_inline(self, requests: int = 1) -> None:
        """Count requests that the I/O thread processes itself."""
        self.inline_requests += requests

    def move_to_thread(self) -> None:
        """Count one request less: its processor has passed it to another thread."""
        self.inline_requests -= 1

    def run(self, work: Callable[[], None], address: str, *, is_heavy: bool) -> None:
        """Run a piece of work, and count its processor time. Heavy work waits for the heavy work of the other pools."""
        if not is_heavy:
            self._run(work, address)
            return
        with self._one_at_a_time:
            self._owed_s += self._run(work, address)
            if self._owed_s < _SHORTEST_REST_S:
                return
            if self.inline_requests > self._requests:
                self._rest(min(self._owed_s, _LONGEST_REST_S))
            self._owed_s, self._requests = 0.0, self.inline_requests

    def pause(self) -> None:
        """Rest within long work of any address, as after heavy work: between its parts, without a lock.

        A request of a client that has been quiet may create a thousand groups. Outside of work it has no effect.
        """
        thread = self._threads
        if getattr(thread, "address", None) is None:
            return
        if self._thread_time() - thread.seen_s < _SHORTEST_REST_S:
            return
        seconds = self._count(thread.address)
        if self.inline_requests > thread.requests:
            self._rest(min(seconds, _LONGEST_REST_S))
        thread.requests = self.inline_requests

    def _run(self, work: Callable[[], None], address: str) -> float:
        """Return the processor time of this thread since its last work or pause, with the time to get this work."""
        thread = self._threads
        thread.address, thread.requests, thread.seen_s = address, self.inline_requests, getattr(thread, "seen_s", 0.0)
        try:
            work()
        finally:
            thread.address = None
            seconds = self._count(address)
        return seconds

    def _count(self, address: str) -> float:
        now_s = self._thread_time()
        seconds: float = now_s - self._threads.seen_s
        self._threads.seen_s = now_s
        self.processor_time.add(address, seconds)
        return seconds


# --- threads --------------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remoting")

_Job = tuple[Callable[[], None], int]
"""Work, and the bytes that it holds."""


@dataclass(slots=True)
class _Line:
    """The waiting work of one connection, and the number of its threads."""

    address: str
    jobs: deque[_Job] = field(default_factory=deque)
    running: int = 0


class WorkerPool:
    """Threads that work for connections in turns.

    - After each piece of work of one connection, the next connection has its turn.
    - One connection has half of the threads at most, and at least one.
    - The work of all heavy addresses has one thread together, of all pools with the same `HeavyWork`.
    - The queue is bounded: in total, for one connection, and in bytes.
    - Queued work of a connection that is closed, or of a pool that is stopped, is dropped.
    - Its threads are daemons: work that never ends does not hold the end of the process.

    Args:
        max_jobs: Largest number of pieces of work that wait or run.
        max_waiting_per_connection: Largest number of pieces of work of one connection that wait.
        max_bytes: With more bytes in all work, no more is accepted.
        heavy: The same one for all pools of a server.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        max_jobs: int,
        max_waiting_per_connection: int,
        max_bytes: int,
        heavy: HeavyWork,
    ) -> None:
        self._name = name
        self._max_jobs = max_jobs
        self._max_waiting = max_waiting_per_connection
        self._max_bytes = max_bytes
        self._max_running = max(threads // 2, 1)
        self._heavy_work = heavy
        self._limited_log = LimitedLog(_log, lambda: int(time.monotonic() * 1_000))
        self._changed = threading.Condition(threading.Lock())  # protects the attributes that follow
        self._lines: dict[int, _Line] = {}
        # Connections with waiting work that may have one more thread, each once in one of the two.
        self._ready: deque[int] = deque()
        self._heavy: deque[int] = deque()  # those whose address was heavy when their turn came
        self._jobs = 0
        self._bytes = 0
        self._is_heavy_running = False
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        self._is_started = False

    def start(self) -> None:
        """Start the threads. A second call has no effect."""
        with self._changed:
            if self._is_started:
                return
            self._is_started = True
        for thread in self._threads:
            thread.start()

    def submit(self, connection: SocketConnection, work: Callable[[], None], size: int = 0) -> bool:
        """Run *work* in a thread. Return False if there is too much work already, or the pool was stopped.

        Args:
            size: Bytes that *work* holds.
        """
        with self._changed:
            if self._is_stopped or self._jobs >= self._max_jobs or self._bytes > self._max_bytes:
                return False
            line = self._lines.get(connection.id)
            if line is None:
                line = self._lines[connection.id] = _Line(connection.remote.ip)
            elif len(line.jobs) >= self._max_waiting:
                return False
            if not line.jobs and line.running < self._max_running:
                self._ready.append(connection.id)
                self._changed.notify()
            line.jobs.append((work, size))
            self._jobs += 1
            self._bytes += size
        return True

    def forget(self, connection: SocketConnection) -> None:
        """Drop the waiting work of a closed connection."""
        with self._changed:
            line = self._lines.get(connection.id)
            if line is None or not line.jobs:
                return
            self._jobs -= len(line.jobs)
            self._bytes -= sum(size for _, size in line.jobs)
            line.jobs.clear()
            if line.running < self._max_running:
                (self._heavy if connection.id in self._heavy else self._ready).remove(connection.id)
            if not line.running:
                del self._lines[connection.id]

    def stop(self, timeout_s: float) -> None:
        """Drop the waiting work, and wait up to *timeout_s* for the work that runs."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0))
        with self._changed:
            running = sum(line.running for line in self._lines.values())
        if running:
            _log.warning("remoting.work_abandoned", pool=self._name, running=running)

    # --- in a thread ------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (taken := self._take()) is not None:
            connection_id, address, (work, size), is_heavy = taken
            try:
                self._heavy_work.run(work, address, is_heavy=is_heavy)
            except BaseException as exc:
                self._limited_log.log(ERROR, "remoting.work_failed", loop=self._name, exc_info=exc)
            del work, taken  # a request may hold megabytes
            self._finish(connection_id, size, is_heavy=is_heavy)

    def _take(self) -> tuple[int, str, _Job, bool] | None:
        """Wait for work; return connection, address, work, and True if it is heavy. None when the pool is stopped."""
        with self._changed:
            while (found := None if self._is_stopped else self._next_ready()) is None:
                if self._is_stopped:
                    return None
                self._changed.wait()
            connection_id, is_heavy = found
            self._is_heavy_running |= is_heavy
            line = self._lines[connection_id]
            job = line.jobs.popleft()
            line.running += 1
            if line.jobs and line.running < self._max_running:
                self._ready.append(connection_id)
                self._changed.notify()
            return connection_id, line.address, job, is_heavy

    def _next_ready(self) -> tuple[int, bool] | None:
        """Remove the next connection whose work may run now; return it, and True if its address is heavy.

        A heavy one goes first while none runs: then one thread is for the heavy ones, and the others are for the rest.
        """
        if self._heavy and not self._is_heavy_running:
            connection_id = self._heavy.popleft()
            return connection_id, self._is_heavy(connection_id)
        while self._ready:
            connection_id = self._ready.popleft()
            if not self._is_heavy(connection_id):
                return connection_id, False
            if not self._is_heavy_running:
                return connection_id, True
            self._heavy.append(connection_id)
        return None

    def _is_heavy(self, connection_id: int) -> bool:
        return self._heavy_work.processor_time.is_heavy(self._lines[connection_id].address)

    def _finish(self, connection_id: int, size: int, *, is_heavy: bool) -> None:
        with self._changed:
            self._jobs -= 1
            self._bytes -= size
            line = self._lines[connection_id]
            if is_heavy:
                self._is_heavy_running = False
                self._changed.notify()
            if line.jobs and line.running == self._max_running:
                self._ready.append(connection_id)
                self._changed.notify()
            line.running -= 1
            if not line.jobs and not line.running:
                del self._lines[connection_id]
