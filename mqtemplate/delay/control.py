"""Cancelling and rescheduling pending messages.

A delayed message is replaced by exactly one record, which names it in ``prepared_transaction_offset``. A release
replaces it by its copy in the real topic, a cancel by a delete marker, a reschedule by a copy with another time, and a
hand-over by a copy in the transit topic. All of them are appended under the lock of the delay store. So one of them is
first, and the others find that the message is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.copies import copy_of
from mqtemplate.delay.delay_store import FLUSH_TIMEOUT_MS, DelayStore, RecordLookup, has_key, is_marker
from mqtemplate.delay.divert import Diverted, TimerLimits, divert_to_timer
from mqtemplate.delay.pending_keys import ChangedTogether, PendingKeys, PendingRecord, WaitingTimer, put_together
from mqtemplate.delay.pending_rows import PendingEntry
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle, handle_of
from mqtemplate.errors import StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import tags_code
from mqtemplate.message import DELAY_PROPERTIES, Property
from mqtemplate.pending import PendingState, ScheduleChange, ScheduleChangeStatus
from mqtemplate.record.appends import PutBatch
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES
from mqtemplate.record.properties import (
    REAL_TOPIC,
    REPLACED_LEVEL,
    TAGS,
    TIMER_DEL_UNIQKEY,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
    find_property,
    property_format,
)
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import HAND_OVER_TOPIC, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, is_in_namespace

_log = get_logger("mqtemplate.delay")

_RECALL_TAG = "_RECALL_TAG_"
"""Tag of a delete marker. Source: ``RecallMessageProcessor``."""
_CANCELLED = b"0"
_MOVED = b"1"
_HANDED_OVER = b"2"
"""Body of a delete marker: the reason why its message is gone. RocketMQ writes ``0``, and reads neither."""
_NO_KEY = "-"
"""Key of a delete marker that deletes nothing in RocketMQ."""
_RECALL_CODE = tags_code(_RECALL_TAG)
_UNIQ_KEY = property_format(UNIQ_KEY, b"")[:-1]
_MARK = property_format(TAGS, _RECALL_TAG.encode()) + property_format(TIMER_DEL_UNIQKEY, b"")[:-1]
_OF_TIMER = b"\x02" + property_format(REPLACED_LEVEL, b"0")

_COPIED_AT_ONCE = 100  # messages copied forward under one lock: some milliseconds in which none is released
_MARKER_BYTES = 1_024  # more bytes of a copy and its marker than twice their record
_DELAYED_TOPICS = (TIMER_TOPIC, SCHEDULE_TOPIC)
_STATES = {
    ScheduleChangeStatus.ALREADY_DELIVERED: PendingState.DELIVERED,
    ScheduleChangeStatus.CANCELLED: PendingState.CANCELLED,
    ScheduleChangeStatus.MOVED: PendingState.MOVED,
    ScheduleChangeStatus.UNKNOWN: PendingState.UNKNOWN,
}


class _Change(NamedTuple):
    """A cancel or a reschedule.

    Attributes:
        status: Status of a message that was changed.
        deliver_ms: The new due time; None for a cancel.
    """

    status: ScheduleChangeStatus
    deliver_ms: int | None


class _NamedMessage(NamedTuple):
    """Messages that a call names: those with a key, for one topic, or for the topics of a namespace."""

    key: str
    topic: str | None = None
    namespace: str | None = None

    def is_name_of(self, record: StoredRecord) -> bool:
        """Return True if a delayed record is meant.

        A retry is a delayed record of a message that was delivered. So it is meant only if its retry topic is given.
        """
        real_topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
        is_meant = not real_topic.startswith(RETRY_TOPIC_PREFIX) if self.topic is None else real_topic == self.topic
        is_own = self.namespace is None or is_in_namespace(real_topic, self.namespace)
        return is_meant and is_own and has_key(record, self.key)


class DelayController:
    """Cancels and reschedules pending messages, named by handle or key.

    - A reported status stays true: ``CANCELLED`` is never delivered, ``ALREADY_DELIVERED`` was not cancelled.
    - It works for levels and timers alike. A rescheduled message is a timer from then on.
    - A message keeps its id, so its handle and keys still name it after any number of changes.

    Args:
        delay_stores: The two delay services.

    Attributes:
        pending_keys: Stores messages with pending keys.
    """

    def __init__(
        self, store: MessageStore, delay_stores: Sequence[DelayStore], limits: TimerLimits, broker_name: str
    ) -> None:
        self._store = store
        self._delay_stores = {delay_store.source_topic: delay_store for delay_store in delay_stores}
        self._lookup = RecordLookup(store)
        self._limits = limits
        self._broker_name = broker_name
        self._cancelled = store.metrics.counter("delay.cancelled")
        self._rescheduled = store.metrics.counter("delay.rescheduled")
        self.pending_keys = PendingKeys(store, self._delay_stores, self, broker_name)

    # --- by handle or key ----------------------------------------------------------------------

    def cancel(
        self, handle: str | None, key: str | None = None, topic: str | None = None, namespace: str | None = None
    ) -> ScheduleChange:
        """See `EmbeddedBroker.cancel`."""
        return self._change(handle, key, topic, namespace, _Change(ScheduleChangeStatus.CANCELLED, None))

    def reschedule(
        self,
        handle: str | None,
        deliver_ms: int,
        key: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
    ) -> ScheduleChange:
        """See `EmbeddedBroker.reschedule`."""
        divert_to_timer({}, "any", 0, self._store.clock.now_ms(), deliver_ms, self._limits)  # raises if too far away
        return self._change(handle, key, topic, namespace, _Change(ScheduleChangeStatus.RESCHEDULED, deliver_ms))

    def _change(
        self, handle: str | None, key: str | None, topic: str | None, namespace: str | None, change: _Change
    ) -> ScheduleChange:
        key = check_selection(handle, key)
        if key is not None:
            return self._change_by_key(_NamedMessage(key, topic, namespace), change)
        assert handle is not None
        results = [self._change_by_handle(decode_handle(part), change) for part in handle.split(",")]
        done = [result for result in results if result.count]
        handles = tuple(handle for result in done for handle in result.handles)
        status = done[0].status if done else results[0].status
        return ScheduleChange(status, sum(result.count for result in done), handles)

    # --- together with sends -------------------------------------------------------------------

    def change_together(
        self,
        handle: str | None,
        key: str | None,
        topic: str | None,
        namespace: str | None,
        then: Sequence[RecordDraft],
        deliver_ms: int | None,
    ) -> ChangedTogether:
        """Cancel pending messages, or reschedule them, and store *then* in the same append; it is not durable yet."""
        status = ScheduleChangeStatus.CANCELLED if deliver_ms is None else ScheduleChangeStatus.RESCHEDULED
        if deliver_ms is not None:
            divert_to_timer({}, "any", 0, self._store.clock.now_ms(), deliver_ms, self._limits)
        with self.pending_keys.locked():
            final, pending = self._state(handle, key, topic, namespace)
            if not pending:
                return ChangedTogether(ScheduleChange(final))
            change = _Change(status, deliver_ms)
            replacing = [self._drafts(*each, change) for each in pending]
            copies = [draft for drafts in replacing for draft in drafts[:-1]]
            records = [*then, *copies, *(drafts[-1] for drafts in replacing)]
            puts = put_together(self._store, records, though_full=deliver_ms is None and not then)
            self.pending_keys.remove(each.record for each in pending)
        (self._cancelled if deliver_ms is None else self._rescheduled).add(len(pending))
        handles = [
            self._handle(copy, deliver_ms, puts[len(then) + number].physical_offset)
            for number, copy in enumerate(copies)
            if deliver_ms is not None and copy.topic == TIMER_TOPIC
        ]
        result = ScheduleChange(status, len(pending), tuple(handles))
        return ChangedTogether(result, puts, frozenset(draft.topic for draft in records))

    def put_if(
        self,
        drafts: Sequence[RecordDraft],
        state: PendingState,
        handle: str | None,
        key: str | None,
        topic: str | None,
        namespace: str | None,
    ) -> tuple[PendingState, PutBatch | None]:
        """Store records if a delayed message is in a state; they are not durable yet.

        Returns:
            Its state, and the positions of the records; None if they were not stored.
        """
        with self.pending_keys.locked():
            final, pending = self._state(handle, key, topic, namespace)
            found = PendingState.PENDING if pending else _STATES[final]
            puts = put_together(self._store, drafts) if found is state else None
        return found, puts

    def _state(
        self, handle: str | None, key: str | None, topic: str | None, namespace: str | None
    ) -> tuple[ScheduleChangeStatus, list[PendingRecord]]:
        """With the locks: return the pending messages that a call names, and the status if there are none."""
        key = check_selection(handle, key)
        if key is not None:
            meant = [_NamedMessage(key, topic, namespace)]
        else:
            named_handles = [decode_handle(part) for part in (handle or "").split(",")]
            meant = [_NamedMessage(each.msg_id, each.topic) for each in named_handles]
        named = [self._named(each) for each in meant]
        records = [record for part in named for record in part if not is_marker(record)]
        pending = self.pending_keys.pending_of(records)
        status = ScheduleChangeStatus.UNKNOWN if pending else self._final_status(named[0], meant[0])
        return status, pending

    def _change_by_handle(self, handle: RecallHandle, change: _Change) -> ScheduleChange:
        first = self._lookup.at(handle.physical_offset) if handle.physical_offset >= 0 else None
        meant = _NamedMessage(handle.msg_id, handle.topic)
        if first is not None and first.topic in _DELAYED_TOPICS and meant.is_name_of(first):
            result = self._apply([first], change)
            if result.count:
                return result  # the common case needs no index: the message was never moved
        return self._change_by_key(meant, change, gone=first)

    def _change_by_key(self, meant: _NamedMessage, change: _Change, gone: StoredRecord | None = None) -> ScheduleChange:
        seen = set() if gone is None else {gone.physical_offset}
        count, handles = 0, list[str]()
        named = self._named(meant)
        while fresh := [each for each in named if each.physical_offset not in seen and not is_marker(each)]:
            result = self._apply(fresh, change)
            count += result.count
            handles += result.handles
            seen |= {each.physical_offset for each in fresh}
            seen |= {decode_handle(each).physical_offset for each in result.handles}
            named = self._named(meant)  # again: a message that was rolled or moved meanwhile has a new record
        status = change.status if count else self._final_status(named, meant)
        return ScheduleChange(status, count, tuple(handles))

    def _named(self, meant: _NamedMessage) -> list[StoredRecord]:
        """Return the delayed records that are meant, pending or not, and their delete markers."""
        return [
            record
            for delayed_topic in _DELAYED_TOPICS
            for record in self._lookup.by_key(delayed_topic, meant.key)
            if meant.is_name_of(record)
        ]

    def _final_status(self, named: Sequence[StoredRecord], meant: _NamedMessage) -> ScheduleChangeStatus:
        """Return the status of a message none of whose delayed records is pending."""
        if not named:
            is_delivered = meant.topic is not None and self._is_stored(meant.topic, meant.key)
            return ScheduleChangeStatus.ALREADY_DELIVERED if is_delivered else ScheduleChangeStatus.UNKNOWN
        newest = max(named, key=lambda record: record.physical_offset)
        if is_marker(newest) and newest.body == _HANDED_OVER:
            return ScheduleChangeStatus.MOVED
        is_cancelled = is_marker(newest) and newest.body != _MOVED
        # We append a marker only for a pending message. RocketMQ does not look for it first, so a marker may be too
        # late.
        if is_cancelled and newest.prepared_transaction_offset <= 0:
            is_cancelled = not self._is_stored(find_property(newest.properties_bytes, REAL_TOPIC) or "", meant.key)
        return ScheduleChangeStatus.CANCELLED if is_cancelled else ScheduleChangeStatus.ALREADY_DELIVERED

    def _is_stored(self, topic: str, key: str) -> bool:
        return any(has_key(record, key) for record in self._lookup.by_key(topic, key))

    def release_now(self, records: Sequence[StoredRecord]) -> None:
        """Release those of *records* that are still pending."""
        now_ms = self._store.clock.now_ms()
        self._apply(records, _Change(ScheduleChangeStatus.RESCHEDULED, now_ms))

    # --- pending messages ----------------------------------------------------------------------

    def _apply(self, records: Iterable[StoredRecord], change: _Change) -> ScheduleChange:
        """Change the pending ones of *records*."""
        end, handles = 0, []
        changed: list[StoredRecord] = []
        topics: set[str] = set()
        error: StoreError | None = None
        for record in records:
            delay_store = self._delay_stores[record.topic]
            with delay_store.lock:
                delay_store.catch_up()
                entry = delay_store.find(record)
                if entry is None:
                    continue
                drafts = self._drafts(record, entry, change)
                try:
                    puts = self._store.put(Drafts(drafts), though_full=change.deliver_ms is None)
                except StoreError as exc:  # those before it are changed: their consumers have to know
                    error = exc
                    break
                delay_store.remove(record)
            changed.append(record)
            end = puts.end
            topics |= {draft.topic for draft in drafts}
            if change.deliver_ms is not None and drafts[0].topic == TIMER_TOPIC:
                handles.append(self._handle(drafts[0], change.deliver_ms, puts[0].physical_offset))
        if changed:
            self._store.confirm(end, topics)
            # A mark of a moved message must not outlive its copy. A cancelled message has no copy to lose.
            if change.deliver_ms is None or self._store.group_commit.flushed >= end:
                for record in changed:
                    with (delay_store := self._delay_stores[record.topic]).lock:
                        delay_store.mark_cancelled(record)
            (self._cancelled if change.deliver_ms is None else self._rescheduled).add(len(changed))
        if error is not None:
            raise error
        return ScheduleChange(change.status, len(changed), tuple(handles))

    def _handle(self, draft: RecordDraft, due_ms: int, physical_offset: int) -> str:
        topic = find_property(draft.properties, REAL_TOPIC) or ""
        return handle_of(topic, self._broker_name, draft.properties, due_ms, physical_offset)

    def cancelled(self, pending: PendingRecord) -> list[RecordDraft]:
        """See `Replacements`."""
        return self._drafts(*pending, _Change(ScheduleChangeStatus.CANCELLED, None))

    def rescheduled(self, pending: PendingRecord, deliver_ms: int) -> list[RecordDraft]:
        """See `Replacements`."""
        return self._drafts(*pending, _Change(ScheduleChangeStatus.RESCHEDULED, deliver_ms))

    def cancelled_waiting(self, waiting: WaitingTimer, new: RecordDraft) -> RecordDraft:
        """See `Replacements`."""
        properties = b"".join(
            (
                _UNIQ_KEY,
                waiting.msg_id,
                b"\x02",
                waiting.keys,
                waiting.times_and_target,
                _MARK,
                waiting.msg_id,
                _OF_TIMER,
            )
        )
        return RecordDraft(
            TIMER_TOPIC,
            0,
            _CANCELLED,
            properties,
            tags_code=_RECALL_CODE,
            born_timestamp=new.born_timestamp,
            born_host=new.born_host,
            prepared_transaction_offset=waiting.physical_offset + 1,
        )

    def _drafts(self, record: StoredRecord, entry: PendingEntry, change: _Change) -> list[RecordDraft]:
        """Return the records that replace a pending one."""
        key = decode_properties(record.properties_bytes).get(Property.UNIQ_KEY, _NO_KEY)
        if change.deliver_ms is None:
            return [self._marker(record, entry, _CANCELLED, key)]
        copy = self._copy(record, change.deliver_ms)
        # RocketMQ deletes by key within a slot. In one slot the marker would delete the copy as well, so it has no key.
        if copy.topic == TIMER_TOPIC and find_property(copy.properties, TIMER_OUT_MS) == str(entry.slot_ms):
            key = _NO_KEY
        # The copy goes first. If a kill leaves only the copy, the message is kept, and the copy names its source, too.
        return [copy, self._marker(record, entry, _MOVED, key)]

    def _marker(self, record: StoredRecord, entry: PendingEntry, body: bytes, delete_key: str) -> RecordDraft:
        """Return a delete marker in the form in which RocketMQ finds it when the message is due."""
        properties = decode_properties(record.properties_bytes)
        kept = {
            name: properties[name]
            for name in (Property.UNIQ_KEY, Property.KEYS, Property.REAL_TOPIC, Property.REAL_QID)
            if name in properties
        }
        kept |= {
            Property.TAGS: _RECALL_TAG,
            Property.TIMER_DELIVER_MS: str(entry.due_ms),
            Property.TIMER_OUT_MS: str(entry.slot_ms),
            Property.TIMER_DEL_UNIQKEY: delete_key,
            Property.REPLACED_LEVEL: _level_of(record),
        }
        return RecordDraft(
            TIMER_TOPIC,
            0,
            body,
            encode_properties(kept),
            tags_code=_RECALL_CODE,
            born_timestamp=self._store.clock.now_ms(),
            born_host=record.born_host,
            prepared_transaction_offset=record.physical_offset + 1,
        )

    def _copy(self, record: StoredRecord, deliver_ms: int) -> RecordDraft:
        """Return the message with another due time: a timer, or a message of its real topic if the time has come."""
        properties = decode_properties(record.properties_bytes)
        topic, queue_id = properties[Property.REAL_TOPIC], int(properties[Property.REAL_QID])
        kept = {name: value for name, value in properties.items() if name not in DELAY_PROPERTIES}
        diverted = divert_to_timer(kept, topic, queue_id, self._store.clock.now_ms(), deliver_ms, self._limits)
        if diverted is None:
            # A released copy has these properties, too.
            kept[Property.TIMER_DELIVER_MS] = str(deliver_ms)
            kept |= {Property.REAL_TOPIC: topic, Property.REAL_QID: str(queue_id)}
            diverted = Diverted(topic, queue_id, kept)
        encoded = encode_properties(diverted.properties | {Property.REPLACED_LEVEL: _level_of(record)})
        return copy_of(record, diverted.topic, diverted.queue_id, encoded)

    # --- hand-over to another broker -----------------------------------------------------------

    def reserve(self, physical_offsets: Sequence[int], is_chosen: Callable[[StoredRecord], bool]) -> int:
        """Replace pending messages by copies in the transit topic, and return their number.

        They are on the disk when this method returns, whatever the flush mode: the other broker may deliver them then.

        Args:
            physical_offsets: Of their records, in the order in which they are reserved.
            is_chosen: Returns True for a record that may move.
        """
        reserved: list[StoredRecord] = []
        end = 0
        for start in range(0, len(physical_offsets), _COPIED_AT_ONCE):
            records = map(self._lookup.at, physical_offsets[start : start + _COPIED_AT_ONCE])
            chosen = [each for each in records if each is not None and is_chosen(each)]
            with ExitStack() as locks:  # both: one append has messages of both, in their order
                for delay_store in self._delay_stores.values():
                    locks.enter_context(delay_store.lock)
                    delay_store.catch_up()
                found = self._reservations(chosen)
                for each in _fitting(found, self._store.sizes.commit_log // 4):
                    end = self._store.put(Drafts([draft for _, drafts in each for draft in drafts])).end
                    for record, _ in each:
                        self._delay_stores[record.topic].remove(record)
                        reserved.append(record)
        self._confirm_on_disk(end, {HAND_OVER_TOPIC, TIMER_TOPIC})
        for record in reserved:
            with (delay_store := self._delay_stores[record.topic]).lock:
                delay_store.mark_cancelled(record)
        return len(reserved)

    def _confirm_on_disk(self, end: int, topics: set[str]) -> None:
        """Wait until records are on the disk, also with asynchronous flushes; then notify the readers of *topics*."""
        if end and not self._store.group_commit.wait(end, FLUSH_TIMEOUT_MS):
            raise StoreError(f"the disk has not written the records of a hand-over after {FLUSH_TIMEOUT_MS // 1_000} s")
        if end:
            self._store.confirm(end, topics)

    def _reservations(self, records: Sequence[StoredRecord]) -> list[_Reservation]:
        """With the locks: return the pending ones of *records*, with the copy and the marker that replace each."""
        found = []
        for record in records:
            entry = self._delay_stores[record.topic].find(record)
            if entry is None:
                continue
            properties = decode_properties(record.properties_bytes)
            properties |= {
                Property.TIMER_DELIVER_MS: str(entry.due_ms),
                Property.REPLACED_LEVEL: _level_of(record),
            }
            encoded = encode_properties(properties)
            if len(encoded) <= MAX_PROPERTIES_BYTES:
                marker = self._marker(record, entry, _HANDED_OVER, properties[Property.UNIQ_KEY])
                found.append((record, [copy_of(record, HAND_OVER_TOPIC, 0, encoded), marker]))
        return found

    def settle(self, ended: Sequence[RecordDraft], returned: Sequence[tuple[StoredRecord, bool]]) -> None:
        """Store how the transit of messages ended, in one append for those that fit.

        Args:
            ended: A record for each message.
            returned: Records of the transit topic whose messages are pending again from now on, each with True if it
                may be reserved once more.
        """
        drafts = [self._returned(record, may_move_again=again) for record, again in returned]
        end = self._store.put(Drafts([*drafts, *ended]), though_full=True).end
        self._confirm_on_disk(end, {draft.topic for draft in (*drafts, *ended)})

    def _returned(self, record: StoredRecord, *, may_move_again: bool) -> RecordDraft:
        """Return the copy of a message in transit that is pending again; it goes to its topic if it is due."""
        due_ms = int(find_property(record.properties_bytes, TIMER_DELIVER_MS) or 0)
        now_ms = self._store.clock.now_ms()
        limits = replace(self._limits, enabled=True, max_delay_ms=max(self._limits.max_delay_ms, due_ms - now_ms))
        properties = decode_properties(record.properties_bytes)
        topic, queue_id = properties[Property.REAL_TOPIC], int(properties[Property.REAL_QID])
        kept = {name: value for name, value in properties.items() if name not in DELAY_PROPERTIES}
        was_recalled = kept.pop(Property.HAND_OVER_BACK, None) is not None
        recalled = str(due_ms) if was_recalled else kept.pop(Property.HAND_OVER_RECALLED, None)
        diverted = divert_to_timer(kept, topic, queue_id, now_ms, due_ms, limits)
        if diverted is None:
            kept |= {Property.TIMER_DELIVER_MS: str(due_ms)}
            diverted = Diverted(topic, queue_id, kept)
        added = {Property.REPLACED_LEVEL: "0"} | ({} if may_move_again else {Property.HAND_OVER_STAYS: "1"})
        added |= {} if recalled is None else {Property.HAND_OVER_RECALLED: recalled}
        return copy_of(record, diverted.topic, diverted.queue_id, encode_properties(diverted.properties | added))

    # --- retention -----------------------------------------------------------------------------

    def copy_forward(self, physical_start: int, physical_end: int) -> bool:
        """Copy the pending messages of this part of the log to its end, so that its files can be deleted.

        Returns:
            False if a message there is due or unreadable: then the part is still needed.
        """
        return all(self._copy_all_forward(each, physical_start, physical_end) for each in self._delay_stores.values())

    def pending_bytes(self, physical_start: int, physical_end: int) -> int:
        """Return how many bytes of this part of the log belong to pending messages."""
        rows = [each.pending_between(physical_start, physical_end) for each in self._delay_stores.values()]
        return sum(int(each["size"].sum()) for each in rows)

    def _copy_all_forward(self, delay_store: DelayStore, physical_start: int, physical_end: int) -> bool:
        rows = delay_store.pending_between(physical_start, physical_end)
        # A due message is released soon, and then its file can be deleted. On a full disk it cannot be released: then
        # it is copied as well, since deleting this file frees the space that the release needs.
        if len(rows) and self._store.cleaning.refusal is None and rows["due_ms"].min() <= self._store.clock.now_ms():
            return False
        offsets = np.sort(rows["physical_offset"])
        moved = [
            self._move_between(delay_store, int(piece[0]), int(piece[-1]) + 1)
            for piece in np.split(offsets, range(_COPIED_AT_ONCE, len(offsets), _COPIED_AT_ONCE))
            if len(piece)
        ]
        self._store.group_commit.wait(self._store.end_offset, FLUSH_TIMEOUT_MS)
        return all(moved)

    def _move_between(self, delay_store: DelayStore, physical_start: int, physical_end: int) -> bool:
        """Copy a few messages under one lock. Other messages may be released before and after."""
        with delay_store.lock:
            rows = delay_store.pending_between(physical_start, physical_end)
            records = [self._lookup.at(physical_offset) for physical_offset in rows["physical_offset"].tolist()]
            readable = [record for record in records if record is not None]
            if len(readable) < len(records) or not readable:
                return not records
            topics, end = set(), 0
            # One by one: all of them together could be larger than a file of the log.
            for record, due_ms in zip(readable, rows["due_ms"].tolist(), strict=True):
                draft = self._forward(record, due_ms)
                end = self._store.put(draft, though_full=True).end  # it frees disk space in the end
                delay_store.remove(record)
                topics.add(draft.topic)
        self._store.confirm_async(end, topics)  # one that is due is in its topic now, readable after the flush
        return True

    def _forward(self, record: StoredRecord, due_ms: int) -> RecordDraft:
        if record.topic == SCHEDULE_TOPIC:
            return self._copy(record, due_ms)
        properties = encode_properties(
            decode_properties(record.properties_bytes) | {Property.REPLACED_LEVEL: _level_of(record)}
        )
        return copy_of(record, TIMER_TOPIC, 0, properties)


_Reservation = tuple[StoredRecord, list[RecordDraft]]


def _fitting(reservations: Sequence[_Reservation], max_bytes: int) -> Iterator[list[_Reservation]]:
    """Yield parts, each small enough for one append."""
    part: list[_Reservation] = []
    size = 0
    for record, drafts in reservations:
        added = 2 * record.total_size + _MARKER_BYTES
        if part and size + added > max_bytes:
            yield part
            part, size = [], 0
        part.append((record, drafts))
        size += added
    if part:
        yield part


def _level_of(record: StoredRecord) -> str:
    """Return the level of a delayed record; 0 for a timer."""
    return str(record.queue_id + 1) if record.topic == SCHEDULE_TOPIC else "0"
