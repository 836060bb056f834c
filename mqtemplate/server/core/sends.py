"""Every way in which clients store messages, in any protocol: send, sequenced send, and send back.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor.consumerSendMsgBack``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mqtemplate.broker import QueuedMessage
from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.engine.sends import SentBackCopy, StoredSend, permitted_properties, send_back_of_record
from mqtemplate.engine.topics import queue_of_priority
from mqtemplate.errors import MessageError, SendError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import (
    DELAY_PROPERTIES,
    Message,
    MessageQueue,
    Property,
    SendSequence,
    copy_properties,
    valid_time,
)
from mqtemplate.record.codec import EncodedMessage, RecordDraft, pack_host
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import PRIORITY_PROPERTY, decode_properties
from mqtemplate.record.properties_template import AddedProperties, CompleteProperties
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.messages import count_batch, decode_batch, decode_properties_text, split_batch
from mqtemplate.remoting.protocol.sequenced import QueueBatch, decode_queue_batches
from mqtemplate.results import SequencedResult
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.core.batches import read_uniform
from mqtemplate.server.core.producers import ClientRecalls
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError, decode_handles
from mqtemplate.server.state.groups import ClientCreations, max_reconsume_times
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import AUTO_CREATE_TOPIC, DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_pack_host = lru_cache(maxsize=65_536)(pack_host)


@dataclass(slots=True)  # frozen it would take three times as long to make, a tuple twice as long (measured)
class ClientSend:
    """One message of a client, or a batch, to store.

    Attributes:
        body: Of a batch: its messages, as `encode_batch` returns them.
        properties: Text of `encode_properties_text`; None without any. Of a batch they have no effect.
        queue_id: If negative, the broker chooses a queue.
        flag: The application's number.
        sys_flag: Bits of `SysFlag`. Only those that a client may set count.
        reconsume_times: Number of failed attempts, of a message to a retry topic.
        producer_group: Of a half message without the property.
        default_topic: Topic whose settings a new topic gets if this message creates it.
        default_topic_queue_nums: Largest number of queues of such a topic.
        max_reconsume_times: After so many attempts a message to a retry topic is a dead letter. None: see its group.
    """

    caller: Caller
    topic: str
    body: bytes
    properties: str | None = None
    queue_id: int = -1
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    reconsume_times: int = 0
    producer_group: str = ""
    default_topic: str = AUTO_CREATE_TOPIC
    default_topic_queue_nums: int = 4
    max_reconsume_times: int | None = None
    is_batch: bool = False

    @property
    def origin(self) -> SendOrigin:
        """The fields of its records that are not the message's."""
        born_host, times = _pack_host(self.caller.connection.remote), max(self.reconsume_times, 0)
        return SendOrigin(self.sys_flag & SysFlag.OF_CLIENTS, valid_time(self.born_timestamp), born_host, times)

    @property
    def is_retry(self) -> bool:
        """True if the topic is the retry topic of a group."""
        return self.topic.startswith(RETRY_TOPIC_PREFIX)


