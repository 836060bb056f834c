"""The checker of one producer group: it runs the user's function for transaction checks, in threads of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeAlias

from mqtemplate.broker.parts import CheckTransaction
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt
from mqtemplate.results import TransactionState
from mqtemplate.user_code import error_text, is_interrupt, safe_text

_log = get_logger("mqtemplate.broker")

_JOIN_S = 5.0

AnswerCheck: TypeAlias = Callable[[TransactionState, str | None], None]
"""Function that gets the state of a checked transaction and, if the checker failed, its error as text."""


@dataclass(eq=False)
class GroupChecker:
    """The checker of one producer group. A `Registration`.

    Its threads are daemon threads; one is started with each of the first checks.

    Args:
        threads: Largest number of threads; 0 runs each check in the thread that submits it.
        max_waiting: Largest number of checks that wait for a thread.
        on_close: Called once, with this checker.
    """

    group: str
    check: CheckTransaction
    threads: int
    max_waiting: int
    on_close: Callable[[GroupChecker], None]

    def __post_init__(self) -> None:
        self._jobs: Queue[Callable[[], None] | None] = Queue(self.max_waiting)
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._under_check: set[tuple[str, str]] = set()  # topic and id of the messages that wait or are checked
        self._is_closed = False

    def submit(self, message: MessageExt, answer: AnswerCheck) -> None:
        """Check the transaction of *message*, and pass the state to *answer*.

        If too many checks wait, or the checker is closed, the check is dropped: brokers repeat checks. So is a check of
        a transaction whose last check waits or runs: brokers repeat checks, too, whose answer takes longer than their
        interval, and that answer ends the transaction.
        """
        if not self.threads:
            answer(*self._state_of(message))
            return
        key = message.topic, message.msg_id

        def job() -> None:
            try:
                answer(*self._state_of(message))
            finally:
                self._under_check.discard(key)

        with self._lock:
            if self._is_closed or key in self._under_check:
                return
            self._under_check.add(key)  # before a thread can end the check
            try:
                self._jobs.put_nowait(job)
            except Full:
                self._under_check.discard(key)
                _log.warning("transaction.check_dropped", group=self.group, msg_id=message.msg_id)
                return
            if len(self._workers) < self.threads:
                name = f"mqtemplate-check-{self.group}-{len(self._workers) + 1}"
                self._workers.append(threading.Thread(target=self._loop, name=name, daemon=True))
                self._workers[-1].start()

    def close(self) -> None:
        """Drop the waiting checks, and wait until the running ones have ended."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.on_close(self)
        with contextlib.suppress(Empty):  # not `empty` before: a worker may take the last check in between
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)  # one for all, since there may be fewer places than workers: each passes it on
        for thread in self._workers:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                _log.exception("transaction.check_failed", group=self.group)
        self._jobs.put(None)

    def _state_of(self, message: MessageExt) -> tuple[TransactionState, str | None]:
        try:
            state: object = self.check(message)
        except BaseException as exc:  # the broker checks again; the thread goes on with other transactions
            if is_interrupt(exc):
                raise
            _log.exception("transaction.checker_failed", group=self.group, topic=message.topic, msg_id=message.msg_id)
            return TransactionState.UNKNOWN, f"checkLocalTransactionState raised {error_text(exc)}"
        if isinstance(state, TransactionState):
            return state, None
        _log.error(
            "transaction.checker_failed", group=self.group, topic=message.topic, result=safe_text(state, 200, repr)
        )
        return TransactionState.UNKNOWN, f"checkLocalTransactionState returned {safe_text(state, 200, repr)}"
