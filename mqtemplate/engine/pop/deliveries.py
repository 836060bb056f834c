"""Deliveries of messages, and their end when their time is over.

An expired message is copied to the retry topic or to the dead-letter topic, or waits in its order.
Source: ``PopMessageProcessor``, ``PopReviveService``. There is one improvement: a message is copied when its time is
over, not seconds later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from mqtemplate.engine.pop.holds import HeldPops, HoldKey
from mqtemplate.engine.pop.pop_queue import MAX_WAITING, Delivery, PopQueue, Waiting
from mqtemplate.engine.pop.progress import PopProgress, QueueSpans, TrackedQueue
from mqtemplate.engine.pop.receipt_handle import ORDERED_REVIVE_QUEUE, ReceiptHandle, retry_topic_v1
from mqtemplate.engine.pop.requests import PoppedMessage, PopRequest, RecordReader, bounded
from mqtemplate.errors import MessageError, StoreError
from mqtemplate.event_log import LimitedLog
from mqtemplate.hashes import tags_code
from mqtemplate.message import MessageQueue, Property, offset_msg_id
from mqtemplate.record.codec import RecordDraft, StoredRecord, unpack_host
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import SHARDING_KEY, TAGS, decode_properties, encode_properties, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import RETRY_TOPIC_PREFIX

MAX_RENEWED_MS = 3 * 3_600_000
"""A session renews a delivery for this time. Source: ``ProxyConfig.renewMaxTimeMillis``."""
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

    def deliver(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, popped: list[PoppedMessage]
    ) -> bool:
        """Deliver messages of one queue. Return True if it may have more that were not looked at."""
        self._progress.begin(tracked, from_last=request.from_last)
        state = tracked.state
        state.limit_attempts(request.max_attempts)
        room = min(request.max_count - len(popped), self._max_in_flight - len(state.in_flight))
        if room <= 0 or tracked.is_gone:
            return False
        pop = self._pop_ordered if request.is_ordered else self._pop_unordered
        next_offset = pop(tracked, request, target, room, popped)
        is_cut = next_offset > state.next
        state.read_to(next_offset)
        self._progress.settle(tracked)
        return is_cut and next_offset < self._spans.max_offset(tracked.queue)

    def _delivery(self, request: PopRequest, pop_ms: int) -> Delivery:
        """Return the delivery of a pop."""
        visible_ms = pop_ms + (MAX_RENEWED_MS if request.session else request.invisible_ms)
        return Delivery(pop_ms, visible_ms, bounded(request.session), attempt_id=bounded(request.attempt_id))

    def _pop_unordered(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, room: int, popped: list[PoppedMessage]
    ) -> int:
        """Deliver messages in any order. Return the next queue offset to read."""
        state, now_ms = tracked.state, self._clock.now_ms()
        found: list[tuple[int, StoredRecord, int]] = []
        for queue_offset in state.deliverable(room, is_ordered=False):
            earlier = state.waiting[queue_offset].earlier
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
            else:
                found.append((queue_offset, record, earlier))
        next_offset = self._first_offset(state, tracked.queue)
        if len(found) < room:
            count = room - len(found)
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, count, request.selector
            ):
                next_offset = queue_offset + 1
                if record is not None and self._is_new(state, queue_offset):
                    found.append((queue_offset, record, 0))
                    if len(found) == room:
                        break
        delivery, start = self._delivery(request, now_ms), state.next
        exhausted = [at for at, record, earlier in found if record.reconsume_times + earlier >= request.max_attempts]
        if exhausted:  # the next step copies them to the dead-letter topic
            state.deliver(exhausted, delivery._replace(visible_ms=now_ms, counts=False))
            found = [each for each in found if each[0] not in exhausted]
        redelivered = [each for each in found if each[2]]
        for queue_offset, _, earlier in redelivered:
            state.deliver([queue_offset], delivery._replace(earlier=earlier))
        state.deliver([at for at, _, earlier in found if not earlier], delivery)
        for _, record, earlier in found:
            popped.append(self._popped_message(request, target, start, now_ms, record, earlier))
        return next_offset

    def _pop_ordered(
        self, tracked: TrackedQueue, request: PopRequest, target: PopTarget, room: int, popped: list[PoppedMessage]
    ) -> int:
        """Deliver messages whose message groups have no unacknowledged ones. Return the next queue offset to read."""
        state, pop_ms = tracked.state, self._clock.now_ms()
        found: list[tuple[int, str, int, StoredRecord]] = []
        repeated = state.same_attempt(bounded(request.attempt_id))
        for queue_offset in repeated or state.deliverable(room, is_ordered=True):
            before = state.in_flight.get(queue_offset) or state.waiting[queue_offset]
            record = self._reader.record(target.topic, target.queue_id, queue_offset, request.selector)
            if record is None:
                state.done([queue_offset])
                continue
            pop_ms = max(pop_ms, before.pop_ms + 1)  # another one than before, since it identifies the delivery
            found.append((queue_offset, before.group or "", before.earlier, record))
        next_offset = self._first_offset(state, tracked.queue)
        if not repeated and len(found) < room and len(state.waiting) < MAX_WAITING:
            for queue_offset, record in self._reader.records(
                target.topic, target.queue_id, next_offset, room - len(found), request.selector
            ):
                next_offset = queue_offset + 1
                if record is not None and self._is_new(state, queue_offset):
                    group = bounded(find_property(record.properties_bytes, SHARDING_KEY) or "")
                    if state.is_blocked(group):
                        state.wait(queue_offset, Waiting(group))
                    else:
                        found.append((queue_offset, group, 0, record))
                if len(found) == room or len(state.waiting) >= MAX_WAITING:
                    break
        start = state.next
        state.deliver_ordered(
            [(at, group, earlier) for at, group, earlier, _ in found], self._delivery(request, pop_ms)
        )
        for _, _, earlier, record in found:
            popped.append(self._popped_message(request, target, start, pop_ms, record, earlier))
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


class StoredCopy(Protocol):
    """A copy of a message that was stored; `MessageStore.confirm_async` makes it durable."""

    @property
    def end(self) -> int:
        """Physical offset after it."""

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics whose readers are notified then."""