@dataclass(slots=True)
class ClientSends:
    """Stores messages of clients. `MessageStore.confirm` waits until they are as durable as the flush mode requires.

    A stored message equals one that an embedded broker stores. In addition it has the producer's address, the cluster
    name and the fields of the request. Messages of a batch have no further properties, as with RocketMQ 5.5.0.

    Attributes:
        decodes_all: Decode all properties; see `AddedProperties`.

    Raises:
        RefusedError: The topic, its queue or its group is missing, may not be created, or is not writable.
        MessageError: A message or a batch is invalid or too large.
        StoreError: The store cannot store it now, or a table could not be written.
    """

    engine: Engine
    settings: BrokerServerSettings
    topics: TopicConfigs
    creations: ClientCreations
    locks: QueueLockTable
    access: AccessControl
    recalls: ClientRecalls
    decodes_all: bool = False
    _properties: AddedProperties = field(init=False)
    _batch_properties: AddedProperties = field(init=False)

    def __post_init__(self) -> None:
        self._properties = AddedProperties(self.settings.added_properties(), decodes_all=self.decodes_all)
        self._batch_properties = AddedProperties({}, decodes_all=self.decodes_all)

    # --- the topic -----------------------------------------------------------------------------

    def existing_topic(self, send: ClientSend) -> str | None:
        """Return the topic to store in: of a retry the retry topic or the dead letter topic.

        None if it, its queue or its group has to be created, for which a table or a file is written.
        """
        topic = send.topic
        if send.is_retry:
            group = self.creations.groups.find(topic.removeprefix(RETRY_TOPIC_PREFIX))
            if group is None:
                return None
            topic = self._retry_target(send, group)
        queue_id = self._queue_id(send) if topic == send.topic else -1
        return topic if self.topics.has_queue(topic, queue_id) else None

    def _queue_id(self, send: ClientSend) -> int:
        """Return the queue ID of a message: the one of its priority, if it has one. Negative: any queue."""
        text = send.properties
        if not text or PRIORITY_PROPERTY not in text or send.is_batch or send.is_retry:
            return send.queue_id
        count = int((self.topics.table.config(send.topic) or {}).get("writeQueueNums", 0))
        of_priority = queue_of_priority(decode_properties_text(text), count)
        return send.queue_id if of_priority is None else of_priority

    def _created_topic(self, send: ClientSend) -> str:
        """Return the topic to store in, after it, its queue and its group were created if they are missing."""
        topic = send.topic
        if send.is_retry:
            group = self.creations.group(send.caller, topic.removeprefix(RETRY_TOPIC_PREFIX))
            topic = self._retry_target(send, group)
            self.topics.create_group_topic(topic, 1)
        else:
            self.creations.topic(send.caller, topic, send.default_topic, send.default_topic_queue_nums)
        if topic == send.topic and (queue_id := self._queue_id(send)) >= 0:
            self.engine.store.prepare(topic, self.topics.queue(topic, queue_id))
        return topic

    def _retry_target(self, send: ClientSend, group: SubscriptionGroupConfig) -> str:
        """Return the retry topic, or the dead letter topic after the last retry. RocketMQ 5: ``handleRetryAndDLQ``.

        An ordered consumer retries in its own process. It sends a message here only after its last retry, so the
        message is a dead letter: from the retry topic it would be consumed again, out of order.
        """
        max_times = max_reconsume_times(group, send.max_reconsume_times, send.caller.version)
        is_dead = send.reconsume_times > max_times or self.locks.is_ordered(group.group_name)
        return DLQ_TOPIC_PREFIX + group.group_name if is_dead else send.topic

    # --- storing -------------------------------------------------------------------------------

    def checked_count(self, send: ClientSend, topic: str) -> int:
        """Return the number of messages in a batch. Its size and this number are checked before they are read."""
        size, limit = len(send.body), self.engine.settings.max_message_size
        max_count = self.settings.max_batch_messages
        if size > limit:
            raise MessageError(
                f"the batch for {topic!r} has {size} bytes, allowed are {limit}; send fewer messages at "
                "once, or raise max-message-size"
            )
        count = count_batch(send.body, max_count)
        if count > max_count:
            raise MessageError(
                f"the batch for {topic!r} has more than {max_count} messages; send fewer at once, or raise "
                "max-batch-messages"
            )
        return count

    def store(self, send: ClientSend, topic: str | None = None) -> tuple[StoredSend, int]:
        """Store a message or a batch, and return it with its queue ID.

        Args:
            topic: From `existing_topic`, and of a batch after `checked_count`. None: the topic is found or created,
                and a batch is checked, here.
        """
        if topic is None:
            topic = self._created_topic(send)
            if send.is_batch:
                self.checked_count(send, topic)
        if send.is_batch and send.is_retry:
            raise MessageError(
                f"a batch cannot be sent to the retry topic {send.topic!r}; send its messages one by one"
            )
        is_dead = topic != send.topic
        queue_id = self.topics.queue(topic, -1 if is_dead else self._queue_id(send))
        if send.is_batch:
            return self._put_batch(send, topic, queue_id), queue_id
        complete = None if is_dead else self._properties.complete_text(send.properties)
        if complete is None:
            return self._put_decoded(send, topic, queue_id), queue_id
        return self._put_complete(send, queue_id, complete), queue_id

    def store_plain(self, send: ClientSend, unique_id: str, tag: str) -> StoredSend:
        """Store a message of a protocol whose properties are typed: they cannot request a delay or a transaction.

        Args:
            send: Its topic and its queue exist. Its properties have *unique_id* and *tag*, and no name twice.
        """
        queue_id = self.topics.queue(send.topic, send.queue_id)
        return self.engine.writer.store(
            self.plain_draft(send, queue_id, unique_id, tag), unique_id, send.topic, queue_id
        )

    def plain_draft(self, send: ClientSend, queue_id: int, unique_id: str, tag: str) -> RecordDraft:
        """Return the record that `store_plain` stores."""
        complete = self._properties.complete_plain((send.properties or "").encode(), unique_id, tag)
        return self._complete_draft(send, queue_id, complete)

    def _put_complete(self, send: ClientSend, queue_id: int, complete: CompleteProperties) -> StoredSend:
        """Store a message without decoding its properties."""
        draft = self._complete_draft(send, queue_id, complete)
        return self.engine.writer.store(draft, complete.unique_id, send.topic, queue_id)

    def _complete_draft(self, send: ClientSend, queue_id: int, complete: CompleteProperties) -> RecordDraft:
        message = EncodedMessage(send.topic, send.body, complete.encoded, send.flag)
        return self.engine.drafts.make_complete(message, queue_id, complete.tags_code, send.origin)

    def _put_decoded(self, send: ClientSend, topic: str, queue_id: int) -> StoredSend:
        """Store a message that may be delayed, in a transaction, or a dead letter."""
        writer = self.engine.writer
        properties = self._properties.complete(decode_properties_text(send.properties))
        if topic != send.topic:
            properties = copy_properties(properties, *DELAY_PROPERTIES)
        elif PRIORITY_PROPERTY in properties and not send.is_retry and queue_of_priority(properties, 1) is None:
            del properties[
                PRIORITY_PROPERTY
            ]  # a message has one type: the delayed and the ordered ones have no priority
        message = self._checked(send, Message(topic, send.body, properties, send.flag))
        # A retry of a committed message has the property of an open transaction as well.
        is_half = message.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
        if is_half and not send.is_retry and send.reconsume_times <= 0:
            self._check_cancels(send, message)
            group = properties.get(Property.PRODUCER_GROUP) or send.producer_group
            return writer.send_half(message, group, queue_id, send.origin)
        stored = writer.send(message, queue_id, send.origin)
        return stored._replace(handle=None) if topic.startswith(RETRY_TOPIC_PREFIX) else stored

    def _put_batch(self, send: ClientSend, topic: str, queue_id: int) -> StoredSend:
        """Store a batch at once if its messages are uniform, else one message after the other."""
        engine, origin, added = self.engine, send.origin, self._batch_properties
        uniform = read_uniform(send.body, added)
        if uniform is not None:
            return engine.writer.store_uniform(uniform.batch(topic, queue_id, origin))
        messages = split_batch(send.body)
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        now_ms = engine.clock.now_ms()
        drafts, ids = [], []
        for body, encoded, flag in messages:
            complete = added.complete_encoded(encoded)
            if complete is None:
                decoded = added.complete(decode_properties(encoded))
                message = self._checked(send, Message(topic, body, decoded, flag))
                draft, unique_id = engine.drafts.make(message, queue_id, now_ms, origin)
            else:
                properties, code, unique_id = complete
                draft = RecordDraft(topic, queue_id, body, properties, code, flag, *origin)
            drafts.append(draft)
            ids.append(unique_id)
        return engine.writer.store_all(drafts, ids, topic, queue_id)

    def _checked(self, send: ClientSend, message: Message) -> Message:
        # A message that a hand-over moves cancels nothing.
        if Property.PENDING_KEY in message.properties and Property.HAND_OVER not in message.properties:
            self.recalls.check_enabled("a message with a pending_key may cancel another one, and ")
        has_origin = message.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
        return self.access.checked_origin(send.caller.account, message) if has_origin else message

    def _check_cancels(self, send: ClientSend, message: Message) -> None:
        """Check that the client may cancel what the commit of a half message cancels."""
        if (handles := message.properties.get(Property.CANCELS)) is not None:
            self.recalls.check_change(handles)
            for handle in decode_handles(handles):
                self.access.check_topic(send.caller, handle.topic, Right.PUB, "the message that the commit cancels")


