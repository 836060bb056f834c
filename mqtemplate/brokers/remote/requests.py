"""Requests and replies over a cluster.

Source: RocketMQ ``client: DefaultMQProducerImpl.request``, ``MessageUtil``; section 16 of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import OutboundMaker
from mqtemplate.brokers.remote.producer import RemoteSender
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.requests import PendingRequests, create_reply, create_request
from mqtemplate.checksum import crc32
from mqtemplate.clock import Clock
from mqtemplate.compression import decompress_body
from mqtemplate.errors import ConversionError
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property
from mqtemplate.metrics import Metrics
from mqtemplate.record.codec import SysFlag
from mqtemplate.remoting import Channel
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.headers.message import ReplyMessageRequestHeader
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.results import SendResult

_DEFAULT_TTL_MS = "3000"


class RemoteRequests:
    """Sends requests and replies.

    Attributes:
        pending: The requests that have no reply yet.
    """

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
        self.pending = PendingRequests("remote.requests", clock, Metrics())

    # --- asking --------------------------------------------------------------------------------

    def request(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> Future[MessageExt]:
        """See `Broker.request`."""
        asking = create_request(message, self._instance.id, timeout_ms)
        self._maker.single(asking)  # what is wrong with it is told at once
        future = self.pending.add(asking, timeout_ms)
        self._be_known(message.topic)
        sent = self._sender.send_async([asking], queue, timeout_ms)
        sent.add_done_callback(lambda done: self._sent(asking.properties[Property.CORRELATION_ID], done))
        return future

    def _be_known(self, topic: str) -> None:
        """A reply finds its way by the heartbeat of who asked, on whichever broker it comes to."""
        known = self._instance.versions
        strangers = [address for address in self._sender.route(topic).masters() if address not in known]
        if strangers:
            self._instance.heartbeat(strangers)

    def _sent(self, correlation_id: str, done: Future[SendResult]) -> None:
        if (error := done.exception()) is not None:
            self.pending.fail(correlation_id, error)

    def on_reply(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        """A broker brings a reply."""
        header = request.header(ReplyMessageRequestHeader)
        properties = decode_properties_text(header.properties)
        try:
            self.pending.complete(_reply_message(header, properties, request.body))
        except ConversionError as exc:
            self.pending.fail(properties.get(Property.CORRELATION_ID, ""), exc)
        return None if request.is_one_way else request.response(ResponseCode.SUCCESS)

    # --- answering -----------------------------------------------------------------------------

    def reply(self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None, timeout_ms: int) -> None:
        """See `Broker.reply`."""
        reply = create_reply(request, body, {Property.TTL: _DEFAULT_TTL_MS, **(properties or {})})
        self._routes.share(reply.topic)
        self._sender.deliver(self._maker.reply(reply.topic, body, reply.properties), None, timeout_ms)


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
