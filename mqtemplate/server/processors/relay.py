"""Requests that the broker relays from an administration tool to one consumer.

Source: RocketMQ ``broker: AdminBrokerProcessor.callConsumer``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.errors import BrokerError, MessageError, RemoteTimeoutError
from mqtemplate.message import parse_offset_msg_id
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import ConsumeMessageDirectlyResultRequestHeader
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.remote_clients import connection_of
from mqtemplate.server.state.topics import TopicConfigs

_Header = GetConsumerRunningInfoRequestHeader | ConsumeMessageDirectlyResultRequestHeader

_TIMEOUT_MS = 10_000
_ACL_FIELDS = (ACCESS_KEY, SECURITY_TOKEN, SIGNATURE)


@dataclass(frozen=True, slots=True)
class RelayProcessor:
    """Relays requests between a tool and a consumer, which both know the broker's address only.

    The signature of the tool is not relayed: it is valid for the broker only.
    """

    raw: RawReader
    topics: TopicConfigs
    clients: ClientRegistry

    @handles(RequestCode.GET_CONSUMER_RUNNING_INFO)
    def _running_info(self, connection: Connection, request: RemotingCommand) -> None:
        header = request.header(GetConsumerRunningInfoRequestHeader)
        self._relay(connection, request, header, request.body)

    @handles(RequestCode.CONSUME_MESSAGE_DIRECTLY, slow=True)
    def _consume_directly(self, connection: Connection, request: RemotingCommand) -> None:
        header = request.header(ConsumeMessageDirectlyResultRequestHeader)
        record = self.raw.record_at(_physical_offset(header.msg_id or ""))
        if record is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"message {header.msg_id} does not exist")
        added_fields = {"brokerName": self.topics.broker_name}
        config = self.topics.find(header.topic) if header.topic else None
        if config is not None:
            added_fields["topicSysFlag"] = str(config.topic_sys_flag)
        self._relay(connection, request, header, record, **added_fields)

    def _relay(
        self, connection: Connection, request: RemotingCommand, header: _Header, body: bytes, **added_fields: str
    ) -> None:
        group, client_id = header.consumer_group, header.client_id or ""
        consumer = self.clients.consumer(group, client_id)
        if consumer is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {group!r} has no connected consumer {client_id!r}")
        if consumer.version < Version.V3_1_8_SNAPSHOT:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"client {client_id!r} is older than 3.1.8")
        relayed = RemotingCommand.request(request.code, body=body)
        fields = {name: value for name, value in request.ext_fields.items() if name not in _ACL_FIELDS}
        relayed.ext_fields = fields | added_fields

        def on_response(response: RemotingCommand | BrokerError) -> None:
            connection.reply(_relayed_response(request, client_id, response))

        connection_of(consumer).request(relayed, _TIMEOUT_MS, on_response)


def _relayed_response(
    request: RemotingCommand, client_id: str, response: RemotingCommand | BrokerError
) -> RemotingCommand:
    """Return the consumer's response as the response to *request*, or an error response if there is none."""
    if isinstance(response, RemotingCommand):
        relayed = request.response(response.code, body=response.body, remark=response.remark)
        relayed.ext_fields = response.ext_fields
        return relayed
    code = ResponseCode.CONSUME_MSG_TIMEOUT if isinstance(response, RemoteTimeoutError) else ResponseCode.SYSTEM_ERROR
    return request.response(code, remark=f"client {client_id!r} did not respond: {response}")


def _physical_offset(msg_id: str) -> int:
    try:
        return parse_offset_msg_id(msg_id)[1]
    except MessageError as exc:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"{msg_id!r} is no offset message ID ({len(msg_id)} characters): it must have 32 hex digits, or 56 for an "
            "IPv6 address",
        ) from exc
