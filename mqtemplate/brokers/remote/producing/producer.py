"""Producer: chooses a queue, sends to its broker, and tries another one where that may help.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``MQFaultStrategy``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import RETRY_ELSEWHERE, UNANSWERED, pending_key_error, send_error
from mqtemplate.brokers.remote.cluster.routes import MissingTopicError, TopicRoute
from mqtemplate.brokers.remote.producing.auto_batch import AutoBatch, MessageAccumulator, Outcome, ThreadOutcome
from mqtemplate.brokers.remote.producing.send_request import (
    SendRequest,
    SendRequestFactory,
    SequencedSends,
)
from mqtemplate.brokers.remote.producing.tries import Tries, kind_of_send_error
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DestinationError,
    ForkedError,
    MessageError,
    MQTemplateError,
    PendingKeyError,
    SendError,
    UnsupportedError,
)
from mqtemplate.futures import AwaitableFuture
from mqtemplate.hashes import queue_number
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageQueue, Property, SelectedQueue
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.results import HalfMessage, SendResult, SendStatus
from mqtemplate.user_code import is_interrupt

_STATUS = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_WITHOUT = {
    Capability.BATCH_DELAY: "send the messages one by one",
    Capability.TRANSACTION_DELAY: "send it without a delay",
    Capability.PENDING_KEYS: "use an embedded broker, or a server of this library that is up to date and has "
    "recall-message-enable; to a broker of RocketMQ 5.3 send one message at a time, with sync_send or async_send",
}
_SHORTEST_TRY_MS = 500
_NOT_RETRIED = (BrokerClosedError, ForkedError, UnsupportedError)
_REPEATED = (*UNANSWERED, MissingTopicError)  # a topic that was just created may have a route before the timeout


class _Target(NamedTuple):
    queue: MessageQueue
    address: str


SendInSteps = Callable[[Message, MessageQueue | None, int], SendResult | None]
"""Sends a message with a pending key to brokers that do not decide about it; None if they do. Arguments as `send`."""


class Producer:
    """The producer of one client. After a failed send it prefers other brokers of the topic for some time.

    Args:
        send_in_steps: Sends messages with a pending key to brokers of RocketMQ.
    """

    def __init__(self, context: ClientContext, send_in_steps: SendInSteps) -> None:
        self._send_in_steps = send_in_steps
        sequenced = SequencedSends(context)
        self.send_sequenced, self.send_encoded = sequenced.send, sequenced.send_encoded
        self.factory = SendRequestFactory(context.settings, context.namespace, context.clock)
        self.instance = context.instance
        self.routes = context.routes
        self._settings = context.settings
        self._clock = context.clock
        self._sent = context.sent
        self._namespace = context.namespace
        self._avoid_until: dict[str, int] = {}
        self.waiting: set[_AsyncSend] = set()
        self._auto_batch = AutoBatch(self)
        self._is_closed = False

    # --- the sends of `Broker` -----------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """See `MessageSends.send`."""
        if Property.PENDING_KEY in message.properties:
            result = self._with_pending_key(message, queue, timeout_ms)
            if result is not None:
                return result
        accumulator = self._accumulator(message, timeout_ms) if queue is None and self._settings.auto_batch else None
        # A callback must not wait for its own thread.
        if accumulator is None or self.instance.remoting.loop.is_current_thread:
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

    def send_as_it_is(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """Send a message to brokers that do not decide about its pending key, and look up no other one."""
        request = self.factory.single(message)
        request.needs, request.pending_keys = None, frozenset()
        return self.deliver(request, queue, timeout_ms)

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
            if len(messages) == 1 and Property.PENDING_KEY in messages[0].properties:
                result = self._with_pending_key(messages[0], queue, timeout_ms)
                if result is not None:
                    future.set_result(result)
                    return future
            accumulator = self._accumulator(messages[0], timeout_ms) if may_join else None
            if accumulator is not None:
                accumulator.add(messages[0], future)
            else:
                deadline = time.monotonic() + timeout_ms / 1_000
                self._async_send(self.factory.for_messages(messages), queue, timeout_ms, deadline, future).attempt()
        except MQTemplateError as exc:
            future.set_exception(exc)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """See `MessageSends.send_one_way`."""
        request = self.factory.single(message)
        target = self.target(request, self.route(request.topic), queue, None)
        try:
            self.instance.invoke_one_way(target.address, request.command(target.queue, one_way=True))
        except UNANSWERED as exc:
            self.avoid(target)
            raise kind_of_send_error(exc).during(str(request), str(exc)) from exc

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """See `MessageSends.send_half`."""
        request = self.factory.single(message, transaction_group=group)
        if (handles := message.properties.get(Property.CANCELS)) is not None:
            queue = self._queue_beside(handles, message.topic, queue)
        return HalfMessage(message, group, self.deliver(request, queue, timeout_ms))

    def _queue_beside(self, handles: str, topic: str, queue: MessageQueue | None) -> MessageQueue:
        """Return a queue of the broker that has the messages of *handles*: it cancels them with the commit.

        Raises:
            MessageError: Several brokers have them, or *queue* or the topic is not at theirs.
        """
        route = self.route(topic)
        names = {decode_handle(handle).broker_name for handle in handles.split(",")}
        queues = [each for each in route.write_queues if {each.broker_name} == names and queue in (None, each)]
        if not queues:
            raise MessageError(
                f"cancels= names messages of {' and '.join(sorted(names))}, and a transaction for {topic!r} "
                f"{'of any queue' if queue is None else f'of {queue}'} is not stored there alone; one broker commits "
                "it and cancels them"
            )
        return queues[route.next_turn() % len(queues)]

    def _with_pending_key(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult | None:
        """Send a delayed message to brokers that do not decide about its pending key; None if they do."""
        if message.properties.keys().isdisjoint(DELAY_PROPERTIES):
            return None
        return self._send_in_steps(message, queue, timeout_ms)

    def _accumulator(self, message: Message, timeout_ms: int) -> MessageAccumulator | None:
        """Return the accumulator of a message that may be sent with others; None if it has to be sent alone."""
        # A first message is sent alone: it creates the topic, and that takes longer.
        if self.routes.cached(message.topic) is None or not self.factory.can_be_joined(message):
            return None
        if not self.instance.remoting.is_usable:  # closed, or of the parent process: sending it alone raises the error
            return None
        return self._auto_batch.accumulator(message.topic, timeout_ms)

    def _async_send(
        self, request: SendRequest, queue: MessageQueue | None, timeout_ms: int, deadline: float, outcome: Outcome
    ) -> _AsyncSend:
        retries = self._settings.retry_times_when_send_async_failed
        return _AsyncSend(self, request, queue, timeout_ms, deadline, retries, outcome)

    # --- interface of `AutoBatch` --------------------------------------------------------------

    def start(self, request: SendRequest, timeout_ms: int, deadline: float, outcome: Outcome) -> None:
        """Send without waiting, in any thread."""
        send = self._async_send(request, None, timeout_ms, deadline, outcome)
        if self.instance.remoting.loop.is_current_thread and self.routes.cached(request.topic) is None:
            self.try_later(send, 0)  # to look up the route may take long
        else:
            send.attempt()

    def call_later(self, delay_ms: float, work: Callable[[], None]) -> None:
        """Call *work* in the I/O thread, unless the client is closed before."""
        self.instance.remoting.loop.call_later(delay_ms, work)

    # --- a send that waits ---------------------------------------------------------------------

    def deliver(self, request: SendRequest, queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        """Send and wait for the result; try other queues and brokers if *queue* is None.

        Raises:
            SendError: No broker accepted the message in time.
            MessageError, UnsupportedError: A broker refused it for good.
        """
        deadline = time.monotonic() + timeout_ms / 1_000
        send = _RoutedSend(self, request, queue, timeout_ms, deadline, self._settings.retry_times_when_send_failed)
        while True:
            answer: RemotingCommand | BrokerError
            try:
                target = send.choose_target()
                answer = self.instance.invoke(target.address, request.command(target.queue), send.limit_ms)
            except _REPEATED as exc:
                answer = exc
            result = send.result_or_pause(answer)
            if isinstance(result, SendResult):
                return result
            threading.Event().wait(result)

    def try_ms(self, route: TopicRoute, target: _Target, timeout_ms: int, retries: int) -> int:
        """Return the time limit of one try: a part of the timeout if another broker may accept the message.

        Otherwise a broker that does not answer would use up the timeout.
        """
        if retries and self._avoid_until:
            now_ms, others = self._clock.steady_ms(), set(route.write_brokers) - {target.queue.broker_name}
            if all(self._avoid_until.get(name, 0) > now_ms for name in others):
                return timeout_ms
        return max(_SHORTEST_TRY_MS, timeout_ms // (retries + 1)) if retries else timeout_ms

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
        except _REPEATED as exc:
            raise kind_of_send_error(exc)(f"no route for {topic!r}: {exc}") from exc

    def _find_route(self, topic: str) -> TopicRoute:
        """Return the route to send by; raise one of *_REPEATED* while there is none, else as `route`."""
        try:
            route = self.routes.publish_route(topic)
        except (*_NOT_RETRIED, *_REPEATED, DestinationError):
            raise
        except BrokerError as exc:
            raise SendError(f"no route for {topic!r}: {exc}") from exc
        if not route.write_queues:
            reason = "its brokers are replicas without a master, or its permission forbids writing"
            raise SendError(f"topic {topic!r} has no queue that accepts messages: {reason} (mqadmin updateTopicPerm)")
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
            queue = (
                self._queue_of_keys(request, route) if request.pending_keys else self._next_queue(route, last_broker)
            )
        elif queue not in route.write_queues:
            raise DestinationError(
                f"{queue} is not a queue of the topic; there are {len(route.write_queues)}, on "
                f"{', '.join(sorted({each.broker_name for each in route.write_queues}))}, from queue 0 on"
            )
        address = self.routes.address(queue.broker_name)
        if request.has_timer and not request.has_level and self.instance.is_before_5(address):
            raise UnsupportedError.during(
                str(request),
                f"broker {queue.broker_name!r} at {address} is older than RocketMQ 5.0 and has no timers "
                "(it would deliver at once); use a delay level, or a newer broker with timerWheelEnable=true",
            )
        if request.needs is not None and request.needs not in self.instance.announced.get(address, ()):
            raise UnsupportedError.during(
                str(request),
                f"broker {queue.broker_name!r} at {address} does not support {request.needs.value} "
                f"(RocketMQ's brokers do not); {_WITHOUT[request.needs]}",
            )
        return _Target(queue, address)

    def route_of(self, request: SendRequest) -> TopicRoute:
        """Return the route to send by; raise one of *_REPEATED* while there is none, else as `route`.

        Its brokers have announced their capabilities if the message needs one.
        """
        route = self._find_route(request.topic)
        if request.needs is not None:
            self.instance.register_at(route.masters())
        return route

    def _next_queue(self, route: TopicRoute, last_broker: str | None) -> MessageQueue:
        """Return the queues in turn; queues of brokers that failed recently only if there are no other ones."""
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

    def _queue_of_keys(self, request: SendRequest, route: TopicRoute) -> MessageQueue:
        """Return a queue of the broker that decides about the pending keys of a request; its queues take turns.

        Raises:
            MessageError: Several brokers decide about the keys of a batch.
        """
        names = sorted(route.write_brokers)
        chosen = {names[queue_number(key, len(names))] for key in request.pending_keys}
        if len(chosen) > 1:
            raise MessageError.during(
                str(request),
                f"a batch goes to one broker, and {' and '.join(sorted(chosen))} decide about its pending keys; send "
                "the messages one by one, or give them a hash_key",
            )
        queues = [queue for queue in route.write_queues if queue.broker_name in chosen]
        return queues[route.next_turn() % len(queues)]

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
            if request.pending_keys:
                refused = pending_key_error(response, self._namespace, str(request), target.address)
                if isinstance(refused, PendingKeyError):
                    stored = request.result_of_earlier_try(refused, target.queue.broker_name)
                    if stored is not None:
                        return stored
                if refused is not None:
                    raise refused
            raise send_error(response, str(request), target.address, has_timer=request.has_timer)
        self._avoid_until.pop(target.queue.broker_name, None)
        result = request.result(status, target.queue.broker_name, response.header(SendMessageResponseHeader))
        self._sent.add_sent(result, len(request.msg_ids), request.queue_of(result))
        self.routes.forget_default(request.topic)  # the broker has just created the topic
        return result

    def try_later(self, send: _AsyncSend, pause_s: float) -> None:
        """Let an asynchronous send try again after a pause."""
        self.waiting.add(send)
        self.instance.remoting.call_later(pause_s * 1_000, send.resume)
        if self._is_closed:
            send.close()

    def may_retry(self, response: RemotingCommand) -> bool:
        """Return True if another queue or broker may give a better response."""
        if response.code in _STATUS:
            return self._settings.retry_next_server and response.code != ResponseCode.SUCCESS
        return response.code in RETRY_ELSEWHERE


@dataclass(slots=True, eq=False)
class _RoutedSend:
    """One send: the queue of its current try, and the tries that have failed.

    Args:
        queue: The only queue to send to; None for any.
        retries: Setting for sends of this kind.

    Attributes:
        target: Queue and broker of the current try; None while the topic has no route.
        limit_ms: Time limit of the current try.
    """

    producer: Producer
    request: SendRequest
    queue: MessageQueue | None
    timeout_ms: int
    deadline: float
    retries: int
    target: _Target | None = field(default=None, init=False)
    limit_ms: int = field(default=0, init=False)
    _last_broker: str | None = field(default=None, init=False)
    _tries: Tries | None = field(default=None, init=False)

    def choose_target(self) -> _Target:
        """Choose queue and time limit of the next try. This may block while the topic has no route.

        Raises:
            RemoteConnectError, MissingTopicError: There is no route yet, or none has the broker. It may be tried again.
            DestinationError: *queue* is not in the route. After the first try a `SendError` that says so.
            SendError, UnsupportedError: As `Producer.route` and `Producer.target`.
        """
        producer = self.producer
        if self.target is not None:
            self._last_broker, self.target = self.target.queue.broker_name, None
        try:
            route = producer.route_of(self.request)
            self.target = target = producer.target(self.request, route, self.queue, self._last_broker)
        except DestinationError as exc:
            if self._tries is None:
                raise
            raise self._tries.queue_is_away(self.queue) from exc
        self.limit_ms = max(1, int((self.deadline - time.monotonic()) * 1_000))
        if self.queue is None and len(route.write_brokers) > 1:
            self.limit_ms = min(self.limit_ms, producer.try_ms(route, target, self.timeout_ms, self.retries))
        return target

    def result_or_pause(self, answer: RemotingCommand | BrokerError) -> SendResult | float:
        """Return the result of the send, or the pause in seconds before the next try.

        Args:
            answer: The response to the request, or why there is none.

        Raises:
            SendError: No broker accepted the message in time.
            MessageError, UnsupportedError: A broker refused it for good.
        """
        producer, target = self.producer, self.target
        response = answer if isinstance(answer, RemotingCommand) else None
        if response is not None and target is not None and not producer.may_retry(response):
            return producer.result(self.request, target, response)
        if isinstance(answer, BrokerError) and not isinstance(answer, _REPEATED):
            raise answer
        if self._tries is None:
            retries = self.retries if self.queue is None else 0
            self._tries = Tries(self.request, retries, self.retries > 0, self.timeout_ms, self.deadline)
        address = ""
        if target is not None:
            producer.avoid(target)
            address = target.address
        if response is not None and response.code == ResponseCode.TOPIC_NOT_EXIST:
            producer.routes.forget(self.request.topic)
        pause_s = self._tries.pause_s(address, answer)
        if pause_s is not None:
            return pause_s
        if response is not None and target is not None and response.code in _STATUS:  # stored, with a weaker guarantee
            return producer.result(self.request, target, response)
        raise self._tries.error(address, answer) from (answer if isinstance(answer, BrokerError) else None)


@dataclass(slots=True, eq=False)
class _AsyncSend(_RoutedSend):
    """One asynchronous send: the first try in the thread of the caller, the others in worker threads.

    Whatever a try raises ends the send with this error: it may also run a queue selector of the application.
    """

    outcome: Outcome
    _seen: int = field(default=0, init=False)

    def attempt(self) -> None:
        """Send the request. This may block while the topic has no route."""
        self._seen = self.producer.instance.outages.changes
        try:
            target = self.choose_target()
            command = self.request.command(target.queue)
            self.producer.instance.invoke_async(target.address, command, self.limit_ms, self._done)
        except _REPEATED as exc:
            self._done(exc)
        except BaseException as exc:
            self._fail(exc)

    def _done(self, answer: RemotingCommand | BrokerError) -> None:
        try:
            if self.target is not None:
                self.producer.instance.report(self.target.address, answer, self._seen, self.limit_ms)
            result = self.result_or_pause(answer)
        except BaseException as exc:
            self._fail(exc)
            return
        if isinstance(result, SendResult):
            self.outcome.set_result(result)
        else:
            self.producer.try_later(self, result)

    def _fail(self, error: BaseException) -> None:
        if is_interrupt(error):
            raise error
        self.outcome.set_exception(error)

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
