"""What tools ask of one consumer: the broker hands the question on, and the answer back.

Source: RocketMQ ``broker: AdminBrokerProcessor.callConsumer``; section 18.4 of the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mqtemplate.errors import BrokerError, RemoteTimeoutError
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE
from mqtemplate.remoting.protocol.codes import FLAG_RESPONSE
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import ConsumeMessageDirectlyResultRequestHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.response import RefusedError
from mqtemplate.server.topic_configs import TopicConfigs

_TIMEOUT_MS = 10_000
_WHO_ASKED = (ACCESS_KEY, SECURITY_TOKEN, SIGNATURE)
_OFFSET_DIGITS = 16
_ID_LENGTHS = (32, 56)


class RelayProcessor:
    """Carries requests between a tool and a consumer, which each know the broker only.

    Who asked is not handed on: a signature is for the one it was made for.

    Args:
        record_at: The record that begins at a physical offset; see `QueryProcessor.record_at`.

    Attributes:
        slow: Codes whose answers read a message.
    """

    slow: ClassVar[frozenset[int]] = frozenset({RequestCode.CONSUME_MESSAGE_DIRECTLY})

    def __init__(self, clients: ClientRegistry, topics: TopicConfigs, record_at: Callable[[int], bytes | None]) -> None:
        self._clients = clients
        self._topics = topics
        self._record_at = record_at

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
        }

    def _running_info(self, connection: Connection, request: RemotingCommand) -> None:
        asked = request.header(GetConsumerRunningInfoRequestHeader)
        self._hand_on(connection, request, asked.consumer_group, asked.client_id, {}, request.body)

    def _consume_directly(self, connection: Connection, request: RemotingCommand) -> None:
        asked = request.header(ConsumeMessageDirectlyResultRequestHeader)
        record = self._record_at(_physical_offset(asked.msg_id or ""))
        if record is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"there is no message {asked.msg_id} any more")
        more = {"brokerName": self._topics.broker_name}
        config = self._topics.find(asked.topic) if asked.topic else None
        if config is not None:
            more["topicSysFlag"] = str(config.topic_sys_flag)
        self._hand_on(connection, request, asked.consumer_group, asked.client_id or "", more, record)

    def _hand_on(
        self,
        connection: Connection,
        request: RemotingCommand,
        group: str,
        client_id: str,
        more: dict[str, str],
        body: bytes,
    ) -> None:
        consumer = self._clients.consumer(group, client_id)
        if consumer is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR, f"client {client_id!r} does not consume for group {group!r} now"
            )
        if consumer.version < Version.V3_1_8_SNAPSHOT:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR, f"client {client_id!r} is too old to be asked; 3.1.8 or newer can be"
            )
        question = RemotingCommand.request(request.code, body=body)
        fields = {name: value for name, value in request.ext_fields.items() if name not in _WHO_ASKED}
        question.ext_fields = fields | more

        def hand_back(answer: RemotingCommand | BrokerError) -> None:
            connection.reply(_answer(request, client_id, answer))

        consumer.connection.request(question, _TIMEOUT_MS, hand_back)


def _answer(request: RemotingCommand, client_id: str, answer: RemotingCommand | BrokerError) -> RemotingCommand:
    if isinstance(answer, RemotingCommand):
        return RemotingCommand(
            answer.code,
            request.opaque,
            FLAG_RESPONSE,
            remark=answer.remark,
            ext_fields=answer.ext_fields,
            body=answer.body,
        )
    late = isinstance(answer, RemoteTimeoutError)
    code = ResponseCode.CONSUME_MSG_TIMEOUT if late else ResponseCode.SYSTEM_ERROR
    return request.response(code, remark=f"client {client_id!r} did not answer: {answer}")


def _physical_offset(msg_id: str) -> int:
    """The place in the log that an id of the broker's names."""
    try:
        if len(msg_id) not in _ID_LENGTHS:
            raise ValueError(f"{len(msg_id)} characters")
        return int(msg_id[-_OFFSET_DIGITS:], 16)
    except ValueError as exc:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"{msg_id!r} is no offset message id ({exc}): those are 32 hex digits, or 56 with an IPv6 address",
        ) from exc
