"""Codes 10, 310 and 320: producers send messages. Code 36: consumers send messages back that they could not handle.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor.consumerSendMsgBack``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial

from mqtemplate.engine.engine import Engine
from mqtemplate.engine.message_writer import StoredBatch
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.engine.retries import dead_letter, is_exhausted, retry
from mqtemplate.errors import MessageError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import (
    DELAY_PROPERTIES,
    RESERVED_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    Property,
    copy_properties,
    offset_msg_id,
    valid_time,
)
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.dead_letter import CAUSES
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.record.properties import decode_properties
from mqtemplate.record.properties_template import AddedProperties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import count_batch, split_batch
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.fast_path.pipelined_batches import INLINE_MESSAGES, read_uniform
from mqtemplate.server.fast_path.send_responses import SendResponses, added_properties
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError, reply_when_durable
from mqtemplate.server.state.creations import ClientCreations
from mqtemplate.server.state.groups import max_reconsume_times
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_pack_host = lru_cache(maxsize=65_536)(pack_host)
_Origin = tuple[int, int, bytes, int]
"""Sys flag, born timestamp, born host and reconsume times: they follow from the request header and the connection."""


@dataclass(slots=True)
class SendProcessor:
    """Stores the messages of producers, and replies when they are as durable as the flush mode requires.

    A stored message equals one that an embedded broker stores. In addition it has the producer's address, the cluster
    name and the fields of the request header. Messages of a batch have no further properties, as with RocketMQ 5.5.0.
    """

    engine: Engine
    settings: BrokerServerSettings
    topics: TopicConfigs
    creations: ClientCreations
    locks: QueueLockTable
    access: AccessControl
    deferred_work: DeferredWork
    fast_path: bool = True
    _properties: AddedProperties = field(init=False)
    _batch_properties: AddedProperties = field(init=False)
    _responses: SendResponses = field(init=False)

    def __post_init__(self) -> None:
        added = added_properties(self.settings)
        self._properties = AddedProperties(added, decodes_all=not self.fast_path)
        self._batch_properties = AddedProperties({}, decodes_all=not self.fast_path)
        self._responses = SendResponses(added)

    @handles(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, max_body_bytes=None)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_MESSAGE
        sent = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        topic: str | None = sent.topic
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            group = self.creations.groups.find(sent.topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = None if group is None else self._retry_target(sent, group, request.version)
        if topic is None or not self.topics.has_queue(topic, sent.queue_id if topic is sent.topic else -1):
            create = partial(self._create_and_store, connection, request, sent)
            return self.deferred_work.run(connection, request, create)
        self._store(connection, request, sent, topic)
        return None

    def _create_and_store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader
    ) -> None:
        topic = sent.topic
        if topic.startswith(RETRY_TOPIC_PREFIX):
            group = self.creations.group(connection, request, topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = self._retry_target(sent, group, request.version)
            self.topics.create_group_topic(topic, 1)
        else:
            self.creations.topic(connection, request, topic, sent.default_topic, sent.default_topic_queue_nums)
        if topic is sent.topic and sent.queue_id >= 0:
            self.engine.store.prepare(topic, self.topics.queue(topic, sent.queue_id))
        self._store(connection, request, sent, topic)

    def _retry_target(self, sent: SendMessageRequestHeader, group: SubscriptionGroupConfig, version: int) -> str:
        """Return the retry topic, or the dead letter topic after the last retry. RocketMQ 5: ``handleRetryAndDLQ``.

        An ordered consumer retries in its own process. It sends a message here only after its last retry, so the
        message is a dead letter: from the retry topic it would be consumed again, out of order.
        """
        max_times = max_reconsume_times(group, sent.max_reconsume_times, version)
        is_dead = (sent.reconsume_times or 0) > max_times or self.locks.is_ordered(group.group_name)
        return DLQ_TOPIC_PREFIX + group.group_name if is_dead else sent.topic

    # --- storing -------------------------------------------------------------------------------

    def _store(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> None:
        if sent.batch or request.code == RequestCode.SEND_BATCH_MESSAGE:
            self._check_and_store_batch(connection, request, sent, topic)
            return
        is_dead = topic is not sent.topic
        queue_id = self.topics.queue(topic, -1 if is_dead else sent.queue_id)
        complete = None if is_dead else self._properties.complete_text(sent.properties)
        if complete is None:
            stored = self._store_decoded(connection, request, sent, topic, queue_id, is_dead=is_dead)
        else:
            engine = self.engine
            draft = engine.drafts.make_complete(
                topic, queue_id, request.body, complete.encoded, complete.tags_code, engine.clock.now_ms()
            )
            draft.flag = sent.flag
            _set_origin(draft, _origin(sent, connection.remote))
            put = engine.writer.put(draft, topic, queue_id)
            msg_id = offset_msg_id(engine.settings.listen_host, put.physical_offset)
            stored = StoredBatch(put.end, (topic,), complete.unique_id, msg_id, put.queue_offset, None)
        self._reply(connection, request, queue_id, stored, stored.msg_id)

    def _store_decoded(
        self,
        connection: Connection,
        request: RemotingCommand,
        sent: SendMessageRequestHeader,
        topic: str,
        queue_id: int,
        *,
        is_dead: bool,
    ) -> StoredBatch:
        """Store a message that may be delayed or in a transaction."""
        engine = self.engine
        properties = self._properties.complete(decode_properties_text(sent.properties))
        if is_dead:
            properties = copy_properties(properties, *DELAY_PROPERTIES)
        message, now_ms, handle = Message(topic, request.body, properties, sent.flag), engine.clock.now_ms(), None
        message = self._checked(request, message)
        topics: tuple[str, ...] = ()
        if _is_half(message, sent):
            group = properties.get(Property.PRODUCER_GROUP) or sent.producer_group
            draft, unique_id = engine.drafts.make_half(message, group, queue_id, now_ms)
            _set_origin(draft, _origin(sent, connection.remote))
            # The response has the offset in the half topic. A half message has no readers to notify.
            put = engine.transactions.prepare(draft)
        else:
            draft, unique_id = engine.drafts.make(message, queue_id, now_ms)
            _set_origin(draft, _origin(sent, connection.remote))
            put, topics = engine.writer.put(draft, topic, queue_id), (draft.topic,)
            if draft.topic != topic and not topic.startswith(RETRY_TOPIC_PREFIX):
                handle = engine.writer.handle(draft, put, topic)
        msg_id = offset_msg_id(engine.settings.listen_host, put.physical_offset)
        return StoredBatch(put.end, topics, unique_id, msg_id, put.queue_offset, handle)

    def _check_and_store_batch(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> None:
        """Check the size and the number of messages before they are read; read a long batch in another thread."""
        limit, max_count = self.engine.settings.max_message_size, self.settings.max_batch_messages
        if len(request.body) > limit:
            raise MessageError(
                f"the batch for {topic!r} has {len(request.body)} bytes, allowed are {limit}; send fewer messages at "
                "once, or raise max-message-size"
            )
        count = count_batch(request.body, max_count)
        if count > max_count:
            raise MessageError(
                f"the batch for {topic!r} has more than {max_count} messages; send fewer at once, or raise "
                "max-batch-messages"
            )
        store = partial(self._store_batch, connection, request, sent, topic)
        if count > INLINE_MESSAGES:
            self.deferred_work.run(connection, request, store)
        else:
            store()

    def _store_batch(
        self, connection: Connection, request: RemotingCommand, sent: SendMessageRequestHeader, topic: str
    ) -> None:
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            raise MessageError(
                f"a batch cannot be sent to the retry topic {sent.topic!r}; send its messages one by one"
            )
        queue_id = self.topics.queue(topic, sent.queue_id)
        origin = _origin(sent, connection.remote)
        uniform = read_uniform(request.body, self._batch_properties)
        if uniform is None:
            stored = self._put_messages(request, topic, queue_id, origin)
        else:
            stored = self.engine.writer.put_alike(uniform.sent_batch(topic, queue_id, *origin))
        unique_id = decode_properties_text(sent.properties).get(Property.UNIQ_KEY)
        self._reply(connection, request, queue_id, stored, unique_id)

    def _checked(self, request: RemotingCommand, message: Message) -> Message:
        has_origin = message.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
        return self.access.checked_origin(request, message) if has_origin else message

    def _put_messages(self, request: RemotingCommand, topic: str, queue_id: int, origin: _Origin) -> StoredBatch:
        """Store messages of any kind, one after the other."""
        messages = split_batch(request.body)
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        now_ms = self.engine.clock.now_ms()
        drafts, ids = [], []
        for body, encoded, flag in messages:
            complete = self._batch_properties.complete_encoded(encoded)
            if complete is None:
                decoded = self._batch_properties.complete(decode_properties(encoded))
                message = self._checked(request, Message(topic, body, decoded, flag))
                draft, unique_id = self.engine.drafts.make(message, queue_id, now_ms)
                _set_origin(draft, origin)
            else:
                properties, code, unique_id = complete
                draft = RecordDraft(topic, queue_id, body, properties, code, -1, flag, *origin)
            drafts.append(draft)
            ids.append(unique_id)
        return self.engine.writer.put_batch(drafts, ids, topic, queue_id)

    def _reply(
        self,
        connection: Connection,
        request: RemotingCommand,
        queue_id: int,
        stored: StoredBatch,
        unique_id: str | None,
    ) -> None:
        """Reply with the positions of the messages when they are durable."""
        store = self.engine.store
        if request.is_one_way:
            store.confirm_async(stored.end, stored.topics)
            return
        header = self._responses.header(stored.offset_msg_id, queue_id, stored.queue_offset, unique_id, stored.handle)
        reply_when_durable(
            store, connection, request, stored.end, stored.topics, header, ResponseCode.FLUSH_DISK_TIMEOUT
        )


def _origin(sent: SendMessageRequestHeader, remote: HostAddress) -> _Origin:
    times = max(sent.reconsume_times or 0, 0)
    return sent.sys_flag & SysFlag.OF_CLIENTS, valid_time(sent.born_timestamp), _pack_host(remote), times


def _set_origin(draft: RecordDraft, origin: _Origin) -> None:
    draft.sys_flag, draft.born_timestamp, draft.born_host, draft.reconsume_times = origin


def _is_half(message: Message, sent: SendMessageRequestHeader) -> bool:
    """Return True for a message whose transaction is open. A retry of a committed message has the same property."""
    is_retry = sent.topic.startswith(RETRY_TOPIC_PREFIX) or (sent.reconsume_times or 0) > 0
    return message.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true" and not is_retry


@dataclass(frozen=True, slots=True)
class SendBackProcessor:
    """Stores the message again: delayed in the retry topic of the group, or in its dead letter topic.

    The physical offset identifies the message. Its body is stored as it was, compressed or not.
    """

    engine: Engine
    topics: TopicConfigs
    creations: ClientCreations
    access: AccessControl
    deferred_work: DeferredWork
    peer_log: LimitedLog

    @handles(RequestCode.CONSUMER_SEND_MSG_BACK)
    def _send_back(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ConsumerSendMsgBackRequestHeader)
        work = partial(self._store_again, connection, request, header)
        if self.creations.groups.find(header.group) is not None:
            return work()
        return self.deferred_work.run(connection, request, work)

    def _store_again(
        self, connection: Connection, request: RemotingCommand, header: ConsumerSendMsgBackRequestHeader
    ) -> RemotingCommand | None:
        engine, group = self.engine, self.creations.group(connection, request, header.group)
        if group.retry_queue_nums <= 0:
            return request.response()  # The group has no retries.
        record = engine.store.read_at(header.offset) if header.offset >= 0 else None
        if record is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"no message starts at physical offset {header.offset}; retention may have deleted it",
            )
        # The copy is readable with a right to the group only, so the request would read any message.
        self.access.check_topic(request, record.topic, Right.SUB, f"the message at physical offset {header.offset}")
        # Without the flag the body is not decompressed: it is stored again as it is.
        original = to_message_ext(record._replace(sys_flag=record.sys_flag & ~SysFlag.COMPRESSED), engine.name)
        max_times = max_reconsume_times(group, header.max_reconsume_times, request.version)
        message = _new_message(original, header, max_times, self.peer_log)
        origin_topic = message.properties[Property.RETRY_TOPIC]
        may_send = self.access.may(self.access.key_of(request), origin_topic, Right.PUB)
        message.properties |= _added_properties(header.properties, may_send=may_send)

        def store() -> None:
            is_dead = message.topic.startswith(DLQ_TOPIC_PREFIX)
            self.topics.create_group_topic(message.topic, 1 if is_dead else group.retry_queue_nums)
            queue_id = self.topics.queue(message.topic, -1)
            draft = engine.drafts.make_send_back(message, original, queue_id, engine.clock.now_ms())
            draft.sys_flag = record.sys_flag & SysFlag.OF_CLIENTS
            put = engine.writer.put(draft, message.topic, queue_id)
            reply_when_durable(engine.store, connection, request, put.end, (draft.topic,))

        if not self.topics.has(message.topic):
            return self.deferred_work.run(connection, request, store)
        store()
        return None


def _new_message(
    original: MessageExt, header: ConsumerSendMsgBackRequestHeader, max_times: int, log: LimitedLog
) -> Message:
    """Return the message for the retry topic, or for the dead letter topic after the last retry."""
    if is_exhausted(original, header.delay_level, max_times):
        message = dead_letter(original, header.group)
        log.warning(
            "server.dead_letter", group=header.group, topic=original.topic, msg_id=original.msg_id, times=max_times
        )
    else:
        message = retry(original, header.group, header.delay_level)
        if header.delay_ms is not None:
            del message.properties[Property.DELAY]
            message.properties[Property.TIMER_DELAY_MS] = str(header.delay_ms)
    message.properties[Property.WAIT] = "false"
    return message


def _added_properties(text: str | None, *, may_send: bool) -> dict[str, str]:
    """Return the properties that a consumer adds to a message that it sends back.

    Args:
        may_send: The account may send to the topic of the message. If not, it may only add the cause of the failure:
            an operator may send the dead letter to that topic again.
    """
    added = decode_properties_text(text)
    return {
        name: value for name, value in added.items() if name in CAUSES or (may_send and name not in RESERVED_PROPERTIES)
    }
