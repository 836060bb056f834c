"""Codes 37 and 39: a producer ends a transaction; the broker checks transactions that were not ended.

Source: RocketMQ ``broker: EndTransactionProcessor``, ``AbstractTransactionalMessageCheckListener``.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mqtemplate.brokers.embedded.transactions.checkers import TransactionCheck
from mqtemplate.errors import MessageError, StoreError
from mqtemplate.message import offset_msg_id
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import UNIQ_KEY, find_property
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.results import TransactionState
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError, reply_when_durable
from mqtemplate.topics import HALF_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.server")

_STATES = {
    0: TransactionState.UNKNOWN,
    SysFlag.TRANSACTION_COMMIT: TransactionState.COMMIT,
    SysFlag.TRANSACTION_ROLLBACK: TransactionState.ROLLBACK,
}


@dataclass(frozen=True, slots=True)
class TransactionProcessor:
    """Ends transactions for remote producers, and sends them transaction checks. A `TransactionChecker`.

    Unlike RocketMQ's broker, this one accepts the end of a transaction that arrives after a check was sent. A
    transaction still ends once.
    """

    server: ServerParts

    # --- ends ----------------------------------------------------------------------------------

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
            end = self.server.engine.transactions.end(
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                state,
                remark=request.remark,
            )
        except (MessageError, StoreError) as exc:
            # Most of these requests are one-way: without a log entry the error would be lost.
            _log.warning("server.end_refused", group=header.producer_group, msg_id=header.msg_id, reason=str(exc))
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(exc)) from exc
        if end is None:
            return request.response()
        reply_when_durable(self.server.engine.store, connection, request, end.physical_end, end.topics)
        return None

    # --- checks --------------------------------------------------------------------------------

    def can_check(self, group: str) -> bool:
        return any(channel.connection.is_open for channel in self.server.clients.producers(group))

    def send_check(self, check: TransactionCheck) -> None:
        channel = self.server.clients.next_producer(check.group)
        if channel is None:
            return  # The last producer has just disconnected. The check is repeated later.
        half = check.half
        unique_id = find_property(half.properties_bytes, UNIQ_KEY)
        header = CheckTransactionStateRequestHeader(
            topic=HALF_TOPIC,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            msg_id=unique_id,
            transaction_id=unique_id,
            offset_msg_id=offset_msg_id(self.server.engine.settings.listen_host, half.physical_offset),
            broker_name=self.server.engine.name,
        )
        request = RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, header, _record_of(check), one_way=True)
        channel.connection.send_one_way(request)


def _record_of(check: TransactionCheck) -> bytes:
    """Return the half message with the real topic, as its producer sent it. Its properties identify the transaction."""
    half = check.half
    draft = RecordDraft(
        check.topic,
        check.queue_id,
        half.body,
        half.properties_bytes,
        flag=half.flag,
        sys_flag=half.sys_flag,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.prepared_transaction_offset,
        body_crc=half.body_crc,
    )
    return draft.encode(half.queue_offset, half.physical_offset, half.store_timestamp, half.store_host)
