"""Producer: chooses a queue, sends to its broker, and tries another one where that may help.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``MQFaultStrategy``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import RETRY_ELSEWHERE, refusal_text, send_error
from mqtemplate.brokers.remote.cluster.routes import TopicRoute
from mqtemplate.brokers.remote.producing.auto_batch import AutoBatch, MessageAccumulator, Outcome, ThreadOutcome
from mqtemplate.brokers.remote.producing.send_request import SendRequest, SendRequestFactory
from mqtemplate.brokers.remote.producing.sequenced import SequencedSends
from mqtemplate.durations import format_ms
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DestinationError,
    ForkedError,
    MQTemplateError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageQueue, SelectedQueue
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.results import HalfMessage, SendResult, SendStatus
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

# --- tries of one send ----------------------------------------------------------------------------


_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_SHORTEST_TRY_S = 0.05  # in less time, a broker could store the message and answer too late
_NOT_STORED = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY})
"""Responses of a broker that is overloaded, starts or stops. It has not stored the message."""


@dataclass(slots=True)
class _Failure:
    """One reason, and the tries in a row that failed for it; times in milliseconds since the start of the send."""

    reason: str
    first: int
    last: int
    first_ms: int
    last_ms: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"({self.first}) after {format_ms(self.first_ms)}: {self.reason}"
        return (
            f"({self.first}-{self.last}) after {format_ms(self.first_ms)} to {format_ms(self.last_ms)}: {self.reason}"
        )


@dataclass(slots=True, eq=False)
class Tries:
    """The failed tries of one send.

    - A try that certainly stored nothing is repeated until the timeout: the broker could not be reached, or it answered
      that it is busy, starts or stops. The pauses grow, so that a broker that starts is not flooded.
    - All other tries count. There are as many of them as RocketMQ's own client makes; a message for one queue has one.

    Args:
        retries: Number of tries that count, after the first one.
        may_repeat: False for a setting of no retries: then the first failure is the last one.
    """

    request: SendRequest
    retries: int
    may_repeat: bool
    timeout_ms: int
    deadline: float
    _number: int = 0
    _counted: int = 0
    _failures: list[_Failure] = field(default_factory=list)
    _has_timed_out: bool = False

    def pause_s(self, address: str, failure: BrokerError | RemotingCommand) -> float | None:
        """Add a failed try; return the pause before the next one, or None if there is none."""
        self._add(address, failure)
        if not _stored_nothing(failure):
            self._counted += 1
        left_s = self.deadline - time.monotonic() - min(_SHORTEST_TRY_S, self.timeout_ms / 10_000)
        if not self.may_repeat or self._counted > self.retries or left_s <= 0:
            return None
        pause_s = min(_FIRST_PAUSE_S * (1 << min(self._number - 1, 10)), _LONGEST_PAUSE_S)
        return min(pause_s * random.uniform(0.5, 1), left_s)  # at random times, since many producers lose one broker

    def _add(self, address: str, failure: BrokerError | RemotingCommand) -> None:
        self._number += 1
        self._has_timed_out |= isinstance(failure, TimeoutError)
        reason = str(failure) if isinstance(failure, BrokerError) else refusal_text(failure, address)
        now_ms = self.timeout_ms - round((self.deadline - time.monotonic()) * 1_000)
        if self._failures and self._failures[-1].reason == reason:
            self._failures[-1].last, self._failures[-1].last_ms = self._number, now_ms
        else:
            self._failures.append(_Failure(reason, self._number, self._number, now_ms, now_ms))

    def queue_is_away(self, queue: MessageQueue | None) -> SendError:
        """Return the error for a queue that left the route while the send was tried; these tries stored nothing."""
        self._add(
            "",
            RemoteConnectError(
                f"{queue} is not in the route of its topic any more, since its broker has stopped; send again to "
                "another queue, or when the broker is back"
            ),
        )
        error = SendError.during(str(self.request), self._text())
        error.tries, error.queue_is_away = tuple(map(str, self._failures)), True
        return error

    def _text(self) -> str:
        times = "once" if self._number == 1 else f"{self._number} times"
        return f"tried {times} within {format_ms(self.timeout_ms)}: {'; '.join(map(str, self._failures))}"

    def error(self, address: str, failure: BrokerError | RemotingCommand) -> MQTemplateError:
        """Return the error of the send after its last try, *failure*."""
        if isinstance(failure, RemotingCommand):
            refused = send_error(failure, str(self.request), address, has_timer=self.request.has_timer)
            if self._number == 1:
                return refused
            kind = type(refused)
        else:
            kind = SendTimeoutError if self._has_timed_out else SendError
        error = kind.during(str(self.request), self._text())
        if isinstance(error, SendError):
            error.tries = tuple(map(str, self._failures))
        return error


def _stored_nothing(failure: BrokerError | RemotingCommand) -> bool:
    """Return True if the broker has certainly not stored the message."""
    if isinstance(failure, RemotingCommand):
        return failure.code in _NOT_STORED
    return isinstance(failure, RemoteConnectError) and not failure.was_sent


# --- producer -------------------------------------------------------------------------------------


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
_SHORTEST_TRY_MS = 500
_UNANSWERED = (RemoteConnectError, RemoteTimeoutError)
_NOT_RETRIED = (BrokerClosedError, ForkedError, UnsupportedError)


class _Target(NamedTuple):
    queue: MessageQueue
    address: str


class Producer:
    """The producer of one client. After a failed send it prefers other brokers of the topic for some time."""

    def __init__(self, context: ClientContext) -> None:
        sequenced = SequencedSends(context)
        self.send_sequenced, self.send_encoded = sequenced.send, sequenced.send_encoded
        self.factory = SendRequestFactory(context.settings, context.namespace, context.clock)
        self._instance = context.instance
        self._routes = context.routes
        self._settings = context.settings
        self._clock = context.clock
        self._sent = context.sent
        self._avoid_until: dict[str, int] = {}
        self.waiting: set[_AsyncSend] = set()
        self._auto_batch = AutoBatch(self)
        self._is_closed = False

    # --- the sends of `Broker` -----------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """See `MessageSends.send`."""
        accumulator = self._accumulator(message, timeout_ms) if queue is None and self._settings.auto_batch else None
        # A callback must not wait for its own thread.
        if accumulator is None or self._instance.remoting.loop.is_current_thread:
            return self.deliver(self.factory.single(message), queue, timeout_ms)
        if accumulator.may_start():
            start_s, result = time.monotonic(), None
            try:
                result = self.deliver(self.factory.single(message), None, timeout_ms)
            finally:
                accumulator.ended(1, None if result is None else time.monotonic() - start_s)
            return result
        outcome = ThreadOutcome()
        accumulator.add(message, outcome)
        return outcome.get()

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """See `MessageSends.send_batch`."""
        return self.deliver(self.factory.batch(messages), queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """See `MessageSends.send_async`."""
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled
        may_join = queue is None and len(messages) == 1 and self._settings.auto_batch
        try:
            accumulator = self._accumulator(messages[0], timeout_ms) if may_join else None
            if accumulator is not None:
                accumulator.add(messages[0], future)
            else:
                deadline = time.monotonic() + timeout_ms / 1_000
                _AsyncSend(self, self.factory.for_messages(messages), queue, timeout_ms, deadline, future).attempt()
        except MQTemplateError as exc:
            future.set_exception(exc)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """See `MessageSends.send_one_way`."""
        request = self.factory.single(message)
        target = self.target(request, self.route(request.topic), queue, None)
        try:
            self._instance.invoke_one_way(target.address, request.command(target.queue, one_way=True))
        except (RemoteConnectError, RemoteTimeoutError) as exc:
            self.avoid(target)
            raise SendError.during(str(request), str(exc)) from exc

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """See `MessageSends.send_half`."""
        request = self.factory.single(message, transaction_group=group)
        return HalfMessage(message, group, self.deliver(request, queue, timeout_ms))

    def _accumulator(self, message: Message, timeout_ms: int) -> MessageAccumulator | None:
        """Return the accumulator of a message that may be sent with others; None if it has to be sent alone."""
        route = self._routes.cached(message.topic)
        # A first message is sent alone: it creates the topic, and that takes longer.
        if route is None or route.is_default or not self.factory.can_be_joined(message):
            return None
        if not self._instance.remoting.is_usable:  # closed, or of the parent process: sending it alone raises the error
            return None
        return self._auto_batch.accumulator(message.topic, timeout_ms)

    # --- interface of `AutoBatch` --------------------------------------------------------------

    def start(self, request: SendRequest, timeout_ms: int, deadline: float, outcome: Outcome) -> None:
        """Send without waiting, in any thread."""
        send = _AsyncSend(self, request, None, timeout_ms, deadline, outcome)
        if self._instance.remoting.loop.is_current_thread and self._routes.cached(request.topic) is None:
            self.try_later(send, 0)  # to look up the route may take long
        else:
            send.attempt()

    def call_later(self, delay_ms: float, work: Callable[[], None]) -> None:
        """Call *work* in the I/O thread, unless the client is closed before."""
        self._instance.remoting.loop.call_later(delay_ms, work)

    # --- a send that waits ---------------------------------------------------------------------

    def deliver(self, request: SendRequest, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """Send and wait for the result; try other queues and brokers if *queue* is None.

        Raises:
            SendError: No broker accepted the message in time.
            MessageError, UnsupportedError: A broker refused it for good.
        """
        deadline = time.monotonic() + timeout_ms / 1_000
        retries = self._settings.retry_times_when_send_failed
        tries: Tries | None = None
        last_broker: str | None = None
        while True:
            target: _Target | None = None
            failure: BrokerError | RemotingCommand
            try:
                route = self.route_of(request)
                target = self.target(request, route, queue, last_broker)
                left_ms = max(1, int((deadline - time.monotonic()) * 1_000))
                if queue is None and len(route.write_brokers) > 1:
                    left_ms = min(left_ms, self.try_ms(route, target, timeout_ms, retries))
                failure = self._instance.invoke(target.address, request.command(target.queue), left_ms)
                if not self.may_retry(failure):
                    return self.result(request, target, failure)
            except _UNANSWERED as exc:
                failure = exc
            except DestinationError as exc:
                raise exc if tries is None else tries.queue_is_away(queue) from exc
            if tries is None:
                tries = self.tries(request, queue, timeout_ms, deadline, retries)
            pause_s = self.failed(tries, target, failure)
            if pause_s is None:
                return self.end(tries, target, failure)
            last_broker = target.queue.broker_name if target is not None else last_broker
            threading.Event().wait(pause_s)

    def try_ms(self, route: TopicRoute, target: _Target, timeout_ms: int, retries: int) -> int:
        """Return the time limit of one try: a part of the timeout if another broker may accept the message.

        Otherwise a broker that does not answer would use up the timeout.
        """
        if retries == 0 or not self._has_other_broker(route, target):
            return timeout_ms
        return max(_SHORTEST_TRY_MS, timeout_ms // (retries + 1))

    def _has_other_broker(self, route: TopicRoute, target: _Target) -> bool:
        if not self._avoid_until:
            return True
        now_ms = self._clock.steady_ms()
        return any(
            name != target.queue.broker_name and self._avoid_until.get(name, 0) <= now_ms
            for name in route.write_brokers
        )

    def tries(
        self, request: SendRequest, queue: MessageQueue | None, timeout_ms: int, deadline: float, retries: int
    ) -> Tries:
        """Return the tries of a send whose first one has failed."""
        return Tries(request, retries if queue is None else 0, retries > 0, timeout_ms, deadline)

    def close(self) -> None:
        """Fail the asynchronous sends that are to be tried again."""
        self._is_closed = True
        self._auto_batch.close()
        for send in list(self.waiting):
            send.close()

    # --- steps of a try ------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRoute:
        """Return the route to send by.

        Raises:
            SendError: The topic has no queue that accepts messages, or no name server answers.
        """
        try:
            return self._find_route(topic)
        except RemoteConnectError as exc:
            raise SendError(f"no route for {topic!r}: {exc}") from exc

    def _find_route(self, topic: str) -> TopicRoute:
        """Return the route to send by; raise `RemoteConnectError` if no name server answers, else as `route`."""
        try:
            route = self._routes.publish_route(topic)
        except (*_NOT_RETRIED, RemoteConnectError, DestinationError):
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
            queue: The only queue to send to; None for any. A selected one is selected again if the route has lost it.
            last_broker: Broker of the attempt before.

        Raises:
            DestinationError: *queue* is not in the route.
            UnsupportedError: The broker would deliver the message at once. It is older than 5.0 and the message has a
                timer, or it is one of RocketMQ and the message has a delay in a batch or in a transaction.
        """
        if isinstance(queue, SelectedQueue) and queue not in route.write_queues:
            queue = queue.select()  # its broker has stopped
        if queue is None:
            queue = self._next_queue(route, last_broker)
        elif queue not in route.write_queues:
            raise DestinationError(
                f"{queue} is no queue of the topic; there are {len(route.write_queues)}, on "
                f"{', '.join(sorted({each.broker_name for each in route.write_queues}))}, from queue 0 on"
            )
        address = self._routes.address(queue.broker_name)
        if request.has_timer and not request.has_level and self._instance.is_before_5(address):
            raise UnsupportedError.during(
                str(request),
                f"broker {queue.broker_name!r} at {address} is older than RocketMQ 5.0 and has no timers "
                "(it would deliver at once); use a delay level, or a newer broker with timerWheelEnable=true",
            )
        if request.needs is not None and request.needs not in self._instance.announced.get(address, ()):
            raise UnsupportedError.during(
                str(request),
                f"broker {queue.broker_name!r} at {address} does not support {request.needs.value} "
                f"(RocketMQ's brokers do not); {_WITHOUT[request.needs]}",
            )
        return _Target(queue, address)

    def route_of(self, request: SendRequest) -> TopicRoute:
        """Return the route to send by; raise `RemoteConnectError` if no name server answers, else as `route`.

        Its brokers have announced their capabilities if the message needs one.
        """
        route = self._find_route(request.topic)
        if request.needs is not None:
            self._instance.register_at(route.masters())
        return route

    def _next_queue(self, route: TopicRoute, last_broker: str | None) -> MessageQueue:
        """Return the queues in turn; queues of brokers that failed recently only if there are no others."""
        queues = route.write_queues
        chosen = queues[route.next_turn() % len(queues)]
        if last_broker is None and not self._avoid_until:
            return chosen
        now_ms = self._clock.steady_ms()
        for _ in queues:
            if chosen.broker_name != last_broker and self._avoid_until.get(chosen.broker_name, 0) <= now_ms:
                return chosen
            chosen = queues[route.next_turn() % len(queues)]
        others = [queue for queue in queues if queue.broker_name != last_broker]
        return others[route.next_turn() % len(others)] if others else chosen

    def avoid(self, target: _Target) -> None:
        """Prefer other brokers than the target's for some time."""
        self._avoid_until[target.queue.broker_name] = self._clock.steady_ms() + self._settings.send_avoid_ms

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
            header.msg_region,
            header.trace_on != "false",
        )
        queue = result.message_queue if request.is_immediate else _delayed_queue(request, result)
        self._sent.add_sent(result, len(request.msg_ids), queue)
        route = self._routes.cached(request.topic)
        if route is not None and route.is_default:
            self._routes.forget(request.topic)  # the broker has created the topic: look its real queues up
        return result

    def failed(self, tries: Tries, target: _Target | None, failure: BrokerError | RemotingCommand) -> float | None:
        """Note a failed try; return the pause before the next one in seconds, or None if there is none.

        Args:
            target: None if the topic had no route.
        """
        if target is not None:
            self.avoid(target)
        if isinstance(failure, RemotingCommand) and failure.code == ResponseCode.TOPIC_NOT_EXIST:
            self._routes.forget(tries.request.topic)
        return tries.pause_s("" if target is None else target.address, failure)

    def end(self, tries: Tries, target: _Target | None, failure: BrokerError | RemotingCommand) -> SendResult:
        """Return the result of the last try, if the message is stored with a weaker guarantee; else raise the error."""
        if target is not None and isinstance(failure, RemotingCommand) and failure.code in _STATUS:
            return self.result(tries.request, target, failure)
        cause = failure if isinstance(failure, BrokerError) else None
        raise tries.error("" if target is None else target.address, failure) from cause

    def try_later(self, send: _AsyncSend, pause_s: float) -> None:
        """Let an asynchronous send try again after a pause."""
        self.waiting.add(send)
        self._instance.remoting.call_later(pause_s * 1_000, send.resume)
        if self._is_closed:
            send.close()

    def may_retry(self, response: RemotingCommand) -> bool:
        """Return True if another queue or broker may give a better response."""
        if response.code in _STATUS:
            return self._settings.retry_next_server and response.code != ResponseCode.SUCCESS
        return response.code in RETRY_ELSEWHERE


