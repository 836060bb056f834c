"""Codes 37 and 39: producers end their transactions, and are asked about those that they did not end.

Source: RocketMQ ``broker: EndTransactionProcessor``, ``AbstractTransactionalMessageCheckListener``; section 15 of the
specification.
"""

from __future__ import annotations

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.brokers.embedded.transactions.checkers import TransactionCheck
from mqtemplate.errors import MessageError, StoreError
from mqtemplate.message import offset_msg_id
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import UNIQ_KEY, find_property
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.results import TransactionState
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.processors.message_writer import MessageWriter
from mqtemplate.server.response import RefusedError
from mqtemplate.topics import HALF_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.server")

_STATES = {
    0: TransactionState.UNKNOWN,
    SysFlag.TRANSACTION_COMMIT: TransactionState.COMMIT,
    SysFlag.TRANSACTION_ROLLBACK: TransactionState.ROLLBACK,
}


class TransactionProcessor:
    """Ends transactions for remote producers, and asks them. A `TransactionChecker`.

    Unlike RocketMQ's, it takes an end that comes late, after the question: a transaction has one end all the same.
    """

    def __init__(self, engine: EmbeddedBroker, clients: ClientRegistry, writer: MessageWriter) -> None:
        self._engine = engine
        self._host = engine.settings.listen_host
        self._clients = clients
        self._writer = writer

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {RequestCode.END_TRANSACTION: self._end}

    # --- ends ----------------------------------------------------------------------------------

    def _end(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        ended = request.header(EndTransactionRequestHeader)
        state = _STATES.get(ended.commit_or_rollback)
        if state is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback is {ended.commit_or_rollback}; it is 0 for unknown, 8 to commit, 12 to roll back",
            )
        try:
            end = self._engine.transactions.end(
                ended.tran_state_table_offset,
                ended.commit_log_offset,
                ended.producer_group,
                state,
                remark=request.remark,
            )
        except (MessageError, StoreError) as exc:
            # The request is one way in most cases, so nobody would hear of it.
            _log.warning("server.end_refused", group=ended.producer_group, msg_id=ended.msg_id, reason=str(exc))
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(exc)) from exc
        if end is None:
            return request.response()

        def done(error: StoreError | None) -> None:
            code = ResponseCode.SUCCESS if error is None else ResponseCode.SYSTEM_ERROR
            connection.reply(request.response(code, remark=None if error is None else str(error)))

        self._writer.confirm(end.physical_end, end.topics, done)
        return None

    # --- questions -----------------------------------------------------------------------------

    def can_check(self, group: str) -> bool:
        return any(channel.connection.is_open for channel in self._clients.producers(group))

    def send_check(self, check: TransactionCheck) -> None:
        channel = self._clients.next_producer(check.group)
        if channel is None:
            return  # it left at this moment; the question comes again
        half = check.half
        unique_id = find_property(half.properties_bytes, UNIQ_KEY)
        header = CheckTransactionStateRequestHeader(
            topic=HALF_TOPIC,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            msg_id=unique_id,
            transaction_id=unique_id,
            offset_msg_id=offset_msg_id(self._host, half.physical_offset),
            broker_name=self._engine.name,
        )
        body = _record_for(check)
        request = RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, header, body, one_way=True)
        channel.connection.send_one_way(request)


def _record_for(check: TransactionCheck) -> bytes:
    """The half message as its producer knows it: for the real topic. It finds the transaction by the properties."""
    half: StoredRecord = check.half
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
