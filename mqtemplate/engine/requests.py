"""Requests and replies: their messages, and the table of requests that wait for a reply.

The properties are RocketMQ's, so clients in any language can send requests and replies. A request names its client
(``REPLY_TO_CLIENT``) and has an id (``CORRELATION_ID``); the reply repeats both.

Source: ``client: DefaultMQProducerImpl.request``, ``MessageUtil``, ``RequestFutureHolder``.
"""

from __future__ import annotations

import heapq
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerClosedError, MessageError, RequestTimeoutError, SendError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import crc32
from mqtemplate.message import (
    DELAY_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    MessageQueue,
    Property,
    create_unique_id,
)
from mqtemplate.metrics import Metrics
from mqtemplate.results import SendResult
from mqtemplate.services import wall_time
from mqtemplate.topics import reply_topic

_log = get_logger("mqtemplate.broker")

_DEFAULT_CLUSTER = "DefaultCluster"


def create_request(message: Message, client_id: str, timeout_ms: int) -> Message:
    """Return a copy of *message* with the properties of a request."""
    properties = message.properties | {
        Property.CORRELATION_ID: str(uuid.uuid4()),
        Property.REPLY_TO_CLIENT: client_id,
        Property.TTL: str(timeout_ms),
    }
    return Message(message.topic, message.body, properties, message.flag)


def create_reply(
    request: MessageExt, body: bytes, properties: Mapping[str, str] | None, default_cluster: str | None = None
) -> Message:
    """Return the reply to *request*.

    Args:
        default_cluster: Name of the cluster for a *request* without one; None if *request* must name it.

    Raises:
        MessageError: *request* is not a request.
    """
    required = {Property.CLUSTER: request.properties.get(Property.CLUSTER) or default_cluster}
    required |= {name: request.properties.get(name) for name in (Property.CORRELATION_ID, Property.REPLY_TO_CLIENT)}
    missing = [name for name, value in required.items() if not value]
    if missing:
        raise MessageError(
            f"message {request.msg_id} of {request.topic!r} is not a request: it has no {' and no '.join(missing)}; "
            "only messages of send_and_receive can be replied to"
        )
    copied = (Property.CORRELATION_ID, Property.REPLY_TO_CLIENT, Property.TTL)
    own = {name: request.properties[name] for name in copied if name in request.properties}
    topic = reply_topic(str(required[Property.CLUSTER]))
    return Message(topic, body, {**(properties or {}), **own, Property.MESSAGE_TYPE: "reply"})


def received_reply(reply: Message, broker_name: str, now_ms: int, host: HostAddress) -> MessageExt:
    """Return a reply that was not stored as the message that the requesting client receives."""
    return MessageExt(
        reply.topic,
        reply.body,
        {Property.UNIQ_KEY: create_unique_id(), **reply.properties},
        reply.flag,
        broker_name=broker_name,
        queue_id=0,
        queue_offset=0,
        physical_offset=0,
        store_size=0,
        sys_flag=0,
        body_crc=crc32(reply.body) & 0x7FFF_FFFF,
        born_timestamp=now_ms,
        born_host=host,
        store_timestamp=now_ms,
        store_host=host,
        reconsume_times=0,
        prepared_transaction_offset=0,
    )


class _PendingRequest(NamedTuple):
    topic: str
    timeout_ms: int
    is_delayed: bool
    future: Future[MessageExt]


