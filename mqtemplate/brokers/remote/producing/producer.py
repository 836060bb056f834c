"""Producer: chooses a queue, sends to its broker, and tries another one where that may help.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``MQFaultStrategy``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.errors import RETRY_ELSEWHERE, send_error, unanswered_send_error
from mqtemplate.brokers.remote.producing.send_request import SendRequest, SendRequestFactory
from mqtemplate.brokers.remote.routes import TopicRoute
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DestinationError,
    ForkedError,
    MQTemplateError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendError,
    UnsupportedError,
)
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.results import SendResult, SendStatus

_STATUS = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_WITHOUT = {
    Capability.BATCH_DELAY: "send the messages one by one",
    Capability.TRANSACTION_DELAY: "send it without a delay",
}
_SHORTEST_ATTEMPT_S = 0.005
_NOT_RETRIED = (BrokerClosedError, ForkedError, UnsupportedError)


class _Target(NamedTuple):
    queue: MessageQueue
    address: str


class Producer:
    """The producer of one client. After a failed send it prefers other brokers of the topic for some time."""

    def __init__(self, context: ClientContext) -> None:
        self.factory = SendRequestFactory(context.settings, context.namespace, context.clock)
        self._instance = context.instance
        self._routes = context.routes
        self._settings = context.settings
        self._clock = context.clock
        self._sent = context.sent
        self._avoid_until: dict[str, int] = {}

    # --- the sends of `Broker` -----------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """See `Broker.send`."""
        return self.deliver(self.factory.single(message), queue, timeout_ms)

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """See `Broker.send_batch`."""
        return self.deliver(self.factory.batch(messages), queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int
    ) -> Future[SendResult]:
        """See `Broker.send_async`."""
        future: Future[SendResult] = Future()
        future.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled
        try:
            request = self.factory.for_messages(messages)
            deadline, route = time.monotonic() + timeout_ms / 1_000, self._route_of(request)
            target = self.target(request, route, queue, None)
            _AsyncSend(self, request, queue, timeout_ms, deadline, future, route, target).attempt()
        except MQTemplateError as exc:
            future.set_exception(exc)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None) -> None:
        """See `Broker.send_one_way`."""
        request = self.factory.single(message)
        target = self.target(request, self.route(request.topic), queue, None)
        try:
            self._instance.invoke_one_way(target.address, request.command(target.queue, one_way=True))
        except (RemoteConnectError, RemoteTimeoutError) as exc:
            self.avoid(target)
            raise SendError(f"{request}: {exc}") from exc

    def deliver(self, request: SendRequest, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """Send and wait for the result; try other queues and brokers if *queue* is None.

        Raises:
            SendError: No broker accepted the message in time.
            MessageError, UnsupportedError: A broker refused it for good.
        """
        deadline = time.monotonic() + timeout_ms / 1_000
        attempts = 1 + (self._settings.retry_times_when_send_failed if queue is None else 0)
        route = self._route_of(request)
        last_broker: str | None = None
        for number in range(1, attempts + 1):
            target = self.target(request, route, queue, last_broker)
            last_broker = target.queue.broker_name
            left_ms = max(1, int((deadline - time.monotonic()) * 1_000))
            try:
                response = self._instance.invoke(target.address, request.command(target.queue), left_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                self.avoid(target)
                if number == attempts or _is_over(deadline):
                    raise unanswered_send_error(str(request), exc, number, timeout_ms) from exc
                continue
            if number == attempts or _is_over(deadline) or not self.may_retry(response):
                return self.result(request, target, response)
            self.avoid(target)
            if response.code == ResponseCode.TOPIC_NOT_EXIST:
                self._routes.forget(request.topic)
                route = self.route(request.topic)
        raise AssertionError("the last attempt returns or raises")

    # --- steps of an attempt -------------------------------------------------------------------

    def route(self, topic: str) -> TopicRoute:
        """Return the route to send by.

        Raises:
            SendError: The topic has no queue that accepts messages.
        """
        try:
            route = self._routes.publish_route(topic)
        except (*_NOT_RETRIED, DestinationError):
            raise
        except BrokerError as exc:
            raise SendError(f"no route for {topic!r}: {exc}") from exc
        if not route.write_queues:
            raise SendError(
                f"topic {topic!r} has no queue that accepts messages: its brokers are replicas without a master, or "
                "its permission forbids writing (mqadmin updateTopicPerm)"
            )
        return route

    def target(
        self, request: SendRequest, route: TopicRoute, queue: MessageQueue | None, last_broker: str | None
    ) -> _Target:
        """Return the queue of the next attempt and the address of its broker.

        Args:
            queue: The only queue to send to; None for any.
            last_broker: Broker of the attempt before.

        Raises:
            DestinationError: *queue* is not in the route.
            UnsupportedError: The broker would deliver the message at once. It is older than 5.0 and the message has a
                timer, or it is one of RocketMQ and the message has a delay in a batch or in a transaction.
        """
        if queue is None:
            queue = self._next_queue(route, last_broker)
        elif queue not in route.write_queues:
            raise DestinationError(
                f"{queue} is no queue of the topic; there are {len(route.write_queues)}, on "
                f"{', '.join(sorted({each.broker_name for each in route.write_queues}))}, from queue 0 on"
            )
        address = self._routes.address(queue.broker_name)
        if request.has_timer and not request.has_level and self._instance.is_before_5(address):
            raise UnsupportedError(
                f"{request}: broker {queue.broker_name!r} at {address} is older than RocketMQ 5.0 and has no timers "
                "(it would deliver at once); use a delay level, or a newer broker with timerWheelEnable=true"
            )
        if request.needs is not None and request.needs not in self._instance.announced.get(address, ()):
            raise UnsupportedError(
                f"{request}: broker {queue.broker_name!r} at {address} does not support {request.needs.value} "
                f"(RocketMQ's brokers do not); {_WITHOUT[request.needs]}"
            )
        return _Target(queue, address)

    def _route_of(self, request: SendRequest) -> TopicRoute:
        """Return the route to send by. Its brokers have announced their capabilities if the message needs one."""
        route = self.route(request.topic)
        if request.needs is not None:
            self._instance.register_at(route.masters())
        return route

    def _next_queue(self, route: TopicRoute, last_broker: str | None) -> MessageQueue:
        """Return the queues in turn; queues of brokers that failed recently only if there are no others."""
        queues = route.write_queues
        chosen = queues[route.next_turn() % len(queues)]
        if last_broker is None and not self._avoid_until:
            return chosen
        now_ms = self._clock.now_ms()
        for _ in queues:
            if chosen.broker_name != last_broker and self._avoid_until.get(chosen.broker_name, 0) <= now_ms:
                return chosen
            chosen = queues[route.next_turn() % len(queues)]
        others = [queue for queue in queues if queue.broker_name != last_broker]
        return others[route.next_turn() % len(others)] if others else chosen

    def avoid(self, target: _Target) -> None:
        """Prefer other brokers than the target's for some time."""
        self._avoid_until[target.queue.broker_name] = self._clock.now_ms() + self._settings.send_avoid_ms

    def result(self, request: SendRequest, target: _Target, response: RemotingCommand) -> SendResult:
        """Return the result of a send.

        Raises:
            MessageError, SendError, UnsupportedError: The broker did not accept the message.
        """
        status = _STATUS.get(response.code)  # type: ignore[call-overload]  # an int equals its enum member
        if status is None:
            raise send_error(response, str(request), target.address, has_timer=request.has_timer)
        self._avoid_until.pop(target.queue.broker_name, None)
        header = response.header(SendMessageResponseHeader)
        result = SendResult(
            status,
            request.msg_id,
            header.msg_id,
            MessageQueue(request.topic, target.queue.broker_name, header.queue_id),
            header.queue_offset,
            (header.transaction_id or request.msg_id) if request.is_half else None,
            header.recall_handle,
        )
        self._sent.add_sent(result, len(request.msg_ids), in_queue=request.is_immediate)
        route = self._routes.cached(request.topic)
        if route is not None and route.is_default:
            self._routes.forget(request.topic)  # the broker has created the topic: look its real queues up
        return result

    def may_retry(self, response: RemotingCommand) -> bool:
        """Return True if another queue or broker may give a better response."""
        if response.code in _STATUS:
            return self._settings.retry_next_server and response.code != ResponseCode.SUCCESS
        return response.code in RETRY_ELSEWHERE


