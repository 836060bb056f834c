"""Methods of producers: routes, sends, ends of transactions, recalls.

Source: RocketMQ ``proxy: RouteActivity``, ``SendMessageActivity``, ``EndTransactionActivity``,
``RecallMessageActivity``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.engine.sends import StoredSend
from mqtemplate.engine.transactions import was_committed
from mqtemplate.errors import CorruptRecordError, StoreError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, GrpcMessageType, Permission, TransactionResolution
from mqtemplate.message import HostAddress, parse_offset_msg_id
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REAL_TOPIC, UNIQ_KEY, find_property
from mqtemplate.remoting.protocol.bodies.route import TopicConfig
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.results import TransactionState
from mqtemplate.server.core.producers import ClientTransactionEnd
from mqtemplate.server.core.sends import ClientSend
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.fast_path.pipelines import INLINE_MESSAGES
from mqtemplate.server.grpc_api.answers import GrpcAnswers, broker_of, ok
from mqtemplate.server.grpc_api.checks import accepted_types, check_message, check_topic_name, check_type, sent_type
from mqtemplate.server.grpc_api.context import GrpcContext
from mqtemplate.server.grpc_api.encoded import ok_answer
from mqtemplate.server.grpc_api.messages import delivered_message, queue_of_group, sent_properties
from mqtemplate.server.grpc_api.status import GrpcRefusedError, error_status, overall, status
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.response import call_when_durable
from mqtemplate.topics import HALF_TOPIC

_MAX_HALVES = 100_000
_MAX_CANDIDATES = 1_000
PLAIN_TYPES = frozenset({GrpcMessageType.NORMAL, GrpcMessageType.FIFO, GrpcMessageType.PRIORITY})
"""Types of messages that have neither a delay nor a transaction."""

_STATES = {
    TransactionResolution.COMMIT: TransactionState.COMMIT,
    TransactionResolution.ROLLBACK: TransactionState.ROLLBACK,
}


# --- routes ---------------------------------------------------------------------------------------


def queue_permissions(config: TopicConfig) -> list[Permission]:
    """Return the permission of each queue of a topic in a route: those for reading only, for writing only, for both."""
    reads = config.read_queue_nums if config.perm & Perm.READ else 0
    writes = config.write_queue_nums if config.perm & Perm.WRITE else 0
    both = min(reads, writes)
    queues = [Permission.READ] * (reads - both) + [Permission.WRITE] * (writes - both) + [Permission.READ_WRITE] * both
    return queues or [Permission.NONE] * max(1, config.read_queue_nums, config.write_queue_nums)


def route_queue(topic: Any, queue_id: int, permission: Permission, broker: Any, config: TopicConfig) -> Any:
    """Return a queue of a route. The *topic* is as the client named it."""
    return protos.MessageQueue(
        topic=topic,
        id=queue_id,
        permission=permission,
        broker=broker,
        accept_message_types=accepted_types(config.attributes),
    )


# --- sends ----------------------------------------------------------------------------------------


class CheckedMessage(NamedTuple):
    """A checked message."""

    send: ClientSend
    kind: GrpcMessageType
    message_id: str
    tag: str


class _Half(NamedTuple):
    """Position of a half message."""

    queue_offset: int
    physical_offset: int


class GrpcProducing:
    """The methods of producers. Each takes a context and a request, and returns the answer or None.

    Args:
        address: Returns the address of the endpoints in routes.

    Attributes:
        next_queue: Returns a number that counts up: messages without a queue of their own take turns.
    """

    def __init__(self, core: ServerCore, answers: GrpcAnswers, address: Callable[[], HostAddress]) -> None:
        self._core = core
        self._engine = engine = core.registration.engine
        self._store = engine.store
        self._answers = answers
        self._address = address
        self._max_body_bytes = engine.settings.max_message_size
        self._max_batch = core.settings.max_batch_messages
        self.next_queue = itertools.count().__next__
        # Where the half messages of open transactions are: recent ones, the index knows the others.
        self._halves: OrderedDict[tuple[str, str], _Half] = OrderedDict()

    # --- routes --------------------------------------------------------------------------------

    def query_route(self, context: GrpcContext, request: Any) -> Any:
        config = self._core.topics.get(check_topic_name(request.topic.name))
        broker = broker_of(self._engine.name, self._address())
        permissions = queue_permissions(config)
        queues = [route_queue(request.topic, at, each, broker, config) for at, each in enumerate(permissions)]
        return protos.QueryRouteResponse(status=ok(), message_queues=queues)

    # --- sends ---------------------------------------------------------------------------------

    def send(self, context: GrpcContext, request: Any) -> Any:
        messages = request.messages
        count = len(messages)
        if not count:
            raise GrpcRefusedError(Code.MESSAGE_CORRUPTED, "no message to send")
        if count > self._max_batch:
            raise GrpcRefusedError(
                Code.BAD_REQUEST,
                f"the request has {count} messages, allowed are {self._max_batch}; send fewer at once, or raise "
                "max-batch-messages",
            )
        topic = messages[0].topic.name
        config = self._core.topics.table.config(check_topic_name(topic))
        if config is None:
            self._core.topics.get(topic)  # raises the error; messages of this protocol create no topic
            config = {}
        if count > 1 and any(message.topic.name != topic for message in messages):
            raise GrpcRefusedError(Code.MESSAGE_CORRUPTED, "all messages of a request must have one topic")
        sends = [self.check(context.caller, message, config) for message in messages]
        count_queues = int(config.get("writeQueueNums", 0))
        for each, message in zip(sends, messages, strict=True):
            each.send.queue_id = self.queue(message.system_properties, each.kind, count_queues)
        topics = [self._core.sends.existing_topic(each.send) for each in sends]
        if None in topics or count > INLINE_MESSAGES:
            self._answers.later(context.call, lambda: self._store_sends(context, sends, topics))
            return None
        return self._store_sends(context, sends, topics)

    def check(self, caller: Caller, message: Any, config: dict[str, Any]) -> CheckedMessage:
        """Return a message as the core stores it, without the queue.

        Args:
            config: Settings of its topic, whose name was checked.

        Raises:
            GrpcRefusedError: It is invalid, or its topic does not accept it.
        """
        check_message(message, self._max_body_bytes)
        topic, system = message.topic.name, message.system_properties
        kind = sent_type(system)
        check_type(topic, kind, config.get("attributes") or {})
        if kind is GrpcMessageType.LITE:
            raise GrpcRefusedError(Code.NOT_IMPLEMENTED, "lite topics are not implemented; send to a NORMAL topic")
        text, sys_flag, born_ms = sent_properties(message, kind, caller.connection.remote.ip)
        send = ClientSend(caller, topic, message.body, text, -1, 0, sys_flag, born_ms, 0, topic)
        return CheckedMessage(send, kind, system.message_id, system.tag)

    def queue(self, system: Any, kind: GrpcMessageType, count: int) -> int:
        """Return the queue of a message. The queue that the client names has no effect."""
        if count <= 0:
            return -1
        if system.message_group:
            return queue_of_group(system.message_group, count)
        if kind is GrpcMessageType.PRIORITY:
            return min(int(system.priority), count - 1)
        return self.next_queue() % count

    def _store_sends(self, context: GrpcContext, sends: list[CheckedMessage], topics: list[str | None]) -> None:
        """Store messages, and answer when they are as durable as the flush mode requires."""
        if len(sends) == 1:
            results: list[StoredSend | Exception] = [self._store_send(sends[0], topics[0])]
        else:
            results = []
            for send, topic in zip(sends, topics, strict=True):
                try:
                    results.append(self._store_send(send, topic))
                except Exception as exc:  # the messages before it are stored: the entry of this one says why
                    results.append(exc)
        stored = [each for each in results if isinstance(each, StoredSend)]
        call = context.call

        def reply(error: StoreError | None) -> None:
            call.reply(_send_answer(sends, results, error))

        if not stored:
            reply(None)
            return
        woken = stored[0].topics if len(stored) == 1 else {topic for each in stored for topic in each.topics}
        call_when_durable(self._store, max(each.end for each in stored), woken, reply)

    def _store_send(self, checked: CheckedMessage, topic: str | None) -> StoredSend:
        send, kind, message_id, tag = checked
        if kind in PLAIN_TYPES and topic is not None and not send.is_retry:
            return self._core.sends.store_plain(send, message_id, tag)
        stored, _ = self._core.sends.store(send, topic)
        if kind is GrpcMessageType.TRANSACTION:
            _, physical_offset = parse_offset_msg_id(stored.offset_msg_id)
            self._remember(send.topic, message_id, _Half(stored.queue_offset, physical_offset))
        return stored

    # --- transactions --------------------------------------------------------------------------

    def _remember(self, topic: str, transaction_id: str, half: _Half) -> None:
        if len(self._halves) >= _MAX_HALVES:
            # Other threads change it: an iterator would fail.
            with contextlib.suppress(KeyError):
                self._halves.popitem(last=False)
        self._halves[topic, transaction_id] = half

    def check_command(self, check: TransactionCheck) -> bytes:
        """Return the command that checks a transaction: its message, as if it was delivered."""
        half = check.half
        transaction_id = find_property(half.properties_bytes, UNIQ_KEY) or ""
        self._remember(check.topic, transaction_id, _Half(half.queue_offset, half.physical_offset))
        message = delivered_message(half, check.topic, self._engine.settings.max_body_bytes())
        message.system_properties.queue_id = check.queue_id
        message.system_properties.delivery_attempt = half.reconsume_times + 1
        command = protos.TelemetryCommand()
        command.recover_orphaned_transaction_command.message.CopyFrom(message)
        command.recover_orphaned_transaction_command.transaction_id = transaction_id
        return bytes(command.SerializeToString())

    def end_transaction(self, context: GrpcContext, request: Any) -> Any:
        topic, transaction_id = check_topic_name(request.topic.name), request.transaction_id
        if not transaction_id.strip():
            raise GrpcRefusedError(
                Code.INVALID_TRANSACTION_ID, "the transaction id is blank; it is in the result of the send"
            )
        state = _STATES.get(request.resolution)
        if state is None:  # the producer does not know: the transaction is checked again
            return protos.EndTransactionResponse(status=ok())
        half = self._halves.pop((topic, transaction_id), None)
        if half is None or not self._end(context, topic, transaction_id, half, state):
            self._answers.later(context.call, lambda: self._end_found(context, topic, transaction_id, state))
        return None

    def _end(self, context: GrpcContext, topic: str, transaction_id: str, half: _Half, state: TransactionState) -> bool:
        """End a transaction, and answer when the end is durable. Return False if it has ended before."""
        request = ClientTransactionEnd(context.caller, topic, *half, state, transaction_id)
        end = self._core.transaction_ends.end(request)
        if end is None:
            return False

        def reply(error: StoreError | None) -> None:
            found = ok() if error is None else status(Code.MASTER_PERSISTENCE_TIMEOUT, str(error))
            context.call.reply(protos.EndTransactionResponse(status=found).SerializeToString())

        call_when_durable(self._store, end.physical_end, end.topics, reply)
        return True

    def _end_found(self, context: GrpcContext, topic: str, transaction_id: str, state: TransactionState) -> Any:
        """Find a half message by its id, and end its transaction. It may have the same end already."""
        record = self._find_half(topic, transaction_id)
        if record is None:
            raise GrpcRefusedError(
                Code.INTERNAL_SERVER_ERROR,
                f"there is no transaction {transaction_id[:64]!r} of topic {topic!r}; retention may have deleted it",
            )
        half = _Half(record.queue_offset, record.physical_offset)
        if self._end(context, topic, transaction_id, half, state):
            return None
        if was_committed(self._store, record) is not (state is TransactionState.COMMIT):
            raise GrpcRefusedError(
                Code.INTERNAL_SERVER_ERROR, f"transaction {transaction_id[:64]!r} has ended with the other outcome"
            )
        return protos.EndTransactionResponse(status=ok())

    def _find_half(self, topic: str, transaction_id: str) -> StoredRecord | None:
        """Return the newest half message with an id: a check stores it again."""
        candidates = self._store.index.candidates(HALF_TOPIC, transaction_id)
        for physical_offset in itertools.islice(candidates, _MAX_CANDIDATES):
            try:
                record = self._store.read_at(physical_offset)
            except CorruptRecordError:
                continue
            if (
                record is not None
                and record.topic == HALF_TOPIC
                and find_property(record.properties_bytes, UNIQ_KEY) == transaction_id
                and find_property(record.properties_bytes, REAL_TOPIC) == topic
            ):
                return record
        return None

    # --- recalls -------------------------------------------------------------------------------

    def recall(self, context: GrpcContext, request: Any) -> Any:
        topic = check_topic_name(request.topic.name)
        check_type(topic, GrpcMessageType.DELAY, self._core.topics.get(topic).attributes)
        if not request.recall_handle:
            raise GrpcRefusedError(
                Code.INTERNAL_SERVER_ERROR, "the recall handle is empty; it is in the result of the send"
            )
        self._answers.later(context.call, lambda: self._recalled(topic, request.recall_handle))
        return None

    def _recalled(self, topic: str, handle: str) -> Any:
        message_id = self._core.recalls.recall(topic, handle)
        return protos.RecallMessageResponse(status=ok(), message_id=message_id)


def unflushed_answer(error: StoreError) -> bytes:
    """Return the answer to a send of one message that is stored, but may not survive a crash."""
    found = status(Code.MASTER_PERSISTENCE_TIMEOUT, str(error))
    answer = protos.SendMessageResponse(status=found, entries=[protos.SendResultEntry(status=found)])
    return bytes(answer.SerializeToString())


def _send_answer(sends: list[CheckedMessage], results: list[StoredSend | Exception], error: StoreError | None) -> bytes:
    """Return the answer to a send.

    Args:
        error: Of the flush: the messages are stored, but may not survive a crash.
    """
    first = results[0]
    if len(results) == 1 and error is None and isinstance(first, StoredSend) and first.handle is None:
        return ok_answer(sends[0].message_id, first.queue_offset)
    if len(results) == 1 and error is not None:
        return unflushed_answer(error)
    answer, codes = protos.SendMessageResponse(), []
    for send, result in zip(sends, results, strict=True):
        entry = answer.entries.add()
        if isinstance(result, Exception):
            entry.status.CopyFrom(error_status(result))
        elif error is not None:
            entry.status.CopyFrom(status(Code.MASTER_PERSISTENCE_TIMEOUT, str(error)))
        else:
            entry.status.code, entry.status.message = Code.OK, "OK"
            entry.message_id = entry.transaction_id = send.message_id
            entry.offset = result.queue_offset
            if result.handle:
                entry.recall_handle = result.handle
        codes.append(Code(entry.status.code))
    code = overall(codes)
    if len(results) == 1 and code is not Code.OK:
        answer.status.CopyFrom(answer.entries[0].status)
    else:
        answer.status.code, answer.status.message = code, code.name
    return bytes(answer.SerializeToString())