@dataclass(frozen=True, slots=True)
class ClientSequencedSends:
    """Stores the messages of a sequenced send that are not stored yet; see `mqtemplate.message.SendSequence`.

    Attributes:
        default_topic_queue_nums: Number of queues of a topic that such a send creates.
    """

    engine: Engine
    creations: ClientCreations
    access: AccessControl
    default_topic_queue_nums: int

    def store(
        self, caller: Caller, sequence: SendSequence, born_timestamp: int, batches: Sequence[QueueBatch]
    ) -> tuple[SequencedResult, int, frozenset[str]]:
        """Store the messages. Return the result, and the arguments of `MessageStore.confirm`.

        Raises:
            RefusedError: A topic or queue is missing or not writable, or the messages were not stored.
            MessageError: A message is invalid, or has no queue.
        """
        create_topics(self.creations, caller, {batch.topic for batch in batches}, self.default_topic_queue_nums)
        for topic, queue_id in {(batch.topic, batch.queue_id) for batch in batches}:
            if queue_id < 0:
                raise MessageError(f"a sequenced send names the queue of each message, got {queue_id} for {topic!r}")
            self.creations.topics.queue(topic, queue_id)
        born_host = pack_host(caller.connection.remote)

        def complete(draft: RecordDraft) -> None:
            draft.born_host, draft.born_timestamp = born_host, valid_time(born_timestamp)

        messages = [
            # A message with an origin is decoded, and it may not be a false one.
            (self.access.checked_origin(caller.account, each) if isinstance(each, Message) else each, queue_id)
            for each, queue_id in decode_queue_batches(batches)
        ]
        try:
            return self.engine.sequences.put(
                messages, sequence, complete, self.access.application_scope(caller.account)
            )
        except SendError as exc:
            raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, str(exc)) from exc


