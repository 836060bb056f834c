"""Requests of clients beside sends: code 37 ends a transaction, codes 324 and 325 reply to a request.

Source: RocketMQ ``broker: EndTransactionProcessor``, ``ReplyMessageProcessor``. Unlike there, replies are not stored:
only the requesting producer could use them, and only before its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mqtemplate.engine.engine import Engine
from mqtemplate.errors import BrokerError, ConversionError, MessageError, StoreError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import Message, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import client_properties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    EndTransactionRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.results import TransactionState
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError, reply_when_durable
from mqtemplate.server.state.remote_clients import RemoteClients

_STATES = {
    0: TransactionState.UNKNOWN,
    SysFlag.TRANSACTION_COMMIT: TransactionState.COMMIT,
    SysFlag.TRANSACTION_ROLLBACK: TransactionState.ROLLBACK,
}


@dataclass(frozen=True, slots=True)
class TransactionProcessor:
    """Ends transactions for remote producers.

    Unlike RocketMQ's broker, this one accepts the end of a transaction that arrives after a check was sent. A
    transaction still ends once.
    """

    engine: Engine
    access: AccessControl
    peer_log: LimitedLog

    @handles(RequestCode.END_TRANSACTION)
    def _end(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(EndTransactionRequestHeader)
        state = _STATES.get(header.commit_or_rollback)
        if state is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback must be 0 (unknown), 8 (commit) or 12 (rollback), got {header.commit_or_rollback}",
            )
        try:
            end = self.engine.transactions.end(
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                state,
                remark=request.remark,
                check_right=partial(self._check_right, request, header),
            )
        except (MessageError, StoreError, RefusedError) as exc:
            # Most of these requests are one-way: without a log entry the error would be lost.
            self.peer_log.warning(
                "server.end_refused", group=header.producer_group, msg_id=header.msg_id, reason=str(exc)
            )
            if isinstance(exc, RefusedError):
                raise
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(exc)) from exc
        if end is None:
            return request.response()
        reply_when_durable(self.engine.store, connection, request, end.physical_end, end.topics)
        return None

    def _check_right(self, request: RemotingCommand, header: EndTransactionRequestHeader, topic: str) -> None:
        """Check the right to the topic of the half message: the request may name another topic, or none."""
        self.access.check_topic(request, topic, Right.PUB, f"half message {header.tran_state_table_offset}")


_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"


@dataclass(frozen=True, slots=True)
class ReplyProcessor:
    """Forwards replies to the producer of the request, which is a remote client or in this process."""

    engine: Engine
    remote_clients: RemoteClients

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
        if client_id == self.engine.requests.client_id:
            self._deliver_here(sent, request.body, properties)
            return request.response(ResponseCode.SUCCESS, success)

        def done(failure: str | None) -> None:
            if failure is None:
                connection.reply(request.response(ResponseCode.SUCCESS, success))
            else:
                remark = f"the reply could not be delivered to {client_id!r}: {failure}"
                connection.reply(request.response(ResponseCode.SYSTEM_ERROR, remark=remark))

        properties[_PUSH_REPLY_TIME] = str(self.engine.clock.now_ms())
        self.remote_clients.push_reply(client_id, sent, properties, request.body, str(connection.remote), done)
        return None

    def _deliver_here(self, sent: SendMessageRequestHeader, body: bytes, properties: dict[str, str]) -> None:
        """Deliver a reply to a request of this process. If the request has timed out, the reply is dropped."""
        try:
            body = decompress_body(body, sent.sys_flag, self.engine.settings.max_body_bytes())
        except (ConversionError, BrokerError) as exc:
            raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
        self.engine.requests.receive(Message(sent.topic, body, properties, sent.flag))
