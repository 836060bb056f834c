"""Control of messages that were sent: ends and checks of transactions, and recalls of delayed messages.

Source: RocketMQ ``client-java: ProducerImpl``, ``TransactionImpl``; ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mqtemplate.broker import CheckTransaction, QueuedMessage, ReleaseCauses, refuse_then
from mqtemplate.broker.group_checker import GroupChecker
from mqtemplate.brokers.grpc.channels import check_status, refusal_text
from mqtemplate.brokers.grpc.messages import decode_message
from mqtemplate.brokers.grpc.sessions import ClientSession, ProxyContext, Route, Routes
from mqtemplate.brokers.grpc.settings import Endpoints
from mqtemplate.clock import Clock
from mqtemplate.delay.recall_handle import check_selection, decode_handle
from mqtemplate.errors import BrokerClosedError, ForkedError, ListenerError, MQTemplateError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, TransactionResolution, TransactionSource
from mqtemplate.message import Property
from mqtemplate.pending import (
    ConditionalSend,
    PendingCounts,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.results import HalfMessage, TransactionState

_log = get_logger("mqtemplate.remote")

# --- transactions ---------------------------------------------------------------------------------


_RESOLUTIONS = {
    TransactionState.COMMIT: TransactionResolution.COMMIT,
    TransactionState.ROLLBACK: TransactionResolution.ROLLBACK,
}
_MOST_OPEN = 100_000


class GrpcTransactions:
    """Ends and checks of transactions.

    The protocol has no producer groups: a proxy asks any client that sends to the topic of a half message. So a check
    goes to the checker of the group that sent it, which is known in the process that did; else to that of the group
    that sent to its topic; else, if there is one checker only, to that one.

    Args:
        route_to: Returns the route of a topic.
        session: Returns the session of the producer.
    """

    def __init__(
        self, context: ProxyContext, route_to: Callable[[str], Route], session: Callable[[], ClientSession]
    ) -> None:
        self._context = context
        self._route_to = route_to
        self._session = session
        self._lock = threading.Lock()
        self._checkers: dict[str, GroupChecker] = {}
        self._open: OrderedDict[str, tuple[str, Endpoints]] = OrderedDict()
        self._group_of_topic: dict[str, str] = {}

    def note_topic(self, topic: str, group: str) -> None:
        """Note the producer group that sends half messages to a topic."""
        self._group_of_topic[topic] = group

    def note(self, transaction_id: str, group: str, endpoints: Endpoints) -> None:
        """Note a half message, and the proxy that has it."""
        with self._lock:
            self._open[transaction_id] = group, endpoints
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """See `Transactions.end_transaction`. If the request fails, the proxy checks the transaction."""
        result = half.send_result
        transaction_id = result.transaction_id or result.msg_id
        if state not in _RESOLUTIONS:
            return  # the broker checks it
        try:
            with self._lock:
                _, endpoints = self._open.pop(transaction_id, (None, None))
            if endpoints is None:
                endpoints = self._route_to(half.message.topic).endpoints[0]
            self._end(half.message.topic, result.msg_id, transaction_id, state, endpoints, is_check=False)
        except (BrokerClosedError, ForkedError):
            raise
        except MQTemplateError as exc:
            _log.warning("remote.transaction_end_failed", msg_id=result.msg_id, state=state.value, reason=str(exc))

    def _end(
        self,
        topic: str,
        msg_id: str,
        transaction_id: str,
        state: TransactionState,
        endpoints: Endpoints,
        *,
        is_check: bool,
    ) -> None:
        operation = f"end the transaction of message {msg_id}"
        request = protos.EndTransactionRequest(
            topic=self._context.resource(topic),
            message_id=msg_id,
            transaction_id=transaction_id,
            resolution=int(_RESOLUTIONS[state]),
            source=int(TransactionSource.SOURCE_SERVER_CHECK if is_check else TransactionSource.SOURCE_CLIENT),
        )
        answer = self._session().request(endpoints, "EndTransaction", request, operation)
        check_status(answer.status, operation, endpoints)

    # --- checks --------------------------------------------------------------------------------

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> GroupChecker:
        """See `Transactions.check_transactions`."""
        checker = GroupChecker(group, check, threads, max_waiting, self._remove)
        with self._lock:
            if group in self._checkers:
                raise ListenerError(
                    f"producer group {group!r} has a transaction listener here already; give one of them another group"
                )
            self._checkers[group] = checker
        for topic in self._context.settings.topics:
            self._session().join(self._route_to(topic).endpoints)
        return checker

    def _remove(self, checker: GroupChecker) -> None:
        with self._lock:
            if self._checkers.get(checker.group) is checker:
                del self._checkers[checker.group]

    def on_check(self, command: Any, endpoints: Endpoints) -> None:
        """Handle a proxy's check. The answer is a request of its own."""
        message = decode_message(command.message, "", self._context.settings.max_body_bytes)
        message.properties[Property.TRANSACTION_PREPARED] = "true"
        checker = self._checker_for(command.transaction_id, message.topic)
        if checker is None:
            _log.warning(
                "remote.check_unknown_group", msg_id=message.msg_id, topic=message.topic, remote=str(endpoints)
            )
            return

        def answer(state: TransactionState, remark: str | None) -> None:
            if state not in _RESOLUTIONS:
                return
            try:
                self._end(message.topic, message.msg_id, command.transaction_id, state, endpoints, is_check=True)
            except MQTemplateError as exc:
                _log.warning("remote.transaction_end_failed", msg_id=message.msg_id, state=state.value, reason=str(exc))

        checker.submit(message, answer)

    def _checker_for(self, transaction_id: str, topic: str) -> GroupChecker | None:
        with self._lock:
            sent = self._open.get(transaction_id)
            group = self._group_of_topic.get(topic) if sent is None else sent[0]
            if group is None and len(self._checkers) == 1:
                return next(iter(self._checkers.values()))
            return None if group is None else self._checkers.get(group)

    def close(self) -> None:
        """Close all checkers."""
        for checker in list(self._checkers.values()):
            checker.close()


