"""The producer: messages, batches and half messages, with their retries.

Source: RocketMQ ``client-java: ProducerImpl``.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mqtemplate.brokers.grpc.channels import refusal_text, send_error
from mqtemplate.brokers.grpc.control import GrpcTransactions
from mqtemplate.brokers.grpc.messages import MessageEncoder, OutgoingMessage
from mqtemplate.brokers.grpc.sessions import ClientSession, ProxyContext, Route, Routes
from mqtemplate.brokers.grpc.settings import Endpoints
from mqtemplate.brokers.remote.producing.tries import Tries
from mqtemplate.clock import Clock
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerClosedError,
    BrokerError,
    DestinationError,
    MessageError,
    MQTemplateError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendConnectError,
    SendError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.results import HalfMessage, SendResult, SendStatus, SequencedResult
from mqtemplate.user_code import is_interrupt

_log = get_logger("mqtemplate.remote")

_STATUS: dict[int, SendStatus] = {
    Code.OK: SendStatus.SEND_OK,
    Code.MASTER_PERSISTENCE_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    Code.SLAVE_PERSISTENCE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    Code.HA_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_RETRIED = frozenset(
    {
        Code.TOO_MANY_REQUESTS,
        Code.INTERNAL_ERROR,
        Code.INTERNAL_SERVER_ERROR,
        Code.PROXY_TIMEOUT,
        Code.REQUEST_TIMEOUT,
    }
)
_UNANSWERED = (RemoteConnectError, RemoteTimeoutError)
_UNKNOWN_QUEUE = -1


class Later:
    """Actions at later times. A `Service`."""

    name = "grpc.retries"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def call(self, pause_s: float, action: Callable[[], None]) -> None:
        """Call *action* after a pause, in the thread of this service."""
        due_ms = self._clock.now_ms() + int(pause_s * 1_000)
        with self._lock:
            heapq.heappush(self._waiting, (due_ms, next(self._numbers), action))
        self._wake()

    def step(self) -> int | None:
        while True:
            with self._lock:
                if not self._waiting:
                    return None
                if self._waiting[0][0] > self._clock.now_ms():
                    return self._waiting[0][0]
                _, _, action = heapq.heappop(self._waiting)
            action()

    def close(self) -> None:
        """Call all actions now."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, action in waiting:
            action()


# --- sends ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _GrpcSend:
    """One request with its tries."""

    producer: GrpcProducer
    messages: Sequence[OutgoingMessage]
    timeout_ms: int
    retries: int
    deadline: float
    is_half: bool = False
    endpoints: Endpoints | None = None
    _route: Route | None = None
    _tries: Tries | None = field(default=None, init=False)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return str(self.messages[0])
        return f"send a batch of {len(self.messages)} messages to {self.messages[0].topic!r}"

    @property
    def left_ms(self) -> int:
        return max(1, int((self.deadline - time.monotonic()) * 1_000))

    def prepare(self) -> tuple[Endpoints, Any]:
        """Return the address and the request of the next try; this may block while the topic has no route."""
        self._route = route = self.producer.route_to(self.messages[0].topic)
        writable = route.writable
        self.endpoints = writable[self.producer.next_turn() % len(writable)].endpoints
        self._join(self.endpoints)
        return self.endpoints, protos.SendMessageRequest(messages=[each.encoded for each in self.messages])

    def _join(self, endpoints: Endpoints) -> None:
        """Let the proxy know the producer. If it refuses the settings, its answer to the message has the reason."""
        try:
            self.producer.session.join([endpoints])
        except (*_UNANSWERED, BrokerClosedError):
            raise
        except BrokerError as exc:
            _log.debug("remote.settings_refused", server=str(endpoints), reason=str(exc))

    def result_or_pause(self, answer: Any) -> SendResult | float:
        """Return the result of the send, or the pause in seconds before the next try.

        Raises:
            SendError: The proxy did not accept the message in time.
            MessageError, UnsupportedError: It refused it for good.
        """
        address = "" if self.endpoints is None else str(self.endpoints)
        failure = answer
        if not isinstance(answer, BrokerError):
            codes = [answer.status.code, *(entry.status.code for entry in answer.entries)]
            refused = next(
                (entry.status for entry in answer.entries if entry.status.code not in _STATUS), answer.status
            )
            if answer.entries and all(code in _STATUS for code in codes[1:]):
                return self._result(answer)
            if refused.code not in _RETRIED:
                raise send_error(refused, str(self), address)
            kind = BrokerBusyError if refused.code == Code.TOO_MANY_REQUESTS else BrokerError
            failure = kind(refusal_text(refused, address))
        elif not isinstance(answer, _UNANSWERED):
            raise answer
        if self._tries is None:
            self._tries = Tries(self, self.retries, self.retries > 0, self.timeout_ms, self.deadline)
        pause_s = self._tries.pause_s(address, failure)
        if pause_s is None:
            raise self._tries.error(address, failure) from (answer if isinstance(answer, BrokerError) else None)
        return pause_s

    def _result(self, answer: Any) -> SendResult:
        entries = answer.entries
        self.producer.add_topic(self.messages[0].topic)
        status = next(
            (_STATUS[each.status.code] for each in entries if each.status.code != Code.OK), SendStatus.SEND_OK
        )
        handles = [each.recall_handle for each in entries if each.recall_handle]
        return SendResult(
            status,
            ",".join(each.msg_id for each in self.messages),
            "",
            self._queue(),
            entries[0].offset,
            (entries[0].transaction_id or self.messages[0].msg_id) if self.is_half else None,
            ",".join(handles) or None,
        )

    def _queue(self) -> MessageQueue:
        """Return the queue of the message, as far as it is known: the proxy chooses it, and does not say which."""
        queues = () if self._route is None else self._route.writable
        if len(queues) == 1:
            return queues[0].queue
        brokers = {each.queue.broker_name for each in queues}
        return MessageQueue(self.messages[0].topic, brokers.pop() if len(brokers) == 1 else "", _UNKNOWN_QUEUE)


