"""Codes 10, 310 and 320: producers send messages. Code 500,010: sequenced sends, whose repeats are dropped.
Code 36: consumers send messages back that they could not handle.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor.consumerSendMsgBack``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from mqtemplate.engine.clients import Owner
from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.engine.sends import StoredSend, permitted_properties, send_back_of_record
from mqtemplate.errors import MessageError, SendError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import DELAY_PROPERTIES, Message, Property, SendSequence, copy_properties, valid_time
from mqtemplate.record.codec import EncodedMessage, RecordDraft, pack_host
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties
from mqtemplate.record.properties_template import AddedProperties, CompleteProperties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.own_requests import SendSequencedRequestHeader, SendSequencedResponseHeader
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import count_batch, decode_properties_text, split_batch
from mqtemplate.remoting.protocol.sequenced import decode_queue_batches, read_queue_batches
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.fast_path.pipelines import INLINE_MESSAGES, read_uniform
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import RefusedError, SendResponses, reply_when_durable
from mqtemplate.server.state.groups import ClientCreations, max_reconsume_times
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import AUTO_CREATE_TOPIC, DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_MAX_SEQUENCED_BYTES = 16 << 20
"""As many as a frame: one message may have megabytes. Clients send many small ones in requests of 1 MiB."""

_pack_host = lru_cache(maxsize=65_536)(pack_host)


class _Send(NamedTuple):
    """A request to store one message or a batch, with its decoded header."""

    connection: Connection
    request: RemotingCommand
    header: SendMessageRequestHeader
    is_batch: bool

    @property
    def origin(self) -> SendOrigin:
        header, born_host = self.header, _pack_host(self.connection.remote)
        times = max(header.reconsume_times or 0, 0)
        return SendOrigin(header.sys_flag & SysFlag.OF_CLIENTS, valid_time(header.born_timestamp), born_host, times)

    @property
    def is_retry(self) -> bool:
        return self.header.topic.startswith(RETRY_TOPIC_PREFIX)


@dataclass(slots=True)
class SendProcessor:
    """Stores the messages of producers, and replies when they are as durable as the flush mode requires.

    A stored message equals one that an embedded broker stores. In addition it has the producer's address, the cluster
    name and the fields of the request header. Messages of a batch have no further properties, as with RocketMQ 5.5.0.

    The topic of a send is found or created, the messages are stored in it, and their positions become the response:
    each of these steps calls the next one, and only the last returns something.
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
        added = self.settings.added_properties()
        self._properties = AddedProperties(added, decodes_all=not self.fast_path)
        self._batch_properties = AddedProperties({}, decodes_all=not self.fast_path)
        self._responses = SendResponses(added)

    # --- the topic -----------------------------------------------------------------------------

    @handles(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, max_body_bytes=None)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_MESSAGE
        header = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        send = _Send(connection, request, header, header.batch or request.code == RequestCode.SEND_BATCH_MESSAGE)
        topic = self._existing_topic(send)
        if topic is None:
            return self.deferred_work.run(connection, request, partial(self._create_and_store, send))
        return self._store_here_or_deferred(send, topic)

    def _existing_topic(self, send: _Send) -> str | None:
        """Return the topic to store in; None if it, its queue or its group has to be created."""
        header, topic = send.header, send.header.topic
        if send.is_retry:
            group = self.creations.groups.find(topic.removeprefix(RETRY_TOPIC_PREFIX))
            if group is None:
                return None
            topic = self._retry_target(send, group)
        return topic if self.topics.has_queue(topic, header.queue_id if topic is header.topic else -1) else None

    def _create_and_store(self, send: _Send) -> RemotingCommand | None:
        header, topic = send.header, send.header.topic
        owner = self.creations.limits.owner(send.connection, send.request)
        if send.is_retry:
            group = self.creations.group(owner, topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = self._retry_target(send, group)
            self.topics.create_group_topic(topic, 1)
        else:
            self.creations.topic(owner, topic, header.default_topic, header.default_topic_queue_nums)
        if topic is header.topic and header.queue_id >= 0:
            self.engine.store.prepare(topic, self.topics.queue(topic, header.queue_id))
        return self._store_here_or_deferred(send, topic)

    def _retry_target(self, send: _Send, group: SubscriptionGroupConfig) -> str:
        """Return the retry topic, or the dead letter topic after the last retry. RocketMQ 5: ``handleRetryAndDLQ``.

        An ordered consumer retries in its own process. It sends a message here only after its last retry, so the
        message is a dead letter: from the retry topic it would be consumed again, out of order.
        """
        header = send.header
        max_times = max_reconsume_times(group, header.max_reconsume_times, send.request.version)
        is_dead = (header.reconsume_times or 0) > max_times or self.locks.is_ordered(group.group_name)
        return DLQ_TOPIC_PREFIX + group.group_name if is_dead else header.topic

    # --- storing -------------------------------------------------------------------------------

    def _store_here_or_deferred(self, send: _Send, topic: str) -> RemotingCommand | None:
        """Store in this thread, or a long batch in another one."""
        if send.is_batch and self._checked_count(send, topic) > INLINE_MESSAGES:
            return self.deferred_work.run(send.connection, send.request, partial(self._store, send, topic))
        self._store(send, topic)
        return None

    def _checked_count(self, send: _Send, topic: str) -> int:
        """Return the number of messages in a batch. Its size and this number are checked before they are read."""
        size, limit = len(send.request.body), self.engine.settings.max_message_size
        max_count = self.settings.max_batch_messages
        if size > limit:
            raise MessageError(
                f"the batch for {topic!r} has {size} bytes, allowed are {limit}; send fewer messages at "
                "once, or raise max-message-size"
            )
        count = count_batch(send.request.body, max_count)
        if count > max_count:
            raise MessageError(
                f"the batch for {topic!r} has more than {max_count} messages; send fewer at once, or raise "
                "max-batch-messages"
            )
        return count

    def _store(self, send: _Send, topic: str) -> None:
        """Store the message or the batch, and reply with the positions when it is durable."""
        header = send.header
        if send.is_batch and send.is_retry:
            raise MessageError(
                f"a batch cannot be sent to the retry topic {header.topic!r}; send its messages one by one"
            )
        is_dead = topic is not header.topic
        queue_id = self.topics.queue(topic, -1 if is_dead else header.queue_id)
        if send.is_batch:
            stored = self._put_batch(send, topic, queue_id)
            unique_id = decode_properties_text(header.properties).get(Property.UNIQ_KEY)
        else:
            complete = None if is_dead else self._properties.complete_text(header.properties)
            if complete is None:
                stored = self._put_decoded(send, topic, queue_id)
            else:
                stored = self._put_complete(send, queue_id, complete)
            unique_id = stored.msg_id
        self._reply(send, queue_id, stored, unique_id)

    def _put_complete(self, send: _Send, queue_id: int, complete: CompleteProperties) -> StoredSend:
        """Store a message without decoding its properties."""
        engine, header = self.engine, send.header
        message = EncodedMessage(header.topic, send.request.body, complete.encoded, header.flag)
        draft = engine.drafts.make_complete(message, queue_id, complete.tags_code, send.origin)
        return engine.writer.store(draft, complete.unique_id, header.topic, queue_id)

    def _put_decoded(self, send: _Send, topic: str, queue_id: int) -> StoredSend:
        """Store a message that may be delayed, in a transaction, or a dead letter."""
        writer, header = self.engine.writer, send.header
        properties = self._properties.complete(decode_properties_text(header.properties))
        if topic is not header.topic:
            properties = copy_properties(properties, *DELAY_PROPERTIES)
        message = self._checked(send.request, Message(topic, send.request.body, properties, header.flag))
        # A retry of a committed message has the property of an open transaction as well.
        is_half = message.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
        if is_half and not send.is_retry and (header.reconsume_times or 0) <= 0:
            group = properties.get(Property.PRODUCER_GROUP) or header.producer_group
            return writer.send_half(message, group, queue_id, send.origin)
        stored = writer.send(message, queue_id, send.origin)
        return stored._replace(handle=None) if topic.startswith(RETRY_TOPIC_PREFIX) else stored

    def _put_batch(self, send: _Send, topic: str, queue_id: int) -> StoredSend:
        """Store a batch at once if its messages are uniform, else one message after the other."""
        engine, request, origin, added = self.engine, send.request, send.origin, self._batch_properties
        uniform = read_uniform(request.body, added)
        if uniform is not None:
            return engine.writer.store_uniform(uniform.batch(topic, queue_id, origin))
        messages = split_batch(request.body)
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        now_ms = engine.clock.now_ms()
        drafts, ids = [], []
        for body, encoded, flag in messages:
            complete = added.complete_encoded(encoded)
            if complete is None:
                decoded = added.complete(decode_properties(encoded))
                message = self._checked(request, Message(topic, body, decoded, flag))
                draft, unique_id = engine.drafts.make(message, queue_id, now_ms, origin)
            else:
                properties, code, unique_id = complete
                draft = RecordDraft(topic, queue_id, body, properties, code, flag, *origin)
            drafts.append(draft)
            ids.append(unique_id)
        return engine.writer.store_all(drafts, ids, topic, queue_id)

    def _checked(self, request: RemotingCommand, message: Message) -> Message:
        has_origin = message.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
        return self.access.checked_origin(self.access.key_of(request), message) if has_origin else message

    def _reply(self, send: _Send, queue_id: int, stored: StoredSend, unique_id: str | None) -> None:
        """Reply with the positions of the messages when they are durable."""
        store = self.engine.store
        if send.request.is_one_way:
            store.confirm_async(stored.end, stored.topics)
            return
        header = self._responses.header(stored.offset_msg_id, queue_id, stored.queue_offset, unique_id, stored.handle)
        failure = ResponseCode.FLUSH_DISK_TIMEOUT
        reply_when_durable(store, send.connection, send.request, stored.end, stored.topics, header, failure)


@dataclass(frozen=True, slots=True)
class SequencedSendProcessor:
    """Stores the messages of a sequenced send that are not stored yet, and replies when all of them are durable.

    RocketMQ has no such request: see `mqtemplate.message.SendSequence`.
    """

    engine: Engine
    creations: ClientCreations
    access: AccessControl
    default_topic_queue_nums: int

    @handles(RequestCode.SEND_SEQUENCED_MESSAGES, slow=True, max_body_bytes=_MAX_SEQUENCED_BYTES)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(SendSequencedRequestHeader)
        batches = list(read_queue_batches(request.body))
        self._create_topics(self.creations.limits.owner(connection, request), {batch.topic for batch in batches})
        for topic, queue_id in {(batch.topic, batch.queue_id) for batch in batches}:
            if queue_id < 0:
                raise MessageError(f"a sequenced send names the queue of each message, got {queue_id} for {topic!r}")
            self.creations.topics.queue(topic, queue_id)
        born_host = pack_host(connection.remote)

        def complete(draft: RecordDraft) -> None:
            draft.born_host, draft.born_timestamp = born_host, valid_time(header.born_timestamp)

        sequence = SendSequence(header.app_id, header.version, header.partition, header.first)
        account = self.access.key_of(request)
        messages = [
            # A message with an origin is decoded, and it may not be a false one.
            (self.access.checked_origin(account, each) if isinstance(each, Message) else each, queue_id)
            for each, queue_id in decode_queue_batches(batches)
        ]
        try:
            result, end, topics = self.engine.sequences.put(messages, sequence, complete, account or "")
        except SendError as exc:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, str(exc)) from exc
        answer = SendSequencedResponseHeader(stored=result.stored, repeated=result.repeated)
        if self.engine.store.confirm(end, topics):
            return request.response(ResponseCode.SUCCESS, answer)
        return request.response(ResponseCode.FLUSH_DISK_TIMEOUT, remark="stored, but not flushed in time; send again")

    def _create_topics(self, owner: Owner, topics: Iterable[str]) -> None:
        """Create missing topics and groups, within the limits that hold for ordinary messages."""
        for topic in topics:
            if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
                group = topic.removeprefix(RETRY_TOPIC_PREFIX).removeprefix(DLQ_TOPIC_PREFIX)
                self.creations.group(owner, group)
                self.creations.topics.create_group_topic(topic, 1)
            else:
                self.creations.topic(owner, topic, AUTO_CREATE_TOPIC, self.default_topic_queue_nums)


