"""Transactions: half messages, commits and rollbacks, and the brokers' checks of open transactions.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``ClientRemotingProcessor``.
"""

from __future__ import annotations

import threading

from mqtemplate.broker import CheckTransaction
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.engine.checkers import GroupChecker
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, MessageQueue, Property, parse_offset_msg_id
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.results import HalfMessage, TransactionState

_log = get_logger("mqtemplate.remote")

_STATE_BITS = {
    TransactionState.COMMIT: SysFlag.TRANSACTION_COMMIT,
    TransactionState.ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
    TransactionState.UNKNOWN: 0,
}


class Transactions:
    """The producer's side of transactions.

    Brokers check the transactions of a producer group only at clients that have registered the group. This client
    registers the groups that have a checker, and its own producer group, which replies need.
    """

    def __init__(self, context: ClientContext, producer: Producer) -> None:
        self._context = context
        self._producer = producer
        self._lock = threading.Lock()
        self._checkers: dict[str, GroupChecker] = {}

    def send_half(self, message: Message, group: str, queue: MessageQueue | None, timeout_ms: int) -> HalfMessage:
        """See `Broker.send_half`."""
        request = self._producer.factory.single(message, transaction_group=group)
        return HalfMessage(message, group, self._producer.deliver(request, queue, timeout_ms))

    def end(self, half: HalfMessage, state: TransactionState, remark: str | None) -> None:
        """See `Broker.end_transaction`. The request is one-way; if it is lost, the broker checks the transaction."""
        result, namespace = half.send_result, self._context.namespace
        _, commit_log_offset = parse_offset_msg_id(result.offset_msg_id)
        header = EndTransactionRequestHeader(
            topic=namespace.wrap(half.message.topic),
            producer_group=namespace.wrap(half.group),
            tran_state_table_offset=result.queue_offset,
            commit_log_offset=commit_log_offset,
            commit_or_rollback=_STATE_BITS[state],
            msg_id=result.msg_id,
            transaction_id=result.transaction_id or result.msg_id,
            broker_name=result.message_queue.broker_name,
        )
        try:
            address = self._context.routes.address(result.message_queue.broker_name)
            self._context.instance.invoke_one_way(address, _end_request(header, remark))
        except (BrokerClosedError, ForkedError):
            raise
        except BrokerError as exc:
            _log.warning("remote.transaction_end_failed", msg_id=result.msg_id, state=state.value, reason=str(exc))

    # --- checks --------------------------------------------------------------------------------

    def check(self, group: str, check: CheckTransaction, threads: int, max_waiting: int) -> GroupChecker:
        """See `Broker.check_transactions`."""
        wire_group = self._context.namespace.wrap(group)
        checker = GroupChecker(wire_group, check, threads, max_waiting, self._remove)
        with self._lock:
            if wire_group in self._checkers:
                raise ListenerError(
                    f"producer group {group!r} has a transaction listener here already; give one of them another group"
                )
            self._checkers[wire_group] = checker
        self._context.instance.producer_groups.add(wire_group)
        self._context.instance.heartbeat(self._context.routes.masters())
        return checker

    def _remove(self, checker: GroupChecker) -> None:
        """Unregister the group of a checker, unless it is the client's own producer group."""
        context = self._context
        with self._lock:
            if self._checkers.get(checker.group) is not checker:
                return
            del self._checkers[checker.group]
        if checker.group != context.namespace.wrap(context.settings.producer_group):
            context.instance.producer_groups.discard(checker.group)
            context.instance.unregister(context.routes.masters(), producer_group=checker.group)

    def on_check(self, channel: Connection, request: RemotingCommand) -> None:
        """Handle a broker's check. The answer is a request of its own on the same connection."""
        header = request.header(CheckTransactionStateRequestHeader)
        [message] = decode_messages(request.body, header.broker_name or "", self._context.settings.max_body_bytes)
        message.topic = self._context.namespace.unwrap(message.topic)
        checker = self._checkers.get(message.properties.get(Property.PRODUCER_GROUP, ""))
        if checker is None:
            _log.warning("remote.check_unknown_group", msg_id=message.msg_id, remote=str(channel.remote))
        else:
            checker.submit(
                message, lambda state, remark: channel.send_one_way(_check_answer(header, message, state, remark))
            )

    def close(self) -> None:
        """Close all checkers."""
        for checker in list(self._checkers.values()):
            checker.close()


def _check_answer(
    check: CheckTransactionStateRequestHeader, message: MessageExt, state: TransactionState, remark: str | None
) -> RemotingCommand:
    header = EndTransactionRequestHeader(
        topic=check.topic,
        producer_group=message.properties[Property.PRODUCER_GROUP],
        tran_state_table_offset=check.tran_state_table_offset,
        commit_log_offset=check.commit_log_offset,
        commit_or_rollback=_STATE_BITS[state],
        from_transaction_check=True,
        msg_id=message.properties.get(Property.UNIQ_KEY) or check.msg_id or message.msg_id,
        transaction_id=check.transaction_id,
        broker_name=check.broker_name,
    )
    return _end_request(header, remark)


def _end_request(header: EndTransactionRequestHeader, remark: str | None) -> RemotingCommand:
    request = RemotingCommand.request(RequestCode.END_TRANSACTION, header, one_way=True)
    request.remark = remark
    return request
