"""Code 37: a producer ends a transaction.

Source: RocketMQ ``broker: EndTransactionProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mqtemplate.errors import MessageError, StoreError
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import EndTransactionRequestHeader
from mqtemplate.results import TransactionState
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError, reply_when_durable

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

    server: ServerParts

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
                check_right=partial(self._check_right, request, header),
            )
        except (MessageError, StoreError, RefusedError) as exc:
            # Most of these requests are one-way: without a log entry the error would be lost.
            self.server.peer_log.warning(
                "server.end_refused", group=header.producer_group, msg_id=header.msg_id, reason=str(exc)
            )
            if isinstance(exc, RefusedError):
                raise
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(exc)) from exc
        if end is None:
            return request.response()
        reply_when_durable(self.server.engine.store, connection, request, end.physical_end, end.topics)
        return None

    def _check_right(self, request: RemotingCommand, header: EndTransactionRequestHeader, topic: str) -> None:
        """Check the right to the topic of the half message: the request may name another topic, or none."""
        self.server.access.check_topic(request, topic, Right.PUB, f"half message {header.tran_state_table_offset}")