@dataclass(slots=True, eq=False)
class _AsyncSend:
    """One asynchronous send with its attempts; all but the first run in the I/O thread."""

    producer: Producer
    request: SendRequest
    queue: MessageQueue | None
    timeout_ms: int
    deadline: float
    future: Future[SendResult]
    route: TopicRoute
    target: _Target
    number: int = 0

    def attempt(self) -> None:
        self.number += 1
        left_ms = max(1, int((self.deadline - time.monotonic()) * 1_000))
        command = self.request.command(self.target.queue)
        self.producer._instance.invoke_async(self.target.address, command, left_ms, self._done)

    def _done(self, response: RemotingCommand | BrokerError) -> None:
        try:
            self._finish_or_retry(response)
        except MQTemplateError as exc:
            self.future.set_exception(exc)

    def _finish_or_retry(self, response: RemotingCommand | BrokerError) -> None:
        retries = self.producer._settings.retry_times_when_send_async_failed
        is_last = self.number == 1 + (retries if self.queue is None else 0) or _is_over(self.deadline)
        if isinstance(response, RemotingCommand):
            if is_last or not self.producer.may_retry(response):
                self.future.set_result(self.producer.result(self.request, self.target, response))
                return
        elif isinstance(response, _NOT_RETRIED):
            raise response
        elif is_last:
            raise unanswered_send_error(str(self.request), response, self.number, self.timeout_ms) from response
        self.producer.avoid(self.target)
        self.target = self.producer.target(self.request, self.route, self.queue, self.target.queue.broker_name)
        self.attempt()


def _is_over(deadline: float) -> bool:
    """Return True if there is no time for another attempt."""
    return deadline - time.monotonic() < _SHORTEST_ATTEMPT_S
