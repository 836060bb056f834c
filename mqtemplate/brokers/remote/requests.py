"""Requests and replies over a cluster.

Source: RocketMQ ``client: DefaultMQProducerImpl.request``, ``MessageUtil``; section 16 of the specification.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import OutboundMaker
from mqtemplate.brokers.remote.producer import RemoteSender
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.checksum import crc32
from mqtemplate.clock import Clock
from mqtemplate.errors import ConversionError, MessageError, RequestTimeoutError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting import Channel
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.headers.message import ReplyMessageRequestHeader
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.results import SendResult

_log = structlog.stdlib.get_logger("mqtemplate.remote")


class _Waiting(NamedTuple):
    future: Future[MessageExt]
    due_ms: int
    topic: str
    timeout_ms: int


class RemoteRequests:
    """Sends requests, waits for their replies, and answers others'. A `Service`: its step ends those overdue."""

    name = "remote.requests"

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        maker: OutboundMaker,
        sender: RemoteSender,
        clock: Clock,
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._maker = maker
        self._sender = sender
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._wake: Callable[[], None] = lambda: None

    # --- asking --------------------------------------------------------------------------------

    def request(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> Future[MessageExt]:
        """See `Broker.request`."""
        correlation_id = str(uuid.uuid4())
        own = {
            Property.CORRELATION_ID: correlation_id,
            Property.REPLY_TO_CLIENT: self._instance.id,
            Property.TTL: str(timeout_ms),
        }
        asking = Message(message.topic, message.body, message.properties | own, message.flag)
        self._maker.single(asking)  # what is wrong with it is told at once
        future: Future[MessageExt] = Future()
        future.set_running_or_notify_cancel()
        due_ms = self._clock.now_ms() + timeout_ms
        with self._lock:
            self._waiting[correlation_id] = _Waiting(future, due_ms, message.topic, timeout_ms)
        self._wake()
        self._be_known(message.topic)
        sent = self._sender.send_async([asking], queue, timeout_ms)
        sent.add_done_callback(lambda done: self._sent(correlation_id, done))
        return future

    def _be_known(self, topic: str) -> None:
        """A reply finds its way by the heartbeat of who asked, on whichever broker it comes to."""
        known = self._instance.versions
        strangers = [address for address in self._sender.route(topic).masters() if address not in known]
        if strangers:
            self._instance.heartbeat(strangers)

    def _sent(self, correlation_id: str, done: Future[SendResult]) -> None:
        error = done.exception()
        if error is not None and (waiting := self._take(correlation_id)) is not None:
            waiting.future.set_exception(error)

    def _take(self, correlation_id: str) -> _Waiting | None:
        with self._lock:
            return self._waiting.pop(correlation_id, None)

    def on_reply(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        """A broker brings a reply."""
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

    # --- answering -----------------------------------------------------------------------------

    def reply(self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None, timeout_ms: int) -> None:
        """See `Broker.reply`."""
        asked = request.properties
        needed = (Property.CLUSTER, Property.CORRELATION_ID, Property.REPLY_TO_CLIENT)
        missing = [name for name in needed if not asked.get(name)]
        if missing:
            raise MessageError(
                f"message {request.msg_id} of {request.topic!r} is no request: it has no {', '.join(missing)}; reply "
                "to messages that were sent with request() or send_and_receive()"
            )
        topic = f"{asked[Property.CLUSTER]}_REPLY_TOPIC"
        self._routes.share(topic)
        own = {
            **(properties or {}),
            Property.MESSAGE_TYPE: "reply",
            Property.CORRELATION_ID: asked[Property.CORRELATION_ID],
            Property.REPLY_TO_CLIENT: asked[Property.REPLY_TO_CLIENT],
            Property.TTL: asked.get(Property.TTL, "3000"),
        }
        self._sender.deliver(self._maker.reply(topic, body, own), None, timeout_ms)

    # --- time ----------------------------------------------------------------------------------

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
                    f"the request to {waiting.topic!r} got no reply within {waiting.timeout_ms} ms; somebody may have "
                    "handled it all the same. See that a consumer replies, or give it more time"
                )
            )
        return next_ms

    def close(self, error: Exception) -> None:
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