def create_topics(creations: ClientCreations, caller: Caller, topics: Iterable[str], queue_nums: int) -> None:
    """Create missing topics and groups, within the limits that hold for ordinary messages.

    Args:
        queue_nums: Number of queues of a new topic.
    """
    for topic in topics:
        if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
            group = topic.removeprefix(RETRY_TOPIC_PREFIX).removeprefix(DLQ_TOPIC_PREFIX)
            creations.group(caller, group)
            creations.topics.create_group_topic(topic, 1)
        else:
            creations.topic(caller, topic, AUTO_CREATE_TOPIC, queue_nums)


@dataclass(frozen=True, slots=True)
class ClientChangeSends:
    """Messages of clients that are stored together with a change of pending messages, or under a condition."""

    engine: Engine
    settings: BrokerServerSettings
    creations: ClientCreations
    access: AccessControl

    def queued(self, caller: Caller, batches: Sequence[QueueBatch]) -> list[QueuedMessage]:
        """Return the messages of a request with their queues, with the properties that the server adds.

        Raises:
            RefusedError: A topic or queue is missing or not writable.
            MessageError: There are too many messages, or one is invalid.
        """
        topics, added = self.creations.topics, self.settings.added_properties()
        create_topics(
            self.creations, caller, {batch.topic for batch in batches}, self.settings.default_topic_queue_nums
        )
        found: list[QueuedMessage] = []
        for topic, queue_id, view in batches:
            self._check_count(topic, len(found) + count_batch(bytes(view), self.settings.max_batch_messages))
            for message in decode_batch(bytes(view), topic):
                checked = self.access.checked_origin(caller.account, message)
                message = Message(topic, checked.body, {**checked.properties, **added}, checked.flag)
                found.append((message, MessageQueue(topic, self.engine.name, topics.queue(topic, queue_id))))
        return found

    def _check_count(self, topic: str, count: int) -> None:
        limit = self.settings.max_batch_messages
        if count > limit:
            raise MessageError(
                f"a change has more than {limit} messages to store with it, the last ones for {topic!r}; send fewer, "
                "or raise max-batch-messages"
            )


