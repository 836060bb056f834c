"""Codes 324, 325 and 326: somebody replies to a request, and the reply is brought to who asked.

Source: RocketMQ ``broker: ReplyMessageProcessor``; section 16 of the specification. Unlike there, replies are not
stored: nobody could read them but who asked, and who asked has no use for them later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.brokers.requests import received_reply
from mqtemplate.errors import BrokerError, ConversionError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.properties import decode_properties_text, encode_properties_text
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.response import RefusedError

_log = structlog.stdlib.get_logger("mqtemplate.server")

_Done: TypeAlias = Callable[[RemotingCommand | BrokerError], None]

_PUSH_TIMEOUT_MS = 10_000
_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
_OWN_GROUP = "CLIENT_INNER_PRODUCER"


class ReplyProcessor:
    """Brings replies to the connection of the client that asked, or into this process."""

    def __init__(self, engine: EmbeddedBroker, clients: ClientRegistry) -> None:
        self._engine = engine
        self._host = engine.settings.listen_host
        self._clients = clients

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.SEND_REPLY_MESSAGE: self._reply_v1,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply_v2,
        }

    def _reply_v1(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return self._reply(connection, request, request.header(SendMessageRequestHeader))

    def _reply_v2(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return self._reply(connection, request, request.header(SendMessageRequestHeaderV2))

    def _reply(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader
    ) -> RemotingCommand | None:
        properties = decode_properties_text(sent.properties)
        client_id = properties.get(Property.REPLY_TO_CLIENT)
        if not client_id:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR, f"the reply has no {Property.REPLY_TO_CLIENT}, which says who asked"
            )
        header = SendMessageResponseHeader(msg_id="0", queue_id=max(sent.queue_id, 0), queue_offset=0)
        if client_id == self._engine.client_id:
            self._hand_over(sent, request.body, properties)
            return request.response(ResponseCode.SUCCESS, header)

        def done(answer: RemotingCommand | BrokerError) -> None:
            if isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS:
                connection.reply(request.response(ResponseCode.SUCCESS, header))
                return
            reason = answer.remark if isinstance(answer, RemotingCommand) else str(answer)
            _log.warning("server.reply_refused", client_id=client_id, reason=reason)
            remark = f"the reply could not be brought to {client_id!r}: {reason}"
            connection.reply(request.response(ResponseCode.SYSTEM_ERROR, remark=remark))

        properties[_PUSH_REPLY_TIME] = str(self._engine.clock.now_ms())
        self._push(client_id, self._header(sent, properties, str(connection.remote)), request.body, done)
        return None

    def _hand_over(self, sent: SendMessageRequestHeader, body: bytes, properties: dict[str, str]) -> None:
        """To a request of this process, which may have given up."""
        try:
            body = decompress_body(body, sent.sys_flag)
        except (ConversionError, BrokerError) as exc:
            raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
        reply = Message(sent.topic, body, properties, sent.flag)
        received = received_reply(reply, self._engine.name, self._engine.clock.now_ms(), self._host)
        self._engine.requests.complete(received)

    def _header(
        self, sent: SendMessageRequestHeader, properties: dict[str, str], born_host: str
    ) -> ReplyMessageRequestHeader:
        return ReplyMessageRequestHeader(
            producer_group=sent.producer_group,
            topic=sent.topic,
            default_topic=sent.default_topic,
            default_topic_queue_nums=sent.default_topic_queue_nums,
            queue_id=sent.queue_id,
            sys_flag=sent.sys_flag,
            born_timestamp=sent.born_timestamp,
            flag=sent.flag,
            properties=encode_properties_text(properties),
            reconsume_times=sent.reconsume_times,
            unit_mode=bool(sent.unit_mode),
            born_host=born_host,
            store_host=str(self._host),
            store_timestamp=self._engine.clock.now_ms(),
        )

    def _push(self, client_id: str, header: ReplyMessageRequestHeader, body: bytes, done: _Done) -> None:
        channel = self._clients.producer_by_client_id(client_id)
        if channel is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"{client_id!r}, who asked, is not connected as a producer; it may have ended",
            )
        push = RemotingCommand.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body)
        channel.connection.request(push, _PUSH_TIMEOUT_MS, done)

    # --- replies of this process ---------------------------------------------------------------

    def forward(self, reply: MessageExt) -> bool:
        """Bring a reply of a listener in this process to a remote client; False if that is not connected."""
        client_id = reply.properties.get(Property.REPLY_TO_CLIENT, "")
        sent = SendMessageRequestHeader(
            producer_group=_OWN_GROUP,
            topic=reply.topic,
            default_topic=reply.topic,
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=0,
            born_timestamp=reply.born_timestamp,
            flag=reply.flag,
        )

        def done(answer: RemotingCommand | BrokerError) -> None:
            if not isinstance(answer, RemotingCommand) or answer.code != ResponseCode.SUCCESS:
                _log.warning("server.reply_refused", client_id=client_id, reason=str(answer))

        try:
            self._push(client_id, self._header(sent, reply.properties, str(reply.born_host)), reply.body, done)
        except RefusedError:
            return False
        return True
