"""Codes 324, 325 and 326: a consumer replies to a request; the broker forwards the reply to the requesting producer.

Source: RocketMQ ``broker: ReplyMessageProcessor``. Unlike there, replies are not stored: only the requesting producer
could use them, and only before its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mqtemplate.engine.requests import received_reply
from mqtemplate.errors import BrokerError, ConversionError
from mqtemplate.message import Message, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import client_properties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError

_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"


@dataclass(frozen=True, slots=True)
class ReplyProcessor:
    """Forwards replies to the producer of the request, which is a remote client or in this process."""

    server: ServerParts

    @handles(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2, max_body_bytes=None)
    def _reply(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_REPLY_MESSAGE
        sent = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        sent = replace(sent, sys_flag=sent.sys_flag & SysFlag.OF_CLIENTS)
        properties = dict(client_properties(decode_properties_text(sent.properties), sent.topic))
        client_id = properties.get(Property.REPLY_TO_CLIENT)
        if not client_id:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"the reply has no property {Property.REPLY_TO_CLIENT}, the client ID of the requesting producer",
            )
        success = SendMessageResponseHeader(msg_id="0", queue_id=max(sent.queue_id, 0), queue_offset=0)
        if client_id == self.server.engine.client_id:
            self._deliver_here(sent, request.body, properties)
            return request.response(ResponseCode.SUCCESS, success)

        def done(failure: str | None) -> None:
            if failure is None:
                connection.reply(request.response(ResponseCode.SUCCESS, success))
            else:
                remark = f"the reply could not be delivered to {client_id!r}: {failure}"
                connection.reply(request.response(ResponseCode.SYSTEM_ERROR, remark=remark))

        properties[_PUSH_REPLY_TIME] = str(self.server.engine.clock.now_ms())
        self.server.remote_clients.push_reply(client_id, sent, properties, request.body, str(connection.remote), done)
        return None

    def _deliver_here(self, sent: SendMessageRequestHeader, body: bytes, properties: dict[str, str]) -> None:
        """Deliver a reply to a request of this process. If the request has timed out, the reply is dropped."""
        try:
            body = decompress_body(body, sent.sys_flag, self.server.engine.max_body_bytes)
        except (ConversionError, BrokerError) as exc:
            raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
        reply, engine = Message(sent.topic, body, properties, sent.flag), self.server.engine
        received = received_reply(reply, engine.name, engine.clock.now_ms(), engine.settings.listen_host)
        engine.requests.complete(received)