@dataclass(frozen=True, slots=True)
class SendBackProcessor:
    """Stores the message again: delayed in the retry topic of the group, or in its dead letter topic.

    The physical offset identifies the message. The engine decides about its copy: see `send_back_of_record`.
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
        engine, owner = self.engine, self.creations.limits.owner(connection, request)
        group = self.creations.group(owner, header.group)
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
        max_times = max_reconsume_times(group, header.max_reconsume_times, request.version)
        sent_back = send_back_of_record(
            record, engine.name, header.group, header.delay_level, header.delay_ms, max_times
        )
        original, message, _ = sent_back
        if sent_back.is_dead:
            self.peer_log.warning(
                "server.dead_letter", group=header.group, topic=original.topic, msg_id=original.msg_id, times=max_times
            )
        origin_topic = message.properties[Property.RETRY_TOPIC]
        may_send = self.access.may(self.access.key_of(request), origin_topic, Right.PUB)
        message.properties |= permitted_properties(decode_properties_text(header.properties), may_send=may_send)

        def store() -> None:
            self.topics.create_group_topic(message.topic, 1 if sent_back.is_dead else group.retry_queue_nums)
            stored = engine.writer.send_back(sent_back, self.topics.queue(message.topic, -1))
            reply_when_durable(engine.store, connection, request, stored.end, stored.topics)

        if not self.topics.table.has(message.topic):
            return self.deferred_work.run(connection, request, store)
        store()
        return None
