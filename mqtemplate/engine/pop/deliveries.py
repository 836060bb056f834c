"""Deliveries of messages, and their end when their time is over.

An expired message is copied to the retry topic or to the dead-letter topic, or waits in its order.
Source: ``PopMessageProcessor``, ``PopReviveService``. There is one improvement: a message is copied when its time is
over, not seconds later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol

from mqtemplate.engine.pop.holds import HeldPops, HoldKey
from mqtemplate.engine.pop.journal import PopJournal
from mqtemplate.engine.pop.pop_queue import MAX_WAITING, Delivery, PopQueue, Waiting
from mqtemplate.engine.pop.progress import PopProgress, QueueKey, QueueSpans, TrackedQueue
from mqtemplate.engine.pop.receipt_handle import (
    NORMAL_TOPIC,
    ORDERED_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
    ReceiptHandle,
    retry_topic_v1,
    retry_topic_v2,
)
from mqtemplate.engine.pop.requests import PopBatch, PoppedMessage, PopRequest, RecordReader, bounded
from mqtemplate.errors import DestinationError, MessageError, StoreError
from mqtemplate.event_log import LimitedLog
from mqtemplate.hashes import tags_code
from mqtemplate.message import MessageQueue, Property, offset_msg_id
from mqtemplate.record.codec import RecordDraft, StoredRecord, unpack_host
from mqtemplate.record.dead_letter import expired_properties
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import SHARDING_KEY, TAGS, decode_properties, encode_properties, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import TopicTable
from mqtemplate.topics import RETRY_TOPIC_PREFIX

MAX_RENEWED_MS = 3 * 3_600_000
"""A session renews a delivery for this time. Source: ``ProxyConfig.renewMaxTimeMillis``."""
_RETRY_FIRST = 0.2
"""Share of pops that read the retry topic before the queues. Source: ``BrokerConfig.popFromRetryProbability``."""
_MAX_PER_STEP = 128
_AFTER_ERROR_MS = 1_000
_MAX_RECONSUME_TIMES = 2**31 - 1


class PopTarget(NamedTuple):
    """A queue that a pop reads.

    Attributes:
        topic_type: `NORMAL_TOPIC`, `RETRY_V1` or `RETRY_V2`.
    """

    topic: str
    queue_id: int
    topic_type: int


class _ReadTopic(NamedTuple):
    """Settings of a topic for pops: the number of its queues, and True if the queues are priorities."""

    queue_count: int
    has_priorities: bool


class TargetOrder:
    """Chooses the queues that a pop reads, and their order."""

    def __init__(self, topics: TopicTable, progress: PopProgress, random: Random) -> None:
        self._topics = topics
        self._progress = progress
        self._random = random
        self._topics_read: tuple[object, dict[str, _ReadTopic]] = (None, {})

    def of(self, request: PopRequest) -> list[PopTarget]:
        """Return the queues in the order of this pop: from a random one on, and the retry topics first or last.

        With priorities, the last queue is the first one, and the retry topics are last: lower queues wait while higher
        ones have messages. Source: ``PopMessageProcessor.processRequest``, ``BrokerConfig.priorityOrderAsc``.
        """
        topic, group, (count, has_priorities) = request.topic, request.group, self._read_topic(request.topic)
        has_priorities = has_priorities and not request.is_ordered
        if has_priorities:
            has_priorities = self._random.randrange(100) < request.priority_factor
        if count == 0:
            raise DestinationError(f"topic {topic!r} does not exist; create it, or send a message to it first")
        if request.queue_id >= count:
            raise DestinationError(f"topic {topic!r} has queues 0..{count - 1}, got {request.queue_id}")
        if request.queue_id >= 0:
            queues = [PopTarget(topic, request.queue_id, NORMAL_TOPIC)]
        elif has_priorities:
            queues = [PopTarget(topic, number, NORMAL_TOPIC) for number in reversed(range(count))]
        else:
            start = self._random.randrange(count)
            queues = [PopTarget(topic, (start + number) % count, NORMAL_TOPIC) for number in range(count)]
        if request.is_ordered:
            if request.attempt_id:  # the messages of a repeated pop come first
                attempt_id = bounded(request.attempt_id)
                queues.sort(key=lambda target: not self._has_attempt(group, target, attempt_id))
            return queues
        names = ((retry_topic_v1(topic, group), RETRY_V1), (retry_topic_v2(topic, group), RETRY_V2))
        retries = [PopTarget(name, each, kind) for name, kind in names for each in range(self._read_topic(name)[0])]
        if not has_priorities and self._random.random() < _RETRY_FIRST:
            return [*retries, *queues]
        return [*queues, *retries]

    def _has_attempt(self, group: str, target: PopTarget, attempt_id: str) -> bool:
        tracked = self._progress.find(QueueKey(group, target.topic, target.queue_id))
        return tracked is not None and tracked.state.has_attempt(attempt_id)

    def _read_topic(self, topic: str) -> _ReadTopic:
        state, topics = self._topics_read
        if state is not self._topics.state:
            state, topics = self._topics_read = (self._topics.state, {})
        found = topics.get(topic)
        if found is None:
            config = self._topics.config(topic) or {}
            has_priorities = (config.get("attributes") or {}).get("message.type") == "PRIORITY"
            found = topics[topic] = _ReadTopic(int(config.get("readQueueNums", 0)), has_priorities)
        return found


class Deliverer:
    """Delivers messages of one queue. The caller has the lock of the queue."""

    def __init__(
        self,
        store: MessageStore,
        progress: PopProgress,
        reader: RecordReader,
        spans: QueueSpans,
        broker_name: str,
        max_in_flight: int,
    ) -> None:
        self._clock = store.clock
        self._progress = progress
        self._reader = reader
        self._spans = spans
        self._broker_name = broker_name
        self._max_in_flight = max_in_flight

    def deliver(self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, batch: PopBatch) -> bool:
        """Deliver messages of one queue. Return True if it may have more that were not looked at."""
        self._progress.begin(tracked, self._clock.now_ms(), from_last=request.from_last)
        state = tracked.state
        state.limit_attempts(request.max_attempts)
        room = min(batch.room, self._max_in_flight - len(state.in_flight))
        if room <= 0 or tracked.is_gone:
            return False
        pop = self._pop_ordered if request.is_ordered else self._pop_unordered
        next_offset = pop(tracked, request, target, room, batch)
        is_cut = next_offset > state.next
        state.read_to(next_offset)
        self._progress.settle(tracked)
        return is_cut and next_offset < self._spans.max_offset(tracked.queue)

    def _delivery(self, request: PopRequest, now_ms: int, pop_ms: int) -> Delivery:
        """Return the delivery of a pop at *now_ms*. *pop_ms* may be later, since it identifies the delivery."""
        session = bounded(request.session)
        is_received = not request.awaits_receipt
        return Delivery(
            pop_ms,
            now_ms + (MAX_RENEWED_MS if session and is_received else request.invisible_ms),
            session,
            attempt_id=bounded(request.attempt_id),
            client=bounded(request.client) or session,
            since_ms=now_ms,
            is_received=is_received,
        )

    def _pop_unordered(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, room: int, batch: PopBatch
    ) -> int:
        """Deliver messages in any order. Return the next queue offset to read."""
        state, now_ms = tracked.state, self._clock.now_ms()
        pop_ms = max(now_ms, state.least_pop_ms)
        found: list[tuple[int, StoredRecord, int]] = []
        for queue_offset in state.deliverable(room, is_ordered=False):
            _, earlier, last_pop_ms = state.waiting[queue_offset]
            pop_ms = max(pop_ms, last_pop_ms + 1)  # another one than before, since it identifies the delivery
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
            elif batch.takes(record):
                found.append((queue_offset, record, earlier))
            else:
                break
        next_offset = self._first_offset(state, tracked.queue)
        if len(found) < room and batch.room:
            count = room - len(found)
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, count, request.selector
            ):
                if record is not None and self._is_new(state, queue_offset):
                    if not batch.takes(record):
                        break
                    found.append((queue_offset, record, 0))
                next_offset = queue_offset + 1
                if len(found) == room:
                    break
        delivery, start = self._delivery(request, now_ms, pop_ms), state.next
        exhausted = [at for at, record, earlier in found if record.reconsume_times + earlier >= request.max_attempts]
        if exhausted:  # the next step copies them to the dead-letter topic
            state.deliver(exhausted, delivery._replace(visible_ms=now_ms, counts=False))
            found = [each for each in found if each[0] not in exhausted]
        redelivered = [each for each in found if each[2]]
        for queue_offset, _, earlier in redelivered:
            state.deliver([queue_offset], delivery._replace(earlier=earlier))
        state.deliver([at for at, _, earlier in found if not earlier], delivery)
        for _, record, earlier in found:
            batch.messages.append(self._popped_message(request, target, start, pop_ms, record, earlier))
        return next_offset

    def _pop_ordered(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, room: int, batch: PopBatch
    ) -> int:
        """Deliver messages whose message groups have no unacknowledged ones. Return the next queue offset to read."""
        state, now_ms = tracked.state, self._clock.now_ms()
        pop_ms = max(now_ms, state.least_pop_ms)
        found: list[tuple[int, str, int, StoredRecord]] = []
        repeated = state.same_attempt(bounded(request.attempt_id))
        for queue_offset in repeated or state.deliverable(room, is_ordered=True):
            before = state.in_flight.get(queue_offset) or state.waiting[queue_offset]
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
                continue
            if not repeated and not batch.takes(record):
                break
            pop_ms = max(pop_ms, before.pop_ms + 1)
            found.append((queue_offset, before.group or "", before.earlier, record))
        next_offset = self._first_offset(state, tracked.queue)
        if not repeated and batch.room and len(found) < room and len(state.waiting) < MAX_WAITING:
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, room - len(found), request.selector
            ):
                if record is not None and self._is_new(state, queue_offset):
                    group = bounded(find_property(record.properties_bytes, SHARDING_KEY) or "")
                    if state.is_blocked(group):
                        state.wait(queue_offset, Waiting(group))
                    elif batch.takes(record):
                        found.append((queue_offset, group, 0, record))
                    else:
                        break
                next_offset = queue_offset + 1
                if len(found) == room or len(state.waiting) >= MAX_WAITING:
                    break
        start = state.next
        state.deliver_ordered(
            [(at, group, earlier) for at, group, earlier, _ in found], self._delivery(request, now_ms, pop_ms)
        )
        for _, _, earlier, record in found:
            batch.messages.append(self._popped_message(request, target, start, pop_ms, record, earlier))
        return next_offset

    def _first_offset(self, state: PopQueue, queue: MessageQueue) -> int:
        """Return the next queue offset that exists; those that retention deleted are done."""
        return max(state.next, self._spans.min_offset(queue))

    def _is_new(self, state: PopQueue, queue_offset: int) -> bool:
        """Return False if a message after the known ones is done or delivered, as an earlier run noted."""
        return not (
            queue_offset in state.acked_ahead or queue_offset in state.in_flight or queue_offset in state.waiting
        )

    def _popped_message(
        self, request: PopRequest, target: PopTarget, start: int, pop_ms: int, record: StoredRecord, earlier: int
    ) -> PoppedMessage:
        handle = ReceiptHandle(
            start,
            pop_ms,
            request.invisible_ms,
            ORDERED_REVIVE_QUEUE if request.is_ordered else 0,
            target.topic_type,
            self._broker_name,
            target.queue_id,
            record.queue_offset,
            record.physical_offset,
        )
        return PoppedMessage(record, handle, record.reconsume_times + earlier + 1)


class MakeDeadLetter(Protocol):
    """Function that creates a dead letter."""

    def __call__(
        self, record: StoredRecord, group: str, properties: Mapping[str, str] = MappingProxyType({})
    ) -> RecordDraft:
        """Return the copy of a record for the dead-letter topic of *group*, which exists then.

        Args:
            properties: Added to the copy, if they have room.

        Raises:
            MessageError: The copy is not a valid message.
            StoreError: The topic cannot be created.
        """


def retry_draft(record: StoredRecord, topic: str, group: str, attempts: int, pop_ms: int) -> RecordDraft:
    """Return the copy of a record for the retry topic of *group*. It keeps all properties, and the message id.

    Args:
        topic: The topic of the pop.
        attempts: Number of deliveries so far that count.
        pop_ms: Time of the last delivery.
    """
    properties = decode_properties(record.properties_bytes)
    added = {Property.ORIGIN_GROUP: group}
    added[Property.FIRST_POP_TIME] = properties.get(Property.FIRST_POP_TIME) or str(pop_ms)
    if not record.topic.startswith(RETRY_TOPIC_PREFIX):
        added[Property.RETRY_TOPIC] = record.topic
        added[Property.ORIGIN_MESSAGE_ID] = offset_msg_id(unpack_host(record.store_host), record.physical_offset)
    encoded = encode_properties(properties | added)
    if len(encoded) > MAX_PROPERTIES_BYTES - 64:  # the message itself goes before what is known about it
        encoded = encode_properties(properties)
    is_retry = record.topic.startswith(RETRY_TOPIC_PREFIX)
    return RecordDraft(
        record.topic if is_retry else retry_topic_v1(topic, group),
        0,
        record.body,
        encoded,
        tags_code(find_property(record.properties_bytes, TAGS)),
        flag=record.flag,
        sys_flag=record.sys_flag & SysFlag.OF_CLIENTS,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        reconsume_times=min(attempts, _MAX_RECONSUME_TIMES),
        body_crc=record.body_crc,
    )


class Reviver:
    """Ends deliveries whose time is over.

    Args:
        create_topic: Creates a topic with a number of queues, unless it exists.
    """

    def __init__(
        self,
        store: MessageStore,
        progress: PopProgress,
        journal: PopJournal,
        reader: RecordReader,
        holds: HeldPops,
        create_topic: Callable[[str, int], None],
        make_dead_letter: MakeDeadLetter,
        log: LimitedLog,
    ) -> None:
        self._store = store
        self._progress = progress
        self._journal = journal
        self._reader = reader
        self._holds = holds
        self._create_topic = create_topic
        self._make_dead_letter = make_dead_letter
        self._log = log
        self._expired = store.metrics.counter("pop.expired")
        self._dead_lettered = store.metrics.counter("pop.dead_lettered")

    def step(self) -> int | None:
        """End deliveries that are due. Return the time of the next step."""
        now_ms = self._store.clock.now_ms()
        tracked = self._progress.take_due(now_ms)
        if tracked is None:
            return self._progress.next_due_ms()
        topics: set[str] = set()
        end = 0
        with tracked.lock:
            state = tracked.state
            if self._progress.is_forgotten(tracked):
                state.reset(state.base, now_ms)
            due = state.take_due(now_ms, _MAX_PER_STEP)
            for queue_offset, delivery in due:
                try:
                    if delivery.group is not None and delivery.attempts < state.max_attempts:
                        state.wait_again(queue_offset)
                    elif (draft := self._copy(tracked, queue_offset, delivery)) is None:
                        state.done([queue_offset])
                    else:
                        end = self.append(tracked, queue_offset, draft)
                        topics.add(draft.topic)
                except (StoreError, MessageError) as exc:
                    self._delay(tracked, queue_offset, now_ms, exc)
                else:
                    self._count(tracked, delivery)
            self._progress.settle(tracked)
        if topics:  # without the lock: it may call functions of others
            self._store.confirm_async(end, topics)
        if due:
            self._holds.changed(HoldKey(tracked.key.group, tracked.key.topic))
        return now_ms

    def append(self, tracked: TrackedQueue, queue_offset: int, copy: RecordDraft) -> int:
        """Store the copy of a message, which is done then. Return the physical offset after the copy."""
        end = self._journal.append_copy(copy, tracked.key, queue_offset)
        tracked.state.done([queue_offset], is_noted=True)
        return end

    def _delay(self, tracked: TrackedQueue, queue_offset: int, now_ms: int, error: Exception) -> None:
        group, topic, _ = tracked.key
        self._log.warning("pop.revive_failed", group=group, topic=topic, queue_offset=queue_offset, reason=str(error))
        tracked.state.schedule(queue_offset, now_ms + _AFTER_ERROR_MS)

    def _count(self, tracked: TrackedQueue, delivery: Delivery) -> None:
        if delivery.counts:
            tracked.state.expired += 1
            self._expired.add()

    def _copy(self, tracked: TrackedQueue, queue_offset: int, delivery: Delivery) -> RecordDraft | None:
        """Return the copy of an expired message; None if the message was deleted."""
        group, topic, queue_id = tracked.key
        record = self._reader.record(topic, queue_id, queue_offset, None)
        if record is None:
            return None
        attempts = record.reconsume_times + delivery.attempts
        if attempts >= tracked.state.max_attempts:
            self._dead_lettered.add()
            before, now_ms = decode_properties(record.properties_bytes), self._store.clock.now_ms()
            cause = expired_properties(before, record.reconsume_times, attempts, now_ms)
            return self._make_dead_letter(record, group, cause)
        draft = retry_draft(record, topic, group, attempts, delivery.pop_ms)
        self._create_topic(draft.topic, 1)
        return draft
