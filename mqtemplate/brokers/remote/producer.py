"""The sending half of a remote broker: choose a queue, ask its broker, try another one where that may help.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``MQFaultStrategy``; section 8 of the specification.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import RETRY_ELSEWHERE, send_failure, send_problem
from mqtemplate.brokers.remote.outbound import Outbound, OutboundMaker
from mqtemplate.brokers.remote.routes import RouteTable, TopicRoute
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
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
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.results import SendResult, SendStatus

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_STATUS = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_SHORTEST_TRY_S = 0.005
_FOR_GOOD = (BrokerClosedError, ForkedError, UnsupportedError)


class _Target(NamedTuple):
    queue: MessageQueue
    address: str


class RemoteSender:
    """Sends messages and tells what became of them.

    A broker that failed a send is passed over for a while, where the topic has another one.
    """

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        maker: OutboundMaker,
        settings: RemoteSettings,
        clock: Clock,
        marks: SentOffsets,
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._maker = maker
        self._settings = settings
        self._clock = clock
        self._marks = marks
        self._avoid_until: dict[str, int] = {}

    # --- verbs ---------------------------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        return self.deliver(self._maker.single(message), queue, timeout_ms)

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        return self.deliver(self._maker.batch(messages), queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int
    ) -> Future[SendResult]:
        future: Future[SendResult] = Future()
        future.set_running_or_notify_cancel()  # what is on its way is not taken back
        try:
            _AsyncSend(
                self, self._maker.any(messages) if messages else self._maker.batch([]), queue, timeout_ms, future
            )
        except MQTemplateError as exc:
            future.set_exception(exc)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None) -> None:
        out = self._maker.single(message)
        target = self.target(self.route(out.topic), queue, None)
        self.check_version(out, target)
        try:
            self._instance.invoke_one_way(target.address, out.request(target.queue, one_way=True))
        except (RemoteConnectError, RemoteTimeoutError) as exc:
            self.avoid(target)
            raise SendError(f"{_asked(out)}: {exc}") from exc

    # --- one at a time -------------------------------------------------------------------------

    def deliver(self, out: Outbound, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """Send and wait for the answer; to another queue or broker where the first one fails and *queue* is None."""
        deadline = time.monotonic() + timeout_ms / 1_000
        tries = self._tries(queue, self._settings.retry_times_when_send_failed)
        route = self.route(out.topic)
        last_broker: str | None = None
        for number in range(1, tries + 1):
            target = self.target(route, queue, last_broker)
            last_broker = target.queue.broker_name
            self.check_version(out, target)
            left_ms = max(1, int((deadline - time.monotonic()) * 1_000))
            try:
                answer = self._instance.invoke(target.address, out.request(target.queue), left_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                self.avoid(target)
                if number == tries or _is_over(deadline):
                    raise send_failure(_asked(out), exc, number, timeout_ms) from exc
                continue
            is_last = number == tries or _is_over(deadline)
            if not self._goes_on(answer, is_last=is_last):
                return self.result(out, target, answer)
            self.avoid(target)
            route = self._route_after(out, answer, route)
        raise AssertionError("the last try returns or raises")

    def route(self, topic: str) -> TopicRoute:
        """Where to send to.

        Raises:
            SendError: There is nowhere.
        """
        try:
            route = self._routes.publish(topic)
        except (*_FOR_GOOD, DestinationError):
            raise
        except BrokerError as exc:
            raise SendError(f"no route for {topic!r}: {exc}") from exc
        if not route.publish:
            raise SendError(
                f"topic {topic!r} has no queue that takes messages: its brokers are replicas without a master, or its "
                "permission forbids writing (mqadmin updateTopicPerm)"
            )
        return route

    def target(self, route: TopicRoute, queue: MessageQueue | None, last_broker: str | None) -> _Target:
        """The queue to try next, and where it is."""
        if queue is None:
            queue = self._next_queue(route, last_broker)
        elif queue not in route.publish:
            raise DestinationError(
                f"{queue} is no queue of the topic; there are {len(route.publish)}, on "
                f"{', '.join(sorted({each.broker_name for each in route.publish}))}, from queue 0 on"
            )
        return _Target(queue, self._routes.address(queue.broker_name))

    def _next_queue(self, route: TopicRoute, last_broker: str | None) -> MessageQueue:
        """The queues take turns; those of brokers that failed lately wait, unless there are no others."""
        queues = route.publish
        first = queues[route.turn() % len(queues)]
        if last_broker is None and not self._avoid_until:
            return first
        now_ms = self._clock.now_ms()
        for _ in queues:
            if first.broker_name != last_broker and self._avoid_until.get(first.broker_name, 0) <= now_ms:
                return first
            first = queues[route.turn() % len(queues)]
        others = [queue for queue in queues if queue.broker_name != last_broker]
        return others[route.turn() % len(others)] if others else first

    def avoid(self, target: _Target) -> None:
        self._avoid_until[target.queue.broker_name] = self._clock.now_ms() + self._settings.send_avoid_ms

    def check_version(self, out: Outbound, target: _Target) -> None:
        """Refuse what the broker would ignore.

        Raises:
            UnsupportedError: It keeps no timers, and would deliver at once.
        """
        if out.wants_timer and not out.wants_level and self._instance.is_before_5(target.address):
            raise UnsupportedError(
                f"{_asked(out)}: broker {target.queue.broker_name!r} at {target.address} is older than RocketMQ "
                "5.0 and keeps no timers (it would deliver at once); use a delay level, or a newer broker with "
                "timerWheelEnable=true"
            )

    # --- what came of it -----------------------------------------------------------------------

    def result(self, out: Outbound, target: _Target, answer: RemotingCommand) -> SendResult:
        """What the broker says, as the port says it.

        Raises:
            MessageError, SendError: It did not take the message.
        """
        status = _STATUS.get(answer.code)  # type: ignore[call-overload]  # a plain int finds its member
        if status is None:
            raise send_problem(answer, _asked(out), target.address, has_timer=out.wants_timer)
        self._avoid_until.pop(target.queue.broker_name, None)
        header = answer.header(SendMessageResponseHeader)
        result = SendResult(
            status,
            out.msg_id,
            header.msg_id,
            MessageQueue(out.topic, target.queue.broker_name, header.queue_id),
            header.queue_offset,
            (header.transaction_id or out.msg_id) if out.is_half else None,
            header.recall_handle,
        )
        self._marks.note(result, len(out.msg_ids), in_queue=out.is_at_once)
        known = self._routes.known(out.topic)
        if known is not None and known.is_default:
            self._routes.forget(out.topic)  # now it is there, with queues of its own
        return result

    def _goes_on(self, answer: RemotingCommand, *, is_last: bool) -> bool:
        """Whether to try elsewhere."""
        if is_last:
            return False
        if answer.code in _STATUS:
            return self._settings.retry_next_server and answer.code != ResponseCode.SUCCESS
        return answer.code in RETRY_ELSEWHERE

    def _route_after(self, out: Outbound, answer: RemotingCommand, route: TopicRoute) -> TopicRoute:
        if answer.code != ResponseCode.TOPIC_NOT_EXIST:
            return route
        self._routes.forget(out.topic)
        return self.route(out.topic)

    @staticmethod
    def _tries(queue: MessageQueue | None, retries: int) -> int:
        """A message for one queue is not sent elsewhere."""
        return 1 + retries if queue is None else 1


class _AsyncSend:
    """One asynchronous send, with its tries; everything after the first happens in the I/O thread."""

    def __init__(
        self,
        sender: RemoteSender,
        out: Outbound,
        queue: MessageQueue | None,
        timeout_ms: int,
        future: Future[SendResult],
    ) -> None:
        self._sender = sender
        self._out = out
        self._queue = queue
        self._timeout_ms = timeout_ms
        self._deadline = time.monotonic() + timeout_ms / 1_000
        self._future = future
        self._route = sender.route(out.topic)
        self._number = 0
        self._tries = sender._tries(queue, sender._settings.retry_times_when_send_async_failed)
        self._target = sender.target(self._route, queue, None)
        self._try()

    def _try(self) -> None:
        self._number += 1
        self._sender.check_version(self._out, self._target)
        left_ms = max(1, int((self._deadline - time.monotonic()) * 1_000))
        request = self._out.request(self._target.queue)
        self._sender._instance.invoke_async(self._target.address, request, left_ms, self._done)

    def _done(self, answer: RemotingCommand | BrokerError) -> None:
        try:
            self._take(answer)
        except MQTemplateError as exc:
            self._future.set_exception(exc)

    def _take(self, answer: RemotingCommand | BrokerError) -> None:
        is_last = self._number == self._tries or _is_over(self._deadline)
        if isinstance(answer, RemotingCommand):
            if not self._sender._goes_on(answer, is_last=is_last):
                self._future.set_result(self._sender.result(self._out, self._target, answer))
                return
        elif isinstance(answer, _FOR_GOOD):
            raise answer
        elif is_last:
            raise send_failure(_asked(self._out), answer, self._number, self._timeout_ms) from answer
        self._sender.avoid(self._target)
        self._target = self._sender.target(self._route, self._queue, self._target.queue.broker_name)
        self._try()


def _is_over(deadline: float) -> bool:
    """Whether there is no time for another try."""
    return deadline - time.monotonic() < _SHORTEST_TRY_S


def _asked(out: Outbound) -> str:
    what = f"a batch of {len(out.msg_ids)} messages" if len(out.msg_ids) > 1 else f"message {out.msg_ids[0]}"
    return f"send {what} to {out.topic!r}"
