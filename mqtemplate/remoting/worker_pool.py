"""Threads for requests that may block: connections take turns, so that one of them cannot hold the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection

_log = get_logger("mqtemplate.remoting")

_Job = tuple[Callable[[], None], int]
"""Work, and the bytes that it holds."""


@dataclass(slots=True)
class _Line:
    """The waiting work of one connection, and the number of its threads."""

    jobs: deque[_Job] = field(default_factory=deque)
    running: int = 0


class WorkerPool:
    """Threads that work for connections in turns.

    - After each piece of work of one connection, the next connection has its turn.
    - One connection has half of the threads at most, and at least one.
    - The queue is bounded: in total, for one connection, and in bytes.
    - Queued work of a connection that is closed, or of a pool that is stopped, is dropped.
    - Its threads are daemons: work that never ends does not hold the end of the process.

    Args:
        max_jobs: Largest number of pieces of work that wait or run.
        max_waiting_per_connection: Largest number of pieces of work of one connection that wait.
        max_bytes: With more bytes in all work, no more is accepted.
    """

    def __init__(self, name: str, threads: int, max_jobs: int, max_waiting_per_connection: int, max_bytes: int) -> None:
        self._name = name
        self._max_jobs = max_jobs
        self._max_waiting = max_waiting_per_connection
        self._max_bytes = max_bytes
        self._max_running = max(threads // 2, 1)
        self._changed = threading.Condition(threading.Lock())  # protects the attributes that follow
        self._lines: dict[int, _Line] = {}
        self._ready: deque[int] = deque()  # connections with waiting work that may have one more thread, each once
        self._jobs = 0
        self._bytes = 0
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

    def submit(self, connection: Connection, work: Callable[[], None], size: int = 0) -> bool:
        """Run *work* in a thread. Return False if there is too much work already, or the pool was stopped.

        Args:
            size: Bytes that *work* holds.
        """
        with self._changed:
            if self._is_stopped or self._jobs >= self._max_jobs or self._bytes > self._max_bytes:
                return False
            line = self._lines.get(connection.id)
            if line is None:
                line = self._lines[connection.id] = _Line()
            elif len(line.jobs) >= self._max_waiting:
                return False
            if not line.jobs and line.running < self._max_running:
                self._ready.append(connection.id)
                self._changed.notify()
            line.jobs.append((work, size))
            self._jobs += 1
            self._bytes += size
        return True

    def forget(self, connection: Connection) -> None:
        """Drop the waiting work of a closed connection."""
        with self._changed:
            line = self._lines.get(connection.id)
            if line is None or not line.jobs:
                return
            self._jobs -= len(line.jobs)
            self._bytes -= sum(size for _, size in line.jobs)
            line.jobs.clear()
            if line.running < self._max_running:
                self._ready.remove(connection.id)
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
            connection_id, (work, size) = taken
            try:
                work()
            except Exception:
                _log.exception("remoting.work_failed", loop=self._name)
            del work, taken  # a request may hold megabytes
            self._finish(connection_id, size)

    def _take(self) -> tuple[int, _Job] | None:
        """Wait for work; return None when the pool is stopped."""
        with self._changed:
            while not self._ready and not self._is_stopped:
                self._changed.wait()
            if self._is_stopped:
                return None
            connection_id = self._ready.popleft()
            line = self._lines[connection_id]
            job = line.jobs.popleft()
            line.running += 1
            if line.jobs and line.running < self._max_running:
                self._ready.append(connection_id)
                self._changed.notify()
            return connection_id, job

    def _finish(self, connection_id: int, size: int) -> None:
        with self._changed:
            self._jobs -= 1
            self._bytes -= size
            line = self._lines[connection_id]
            if line.jobs and line.running == self._max_running:
                self._ready.append(connection_id)
                self._changed.notify()
            line.running -= 1
            if not line.jobs and not line.running:
                del self._lines[connection_id]
