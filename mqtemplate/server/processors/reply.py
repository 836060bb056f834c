"""Codes 324, 325 and 326: a consumer replies to a request; the broker forwards the reply to the requesting producer.

Source: RocketMQ ``broker: ReplyMessageProcessor``. Unlike there, replies are not stored: only the requesting producer
could use them, and only before its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from mqtemplate.brokers.requests import received_reply
from mqtemplate.errors import BrokerError, ConversionError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.properties import decode_properties_text, encode_properties_text
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError

_log = structlog.stdlib.get_logger("mqtemplate.server")

_PUSH_TIMEOUT_MS = 10_000
_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
_OWN_GROUP = "CLIENT_INNER_PRODUCER"


@dataclass(frozen=True, slots=True)
class ReplyProcessor:
    """Forwards replies to the producer of the request, which is a remote client or in this process."""

    server: ServerParts

    @handles(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    def _reply(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_REPLY_MESSAGE
        sent = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        properties = decode_properties_text(sent.properties)
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
        self._push(client_id, sent, properties, request.body, str(connection.remote), done)
        return None

    def _deliver_here(self, sent: SendMessageRequestHeader, body: bytes, properties: dict[str, str]) -> None:
        """Deliver a reply to a request of this process. If the request has timed out, the reply is dropped."""
        try:
            body = decompress_body(body, sent.sys_flag)
        except (ConversionError, BrokerError) as exc:
            raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
        reply, engine = Message(sent.topic, body, properties, sent.flag), self.server.engine
        received = received_reply(reply, engine.name, engine.clock.now_ms(), engine.settings.listen_host)
        engine.requests.complete(received)

    def forward(self, reply: MessageExt) -> bool:
        """Push the reply of a listener in this process to a remote client. Return False if it is not connected."""
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
        client_id = reply.properties.get(Property.REPLY_TO_CLIENT, "")
        try:
            self._push(client_id, sent, reply.properties, reply.body, str(reply.born_host), lambda failure: None)
        except RefusedError:
            return False
        return True

    def _push(
        self,
        client_id: str,
        sent: SendMessageRequestHeader,
        properties: dict[str, str],
        body: bytes,
        born_host: str,
        done: Callable[[str | None], None],
    ) -> None:
        """Push a reply to a remote client, and call *done* with None, or with the reason of a failure."""
        channel = self.server.clients.producer_by_client_id(client_id)
        if channel is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"client {client_id!r} is not connected as a producer")
        header = ReplyMessageRequestHeader(
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
            store_host=str(self.server.engine.settings.listen_host),
            store_timestamp=self.server.engine.clock.now_ms(),
        )

        def on_response(response: RemotingCommand | BrokerError) -> None:
            failure: str | None = None
            if not isinstance(response, RemotingCommand):
                failure = str(response)
            elif response.code != ResponseCode.SUCCESS:
                failure = response.remark or str(response)
            if failure is not None:
                _log.warning("server.reply_refused", client_id=client_id, reason=failure)
            done(failure)

        push = RemotingCommand.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body)
        channel.connection.request(push, _PUSH_TIMEOUT_MS, on_response)