@dataclass(slots=True, eq=False)
class _AsyncSend:
    """One asynchronous send with its tries: the first in the thread of the caller, the others in worker threads."""

    producer: Producer
    request: SendRequest
    queue: MessageQueue | None
    timeout_ms: int
    deadline: float
    outcome: Outcome
    target: _Target | None = None
    tries: Tries | None = None
    try_ms: int = 0

    def attempt(self) -> None:
        """Send the request. This may block while the topic has no route."""
        last_broker = self.target.queue.broker_name if self.target is not None else None
        try:
            route = self.producer.route_of(self.request)
            self.target = self.producer.target(self.request, route, self.queue, last_broker)
            left_ms = max(1, int((self.deadline - time.monotonic()) * 1_000))
            if self.queue is None and len(route.write_brokers) > 1:
                retries = self.producer._settings.retry_times_when_send_async_failed
                left_ms = min(left_ms, self.producer.try_ms(route, self.target, self.timeout_ms, retries))
            command = self.request.command(self.target.queue)
            self.try_ms = left_ms
            self.producer._instance.invoke_async(self.target.address, command, left_ms, self._done)
        except RemoteConnectError as exc:
            self._done(exc)
        except DestinationError as exc:
            self.outcome.set_exception(exc if self.tries is None else self.tries.queue_is_away(self.queue))
        except MQTemplateError as exc:
            self.outcome.set_exception(exc)

    def _done(self, response: RemotingCommand | BrokerError) -> None:
        try:
            self._finish_or_retry(response)
        except MQTemplateError as exc:
            self.outcome.set_exception(exc)

    def _finish_or_retry(self, response: RemotingCommand | BrokerError) -> None:
        producer, target = self.producer, self.target
        if target is not None and (producer._instance.outages.is_open or not isinstance(response, RemotingCommand)):
            self._report(target, response)
        if isinstance(response, RemotingCommand):
            if target is not None and not producer.may_retry(response):
                self.outcome.set_result(producer.result(self.request, target, response))
                return
        elif not isinstance(response, _UNANSWERED):
            raise response
        if self.tries is None:
            retries = producer._settings.retry_times_when_send_async_failed
            self.tries = producer.tries(self.request, self.queue, self.timeout_ms, self.deadline, retries)
        pause_s = producer.failed(self.tries, target, response)
        if pause_s is None:
            self.outcome.set_result(producer.end(self.tries, target, response))
        else:
            producer.try_later(self, pause_s)

    def _report(self, target: _Target, response: RemotingCommand | BrokerError) -> None:
        """Report an outage, unless the broker had less than the time of a request, which proves none."""
        is_short = self.try_ms < self.producer._settings.request_timeout_ms
        if not (is_short and isinstance(response, RemoteTimeoutError)):
            self.producer._instance.report(target.address, response)

    def resume(self) -> None:
        """Try again, unless the producer was closed."""
        if self._stops_waiting():
            self.attempt()

    def close(self) -> None:
        """Fail, if this send waits for its next try."""
        if self._stops_waiting():
            self.outcome.set_exception(
                BrokerClosedError.during(str(self.request), "the client was closed before the next try")
            )

    def _stops_waiting(self) -> bool:
        """Return True in the one thread that ends the pause."""
        try:
            self.producer.waiting.remove(self)
        except KeyError:
            return False
        return True


def _delayed_queue(request: SendRequest, result: SendResult) -> MessageQueue | None:
    """Return the queue of a system topic that has a delayed message; None for others, such as half messages."""
    if result.handle is not None:
        return MessageQueue(TIMER_TOPIC, result.message_queue.broker_name, 0)
    if request.level > 0:
        return MessageQueue(SCHEDULE_TOPIC, result.message_queue.broker_name, request.level - 1)
    return None