class _RetryCopy(NamedTuple):
    end: int
    topics: tuple[str, ...]


class StoreDeadLetter(Protocol):
    """Function that stores a dead letter."""

    def __call__(self, record: StoredRecord, group: str) -> StoredCopy:
        """Copy a record to the dead-letter topic of *group*.

        Raises:
            MessageError: The copy is not a valid message.
            StoreError: It was not stored.
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
        reader: RecordReader,
        holds: HeldPops,
        create_topic: Callable[[str, int], None],
        dead_letter: StoreDeadLetter,
        log: LimitedLog,
    ) -> None:
        self._store = store
        self._progress = progress
        self._reader = reader
        self._holds = holds
        self._create_topic = create_topic
        self._dead_letter = dead_letter
        self._log = log
        self._expired = store.metrics.counter("pop.expired")
        self._dead_lettered = store.metrics.counter("pop.dead_lettered")

    def step(self) -> int | None:
        """End deliveries that are due. Return the time of the next step."""
        now_ms = self._store.clock.now_ms()
        tracked = self._progress.take_due(now_ms)
        if tracked is None:
            return self._progress.next_due_ms()
        copies: list[StoredCopy] = []
        with tracked.lock:
            state = tracked.state
            if self._progress.is_forgotten(tracked):
                state.reset(state.base)
            due = state.take_due(now_ms, _MAX_PER_STEP)
            for queue_offset, delivery in due:
                self._end(tracked, queue_offset, delivery, now_ms, copies)
            self._progress.settle(tracked)
        for copy in copies:  # without the lock: it may call functions of others
            self._store.confirm_async(copy.end, copy.topics)
        if due:
            self._holds.changed(HoldKey(tracked.key.group, tracked.key.topic))
        return now_ms

    def _end(
        self, tracked: TrackedQueue, queue_offset: int, delivery: Delivery, now_ms: int, copies: list[StoredCopy]
    ) -> None:
        state, (group, topic, queue_id) = tracked.state, tracked.key
        is_exhausted = delivery.attempts >= state.max_attempts
        if delivery.group is not None and not is_exhausted:
            state.wait_again(queue_offset)
            self._count(tracked, delivery)
            return
        record = self._reader.record(topic, queue_id, queue_offset, None)
        try:
            if record is not None:
                copies.append(self._copy(record, group, topic, delivery, state.max_attempts))
        except (StoreError, MessageError) as exc:
            self._log.warning("pop.revive_failed", group=group, topic=topic, queue_offset=queue_offset, reason=str(exc))
            state.schedule(queue_offset, now_ms + _AFTER_ERROR_MS)
            return
        state.done([queue_offset])  # after the copy: a crash in between leads to two copies, not to none
        self._count(tracked, delivery)

    def _count(self, tracked: TrackedQueue, delivery: Delivery) -> None:
        if delivery.counts:
            tracked.state.expired += 1
            self._expired.add()

    def _copy(self, record: StoredRecord, group: str, topic: str, delivery: Delivery, max_attempts: int) -> StoredCopy:
        attempts = record.reconsume_times + delivery.attempts
        if attempts >= max_attempts:
            self._dead_lettered.add()
            return self._dead_letter(record, group)
        draft = retry_draft(record, topic, group, attempts, delivery.pop_ms)
        self._create_topic(draft.topic, 1)
        return _RetryCopy(self._store.put(draft).end, (draft.topic,))