class UnansweredRequests:
    """Requests of one client that have no reply yet. A `Service`: its step ends the requests that timed out."""

    def __init__(self, name: str, clock: Clock, metrics: Metrics) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingRequest] = {}
        self._due: list[tuple[int, str]] = []  # heap of timeout and correlation id; ids without a request are skipped
        self._wake: Callable[[], None] = lambda: None
        metrics.gauge("request.pending", lambda: len(self._pending))
        self._replied = metrics.counter("request.replied")
        self._timed_out = metrics.counter("request.timed_out")

    def __len__(self) -> int:
        """Return the number of requests without a reply."""
        return len(self._pending)

    def add(self, request: Message, timeout_ms: int) -> Future[MessageExt]:
        """Register a request, before it is sent, and return the future of its reply."""
        correlation_id = request.properties[Property.CORRELATION_ID]
        is_delayed = not request.properties.keys().isdisjoint(DELAY_PROPERTIES)
        future: Future[MessageExt] = Future()
        future.set_running_or_notify_cancel()  # a message that is sent cannot be cancelled through the future
        with self._lock:
            self._pending[correlation_id] = _PendingRequest(request.topic, timeout_ms, is_delayed, future)
            heapq.heappush(self._due, (self._clock.steady_ms() + timeout_ms, correlation_id))
            is_first = self._due[0][1] == correlation_id
        if is_first:
            self._wake()
        return future

    def complete(self, reply: MessageExt) -> bool:
        """Pass a reply to its request; return False if no request waits for it."""
        correlation_id = reply.properties.get(Property.CORRELATION_ID, "")
        request = self._remove(correlation_id)
        if request is None:
            _log.warning("reply.discarded", correlation_id=correlation_id, reason="no request waits for it")
            return False
        self._replied.add()
        request.future.set_result(reply)
        return True

    def fail(self, correlation_id: str, error: BaseException) -> None:
        """End a request with *error*, if it still waits."""
        request = self._remove(correlation_id)
        if request is not None:
            request.future.set_exception(error)

    def _remove(self, correlation_id: str) -> _PendingRequest | None:
        with self._lock:
            return self._pending.pop(correlation_id, None)

    def close(self) -> None:
        """End all requests with `BrokerClosedError`."""
        with self._lock:
            requests, self._pending = list(self._pending.values()), {}
            self._due.clear()
        for request in requests:
            request.future.set_exception(
                BrokerClosedError(f"the broker was closed before the reply to the request to {request.topic!r} arrived")
            )

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        now_ms = self._clock.steady_ms()
        timed_out: list[_PendingRequest] = []
        with self._lock:
            while self._due and (self._due[0][0] <= now_ms or self._due[0][1] not in self._pending):
                request = self._pending.pop(heapq.heappop(self._due)[1], None)
                if request is not None:
                    timed_out.append(request)
            next_ms = self._due[0][0] if self._due else None
        self._timed_out.add(len(timed_out))
        for request in timed_out:
            request.future.set_exception(_timeout_error(request))
        return wall_time(self._clock, next_ms)


@dataclass(eq=False)
class LocalRequests:
    """The requests of this process, and the replies of this process to requests of any client.

    Attributes:
        pending: The requests of this process that have no reply yet.
        client_id: The client id in these requests.
    """

    pending: UnansweredRequests
    _broker_name: str
    _host: HostAddress
    _clock: Clock
    _send: Callable[[Message, MessageQueue | None], Future[SendResult]]
    _check_open: Callable[[], None]

    def __post_init__(self) -> None:
        self.client_id = f"{self._broker_name}@{create_unique_id()}"
        self._deliver_reply: Callable[[MessageExt], bool] = lambda reply: False

    def connect_remote(self, deliver_reply: Callable[[MessageExt], bool]) -> None:
        """Note how to send a reply to a remote client; the function returns False if the client is not connected."""
        self._deliver_reply = deliver_reply

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """See `Requests.request`."""
        self._check_open()
        request = create_request(message, self.client_id, timeout_ms)
        future = self.pending.add(request, timeout_ms)

        def sent(sending: Future[SendResult]) -> None:
            if (error := sending.exception()) is not None:
                self.pending.fail(request.properties[Property.CORRELATION_ID], error)

        self._send(request, queue).add_done_callback(sent)
        if future.done() and isinstance(error := future.exception(), MessageError):
            raise error
        return future

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        """See `Requests.reply`. It waits for nothing, so there is no timeout."""
        self._check_open()
        reply = create_reply(request, body, properties, _DEFAULT_CLUSTER)
        client_id = reply.properties[Property.REPLY_TO_CLIENT]
        received = received_reply(reply, self._broker_name, self._clock.now_ms(), self._host)
        is_own = client_id == self.client_id
        if not (self.pending.complete(received) if is_own else self._deliver_reply(received)):
            raise SendError(
                f"the reply to message {request.msg_id} of {request.topic!r} could not be delivered: client "
                f"{client_id!r}, which sent the request, is not connected or no longer waits"
            )

    def receive(self, reply: Message) -> None:
        """Pass a reply of a remote client to its request in this process. If that timed out, the reply is dropped."""
        self.pending.complete(received_reply(reply, self._broker_name, self._clock.now_ms(), self._host))


def _timeout_error(request: _PendingRequest) -> RequestTimeoutError:
    advice = (
        "the time counts from the send, so the timeout must be longer than the delay"
        if request.is_delayed
        else "a listener may have handled it all the same. Check that a listener of the topic returns a value, or "
        "give a longer timeout"
    )
    return RequestTimeoutError(
        f"no reply to the request to {request.topic!r} arrived within {format_ms(request.timeout_ms)}; {advice}"
    )
