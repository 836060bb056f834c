"""Those of this process who know what became of their transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from mqtemplate.broker import CheckTransaction, Registration
from mqtemplate.brokers.check_threads import TransactionCheckThreads
from mqtemplate.brokers.embedded.transactions.service import TransactionCheck
from mqtemplate.errors import ListenerError, MQTemplateError
from mqtemplate.message import MessageExt, Property, copy_properties
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.results import TransactionState

_log = structlog.stdlib.get_logger("mqtemplate.broker")

AnswerCheck = Callable[[TransactionCheck, TransactionState, str | None], None]
"""Ends the transaction that was asked for; the text is what the checker raised."""


def ask_state(check: CheckTransaction, message: MessageExt, group: str) -> tuple[TransactionState, str | None]:
    """What a checker answers, and the text of what it raised; that, and anything that is no state, is ``UNKNOWN``."""
    try:
        state: object = check(message)
    except Exception as exc:
        _log.exception("transaction.checker_failed", group=group, topic=message.topic, msg_id=message.msg_id)
        return TransactionState.UNKNOWN, f"{type(exc).__name__}: {exc}"
    if isinstance(state, TransactionState):
        return state, None
    _log.error("transaction.checker_failed", group=group, topic=message.topic, answer=repr(state)[:200])
    return TransactionState.UNKNOWN, f"the checker answered {state!r}"


@dataclass(slots=True, eq=False)
class _Registered(Registration):
    """One group's checker; without threads it runs where the question is put."""

    owner: TransactionCheckers
    group: str
    check: CheckTransaction
    threads: TransactionCheckThreads | None

    def close(self) -> None:
        self.owner.remove(self)
        if self.threads is not None:
            self.threads.close()


class TransactionCheckers:
    """The checkers of an embedded broker, by producer group. A `TransactionChecker`.

    Args:
        answer: Takes what a checker says.
        has_threads: False on a virtual clock: a question is answered before `ask` returns.
        on_come: Called when a group has a checker now.
    """

    def __init__(
        self, broker_name: str, answer: AnswerCheck, on_come: Callable[[], None], *, has_threads: bool
    ) -> None:
        self._broker_name = broker_name
        self._answer = answer
        self._on_come = on_come
        self._has_threads = has_threads
        self._lock = threading.Lock()
        self._by_group: dict[str, _Registered] = {}

    def register(self, group: str, check: CheckTransaction, threads: int, max_waiting: int) -> Registration:
        """See `Broker.check_transactions`."""
        pool = TransactionCheckThreads(f"mqtemplate-check-{group}", threads, max_waiting) if self._has_threads else None
        made = _Registered(self, group, check, pool)
        with self._lock:
            if group in self._by_group:
                raise ListenerError(
                    f"producer group {group!r} has a transaction checker here; a group has one, so close that one "
                    "first, or send in another group"
                )
            self._by_group = {**self._by_group, group: made}
        self._on_come()
        return made

    def remove(self, registered: _Registered) -> None:
        with self._lock:
            self._by_group = {group: one for group, one in self._by_group.items() if one is not registered}

    def close(self) -> None:
        """Close every checker."""
        for registered in list(self._by_group.values()):
            registered.close()

    def can_ask(self, group: str) -> bool:
        return group in self._by_group

    def ask(self, check: TransactionCheck) -> None:
        registered = self._by_group.get(check.group)
        if registered is None:
            return  # it left at this moment; the question comes again

        def job() -> None:
            self._put(registered.check, check)

        if registered.threads is None:
            job()
        elif not registered.threads.submit(job):
            _log.warning("transaction.too_many_questions", group=check.group, half_offset=check.half.queue_offset)

    def _put(self, checker: CheckTransaction, check: TransactionCheck) -> None:
        message = to_message_ext(check.half, self._broker_name)
        message.topic, message.queue_id = check.topic, check.queue_id
        message.properties = copy_properties(
            message.properties,
            Property.REAL_TOPIC,
            Property.REAL_QID,
            Property.TRANSACTION_PREPARED_QUEUE_OFFSET,
        )
        state, remark = ask_state(checker, message, check.group)
        try:
            self._answer(check, state, remark)
        except MQTemplateError as exc:
            _log.error("transaction.end_failed", group=check.group, topic=check.topic, reason=str(exc))
