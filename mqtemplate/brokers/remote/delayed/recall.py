"""Recalls: requests that a broker deletes a message with a timer.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``, ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.delayed.timer_records import TimerId
from mqtemplate.brokers.remote.errors import response_error
from mqtemplate.brokers.remote.routes import MASTER_ID
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.errors import BrokerError, UnsupportedError
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC

_RECENT_MS = 5_000  # a mark is in the timer topic and in the index some milliseconds after the response
_REFUSED = (ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
_TOO_OLD = "brokers can cancel from RocketMQ 5.3 on"


class Recalls:
    """Sends recalls, and remembers those of the last seconds."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._recent: dict[TimerId, int] = {}

    def is_recent(self, timer: TimerId) -> bool:
        """Return True if this object has recalled a timer, and its mark may not be readable yet."""
        return timer in self._recent

    def recall(self, handle: RecallHandle) -> ScheduleChangeStatus:
        """Recall a timer; the broker accepts a recall without a check that the message is pending.

        Raises:
            UnsupportedError: The broker's ``recallMessageEnable`` is off, or it is too old.
        """
        now_ms = self._context.clock.now_ms()
        if handle.deliver_ms <= now_ms:
            return ScheduleChangeStatus.ALREADY_DELIVERED
        topic = self._context.namespace.unwrap(handle.topic)
        self._context.routes.existing(topic)  # its route has the address of the broker
        response, address = self._request(handle.broker_name, self._context.namespace.wrap(topic), handle)
        if response.code == ResponseCode.SUCCESS:
            self._remember(TimerId(handle.broker_name, handle.msg_id, handle.deliver_ms - 1), now_ms)
            return ScheduleChangeStatus.CANCELLED
        if response.code == ResponseCode.ILLEGAL_OPERATION and handle.deliver_ms <= self._context.clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        raise _error(response, f"cancel message {handle.msg_id} of {handle.topic!r}", address)

    def _remember(self, timer: TimerId, now_ms: int) -> None:
        for old in [each for each, since_ms in self._recent.items() if now_ms - since_ms > _RECENT_MS]:
            self._recent.pop(old, None)
        self._recent[timer] = now_ms

    # --- support -------------------------------------------------------------------------------

    def check_versions(self) -> None:
        """Raise `UnsupportedError` if all brokers are older than RocketMQ 5."""
        context = self._context
        if all(context.instance.is_before_5(context.routes.address(name)) for name in self._masters()):
            raise UnsupportedError(
                f"this RocketMQ cluster has no timers and cancels no message; {_TOO_OLD}, and only messages with a "
                "timer, or use the embedded broker or our server"
            )

    def are_enabled(self) -> bool:
        """Return True if all brokers recall timers."""
        try:
            for name in self._masters():
                self.check_enabled(name)
        except BrokerError:
            return False
        return bool(self._masters())

    def check_enabled(self, broker_name: str) -> None:
        """Raise `UnsupportedError` if a broker refuses recalls. It gets a recall that has no effect."""
        over = RecallHandle(AUTO_CREATE_TOPIC, broker_name, 1, "0")  # the broker refuses its time, after other checks
        response, address = self._request(broker_name, AUTO_CREATE_TOPIC, over)
        if response.code in _REFUSED:
            raise _error(response, "recall messages", address)

    def _request(self, broker_name: str, wire_topic: str, handle: RecallHandle) -> tuple[RemotingCommand, str]:
        header = RecallMessageRequestHeader(
            producer_group=self._context.namespace.wrap(self._context.settings.producer_group),
            topic=wire_topic,
            recall_handle=encode_handle(handle),
            broker_name=broker_name,
        )
        address = self._context.routes.address(broker_name)
        request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, header)
        return self._context.instance.invoke(address, request, self._context.settings.request_timeout_ms), address

    def _masters(self) -> list[str]:
        return [name for name, by_id in self._context.routes.brokers().items() if MASTER_ID in by_id]


def _error(response: RemotingCommand, operation: str, address: str) -> BrokerError:
    problem = response_error(response, operation, address)
    if response.code == ResponseCode.NO_PERMISSION and "recall" in (response.remark or "").lower():
        return UnsupportedError(f"{problem}; set recallMessageEnable=true on the broker")
    if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return UnsupportedError(f"{problem}; {_TOO_OLD}")
    return problem
