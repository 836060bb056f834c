"""The core of every way to send: draft, append, and the result as the flush mode guarantees.

`MessageWriter` stores messages for all brokers: a protocol has checked their queue, and answers when `MessageStore`
confirms them. `LocalSends` is the same with the checks and the results of producers in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from mqtemplate.delay.pending_keys import KeyedSend, PendingKeys, total_outcome, unique_parts
from mqtemplate.delay.recall_handle import new_handle
from mqtemplate.engine.drafts import DraftMaker, SendOrigin
from mqtemplate.engine.group_rules import SentBack, dead_letter, is_exhausted, retry
from mqtemplate.engine.sequences import SequencedSender
from mqtemplate.engine.topics import TopicRoutes, queue_of_priority
from mqtemplate.errors import MessageError, PendingKeyError, SendError, SendTimeoutError, StoreError, UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import (
    RESERVED_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    MessageQueue,
    Property,
    SendSequence,
    offset_msg_id,
    offset_msg_ids,
)
from mqtemplate.record.appends import PutBatch, PutResult
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord, to_message_ext
from mqtemplate.record.dead_letter import CAUSES
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import PRIORITY_PROPERTY, encode_properties
from mqtemplate.record.record_arrays import UniformBatch
from mqtemplate.results import HalfMessage, PendingOutcome, SendResult, SendStatus, SequencedResult
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import DLQ_TOPIC_PREFIX, check_topic


class StoredSend(NamedTuple):
    """One message or a batch in the commit log. The ids and the handles of a batch are joined by commas.

    Attributes:
        end: Physical offset after it; `MessageStore.confirm` waits for it.
        topics: The topics of the records, whose readers are woken once it is durable.
        queue_offset: Queue offset of the first message.
        handle: Handles of the delayed messages; None without delayed messages.
        pending: Outcome of a send with pending keys; None without any.
        queue_id: Queue of a message that is pending under the key, and stays; None otherwise.
    """

    end: int
    topics: tuple[str, ...]
    msg_id: str
    offset_msg_id: str
    queue_offset: int
    handle: str | None = None
    pending: PendingOutcome | None = None
    queue_id: int | None = None


class SentBackCopy(NamedTuple):
    """A message that a consumer sends back, and its copy for the retry topic or the dead-letter topic of the group.

    Attributes:
        sys_flag: Flags of the copy.
    """

    original: MessageExt
    copy: Message
    sys_flag: int = 0

    @property
    def is_dead(self) -> bool:
        """True if the copy is a dead letter."""
        return self.copy.topic.startswith(DLQ_TOPIC_PREFIX)


def send_back_of_record(
    record: StoredRecord, broker_name: str, group: str, delay_level: int, delay_ms: int | None, max_times: int
) -> SentBackCopy:
    """Return a stored message that a remote consumer sends back. Its body is stored as it was, compressed or not.

    Args:
        delay_ms: Exact delay of the retry; None for *delay_level*.
        max_times: Number of retries after which the message is a dead letter.
    """
    # Without the flag the body is not decompressed.
    original = to_message_ext(record._replace(sys_flag=record.sys_flag & ~SysFlag.COMPRESSED), broker_name)
    if is_exhausted(original, delay_level, max_times):
        copy = dead_letter(original, group)
    else:
        copy = retry(original, group, delay_level)
        if delay_ms is not None:
            del copy.properties[Property.DELAY]
            copy.properties[Property.TIMER_DELAY_MS] = str(delay_ms)
    copy.properties[Property.WAIT] = "false"
    return SentBackCopy(original, copy, record.sys_flag & SysFlag.OF_CLIENTS)


def permitted_properties(added: Mapping[str, str], *, may_send: bool) -> dict[str, str]:
    """Return the properties that a remote consumer may add to a message that it sends back.

    Args:
        may_send: The consumer may send to the topic of the message. If not, it may only add the cause of the failure:
            an operator may send the dead letter to that topic again.
    """
    return {
        name: value for name, value in added.items() if name in CAUSES or (may_send and name not in RESERVED_PROPERTIES)
    }


@dataclass(eq=False)
class MessageWriter:
    """Stores messages. It does not wait for the disk: `MessageStore.confirm` does.

    *topic* and *queue_id* are the real ones; the record of a delayed message names a system topic.

    Args:
        prepare: Stores a half message; see `TransactionService.prepare`.

    Raises:
        MessageError: A record or its properties are too large, or a message is invalid.
        DelayError: A delay is invalid or not supported.
        StoreError: The store cannot store a record now.
    """

    _store: MessageStore
    _drafts: DraftMaker
    _prepare: Callable[[RecordDraft], PutResult]
    _pending_keys: PendingKeys
    _broker_name: str
    _host: HostAddress

    # --- messages ------------------------------------------------------------------------------

    def send(self, message: Message, queue_id: int, origin: SendOrigin | None = None) -> StoredSend:
        """Store one message, which may be delayed."""
        draft, unique_id = self._drafts.make(message, queue_id, self._store.clock.now_ms(), origin)
        return self.store(draft, unique_id, message.topic, queue_id)

    def send_batch(self, messages: Sequence[Message], queue_id: int) -> StoredSend:
        """Store one message or more of one topic: all of them or none."""
        topic, now_ms = messages[0].topic, self._store.clock.now_ms()
        uniform = self._drafts.make_uniform(messages, queue_id, now_ms)
        if uniform is not None:
            return self.store_uniform(uniform)
        drafts, ids = zip(*[self._drafts.make(message, queue_id, now_ms) for message in messages], strict=True)
        return self.store_all(drafts, ids, topic, queue_id)

    def send_half(self, message: Message, group: str, queue_id: int, origin: SendOrigin | None = None) -> StoredSend:
        """Store a half message. It has no readers to notify, and its queue offset is in the half topic."""
        draft, unique_id = self._drafts.make_half(message, group, queue_id, self._store.clock.now_ms(), origin)
        put = self._prepare(draft)
        return StoredSend(put.end, (), unique_id, offset_msg_id(self._host, put.physical_offset), put.queue_offset)

    def send_back(self, sent_back: SentBackCopy, queue_id: int) -> StoredSend:
        """Store a message that a consumer sends back in a queue of its retry topic or its dead-letter topic."""
        original, copy, sys_flag = sent_back
        draft = self._drafts.make_send_back(copy, original, queue_id, self._store.clock.now_ms())
        draft.sys_flag = sys_flag
        return self.store(draft, original.msg_id, copy.topic, queue_id)

    # --- records -------------------------------------------------------------------------------

    def put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        """Store one record."""
        if draft.topic != topic:
            self._store.prepare(topic, queue_id)  # creates its file now, so that the delivery need not wait
        return self._store.put(draft)

    def store(self, draft: RecordDraft, unique_id: str, topic: str, queue_id: int) -> StoredSend:
        """Store the record of one message."""
        if draft.pending is not None:
            (outcome, msg_id, offset, queue_offset, kept_id, handle), end, topics = self.put_keyed(
                draft, unique_id, topic, queue_id
            )
            offset_id = offset_msg_id(self._host, offset)
            return StoredSend(end, topics, msg_id, offset_id, queue_offset, handle, outcome, kept_id)
        put = self.put(draft, topic, queue_id)
        offset, size, queue_offset, _ = put
        handle = None if draft.topic == topic else self.handle(draft, put, topic)
        return StoredSend(
            offset + size, (draft.topic,), unique_id, offset_msg_id(self._host, offset), queue_offset, handle
        )

    def store_all(self, drafts: Sequence[RecordDraft], msg_ids: Sequence[str], topic: str, queue_id: int) -> StoredSend:
        """Store several records: all of them or none. If a pending key occurs twice, the part before it comes first."""
        if any(draft.pending is not None for draft in drafts):
            return self._store_keyed(list(zip(drafts, msg_ids, strict=True)), topic, queue_id)
        topics = tuple({draft.topic for draft in drafts})
        if topics == (topic,):
            return self._stored(self._store.put(Drafts(drafts)), topics, ",".join(msg_ids))
        self._store.prepare(topic, queue_id)
        puts = self._store.put(Drafts(drafts))
        handles = (self.handle(draft, put, topic) for draft, put in zip(drafts, puts, strict=True))
        return self._stored(puts, topics, ",".join(msg_ids), ",".join(filter(None, handles)))

    def put_keyed(
        self, draft: RecordDraft, unique_id: str, topic: str, queue_id: int
    ) -> tuple[KeyedSend, int, tuple[str, ...]]:
        """Store the record of a message with a pending key; see `PendingKeys.put_one`."""
        self._store.prepare(topic, queue_id)
        return self._pending_keys.put_one(draft, unique_id, topic)

    def _store_keyed(self, drafts: Sequence[tuple[RecordDraft, str]], topic: str, queue_id: int) -> StoredSend:
        """Store records of which at least one has a pending key."""
        self._store.prepare(topic, queue_id)
        sends: list[KeyedSend] = []
        topics: set[str] = set()
        end = 0
        for part in unique_parts(drafts):
            put, _ = self._pending_keys.put(part, topic)
            sends += put.sends
            topics.update(put.topics)
            end = max(end, put.end)
        return StoredSend(
            end,
            tuple(topics),
            ",".join([each.msg_id for each in sends]),
            ",".join([offset_msg_id(self._host, each.physical_offset) for each in sends]),
            sends[0].queue_offset,
            ",".join(filter(None, [each.handle for each in sends])) or None,
            total_outcome([each.outcome for each in sends]),
            sends[0].queue_id,
        )

    def store_uniform(self, batch: UniformBatch) -> StoredSend:
        """Store a batch of messages that are alike, and not delayed: all of them or none."""
        return self._stored(self._store.put(batch), (batch.first.topic,), batch.msg_ids().decode())

    def _stored(self, puts: PutBatch, topics: tuple[str, ...], ids: str, handle: str | None = None) -> StoredSend:
        offset_ids = offset_msg_ids(self._host, puts.physical_offsets)
        return StoredSend(puts.end, topics, ids, offset_ids, puts.queue_offsets[0], handle)

    def handle(self, draft: RecordDraft, put: PutResult, topic: str) -> str | None:
        """Return the handle for `DelayedMessages.cancel` of a delayed message; None if the message is not delayed."""
        return new_handle(topic, self._broker_name, draft, put)


def _batch_topic(messages: Sequence[Message]) -> str:
    """Return the topic of a batch.

    Raises:
        MessageError: The batch is empty, or its messages have several topics.
    """
    if not messages:
        raise MessageError("the batch is empty; give at least one message")
    topic = messages[0].topic
    for message in messages:
        if message.topic != topic:
            raise MessageError(
                f"a batch goes to one topic, this one names {topic!r} and {message.topic!r}; send two batches"
            )
    return topic


@dataclass(eq=False)
class LocalSends:
    """The sending methods of a `Broker` in this process: they wait as the flush mode requires, and return results.

    All raise `SendError` if the store cannot store a message, and `BrokerClosedError` if the broker is not running.
    """

    _store: MessageStore
    _routes: TopicRoutes
    _drafts: DraftMaker
    _writer: MessageWriter
    _sequences: SequencedSender
    _host: HostAddress
    _check_open: Callable[[], None]

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """See `MessageSends.send`."""
        self._check_open()
        store, topic = self._store, message.topic
        target = self._routes.select(topic, queue)
        if queue is None and PRIORITY_PROPERTY in message.properties:
            target = self._by_priority(message, target)
        queue_id = target.queue_id
        # As `MessageWriter.send`, with fewer calls: this is the most frequent kind of send.
        draft, unique_id = self._drafts.make(message, queue_id, store.clock.now_ms())
        if draft.pending is not None:
            return self._send_keyed(draft, unique_id, target, timeout_ms)
        put = self._put(draft, topic, queue_id)
        store.start_flush(put)
        result = SendResult(  # complete before `confirm`: the disk writes meanwhile
            SendStatus.SEND_OK,
            unique_id,
            offset_msg_id(self._host, put.physical_offset),
            target,
            put.queue_offset,
            handle=None if draft.topic == topic else self._writer.handle(draft, put, topic),
        )
        if store.confirm(put.physical_offset + put.size, (draft.topic,), timeout_ms):
            return result
        return replace(result, send_status=SendStatus.FLUSH_DISK_TIMEOUT)

    def _send_keyed(self, draft: RecordDraft, unique_id: str, target: MessageQueue, timeout_ms: int) -> SendResult:
        """Store the record of a message with a pending key."""
        store, topic = self._store, target.topic
        try:
            sent, end, topics = self._writer.put_keyed(draft, unique_id, topic, target.queue_id)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc
        outcome, msg_id, offset, queue_offset, kept_id, handle = sent
        store.start_flush(PutResult(offset, end - offset, queue_offset, 0))
        is_safe = store.confirm(end, topics, timeout_ms)
        if kept_id is not None and kept_id != target.queue_id:
            target = MessageQueue(topic, target.broker_name, kept_id)
        status = SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT
        offset_id = offset_msg_id(self._host, offset)
        return SendResult(status, msg_id, offset_id, target, queue_offset, handle=handle, pending=outcome)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """See `MessageSends.send_batch`."""
        self._check_open()
        target, stored = self._store_batch(messages, queue)
        return _result(target, stored, is_safe=self._store.confirm(stored.end, stored.topics, timeout_ms))

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """See `MessageSends.send_async`. It does not wait, so there is no timeout."""
        self._check_open()
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_running_or_notify_cancel()  # the messages are stored when this method returns
        try:
            target, stored = self._store_batch(messages, queue)
        except (MessageError, SendError, StoreError, PendingKeyError, UnsupportedError) as exc:
            future.set_exception(exc)
            return future
        result = _result(target, stored, is_safe=True)

        def done(error: StoreError | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._store.confirm_async(stored.end, stored.topics, done)
        return future

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """See `MessageSends.send_one_way`."""
        self._check_open()
        target = self._routes.select(message.topic, queue)
        if queue is None and PRIORITY_PROPERTY in message.properties:
            target = self._by_priority(message, target)
        queue_id = target.queue_id
        draft, unique_id = self._drafts.make(message, queue_id, self._store.clock.now_ms())
        if draft.pending is not None:
            stored = _stored(lambda: self._writer.store(draft, unique_id, message.topic, queue_id))
            self._store.confirm_async(stored.end, stored.topics)
            return
        put = self._put(draft, message.topic, queue_id)
        self._store.confirm_async(put.physical_offset + put.size, (draft.topic,))

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """See `MessageSends.send_half`."""
        self._check_open()
        check_topic(group)
        target = self._routes.select(message.topic, queue)
        stored = _stored(lambda: self._writer.send_half(message, group, target.queue_id))
        result = _result(target, stored, is_safe=self._store.confirm(stored.end, stored.topics, timeout_ms))
        return HalfMessage(message, group, replace(result, transaction_id=stored.msg_id))

    def send_back(self, sent_back: SentBack) -> None:
        """Store a message for the retry topic or the dead-letter topic of a group, and wait until it is durable."""
        self._check_open()
        copy = sent_back.dead_letter() if sent_back.is_dead else self._drafts.delayed_retry(sent_back)
        self._routes.create(copy.topic, 1)
        queue_id = self._routes.select(copy.topic, None).queue_id
        stored = _stored(lambda: self._writer.send_back(SentBackCopy(sent_back.message, copy), queue_id))
        self._store.confirm(stored.end, stored.topics)

    def make_dead_letter(
        self, record: StoredRecord, group: str, properties: Mapping[str, str] = MappingProxyType({})
    ) -> RecordDraft:
        """Return the copy of a record for the dead-letter topic of *group*, and create that topic.

        Args:
            properties: Added to the copy, if they have room.
        """
        topic = DLQ_TOPIC_PREFIX + group
        self._routes.create(topic, 1)
        queue = self._routes.select(topic, None)
        original, copy, sys_flag = send_back_of_record(record, queue.broker_name, group, -1, None, 0)
        if len(record.properties_bytes) + len(encode_properties(properties)) < MAX_PROPERTIES_BYTES // 2:
            copy.properties |= properties
        draft = self._drafts.make_send_back(copy, original, queue.queue_id, self._store.clock.now_ms())
        draft.sys_flag = sys_flag
        return draft

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """See `MessageSends.send_sequenced`.

        Raises:
            SendTimeoutError: They are stored, but were not flushed in time; a repeat is harmless.
        """
        self._check_open()
        for topic, queue in {(message.topic, queue) for message, queue in messages}:
            self._routes.select(topic, queue)
        result, end, topics = self._sequences.put([(message, queue.queue_id) for message, queue in messages], sequence)
        if not self._store.confirm(end, topics, timeout_ms):
            raise SendTimeoutError("the messages are stored, but were not flushed in time; send them again")
        return result

    def _put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        try:
            return self._writer.put(draft, topic, queue_id)
        except StoreError as exc:
            raise SendError(f"not stored: {exc}") from exc

    def _by_priority(self, message: Message, target: MessageQueue) -> MessageQueue:
        """Return the queue of a message whose properties may name a priority; *target* if it has none."""
        queues = self._routes.queues(message.topic)
        queue_id = queue_of_priority(message.properties, len(queues))
        return target if queue_id is None else queues[queue_id]

    def _store_batch(self, messages: Sequence[Message], queue: MessageQueue | None) -> tuple[MessageQueue, StoredSend]:
        target = self._routes.select(_batch_topic(messages), queue)
        if queue is None and len(messages) == 1 and PRIORITY_PROPERTY in messages[0].properties:
            target = self._by_priority(messages[0], target)
        return target, _stored(lambda: self._writer.send_batch(messages, target.queue_id))


def _stored(store: Callable[[], StoredSend]) -> StoredSend:
    try:
        return store()
    except StoreError as exc:
        raise SendError(f"not stored: {exc}") from exc


def _result(target: MessageQueue, stored: StoredSend, *, is_safe: bool) -> SendResult:
    status = SendStatus.SEND_OK if is_safe else SendStatus.FLUSH_DISK_TIMEOUT
    if stored.queue_id is not None and stored.queue_id != target.queue_id:
        target = MessageQueue(target.topic, target.broker_name, stored.queue_id)
    return SendResult(
        *(status, stored.msg_id, stored.offset_msg_id, target, stored.queue_offset),
        handle=stored.handle,
        pending=stored.pending,
    )