# --- recalls --------------------------------------------------------------------------------------


_MOST_CANCELLED = 10_000
_BY_HANDLE_ONLY = (
    "RocketMQ's gRPC protocol has recalls by handle only: keep SendResult.handle, or use rocketmq.name-server"
)


def _unsupported(what: str) -> NoReturn:
    raise UnsupportedError(f"{what}: {_BY_HANDLE_ONLY}")


class GrpcDelayedMessages:
    """Recalls of delayed messages by their handles."""

    def __init__(self, session: ClientSession, routes: Routes, clock: Clock) -> None:
        self._session = session
        self._routes = routes
        self._clock = clock
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    @property
    def release_causes(self) -> ReleaseCauses | None:
        return None

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """See `DelayedMessages.cancel`. A broker accepts a recall without a check that the message is pending."""
        check_selection(handle, key)
        refuse_then(then, "a broker over gRPC")
        if handle is None:
            _unsupported("cancel by key")
        statuses = [self._recall(each) for each in handle.split(",")]
        count = statuses.count(ScheduleChangeStatus.CANCELLED)
        return ScheduleChange(ScheduleChangeStatus.CANCELLED if count else statuses[0], count)

    def _recall(self, text: str) -> ScheduleChangeStatus:
        handle = decode_handle(text)
        if handle.deliver_ms <= self._clock.now_ms():
            was_cancelled = text in self._cancelled
            return ScheduleChangeStatus.CANCELLED if was_cancelled else ScheduleChangeStatus.ALREADY_DELIVERED
        operation = f"cancel message {handle.msg_id} of {handle.topic!r}"
        endpoints = self._routes.get(handle.topic).endpoints[0]
        request = protos.RecallMessageRequest(topic=self._session.context.resource(handle.topic), recall_handle=text)
        answer = self._session.request(endpoints, "RecallMessage", request, operation)
        if answer.status.code != Code.OK and handle.deliver_ms <= self._clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        if answer.status.code != Code.OK and "recall" in answer.status.message.lower():
            raise UnsupportedError(
                f"{operation}: {refusal_text(answer.status, endpoints)}; set recallMessageEnable=true on the broker"
            )
        check_status(answer.status, operation, endpoints)
        self._cancelled[text] = None
        if len(self._cancelled) > _MOST_CANCELLED:
            self._cancelled.popitem(last=False)
        return ScheduleChangeStatus.CANCELLED

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """See `DelayedMessages.reschedule`; this protocol cannot do it."""
        _unsupported("reschedule: cancel the message and send it again")

    def send_if(
        self,
        messages: Sequence[QueuedMessage],
        state: PendingState,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
    ) -> ConditionalSend:
        """See `DelayedMessages.send_if`; this protocol cannot do it."""
        _unsupported("a send under the condition that a message is pending or delivered")

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """See `DelayedMessages.pending`; this protocol cannot do it."""
        _unsupported("a list of pending messages")

    def count_pending(
        self, query: PendingQuery, bucket_ms: int = 60_000, *, on_compared: Callable[[int], None] | None = None
    ) -> PendingCounts:
        """See `DelayedMessages.count_pending`; this protocol cannot do it."""
        _unsupported("the number of pending messages")

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """See `DelayedMessages.pending_positions`; the files of the broker are not on this machine."""
        _unsupported("positions of pending messages")
