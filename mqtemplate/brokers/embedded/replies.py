"""Requests that wait for their replies, and how a reply finds back.

The properties are RocketMQ's, so that requests and replies may come from any client: the request says who asks
(``REPLY_TO_CLIENT``) and which of their questions it is (``CORRELATION_ID``), and the reply repeats both.

Source: ``client: DefaultMQProducerImpl.request``, ``MessageUtil``, ``RequestFutureHolder``.
"""

from __future__ import annotations

import heapq
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple
from zlib import crc32

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError, MessageError, RequestTimeoutError
from mqtemplate.message import DELAY_PROPERTIES, HostAddress, Message, MessageExt, Property, create_unique_id
from mqtemplate.metrics import Metrics

_log = structlog.stdlib.get_logger("mqtemplate.broker")

REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"
_REPLY = "reply"
_DEFAULT_CLUSTER = "DefaultCluster"


def make_request(message: Message, client_id: str, timeout_ms: int) -> tuple[Message, str]:
    """The message that asks, a copy of *message*; and the id that its reply will have."""
    correlation_id = str(uuid.uuid4())
    properties = message.properties | {
        Property.CORRELATION_ID: correlation_id,
        Property.REPLY_TO_CLIENT: client_id,
        Property.TTL: str(timeout_ms),
    }
    return Message(message.topic, message.body, properties, message.flag), correlation_id


def make_reply(request: MessageExt, body: bytes, properties: Mapping[str, str] | None) -> Message:
    """The message that answers *request*.

    Raises:
        MessageError: *request* does not say where a reply goes.
    """
    asked = request.properties
    missing = [name for name in (Property.CORRELATION_ID, Property.REPLY_TO_CLIENT) if not asked.get(name)]
    if missing:
        raise MessageError(
            f"message {request.msg_id} of {request.topic!r} is no request: it has no {' and no '.join(missing)}; "
            "only what send_and_receive sent can be replied to"
        )
    kept = {
        name: asked[name] for name in (Property.CORRELATION_ID, Property.REPLY_TO_CLIENT, Property.TTL) if name in asked
    }
    topic = f"{asked.get(Property.CLUSTER, _DEFAULT_CLUSTER)}{REPLY_TOPIC_SUFFIX}"
    return Message(topic, body, {**(properties or {}), **kept, Property.MESSAGE_TYPE: _REPLY})


def received_reply(reply: Message, broker_name: str, now_ms: int, host: HostAddress) -> MessageExt:
    """A reply as who asked gets it, where it travelled through no store."""
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


class _Waiting(NamedTuple):
    topic: str
    timeout_ms: int
    is_delayed: bool
    future: Future[MessageExt]


class Replies:
    """The requests of one client that wait for replies. A `Service`: it ends those that waited too long.

    Attributes:
        client_id: What ``REPLY_TO_CLIENT`` says on them.
    """

    name = "broker.replies"

    def __init__(self, client_id: str, clock: Clock, metrics: Metrics) -> None:
        self.client_id = client_id
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._due: list[tuple[int, str]] = []
        self._wake: Callable[[], None] = lambda: None
        metrics.gauge("request.waiting", lambda: len(self._waiting))
        self._replied = metrics.counter("request.replied")
        self._timed_out = metrics.counter("request.timed_out")

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def expect(self, message: Message, timeout_ms: int) -> tuple[Message, Future[MessageExt]]:
        """The message to send instead of *message*, and the future of its reply, which begins to wait now."""
        request, correlation_id = make_request(message, self.client_id, timeout_ms)
        is_delayed = not message.properties.keys().isdisjoint(DELAY_PROPERTIES)
        future: Future[MessageExt] = Future()
        future.set_running_or_notify_cancel()  # a message that was sent cannot be taken back
        with self._lock:
            self._waiting[correlation_id] = _Waiting(message.topic, timeout_ms, is_delayed, future)
            heapq.heappush(self._due, (self._clock.now_ms() + timeout_ms, correlation_id))
            is_first = self._due[0][1] == correlation_id
        if is_first:
            self._wake()
        return request, future

    def fail(self, request: Message, error: BaseException) -> None:
        """*request* could not be sent."""
        waiting = self._take(request.properties[Property.CORRELATION_ID])
        if waiting is not None:
            waiting.future.set_exception(error)

    def arrived(self, reply: MessageExt) -> bool:
        """Hand a reply to who waits for it; False if nobody does any more."""
        waiting = self._take(reply.properties.get(Property.CORRELATION_ID, ""))
        if waiting is None:
            _log.warning("request.late_reply", correlation_id=reply.properties.get(Property.CORRELATION_ID))
            return False
        self._replied.add()
        waiting.future.set_result(reply)
        return True

    def _take(self, correlation_id: str) -> _Waiting | None:
        with self._lock:
            return self._waiting.pop(correlation_id, None)

    def close(self) -> None:
        """Fail what waits: no reply can come any more."""
        with self._lock:
            left, self._waiting = list(self._waiting.values()), {}
            self._due.clear()
        for waiting in left:
            waiting.future.set_exception(
                BrokerClosedError(f"the broker was closed while a request to {waiting.topic!r} waited for its reply")
            )

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        now_ms = self._clock.now_ms()
        late: list[_Waiting] = []
        with self._lock:
            while self._due and (self._due[0][0] <= now_ms or self._due[0][1] not in self._waiting):
                waiting = self._waiting.pop(heapq.heappop(self._due)[1], None)
                if waiting is not None:
                    late.append(waiting)
            next_ms = self._due[0][0] if self._due else None
        self._timed_out.add(len(late))
        for waiting in late:
            waiting.future.set_exception(_too_late(waiting))
        return next_ms


def _too_late(waiting: _Waiting) -> RequestTimeoutError:
    advice = (
        "the time counts from the sending, so give a timeout that is longer than the delay"
        if waiting.is_delayed
        else "see that a listener of the topic returns a value, or give a longer timeout"
    )
    return RequestTimeoutError(
        f"no reply to the request to {waiting.topic!r} came within {waiting.timeout_ms} ms; {advice}"
    )