class _AsyncGrpcSend(_GrpcSend):
    """One request that no thread waits for."""

    __slots__ = ("future",)
    future: AwaitableFuture[SendResult]

    def attempt(self) -> None:
        """Send the request. This may block while the topic has no route."""
        try:
            if self.producer.is_closed:
                raise BrokerClosedError.during(str(self), "the client was closed before the next try")
            endpoints, request = self.prepare()
            self.producer.context.channels.call_async(
                endpoints, self.producer.session.id, "SendMessage", request, str(self), self.left_ms, self._done
            )
        except _UNANSWERED as exc:
            self._done(exc)
        except BaseException as exc:
            self._fail(exc)

    def _done(self, answer: Any) -> None:
        try:
            result = self.result_or_pause(answer)
        except BaseException as exc:
            self._fail(exc)
            return
        if isinstance(result, SendResult):
            self.future.set_result(result)
        else:
            self.producer.later.call(result, self.attempt)

    def _fail(self, error: BaseException) -> None:
        if is_interrupt(error):
            raise error
        self.future.set_exception(error)


class GrpcProducer:
    """The sends of one client. The proxy chooses the queue of a message.

    Attributes:
        session: The producer at the proxies. Its settings name the topics: a proxy sends it checks of transactions
            there.
        is_closed: True: no send is tried again.
    """

    def __init__(self, context: ProxyContext, routes: Routes, clock: Clock, later: Later) -> None:
        self.context = context
        self.later = later
        self.encoder = MessageEncoder(context, clock)
        self.transactions = GrpcTransactions(context, self.route_to, lambda: self.session)
        self.session = ClientSession(
            context, ClientType.PRODUCER, "the producer", self._fill, self.transactions.on_check
        )
        self.is_closed = False
        self._routes = routes
        self._topics = dict.fromkeys(context.settings.topics)
        self._turns = itertools.count()
        self.next_turn = self._turns.__next__

    def _fill(self, settings: Any) -> None:
        settings.backoff_policy.max_attempts = self.context.settings.retry_times_when_send_failed + 1
        settings.backoff_policy.exponential_backoff.initial.FromMilliseconds(10)
        settings.backoff_policy.exponential_backoff.max.FromMilliseconds(1_000)
        settings.backoff_policy.exponential_backoff.multiplier = 2
        settings.publishing.topics.extend(self.context.resource(topic) for topic in list(self._topics))
        settings.publishing.validate_message_type = True

    def add_topic(self, topic: str) -> None:
        """Tell the proxies that this client may send to a topic: they send it checks of transactions there."""
        if topic not in self._topics:
            self._topics[topic] = None
            self.session.send_settings()

    def route_to(self, topic: str) -> Route:
        """Return the route of a topic that accepts messages.

        Raises:
            DestinationError: There is no such topic.
            SendError: It accepts no messages.
            BrokerError: The proxy does not answer.
        """
        route = self._routes.get(topic)
        if not route.writable:
            self._routes.forget(topic)
            raise SendError(
                f"topic {topic!r} has no queue that accepts messages: its brokers are replicas without a master, or "
                "its permission forbids writing (mqadmin updateTopicPerm)"
            )
        return route

    # --- the sends of `Broker` -----------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """See `MessageSends.send`.

        Raises:
            UnsupportedError: A queue is given, and the topic has others.
        """
        return self._deliver([self.encoder.encode(message)], queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """See `MessageSends.send_batch`.

        Raises:
            UnsupportedError: A message has a delay or a ``hash_key``.
        """
        return self._deliver(self._batch(messages), queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """See `MessageSends.send_async`."""
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled
        deadline = time.monotonic() + timeout_ms / 1_000
        try:
            encoded = [self.encoder.encode(messages[0])] if len(messages) == 1 else self._batch(messages)
            self._check_queue(encoded, queue)
            retries = self.context.settings.retry_times_when_send_async_failed
            send = _AsyncGrpcSend(self, encoded, timeout_ms, retries, deadline)
            send.future = future
            send.attempt()
        except MQTemplateError as exc:
            future.set_exception(exc)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """See `MessageSends.send_one_way`. The protocol answers each send; the answer is only logged."""
        timeout_ms = self.context.settings.request_timeout_ms
        encoded = [self.encoder.encode(message)]
        self._check_queue(encoded, queue)
        send = _GrpcSend(self, encoded, timeout_ms, 0, time.monotonic() + timeout_ms / 1_000)
        endpoints, request = self._connected(send)

        def done(answer: Any) -> None:
            try:
                send.result_or_pause(answer)
            except MQTemplateError as exc:
                _log.debug("remote.one_way_send_failed", reason=str(exc))

        self.context.channels.call_async(
            endpoints, self.session.id, "SendMessage", request, str(send), timeout_ms, done
        )

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """See `MessageSends.send_half`."""
        encoded = self.encoder.encode(message, in_transaction=True)
        self.transactions.note_topic(message.topic, group)
        send = self._new_send([encoded], queue, timeout_ms)
        send.is_half = True
        result = self._run(send)
        assert send.endpoints is not None  # the result came from there
        self.transactions.note(result.transaction_id or result.msg_id, group, send.endpoints)
        return HalfMessage(message, group, result)

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """See `MessageSends.send_sequenced`; this protocol has no numbered sends."""
        raise UnsupportedError(
            "RocketMQ's gRPC protocol has no sends whose repeats are dropped; use send_batch, or rocketmq.name-server "
            "with a server of this library"
        )

    # --- steps ---------------------------------------------------------------------------------

    def _batch(self, messages: Sequence[Message]) -> list[OutgoingMessage]:
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        topics = {message.topic for message in messages}
        if len(topics) > 1:
            raise MessageError(
                f"a batch goes to one topic, this one names {', '.join(sorted(topics))}; send two batches"
            )
        encoded = [self.encoder.encode(message) for message in messages]
        if any(each.has_delay or each.message_group for each in encoded):
            raise UnsupportedError(
                f"a proxy stores no batch with a delay or a hash_key correctly ({messages[0].topic!r}); send the "
                "messages one by one"
            )
        size = sum(len(message.body) for message in messages)
        if size > self.context.settings.max_message_size:
            raise MessageError(
                f"the batch for {messages[0].topic!r} has {size} bytes, allowed are "
                f"{self.context.settings.max_message_size}; send it in smaller parts"
            )
        return encoded

    def _check_queue(self, messages: Sequence[OutgoingMessage], queue: MessageQueue | None) -> None:
        """Refuse a queue that the proxy would not choose. For a ``hash_key`` it chooses one by itself."""
        if queue is None or messages[0].message_group:
            return
        queues = [each.queue for each in self.route_to(messages[0].topic).writable]
        if queue not in queues:
            raise DestinationError(f"{queue} is not a queue of the topic; there are {len(queues)}, from queue 0 on")
        if len(queues) > 1:
            raise UnsupportedError(
                f"with RocketMQ's gRPC protocol the proxy chooses the queue, so queue {queue.queue_id} of "
                f"{queue.topic!r} cannot be given; leave it out, or pass hash_key= to keep messages in order"
            )

    def _new_send(self, messages: Sequence[OutgoingMessage], queue: MessageQueue | None, timeout_ms: int) -> _GrpcSend:
        self._check_queue(messages, queue)
        retries = self.context.settings.retry_times_when_send_failed
        return _GrpcSend(self, messages, timeout_ms, retries, time.monotonic() + timeout_ms / 1_000)

    def _deliver(self, messages: Sequence[OutgoingMessage], queue: MessageQueue | None, timeout_ms: int) -> SendResult:
        return self._run(self._new_send(messages, queue, timeout_ms))

    def _run(self, send: _GrpcSend) -> SendResult:
        """Send and wait for the result, with the tries that the settings allow."""
        channels, session = self.context.channels, self.session
        while True:
            try:
                endpoints, request = send.prepare()
                answer = channels.call(endpoints, session.id, "SendMessage", request, str(send), send.left_ms)
            except _UNANSWERED as exc:
                answer = exc
            result = send.result_or_pause(answer)
            if isinstance(result, SendResult):
                return result
            threading.Event().wait(result)

    @staticmethod
    def _connected(send: _GrpcSend) -> tuple[Endpoints, Any]:
        try:
            return send.prepare()
        except _UNANSWERED as exc:
            kind = SendConnectError if isinstance(exc, RemoteConnectError) else SendError
            raise kind.during(str(send), str(exc)) from exc

    def close(self) -> None:
        """Fail the sends that are to be tried again."""
        self.is_closed = True
        self.later.close()
        self.transactions.close()
