"""Delayed messages: recalls by handle, which is all that the protocol has.

Source: RocketMQ ``client-java: ProducerImpl.recallMessage``, ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn

from mqtemplate.broker import ReleaseCauses
from mqtemplate.brokers.grpc.channels import check_status, refusal_text
from mqtemplate.brokers.grpc.sessions import ClientSession, Routes
from mqtemplate.clock import Clock
from mqtemplate.delay.recall_handle import check_selection, decode_handle
from mqtemplate.errors import UnsupportedError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange, ScheduleChangeStatus

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

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """See `DelayedMessages.cancel`. A broker accepts a recall without a check that the message is pending."""
        check_selection(handle, key)
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
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        """See `DelayedMessages.reschedule`; this protocol cannot do it."""
        _unsupported("reschedule: cancel the message and send it again")

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
