"""Requests that expect a reply, and replies to them.

Source: RocketMQ ``client: DefaultMQProducerImpl.request``, ``MessageUtil``.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.brokers.remote.producing.send_request import SendRequestFactory
from mqtemplate.checksum import crc32
from mqtemplate.errors import ConversionError, MessageError, RequestTimeoutError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ReplyMessageRequestHeader
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.results import SendResult

_log = structlog.stdlib.get_logger("mqtemplate.remote")


class _Waiting(NamedTuple):
    future: Future[MessageExt]
    due_ms: int
    topic: str
    timeout_ms: int


class Requests:
    """Requests of this client, and its replies to others. A `Service`: its step ends overdue requests."""

    name = "remote.requests"

    def __init__(self, context: ClientContext, factory: SendRequestFactory, producer: Producer) -> None:
        self._instance = context.instance
        self._routes = context.routes
        self._clock = context.clock
        self._factory = factory
        self._producer = producer
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._wake: Callable[[], None] = lambda: None

    # --- requests ------------------------------------------------------------------------------

    def request(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> Future[MessageExt]:
        """See `Broker.request`."""
        correlation_id = str(uuid.uuid4())
        own = {
            Property.CORRELATION_ID: correlation_id,
            Property.REPLY_TO_CLIENT: self._instance.id,
            Property.TTL: str(timeout_ms),
        }
        request = Message(message.topic, message.body, message.properties | own, message.flag)
        self._factory.single(request)  # raises here, not in the future, if the message is invalid
        future: Future[MessageExt] = Future()
        future.set_running_or_notify_cancel()
        due_ms = self._clock.now_ms() + timeout_ms
        with self._lock:
            self._waiting[correlation_id] = _Waiting(future, due_ms, message.topic, timeout_ms)
        self._wake()
        self._register(message.topic)
        sent = self._producer.send_async([request], queue, timeout_ms)
        sent.add_done_callback(lambda done: self._sent(correlation_id, done))
        return future

    def _register(self, topic: str) -> None:
        """Send a heartbeat to the topic's brokers that had none: any of them may get the reply for this client."""
        registered = self._instance.versions
        others = [address for address in self._producer.route(topic).masters() if address not in registered]
        if others:
            self._instance.heartbeat(others)

    def _sent(self, correlation_id: str, done: Future[SendResult]) -> None:
        error = done.exception()
        if error is not None and (waiting := self._take(correlation_id)) is not None:
            waiting.future.set_exception(error)

    def _take(self, correlation_id: str) -> _Waiting | None:
        with self._lock:
            return self._waiting.pop(correlation_id, None)

    def on_reply(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Handle a reply that a broker delivers."""
        header = request.header(ReplyMessageRequestHeader)
        properties = decode_properties_text(header.properties)
        waiting = self._take(properties.get(Property.CORRELATION_ID, ""))
        if waiting is None:
            _log.warning("remote.reply_too_late", correlation_id=properties.get(Property.CORRELATION_ID))
        else:
            try:
                waiting.future.set_result(_reply_message(header, properties, request.body))
            except ConversionError as exc:
                waiting.future.set_exception(exc)
        return None if request.is_one_way else request.response(ResponseCode.SUCCESS)

    # --- replies -------------------------------------------------------------------------------

    def reply(self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None, timeout_ms: int) -> None:
        """See `Broker.reply`."""
        given = request.properties
        needed = (Property.CLUSTER, Property.CORRELATION_ID, Property.REPLY_TO_CLIENT)
        missing = [name for name in needed if not given.get(name)]
        if missing:
            raise MessageError(
                f"message {request.msg_id} of {request.topic!r} is no request: it has no {', '.join(missing)}; reply "
                "to messages that were sent with request() or send_and_receive()"
            )
        topic = f"{given[Property.CLUSTER]}_REPLY_TOPIC"
        self._routes.add_cluster_topic(topic)
        own = {
            **(properties or {}),
            Property.MESSAGE_TYPE: "reply",
            Property.CORRELATION_ID: given[Property.CORRELATION_ID],
            Property.REPLY_TO_CLIENT: given[Property.REPLY_TO_CLIENT],
            Property.TTL: given.get(Property.TTL, "3000"),
        }
        self._producer.deliver(self._factory.reply(topic, body, own), None, timeout_ms)

    # --- timeouts ------------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        now_ms = self._clock.now_ms()
        with self._lock:
            overdue = [key for key, waiting in self._waiting.items() if waiting.due_ms <= now_ms]
            ended = [self._waiting.pop(key) for key in overdue]
            next_ms = min((waiting.due_ms for waiting in self._waiting.values()), default=None)
        for waiting in ended:
            waiting.future.set_exception(
                RequestTimeoutError(
                    f"the request to {waiting.topic!r} got no reply within {waiting.timeout_ms} ms; a consumer may "
                    "have handled it all the same. See that a consumer replies, or give it more time"
                )
            )
        return next_ms

    def close(self, error: Exception) -> None:
        """End all pending requests with *error*."""
        with self._lock:
            ended, self._waiting = list(self._waiting.values()), {}
        for waiting in ended:
            waiting.future.set_exception(error)


def _reply_message(header: ReplyMessageRequestHeader, properties: dict[str, str], body: bytes) -> MessageExt:
    return MessageExt(
        topic=header.topic,
        body=decompress_body(body, header.sys_flag),
        properties=properties,
        flag=header.flag,
        broker_name=header.broker_name or "",
        queue_id=header.queue_id,
        queue_offset=0,
        physical_offset=0,
        store_size=len(body),
        sys_flag=header.sys_flag & ~SysFlag.COMPRESSED,
        body_crc=crc32(body),
        born_timestamp=header.born_timestamp,
        born_host=_host(header.born_host),
        store_timestamp=header.store_timestamp,
        store_host=_host(header.store_host),
        reconsume_times=header.reconsume_times or 0,
        prepared_transaction_offset=0,
    )


def _host(text: str) -> HostAddress:
    ip, _, port = text.lstrip("/").rpartition(":")
    return HostAddress(ip.strip("[]"), int(port) if port.isdecimal() else 0)
