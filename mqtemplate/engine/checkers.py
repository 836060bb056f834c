"""Transaction checks, and the checkers of a process that answer them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from mqtemplate.broker import CheckTransaction, Registration
from mqtemplate.broker.group_checker import GroupChecker
from mqtemplate.errors import ListenerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Property, copy_properties
from mqtemplate.record.codec import StoredRecord, to_message_ext
from mqtemplate.results import TransactionState

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
        """See `Transactions.check_transactions`."""
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
