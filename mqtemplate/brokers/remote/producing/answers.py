"""Other ways to send: transactions with their checks, and requests with their replies.

Source: RocketMQ ``client: DefaultMQProducerImpl``, ``ClientRemotingProcessor``, ``MessageUtil``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from mqtemplate.broker import CheckTransaction
from mqtemplate.broker.group_checker import GroupChecker
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.engine.requests import UnansweredRequests, create_reply, create_request
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ConversionError,
    ForkedError,
    ListenerError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import crc32
from mqtemplate.message import (
    HostAddress,
    Message,
    MessageExt,
    MessageQueue,
    Property,
    parse_offset_msg_id,
)
from mqtemplate.metrics import Metrics
from mqtemplate.numbers import parse_number
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
    ReplyMessageRequestHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages, decode_properties_text
from mqtemplate.results import HalfMessage, SendResult, TransactionState

# --- transactions ---------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

_STATE_BITS = {
    TransactionState.COMMIT: SysFlag.TRANSACTION_COMMIT,
    TransactionState.ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
    TransactionState.UNKNOWN: 0,
}


class RemoteTransactions:
    """The producer's side of transactions.

    Brokers check the transactions of a producer group only at clients that have registered the group. This client
    registers the groups that have a checker, and its own producer group, which replies need.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._checkers: dict[str, GroupChecker] = {}

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """See `Transactions.end_transaction`. If the one-way request is lost, the broker checks the transaction."""
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

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> GroupChecker:
        """See `Transactions.check_transactions`."""
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


# --- requests and replies -------------------------------------------------------------------------


_DEFAULT_TTL_MS = "3000"


class RemoteRequests:
    """Requests of this client, and its replies to requests of other clients.

    Attributes:
        pending: The requests that have no reply yet.
    """

    def __init__(self, context: ClientContext, producer: Producer) -> None:
        self.pending = UnansweredRequests("remote.requests", context.clock, Metrics())
        self._max_body_bytes = context.settings.max_body_bytes
        self._instance = context.instance
        self._routes = context.routes
        self._producer = producer

    # --- requests ------------------------------------------------------------------------------

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """See `Requests.request`."""
        request = create_request(message, self._instance.id, timeout_ms)
        self._producer.factory.single(request)  # raises here, not in the future, if the message is invalid
        future = self.pending.add(request, timeout_ms)
        self._register(message.topic)
        sent = self._producer.send_async([request], queue, timeout_ms)
        sent.add_done_callback(partial(self._sent, request.properties[Property.CORRELATION_ID]))
        return future

    def _register(self, topic: str) -> None:
        """Send a heartbeat to the topic's brokers that had none: any of them may get the reply for this client."""
        registered = self._instance.versions
        others = [address for address in self._producer.route(topic).masters() if address not in registered]
        if others:
            self._instance.heartbeat(others)

    def _sent(self, correlation_id: str, done: Future[SendResult]) -> None:
        if (error := done.exception()) is not None:
            self.pending.fail(correlation_id, error)

    def on_reply(self, request: RemotingCommand) -> RemotingCommand | None:
        """Handle a reply that a broker delivers."""
        header = request.header(ReplyMessageRequestHeader)
        properties = decode_properties_text(header.properties)
        try:
            self.pending.complete(_reply_message(header, properties, request.body, self._max_body_bytes))
        except ConversionError as exc:
            self.pending.fail(properties.get(Property.CORRELATION_ID, ""), exc)
        return None if request.is_one_way else request.response(ResponseCode.SUCCESS)

    # --- replies -------------------------------------------------------------------------------

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        """See `Requests.reply`."""
        reply = create_reply(request, body, {Property.TTL: _DEFAULT_TTL_MS, **(properties or {})})
        self._routes.cluster_topics.add(reply.topic)
        message = self._producer.factory.reply(reply.topic, body, reply.properties)
        self._producer.deliver(message, None, timeout_ms)


def _reply_message(
    header: ReplyMessageRequestHeader, properties: dict[str, str], body: bytes, max_body_bytes: int
) -> MessageExt:
    return MessageExt(
        topic=header.topic,
        body=decompress_body(body, header.sys_flag, max_body_bytes),
        properties=properties,
        flag=header.flag,
        broker_name=header.broker_name or "",
        queue_id=header.queue_id,
        queue_offset=0,
        physical_offset=0,
        store_size=len(body),
        sys_flag=header.sys_flag & ~SysFlag.COMPRESSED,
        body_crc=crc32(body),
        born_timestamp=header.born_timestamp,
        born_host=_host(header.born_host),
        store_timestamp=header.store_timestamp,
        store_host=_host(header.store_host),
        reconsume_times=header.reconsume_times or 0,
        prepared_transaction_offset=0,
    )


def _host(text: str) -> HostAddress:
    ip, _, port = text.lstrip("/").rpartition(":")
    number = parse_number(port) or 0
    return HostAddress(ip.strip("[]"), number if 0 < number < 1 << 16 else 0)
