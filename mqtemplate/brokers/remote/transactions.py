"""Transactions over a cluster: half messages, their ends, and the brokers' questions about those that have none.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``ClientRemotingProcessor``; section 15 of the specification.
"""

from __future__ import annotations

import threading

import structlog

from mqtemplate.broker import CheckTransaction
from mqtemplate.brokers.group_checker import GroupChecker
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import OutboundMaker
from mqtemplate.brokers.remote.producer import RemoteSender
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError, ListenerError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.record.codec import SysFlag
from mqtemplate.remoting import Channel
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.remoting.protocol.messages import decode_messages, decode_offset_msg_id
from mqtemplate.results import HalfMessage, TransactionState

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_STATE_BITS = {
    TransactionState.COMMIT: SysFlag.TRANSACTION_COMMIT,
    TransactionState.ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
    TransactionState.UNKNOWN: 0,
}


class RemoteTransactions:
    """The producer's half of transactions. Only groups with a checker here are asked: they alone are registered.

    Args:
        own_group: The client's own producer group, which is registered in any case.
    """

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        maker: OutboundMaker,
        sender: RemoteSender,
        own_group: str,
    ) -> None:
        self._instance = instance
        self._own_group = own_group
        self._routes = routes
        self._namespace = namespace
        self._maker = maker
        self._sender = sender
        self._lock = threading.Lock()
        self._checkers: dict[str, GroupChecker] = {}

    def send_half(self, message: Message, group: str, queue: MessageQueue | None, timeout_ms: int) -> HalfMessage:
        out = self._maker.single(message, transaction_group=group)
        return HalfMessage(message, group, self._sender.deliver(out, queue, timeout_ms))

    def end(self, half: HalfMessage, state: TransactionState, remark: str | None) -> None:
        """Tell the broker, one way; what does not reach it is asked for later."""
        result = half.send_result
        _, commit_log_offset = decode_offset_msg_id(result.offset_msg_id)
        header = EndTransactionRequestHeader(
            topic=self._namespace.wrap(half.message.topic),
            producer_group=self._namespace.wrap(half.group),
            tran_state_table_offset=result.queue_offset,
            commit_log_offset=commit_log_offset,
            commit_or_rollback=_STATE_BITS[state],
            msg_id=result.msg_id,
            transaction_id=result.transaction_id or result.msg_id,
            broker_name=result.message_queue.broker_name,
        )
        try:
            address = self._routes.address(result.message_queue.broker_name)
            self._instance.invoke_one_way(address, _end_request(header, remark))
        except (BrokerClosedError, ForkedError):
            raise
        except BrokerError as exc:
            _log.warning("remote.end_not_told", msg_id=result.msg_id, state=state.value, reason=str(exc))

    def check(self, group: str, check: CheckTransaction, threads: int, max_waiting: int) -> GroupChecker:
        """See `Broker.check_transactions`."""
        wire_group = self._namespace.wrap(group)
        checker = GroupChecker(wire_group, check, threads, max_waiting, self.forget)
        with self._lock:
            if wire_group in self._checkers:
                raise ListenerError(
                    f"producer group {group!r} has a transaction listener here already; give one of them another group"
                )
            self._checkers[wire_group] = checker
        self._instance.producer_groups.add(wire_group)
        self._instance.heartbeat(self._routes.masters())
        return checker

    def forget(self, checker: GroupChecker) -> None:
        with self._lock:
            if self._checkers.get(checker.group) is not checker:
                return
            del self._checkers[checker.group]
        if checker.group == self._own_group:  # the client sends as it in any case
            return
        self._instance.producer_groups.discard(checker.group)
        self._instance.unregister(self._routes.masters(), producer_group=checker.group)

    def on_check(self, channel: Channel, request: RemotingCommand) -> None:
        """A broker asks how a transaction ended; the answer is a request of its own, on the same connection."""
        header = request.header(CheckTransactionStateRequestHeader)
        [message] = decode_messages(request.body, header.broker_name or "")
        message.topic = self._namespace.unwrap(message.topic)
        checker = self._checkers.get(message.properties.get(Property.PRODUCER_GROUP, ""))
        if checker is None:
            _log.warning("remote.check_unknown_group", msg_id=message.msg_id, remote=str(channel.remote))
            return
        checker.submit(message, lambda state, remark: self._answer(channel, header, message, state, remark))

    @staticmethod
    def _answer(
        channel: Channel,
        asked: CheckTransactionStateRequestHeader,
        message: MessageExt,
        state: TransactionState,
        remark: str | None,
    ) -> None:
        header = EndTransactionRequestHeader(
            topic=asked.topic,
            producer_group=message.properties[Property.PRODUCER_GROUP],
            tran_state_table_offset=asked.tran_state_table_offset,
            commit_log_offset=asked.commit_log_offset,
            commit_or_rollback=_STATE_BITS[state],
            from_transaction_check=True,
            msg_id=message.properties.get(Property.UNIQ_KEY) or asked.msg_id or message.msg_id,
            transaction_id=asked.transaction_id,
            broker_name=asked.broker_name,
        )
        channel.send_one_way(_end_request(header, remark))

    def close(self) -> None:
        for checker in list(self._checkers.values()):
            checker.close()


def _end_request(header: EndTransactionRequestHeader, remark: str | None) -> RemotingCommand:
    request = RemotingCommand.request(RequestCode.END_TRANSACTION, header, one_way=True)
    request.remark = remark
    return request
