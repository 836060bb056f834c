"""Requests that expect a reply, and replies to them.

Source: RocketMQ ``client: DefaultMQProducerImpl.request``, ``MessageUtil``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.brokers.requests import PendingRequests, create_reply, create_request
from mqtemplate.errors import ConversionError
from mqtemplate.hashes import crc32
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property
from mqtemplate.metrics import Metrics
from mqtemplate.numbers import parse_number
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ReplyMessageRequestHeader
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.results import SendResult

_DEFAULT_TTL_MS = "3000"


class Requests:
    """Requests of this client, and its replies to requests of other clients.

    Attributes:
        pending: The requests that have no reply yet.
    """

    def __init__(self, context: ClientContext, producer: Producer) -> None:
        self.pending = PendingRequests("remote.requests", context.clock, Metrics())
        self._max_body_bytes = context.settings.max_body_bytes
        self._instance = context.instance
        self._routes = context.routes
        self._producer = producer

    # --- requests ------------------------------------------------------------------------------

    def request(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> Future[MessageExt]:
        """See `Broker.request`."""
        request = create_request(message, self._instance.id, timeout_ms)
        self._producer.factory.single(request)  # raises here, not in the future, if the message is invalid
        future = self.pending.add(request, timeout_ms)
        self._register(message.topic)
        sent = self._producer.send_async([request], queue, timeout_ms)
        sent.add_done_callback(partial(self._sent, request.properties[Property.CORRELATION_ID]))
        return future

    def _register(self, topic: str) -> None:
        """Send a heartbeat to the topic's brokers that had none: any of them may get the reply for this client."""
        registered = self._instance.versions
        others = [address for address in self._producer.route(topic).masters() if address not in registered]
        if others:
            self._instance.heartbeat(others)

    def _sent(self, correlation_id: str, done: Future[SendResult]) -> None:
        if (error := done.exception()) is not None:
            self.pending.fail(correlation_id, error)

    def on_reply(self, request: RemotingCommand) -> RemotingCommand | None:
        """Handle a reply that a broker delivers."""
        header = request.header(ReplyMessageRequestHeader)
        properties = decode_properties_text(header.properties)
        try:
            self.pending.complete(_reply_message(header, properties, request.body, self._max_body_bytes))
        except ConversionError as exc:
            self.pending.fail(properties.get(Property.CORRELATION_ID, ""), exc)
        return None if request.is_one_way else request.response(ResponseCode.SUCCESS)

    # --- replies -------------------------------------------------------------------------------

    def reply(self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None, timeout_ms: int) -> None:
        """See `Broker.reply`."""
        reply = create_reply(request, body, {Property.TTL: _DEFAULT_TTL_MS, **(properties or {})})
        self._routes.add_cluster_topic(reply.topic)
        message = self._producer.factory.reply(reply.topic, body, reply.properties)
        self._producer.deliver(message, None, timeout_ms)


def _reply_message(
    header: ReplyMessageRequestHeader, properties: dict[str, str], body: bytes, max_body_bytes: int
) -> MessageExt:
    return MessageExt(
        topic=header.topic,
        body=decompress_body(body, header.sys_flag, max_body_bytes),
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
    number = parse_number(port) or 0
    return HostAddress(ip.strip("[]"), number if 0 < number < 1 << 16 else 0)
