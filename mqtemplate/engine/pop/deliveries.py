"""Deliveries of messages, and their end when their time is over.

An expired message is copied to the retry topic or to the dead-letter topic, or waits in its order.
Source: ``PopMessageProcessor``, ``PopReviveService``. There is one improvement: a message is copied when its time is
over, not seconds later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mqtemplate.engine.pop.holds import HeldPops, HoldKey
from mqtemplate.engine.pop.journal import PopJournal
from mqtemplate.engine.pop.pop_queue import MAX_WAITING, Delivery, PopQueue, Waiting
from mqtemplate.engine.pop.progress import KeyTurns, PopProgress, QueueKey, QueueSpans, TrackedQueue
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

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

MAX_RENEWED_MS = 3 * 3_600_000
"""A session renews a delivery for this time. Source: ``ProxyConfig.renewMaxTimeMillis``."""
_RETRY_FIRST = 0.2
"""Share of pops that read the retry topic before the queues. Source: ``BrokerConfig.popFromRetryProbability``."""
MAX_READ_AHEAD = 1_024
"""Most messages of a queue that are read and wait for the turns of their keys."""
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
        self._wake: Callable[[], None] = lambda: None
        self._turns: dict[tuple[HoldKey, str], KeyTurns] = {}  # for each group, topic and property of the keys

    def deliver(self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, batch: PopBatch) -> bool:
        """Deliver messages of one queue. Return True if it may have more that were not looked at."""
        self._progress.begin(tracked, self._clock.now_ms(), from_last=request.from_last)
        state = tracked.state
        state.limit_attempts(request.max_attempts)
        room = min(batch.room, self._max_in_flight - len(state.in_flight))
        if room <= 0 or tracked.is_gone:
            return False
        pop = self._pop_ordered if request.is_ordered else self._pop_unordered
        if request.key_limits is not None and not request.is_ordered:
            pop = self._pop_by_key
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
        self._deliver_found(tracked, request, target, batch, found, now_ms, pop_ms)
        return next_offset

    def _deliver_found(
        self,
        tracked: TrackedQueue,
        request: PopRequest,
        target: PopTarget,
        batch: PopBatch,
        found: list[tuple[int, StoredRecord, int]],
        now_ms: int,
        pop_ms: int,
    ) -> None:
        state = tracked.state
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

    # --- fair by key ---------------------------------------------------------------------------

    def _pop_by_key(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, room: int, batch: PopBatch
    ) -> int:
        """Deliver messages whose keys have a turn and are within their limits. Return the next queue offset to read.

        Messages are read ahead, and wait by key. The turns are those of the group over all queues.
        """
        assert request.key_limits is not None, "the request has limits"
        state, now_ms, limits = tracked.state, self._clock.now_ms(), request.key_limits
        next_offset = self._read_ahead(tracked, request, target)
        turns = self._turns_of(request.group, request.topic, limits)
        pop_ms = max(now_ms, state.least_pop_ms)
        found: list[tuple[int, StoredRecord, int]] = []
        try:
            for key, queue_offset in turns.choose(state.waiting_by_group(), tracked, limits, now_ms):
                _, earlier, last_pop_ms = state.waiting[queue_offset]
                record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
                if record is None:
                    state.done([queue_offset])
                    turns.give_back(key, tracked, queue_offset, limits)
                elif batch.takes(record):
                    pop_ms = max(pop_ms, last_pop_ms + 1)
                    found.append((queue_offset, record, earlier))
                    if len(found) == room:
                        break
                else:
                    turns.give_back(key, tracked, queue_offset, limits)
                    break
            self._deliver_found(tracked, request, target, batch, sorted(found), now_ms, pop_ms)
        finally:
            turns.delivered(tracked)
        return next_offset

    def _read_ahead(self, tracked: TrackedQueue, request: PopRequest, target: PopTarget) -> int:
        """Let messages wait that were not read before, up to a bound. Return the next queue offset to read."""
        assert request.key_limits is not None, "the request has limits"
        state, name = tracked.state, request.key_limits.property_name.encode()
        next_offset = self._first_offset(state, tracked.queue)
        if (missing := MAX_READ_AHEAD - len(state.waiting)) > 0:
            records = self._reader.records(target.topic, target.queue_id, next_offset, missing, request.selector)
            for queue_offset, record in records:
                if record is not None and self._is_new(state, queue_offset):
                    state.wait(queue_offset, Waiting(bounded(find_property(record.properties_bytes, name) or "")))
                next_offset = queue_offset + 1
                if len(state.waiting) >= MAX_READ_AHEAD:
                    break
        return next_offset

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when `next_turn_ms` is earlier than before."""
        self._wake = wake

    @property
    def next_turn_ms(self) -> int | None:
        """Time at which a rate allows a message of a key again; None if none waits for its rate."""
        times = [turns.next_ms for turns in list(self._turns.values())]
        return min((each for each in times if each is not None), default=None)

    def take_due_turns(self, now_ms: int) -> list[HoldKey]:
        """Return the groups and topics with a key that may have a message that its rate held."""
        return [hold_key for (hold_key, _), turns in list(self._turns.items()) if turns.take_due(now_ms)]

    def has_turns(self, key: HoldKey) -> bool:
        """Return True if the end of a delivery may let another message of its key be delivered."""
        return any(hold_key == key for hold_key, _ in list(self._turns))

    def key_of(self, hold_key: HoldKey, tracked: TrackedQueue, queue_offset: int) -> str:
        """Return the key by which a message takes turns; empty if the messages of its group and topic take none."""
        name = next((name for key, name in list(self._turns) if key == hold_key), None)
        if name is None:
            return ""
        record = self._reader.record(tracked.key.topic, tracked.key.queue_id, queue_offset, None)
        return "" if record is None else bounded(find_property(record.properties_bytes, name.encode()) or "")

    def forget_turns(self, belongs: Callable[[HoldKey], bool]) -> None:
        """Forget the turns of a group or a topic that is deleted."""
        for place in [place for place in self._turns if belongs(place[0])]:
            del self._turns[place]

    def _turns_of(self, group: str, topic: str, limits: KeyLimits) -> KeyTurns:
        place = HoldKey(group, topic), limits.property_name
        found = self._turns.get(place)
        if found is None:
            found = KeyTurns(self._wake)
            if limits.max_in_flight is not None:
                self._count_in_flight(found, group, topic, limits.property_name.encode())
            found = self._turns.setdefault(place, found)
        return found

    def _count_in_flight(self, turns: KeyTurns, group: str, topic: str, name: bytes) -> None:
        """Count the deliveries from before a restart, or from before the group had limits."""
        topics = {topic, retry_topic_v1(topic, group), retry_topic_v2(topic, group)}
        for tracked in self._progress.of_group(group):
            for queue_offset in list(tracked.state.in_flight) if tracked.key.topic in topics else ():
                record = self._reader.record(tracked.key.topic, tracked.key.queue_id, queue_offset, None)
                if record is not None:
                    key = bounded(find_property(record.properties_bytes, name) or "")
                    turns.count(key, tracked, queue_offset)

    # --- in order ------------------------------------------------------------------------------

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
