"""Cancelling timers on a cluster.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``; section 14.3 of the specification.
"""

from __future__ import annotations

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import answer_problem
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.clock import Clock
from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader


class RemoteRecall:
    """Calls waiting messages back by their handles; that is all that RocketMQ can do about them."""

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        clock: Clock,
        group: str,
        timeout_ms: int,
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._clock = clock
        self._group = group
        self._timeout_ms = timeout_ms

    def cancel(self, handle: str | None, key: str | None) -> ScheduleChange:
        """See `Broker.cancel`. A broker takes the wish without looking whether the message still waits.

        Raises:
            UnsupportedError: By key, or the broker's ``recallMessageEnable`` is off.
        """
        if (handle is None) == (key is None):
            raise MessageError(
                "name the pending message by its handle or by key, one of the two; SendResult.handle is the first"
            )
        if handle is None:
            raise UnsupportedError(
                "a RocketMQ cluster cancels by handle only; keep SendResult.handle, which messages with a timer have"
            )
        results = [self._cancel_one(each) for each in handle.split(",")]
        count = sum(result is ScheduleChangeStatus.CANCELLED for result in results)
        return ScheduleChange(ScheduleChangeStatus.CANCELLED if count else results[0], count)

    def _cancel_one(self, text: str) -> ScheduleChangeStatus:
        handle = decode_handle(text)
        if handle.deliver_ms <= self._clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        topic = self._namespace.unwrap(handle.topic)
        header = RecallMessageRequestHeader(
            producer_group=self._namespace.wrap(self._group),
            topic=self._namespace.wrap(topic),
            recall_handle=text,
            broker_name=handle.broker_name,
        )
        self._routes.existing(topic)
        address = self._routes.address(handle.broker_name)
        request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, header)
        answer = self._instance.invoke(address, request, self._timeout_ms)
        if answer.code == ResponseCode.SUCCESS:
            return ScheduleChangeStatus.CANCELLED
        return self._refused(handle, answer, address)

    def _refused(self, handle: RecallHandle, answer: RemotingCommand, address: str) -> ScheduleChangeStatus:
        problem = answer_problem(answer, f"cancel message {handle.msg_id} of {handle.topic!r}", address)
        if answer.code == ResponseCode.NO_PERMISSION and "recall" in (answer.remark or "").lower():
            raise UnsupportedError(f"{problem}; set recallMessageEnable=true on the broker")
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedError(f"{problem}; brokers can cancel from RocketMQ 5.3 on")
        if answer.code == ResponseCode.ILLEGAL_OPERATION and handle.deliver_ms <= self._clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        raise problem
