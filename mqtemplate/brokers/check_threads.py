"""Threads that answer questions about transactions: few, made as questions come, with a line before them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue

import structlog

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_JOIN_S = 5.0


class TransactionCheckThreads:
    """Runs jobs in threads of its own.

    Args:
        threads: How many run at once.
        max_waiting: How many may wait; one more is refused.
    """

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self._name = name
        self._count = threads
        self._line: Queue[Callable[[], None] | None] = Queue(max_waiting)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Have *job* run; False if too many wait already, or this was closed."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._line.put_nowait(job)
            except Full:
                return False
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return True

    def close(self) -> None:
        """Drop what waits, and let what runs end."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        while not self._line.empty():
            self._line.get_nowait()
        for _ in self._threads:
            self._line.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _loop(self) -> None:
        while (job := self._line.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("transaction.answer_failed", thread=self._name)
