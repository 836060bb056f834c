"""Threads that run the transaction checks of a producer group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue

import structlog

from mqtemplate.broker import CheckTransaction
from mqtemplate.message import MessageExt
from mqtemplate.results import TransactionState

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_JOIN_S = 5.0


def run_check(check: CheckTransaction, message: MessageExt, group: str) -> tuple[TransactionState, str | None]:
    """Return the state that *check* returns, and the text of its error. With an error the state is ``UNKNOWN``."""
    try:
        state: object = check(message)
    except Exception as exc:
        _log.exception("transaction.checker_failed", group=group, topic=message.topic, msg_id=message.msg_id)
        return TransactionState.UNKNOWN, f"{type(exc).__name__}: {exc}"
    if isinstance(state, TransactionState):
        return state, None
    _log.error("transaction.checker_failed", group=group, topic=message.topic, result=repr(state)[:200])
    return TransactionState.UNKNOWN, f"the checker returned {state!r}"


class CheckThreads:
    """A pool of daemon threads with a bounded queue. A thread is started with each of the first jobs.

    Args:
        threads: Largest number of threads.
        max_waiting: Largest number of jobs in the queue.
    """

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self._name = name
        self._max_threads = threads
        self._queue: Queue[Callable[[], None] | None] = Queue(max_waiting)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Run *job* in a thread; return False if the queue is full or the pool is closed."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._queue.put_nowait(job)
            except Full:
                return False
            if len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return True

    def close(self) -> None:
        """Remove the queued jobs, and wait until the running ones have ended."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("transaction.check_failed", thread=self._name)
