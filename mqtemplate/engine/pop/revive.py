"""Expired deliveries: a message is copied to the retry topic or to the dead-letter topic, or waits in its order.

Source: ``PopReviveService``. There is one improvement: a message is copied when its time is over, not seconds later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from mqtemplate.engine.pop.holds import HeldPops, HoldKey
from mqtemplate.engine.pop.pop_queue import Delivery
from mqtemplate.engine.pop.progress import PopProgress, TrackedQueue
from mqtemplate.engine.pop.receipt_handle import retry_topic_v1
from mqtemplate.engine.pop.requests import RecordReader
from mqtemplate.errors import MessageError, StoreError
from mqtemplate.event_log import LimitedLog
from mqtemplate.hashes import tags_code
from mqtemplate.message import Property, offset_msg_id
from mqtemplate.record.codec import RecordDraft, StoredRecord, unpack_host
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import TAGS, decode_properties, encode_properties, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_MAX_PER_STEP = 128
_AFTER_ERROR_MS = 1_000
_MAX_RECONSUME_TIMES = 2**31 - 1


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
