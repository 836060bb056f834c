"""Cancelling and rescheduling what waits.

A waiting message is handed over exactly once, and the commit log tells to whom: a record that takes its place names it
in ``prepared_transaction_offset``. A cancel hands it over to nobody: that record is a marker. A reschedule hands it
over to a copy of it with another time. Both are appended under the lock that the release needs too, so that one of them
comes first and the other finds the message gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.divert import Diverted, TimerLimits, divert
from mqtemplate.delay.levels.table import DelayLevels
from mqtemplate.delay.recall_handle import RecallHandle, decode_handle, encode_handle
from mqtemplate.delay.release import copy_of
from mqtemplate.errors import CorruptRecordError, MessageError
from mqtemplate.java_hash import tags_code
from mqtemplate.message import DELAY_PROPERTIES, Property
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import (
    KEYS,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_OUT_MS,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
    find_property,
)
from mqtemplate.store import MessageStore
from mqtemplate.topics import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

_RECALL_TAG = "_RECALL_TAG_"
"""The tag of a delete marker. Source: ``RecallMessageProcessor``."""
_CANCELS = b"0"
_MOVES = b"1"
"""The body of a marker: what became of its message. Upstream writes the first and reads neither."""
_NO_KEY = "-"

_MOST_OF_A_KEY = 100_000
_AT_ONCE = 100  # messages copied forward while nobody else may take one out: some milliseconds
_WAITING_TOPICS = (TIMER_TOPIC, SCHEDULE_TOPIC)


class KeyIndex(Protocol):
    """Where messages with a key lie."""

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int, max_count: int) -> list[int]:
        """Physical offsets of records of *topic* that may have *key*, the newest first."""


def handle_of(topic: str, broker_name: str, properties: bytes, due_ms: int, physical_offset: int) -> str:
    """The handle of a message that waits at *physical_offset*.

    Args:
        topic: The real topic.
        properties: As its record has them.
        due_ms: When it is due.
    """
    slot_ms = find_property(properties, TIMER_OUT_MS)
    time_ms = due_ms if slot_ms is None else int(slot_ms) + 1
    msg_id = find_property(properties, UNIQ_KEY) or ""
    return encode_handle(RecallHandle(topic, broker_name, time_ms, msg_id, physical_offset))


class _Wish(NamedTuple):
    """What to do with a message.

    Attributes:
        status: What it is called when it was done.
        deliver_ms: The new time; None takes the message back.
    """

    status: ScheduleChangeStatus
    deliver_ms: int | None


class DelayController:
    """Changes what waits, by handle or key.

    - An answer is true for good: "cancelled" is never delivered, "already delivered" was not cancelled.
    - Levels and timers alike; a rescheduled message is a timer from then on.
    - A message keeps its id, so its handle and keys go on naming it, however often it is moved.

    Args:
        delay_stores: The two delay services.
        index: Finds messages by key.
        levels: The level table of now.
    """

    def __init__(
        self,
        store: MessageStore,
        delay_stores: Sequence[DelayStore],
        index: KeyIndex,
        levels: Callable[[], DelayLevels],
        limits: TimerLimits,
        broker_name: str,
    ) -> None:
        self._store = store
        self._keepers = {delay_store.source_topic: delay_store for delay_store in delay_stores}
        self._index = index
        self._levels = levels
        self._limits = limits
        self._broker_name = broker_name
        self._cancelled = store.metrics.counter("delay.cancelled")
        self._rescheduled = store.metrics.counter("delay.rescheduled")

    # --- what users call -----------------------------------------------------------------------

    def cancel(self, handle: str | None, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """See `Broker.cancel`."""
        return self._steer(handle, key, topic, _Wish(ScheduleChangeStatus.CANCELLED, None))

    def reschedule(
        self, handle: str | None, deliver_ms: int, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        """See `Broker.reschedule`."""
        now_ms = self._store.clock.now_ms()
        divert(_timer(deliver_ms), topic or "any", 0, now_ms, self._levels(), self._limits)  # raises if too far
        return self._steer(handle, key, topic, _Wish(ScheduleChangeStatus.RESCHEDULED, deliver_ms))

    def _steer(self, handle: str | None, key: str | None, topic: str | None, wish: _Wish) -> ScheduleChange:
        if (handle is None) == (key is None):
            raise MessageError("name what waits by its handle or by key=..., and by one of them")
        if key is not None:
            if not key or " " in key:
                raise MessageError(f"key must be one word, got {key!r}; call once for each key")
            return self._steer_key(key, topic, wish)
        assert handle is not None
        results = [self._steer_handle(decode_handle(part), wish) for part in handle.split(",")]
        done = [result for result in results if result.count]
        handles = tuple(handle for result in done for handle in result.handles)
        status = done[0].status if done else results[0].status
        return ScheduleChange(status, sum(result.count for result in done), handles)

    def _steer_handle(self, handle: RecallHandle, wish: _Wish) -> ScheduleChange:
        first = self._read(handle.physical_offset) if handle.physical_offset >= 0 else None
        if first is not None and _names(first, handle.msg_id, handle.topic) and first.topic in _WAITING_TOPICS:
            answer = self._try([first], wish)
            if answer.count:
                return answer  # the common case, which needs no index: it waits where it waited first
        return self._steer_key(handle.msg_id, handle.topic, wish)

    def _steer_key(self, key: str, topic: str | None, wish: _Wish) -> ScheduleChange:
        family = [
            record
            for waiting_topic in _WAITING_TOPICS
            for record in self._find(waiting_topic, key)
            if _names(record, key, topic)
        ]
        answer = self._try([record for record in family if not is_marker(record)], wish)
        return answer if answer.count else ScheduleChange(self._tell(family, key, topic))

    # --- one message ---------------------------------------------------------------------------

    def _try(self, records: Iterable[StoredRecord], wish: _Wish) -> ScheduleChange:
        """Carry the wish out on those that wait."""
        end, handles = 0, []
        steered: list[StoredRecord] = []
        topics: set[str] = set()
        for record in records:
            delay_store = self._keepers[record.topic]
            with delay_store.lock:
                delay_store.catch_up()
                if not delay_store.is_waiting(record):
                    continue
                drafts = self._drafts(record, delay_store, wish)
                puts = self._store.put_all(drafts, though_full=wish.deliver_ms is None)
                delay_store.withdraw(record)
            steered.append(record)
            end = puts[-1].end
            topics |= {draft.topic for draft in drafts}
            if wish.deliver_ms is not None and drafts[0].topic == TIMER_TOPIC:
                handles.append(self._handle(drafts[0], wish.deliver_ms, puts[0].physical_offset))
        if steered:
            self._store.confirm(end, topics)
            if wish.deliver_ms is None or self._store.group_commit.flushed >= end:
                self._strike_out(steered)
            (self._cancelled if wish.deliver_ms is None else self._rescheduled).add(len(steered))
        return ScheduleChange(wish.status, len(steered), tuple(handles))

    def _strike_out(self, records: Iterable[StoredRecord]) -> None:
        for record in records:
            delay_store = self._keepers[record.topic]
            with delay_store.lock:
                delay_store.mark_cancelled(record)

    def _handle(self, draft: RecordDraft, due_ms: int, physical_offset: int) -> str:
        topic = find_property(draft.properties, REAL_TOPIC) or ""
        return handle_of(topic, self._broker_name, draft.properties, due_ms, physical_offset)

    def _drafts(self, record: StoredRecord, delay_store: DelayStore, wish: _Wish) -> list[RecordDraft]:
        """The records that take the place of a waiting one."""
        if wish.deliver_ms is None:
            return [
                self._marker(
                    record,
                    delay_store,
                    _CANCELS,
                    decode_properties(record.properties_bytes).get(Property.UNIQ_KEY, _NO_KEY),
                )
            ]
        copy = self._copy(record, wish.deliver_ms)
        # The copy goes first: a kill that leaves it alone leaves the message, and the copy names its source, too.
        slot = str(delay_store.slot_of(record))
        meets_copy = find_property(copy.properties, TIMER_OUT_MS) == slot and copy.topic == TIMER_TOPIC
        key = _NO_KEY if meets_copy else decode_properties(record.properties_bytes).get(Property.UNIQ_KEY, _NO_KEY)
        return [copy, self._marker(record, delay_store, _MOVES, key)]

    def _marker(self, record: StoredRecord, delay_store: DelayStore, body: bytes, delete_key: str) -> RecordDraft:
        """What RocketMQ would find when the message is due, and drop it for."""
        properties = decode_properties(record.properties_bytes)
        kept = {
            name: properties[name]
            for name in (Property.UNIQ_KEY, Property.KEYS, Property.REAL_TOPIC, Property.REAL_QID)
            if name in properties
        }
        due_ms = delay_store.due_ms(record)
        kept |= {
            Property.TAGS: _RECALL_TAG,
            Property.TIMER_DELIVER_MS: str(due_ms),
            Property.TIMER_OUT_MS: str(delay_store.slot_of(record)),
            Property.TIMER_DEL_UNIQKEY: delete_key,
            Property.REPLACED_LEVEL: _kind(record),
        }
        return RecordDraft(
            TIMER_TOPIC,
            0,
            body,
            encode_properties(kept),
            tags_code=tags_code(_RECALL_TAG),
            born_timestamp=self._store.clock.now_ms(),
            born_host=record.born_host,
            prepared_transaction_offset=record.physical_offset + 1,
        )

    def _copy(self, record: StoredRecord, deliver_ms: int) -> RecordDraft:
        """The message with another time: a timer, or, if the time has come, in its real topic."""
        properties = decode_properties(record.properties_bytes)
        topic, queue_id = properties[Property.REAL_TOPIC], int(properties[Property.REAL_QID])
        kept = {name: value for name, value in properties.items() if name not in DELAY_PROPERTIES}
        now_ms = self._store.clock.now_ms()
        wanted = kept | _timer(deliver_ms)
        diverted = divert(wanted, topic, queue_id, now_ms, self._levels(), self._limits)
        if diverted is None:
            real = {Property.REAL_TOPIC: topic, Property.REAL_QID: str(queue_id)}  # as every released copy has them
            diverted = Diverted(topic, queue_id, wanted | real)
        encoded = encode_properties(diverted.properties | {Property.REPLACED_LEVEL: _kind(record)})
        return copy_of(record, diverted.topic, diverted.queue_id, encoded)

    # --- the truth about what does not wait ----------------------------------------------------

    def _tell(self, family: Sequence[StoredRecord], key: str, topic: str | None) -> ScheduleChangeStatus:
        """What became of a message none of whose records waits."""
        if family:
            newest = max(family, key=lambda record: record.physical_offset)
            if is_marker(newest) and newest.body != _MOVES and not self._was_released(newest, key):
                return ScheduleChangeStatus.CANCELLED
            return ScheduleChangeStatus.ALREADY_DELIVERED
        if topic is not None and any(has_key(record, key) for record in self._find(topic, key)):
            return ScheduleChangeStatus.ALREADY_DELIVERED
        return ScheduleChangeStatus.UNKNOWN

    def _was_released(self, marker: StoredRecord, key: str) -> bool:
        """Whether a marker came too late: RocketMQ stores one first, and looks for its message later."""
        if marker.prepared_transaction_offset > 0:
            return False
        topic = find_property(marker.properties_bytes, REAL_TOPIC) or ""
        return any(has_key(record, key) for record in self._find(topic, key))

    def _find(self, topic: str, key: str) -> Iterator[StoredRecord]:
        for physical_offset in self._index.find(topic, key, 0, (1 << 63) - 1, _MOST_OF_A_KEY):
            record = self._read(physical_offset)
            if record is not None and record.topic == topic:
                yield record

    def _read(self, physical_offset: int) -> StoredRecord | None:
        try:
            return self._store.read_at(physical_offset)
        except CorruptRecordError:
            return None  # whoever reads the message itself is told

    # --- files that go -------------------------------------------------------------------------

    def copy_forward(self, physical_begin: int, physical_end: int) -> bool:
        """Write what waits in this part of the log again at its end, so that its files may go.

        Returns:
            False if something there is due, or cannot be read: then the part is still needed.
        """
        return all(
            self._copy_all_forward(delay_store, physical_begin, physical_end) for delay_store in self._keepers.values()
        )

    def pending_bytes(self, physical_begin: int, physical_end: int) -> int:
        """How much of this part of the log waits."""
        total = 0
        for delay_store in self._keepers.values():
            with delay_store.lock:
                delay_store.catch_up()
                total += int(delay_store.waiting_between(physical_begin, physical_end)["size"].sum())
        return total

    def _copy_all_forward(self, delay_store: DelayStore, physical_begin: int, physical_end: int) -> bool:
        with delay_store.lock:
            delay_store.catch_up()
            rows = delay_store.waiting_between(physical_begin, physical_end)
        # what is due goes by itself; on a full disk it cannot, and must not keep the file that would make room
        if len(rows) and self._store.cleaning.refusal is None and rows["due_ms"].min() <= self._store.clock.now_ms():
            return False
        offsets = np.sort(rows["physical_offset"])
        moved = [
            self._move_between(delay_store, int(piece[0]), int(piece[-1]) + 1)
            for piece in np.split(offsets, range(_AT_ONCE, len(offsets), _AT_ONCE))
            if len(piece)
        ]
        self._store.group_commit.wait(self._store.end_offset, 60_000)
        return all(moved)

    def _move_between(self, delay_store: DelayStore, physical_begin: int, physical_end: int) -> bool:
        """Copy a few messages; others may be handed over before and after."""
        with delay_store.lock:
            rows = delay_store.waiting_between(physical_begin, physical_end)
            records = [self._read(physical_offset) for physical_offset in rows["physical_offset"].tolist()]
            whole = [record for record in records if record is not None]
            if len(whole) < len(records) or not whole:
                return not records
            topics = set()
            for record in whole:  # one by one: together they could be more than a file takes
                draft = self._forward(record, delay_store)
                self._store.put_all([draft], though_full=True)  # it makes room
                delay_store.withdraw(record)
                topics.add(draft.topic)
        self._store.notify(topics)
        return True

    def _forward(self, record: StoredRecord, delay_store: DelayStore) -> RecordDraft:
        if record.topic == SCHEDULE_TOPIC:
            return self._copy(record, delay_store.due_ms(record))
        properties = encode_properties(
            decode_properties(record.properties_bytes) | {Property.REPLACED_LEVEL: _kind(record)}
        )
        return copy_of(record, TIMER_TOPIC, 0, properties)


def _timer(deliver_ms: int) -> dict[str, str]:
    return {Property.TIMER_DELIVER_MS: str(deliver_ms)}


def _kind(record: StoredRecord) -> str:
    """The level of a waiting record, 0 for a timer."""
    return str(record.queue_id + 1) if record.topic == SCHEDULE_TOPIC else "0"


def is_marker(record: StoredRecord) -> bool:
    """Whether a record is a delete marker, ours or RocketMQ's, and so no message."""
    return find_property(record.properties_bytes, TIMER_DEL_UNIQKEY) is not None


def has_key(record: StoredRecord, key: str) -> bool:
    """Whether *key* is a record's message id or one of its keys."""
    properties = record.properties_bytes
    if find_property(properties, UNIQ_KEY) == key:
        return True
    return key in (find_property(properties, KEYS) or "").split()


def _names(record: StoredRecord, key: str, topic: str | None) -> bool:
    """Whether a record of a waiting topic has this key and is for this topic.

    A retry waits too, but its message was delivered already: it is meant only where its topic is named.
    """
    real_topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
    is_meant = not real_topic.startswith(RETRY_TOPIC_PREFIX) if topic is None else real_topic == topic
    return is_meant and has_key(record, key)