class ClientSendBack(NamedTuple):
    """A message that a consumer sends back. The physical offset identifies it.

    Attributes:
        properties: Added to the message, if the consumer may add them; see `permitted_properties`.
        delay_level: 0: the broker chooses; negative: to the dead letter topic at once.
        delay_ms: Exact delay instead of a level.
        max_reconsume_times: After so many attempts the message is a dead letter. None: as its group says.
    """

    caller: Caller
    group: str
    physical_offset: int
    properties: Mapping[str, str]
    delay_level: int = 0
    delay_ms: int | None = None
    max_reconsume_times: int | None = None


class CheckedSendBack(NamedTuple):
    """A message that may be sent back, and its copy.

    Attributes:
        queue_nums: Number of queues of the topic of the copy, if it is created.
    """

    sent_back: SentBackCopy
    queue_nums: int

    @property
    def topic(self) -> str:
        """The retry topic or the dead letter topic of the group."""
        return self.sent_back.copy.topic


@dataclass(frozen=True, slots=True)
class ClientSendBacks:
    """Stores messages again that consumers send back: delayed in the retry topic, or in the dead letter topic.

    The engine decides about the copy: see `send_back_of_record`.
    """

    engine: Engine
    topics: TopicConfigs
    creations: ClientCreations
    access: AccessControl
    peer_log: LimitedLog

    def check(self, back: ClientSendBack) -> CheckedSendBack | None:
        """Check a message that is sent back, and create its group if it is missing.

        Returns:
            None if the group has no retries: there is nothing to store.

        Raises:
            RefusedError: The message does not exist, the consumer may not read it, or the group may not be created.
        """
        engine, caller, offset = self.engine, back.caller, back.physical_offset
        group = self.creations.group(caller, back.group)
        if group.retry_queue_nums <= 0:
            return None
        record = engine.store.read_at(offset) if offset >= 0 else None
        if record is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"no message starts at physical offset {offset}; retention may have deleted it",
            )
        # The copy is readable with a right to the group only, so the request would read any message.
        self.access.check_topic(caller, record.topic, Right.SUB, f"the message at physical offset {offset}")
        max_times = max_reconsume_times(group, back.max_reconsume_times, caller.version)
        sent_back = send_back_of_record(record, engine.name, back.group, back.delay_level, back.delay_ms, max_times)
        original, message, _ = sent_back
        if sent_back.is_dead:
            self.peer_log.warning(
                "server.dead_letter", group=back.group, topic=original.topic, msg_id=original.msg_id, times=max_times
            )
        may_send = self.access.may(caller.account, message.properties[Property.RETRY_TOPIC], Right.PUB)
        message.properties |= permitted_properties(back.properties, may_send=may_send)
        return CheckedSendBack(sent_back, 1 if sent_back.is_dead else group.retry_queue_nums)

    def store(self, checked: CheckedSendBack) -> StoredSend:
        """Store the copy. Its topic is created if it is missing.

        Raises:
            RefusedError: The topic is not writable.
            StoreError: The store cannot store it now.
        """
        self.topics.create_group_topic(checked.topic, checked.queue_nums)
        return self.engine.writer.send_back(checked.sent_back, self.topics.queue(checked.topic, -1))
