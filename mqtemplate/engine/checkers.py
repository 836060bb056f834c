"""Transaction checks, and the checkers of a process that answer them: user code, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Full, Queue
from typing import NamedTuple, Protocol, TypeAlias

from mqtemplate.broker import CheckTransaction, Registration
from mqtemplate.errors import ListenerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, Property, copy_properties
from mqtemplate.record.codec import StoredRecord, to_message_ext
from mqtemplate.results import TransactionState
from mqtemplate.user_code import error_text, is_interrupt, safe_text

_log = get_logger("mqtemplate.broker")


class TransactionCheck(NamedTuple):
    """A check of one transaction, for a producer of a group.

    Attributes:
        topic: The real topic of the message.
        queue_id: The real queue of the message.
        half: The half message. The answer names it by its queue offset and its physical offset.
    """

    group: str
    topic: str
    queue_id: int
    half: StoredRecord


class TransactionChecker(Protocol):
    """Sends transaction checks to producers."""

    def can_check(self, group: str, topic: str) -> bool:
        """Return True if a producer of *group* is connected that may receive half messages of the real *topic*."""

    def send_check(self, check: TransactionCheck) -> None:
        """Send a check, without waiting. A producer that knows the state calls `TransactionService.end`."""


EndTransaction: TypeAlias = Callable[[int, int, str, TransactionState, str | None], None]
"""Function that ends a transaction. Arguments: queue offset and physical offset of the half message, producer group,
state, and the error of the checker."""


class LocalCheckers:
    """The checkers in this process, by producer group. A `TransactionChecker`.

    Args:
        end: Called with the state that a checker returned.
        on_register: Called after a group got a checker.
        has_threads: False on a virtual clock: `send_check` runs the checker.
        max_body_bytes: Largest body that is decompressed for a checker.
    """

    def __init__(
        self,
        broker_name: str,
        end: EndTransaction,
        on_register: Callable[[], None],
        *,
        has_threads: bool,
        max_body_bytes: int,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._broker_name = broker_name
        self._end = end
        self._on_register = on_register
        self._has_threads = has_threads
        self._lock = threading.Lock()
        self._by_group: dict[str, GroupChecker] = {}

    def register(self, group: str, check: CheckTransaction, threads: int, max_waiting: int) -> Registration:
        """See `Broker.check_transactions`."""
        checker = GroupChecker(group, check, threads if self._has_threads else 0, max_waiting, self._remove)
        with self._lock:
            if group in self._by_group:
                raise ListenerError(
                    f"producer group {group!r} has a transaction checker in this process already; close it first, or "
                    "use another group"
                )
            self._by_group = {**self._by_group, group: checker}
        self._on_register()
        return checker

    def _remove(self, checker: GroupChecker) -> None:
        with self._lock:
            self._by_group = {group: other for group, other in self._by_group.items() if other is not checker}

    def close(self) -> None:
        """Close all checkers."""
        for checker in list(self._by_group.values()):
            checker.close()

    def can_check(self, group: str, topic: str) -> bool:
        return group in self._by_group

    def send_check(self, check: TransactionCheck) -> None:
        checker = self._by_group.get(check.group)
        if checker is None:
            return  # it was closed at this moment; the service repeats the check
        message = to_message_ext(check.half, self._broker_name, self._max_body_bytes)
        message.topic, message.queue_id = check.topic, check.queue_id
        message.properties = copy_properties(
            message.properties, Property.REAL_TOPIC, Property.REAL_QID, Property.TRANSACTION_PREPARED_QUEUE_OFFSET
        )
        checker.submit(message, partial(self._answer, check))

    def _answer(self, check: TransactionCheck, state: TransactionState, remark: str | None) -> None:
        half = check.half
        try:
            self._end(half.queue_offset, half.physical_offset, check.group, state, remark)
        except MQTemplateError as exc:
            _log.error("transaction.end_failed", group=check.group, topic=check.topic, reason=str(exc))


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
        self._is_closed = False

    def submit(self, message: MessageExt, answer: AnswerCheck) -> None:
        """Check the transaction of *message*, and pass the state to *answer*.

        If too many checks wait, or the checker is closed, the check is dropped: brokers repeat checks.
        """

        def job() -> None:
            answer(*self._state_of(message))

        if not self.threads:
            job()
            return
        with self._lock:
            try:
                if self._is_closed:
                    return
                self._jobs.put_nowait(job)
            except Full:
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
        while not self._jobs.empty():
            self._jobs.get_nowait()
        for _ in self._workers:
            self._jobs.put(None)
        for thread in self._workers:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                _log.exception("transaction.check_failed", group=self.group)

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
