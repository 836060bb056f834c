"""Copies of delayed records that are due, and the link from a copy to the record it replaces.

Appending the copy under the real topic *is* the release; no other file has to agree. A copy stores one more than the
physical offset of the delayed record in ``prepared_transaction_offset``, a field that ordinary records do not use. So a
recovery reads from the commit log alone which delayed records were released.

`Releaser` builds the copies, many alike ones as one array, and appends them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mqtemplate.delay.causes import observe_all
from mqtemplate.delay.pending_rows import DueRecord
from mqtemplate.errors import CorruptRecordError, DestinationError, MessageError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import tags_code
from mqtemplate.message import Property
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import (
    LEVEL_DELAY_MS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    TIMER_DELIVER_MS,
    TIMER_DEQUEUE_MS,
    TIMER_ENQUEUE_MS,
    decode_properties,
    encode_properties,
    find_property,
    may_have_property,
    property_format,
)
from mqtemplate.record.record_arrays import AlikeCopies, RecordShape, ReleasedCopies
from mqtemplate.store.commit_log import read_records
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC, check_topic

LEVEL_DELAY_PAIR, _DELIVER_PAIR, _REAL_TOPIC_PAIR, _REAL_QID_PAIR = (
    PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR
    for name in (LEVEL_DELAY_MS, TIMER_DELIVER_MS, REAL_TOPIC, REAL_QID)
)
"""Start of a property that is not the first one."""
_DELIVER_FORMAT = property_format(TIMER_DELIVER_MS)
_TIMER_FORMAT = property_format(TIMER_ENQUEUE_MS) + property_format(TIMER_DEQUEUE_MS)
_KEPT_FLAGS = ~SysFlag.TRANSACTION_MASK
_MAX_TAIL_BYTES = 200  # a longer tail of properties is unlikely to occur again, so it is not cached
_MAX_QUEUE_ID = 0x7FFF_FFFF


class PoisonError(Exception):
    """A delayed record that cannot be released. The text gives the reason."""


def _target(properties: bytes) -> tuple[str, int]:
    """Return the real topic and queue.

    Raises:
        PoisonError: No broker can have written them.
    """
    # `divert` writes these two last. So the tail is the same for many messages, and a cache finds it.
    tail = properties[properties.rfind(_REAL_TOPIC_PAIR) + 1 :]
    if len(tail) <= _MAX_TAIL_BYTES and _REAL_QID_PAIR in tail:
        return _target_in_tail(tail)
    return _read_target(properties)


def _read_target(properties: bytes) -> tuple[str, int]:
    topic, queue_id = find_property(properties, REAL_TOPIC), find_property(properties, REAL_QID)
    if not topic or topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
        raise PoisonError(f"its real topic is {topic!r}")
    try:
        check_topic(topic)
    except DestinationError as exc:
        raise PoisonError(f"its real topic is not a legal topic: {exc}") from exc
    number = parse_number(queue_id)
    if number is None or not 0 <= number <= _MAX_QUEUE_ID:
        raise PoisonError(f"its real queue id is {queue_id and queue_id[:40]!r}")
    return topic, number


_target_in_tail = lru_cache(maxsize=4_096)(_read_target)


@lru_cache(maxsize=4_096)
def _target_after_delay(tail: bytes) -> tuple[str, int, bytes] | None:
    """Return topic, queue, and *tail* without the level's delay that it starts with; None for another order.

    `divert` writes the delay right before the real topic and queue.
    """
    rest = tail[tail.find(b"\x02") + 1 :]
    if not rest.startswith(_REAL_TOPIC_PAIR[1:]) or len(tail) > _MAX_TAIL_BYTES:
        return None
    return *_read_target(rest), rest


def released_draft(record: StoredRecord, stamps: bytes) -> RecordDraft:
    """Return the copy of a due record for its real topic.

    The properties are kept, ``DELAY`` and ``REAL_*`` included, as RocketMQ does. Only the level's delay is left out: it
    has no meaning for a delivered message.

    Args:
        stamps: Encoded properties to add, see `release_stamps`.

    Raises:
        PoisonError: The real topic or queue is missing or illegal, or the properties take too many bytes.
    """
    properties = record.properties_bytes
    at = properties.rfind(LEVEL_DELAY_PAIR) + 1 if record.topic == SCHEDULE_TOPIC else 0
    found = _target_after_delay(properties[at:]) if at else None
    if found is None:
        topic, queue_id = _target(properties)
    else:
        topic, queue_id, tail = found
        properties = properties[:at] + tail
    return copy_of(record, topic, queue_id, _with_stamps(properties, stamps))


def release_stamps(record: StoredRecord, due: DueRecord, now_ms: int) -> bytes:
    """Encode what the copy has beyond the record's properties: a timer's times on the wheel, and a missing due time."""
    properties = record.properties_bytes
    stamps = b""
    if due.enqueue_ms >= 0 and not may_have_property(properties, TIMER_ENQUEUE_MS):  # a roll adds these times, too
        stamps = _TIMER_FORMAT % (due.enqueue_ms, now_ms)
    if _DELIVER_PAIR not in properties and not properties.startswith(_DELIVER_PAIR[1:]):
        stamps += _DELIVER_FORMAT % due.due_ms
    return stamps


def _with_stamps(properties: bytes, stamps: bytes) -> bytes:
    if not stamps or len(properties) + len(stamps) >= MAX_PROPERTIES_BYTES:
        # RocketMQ accepts slightly more: its records do not end with our check.
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise PoisonError(f"its properties take {len(properties)} bytes, {MAX_PROPERTIES_BYTES} can be copied")
        return properties  # stamps are for information only, so a full record has none
    separator = b"" if properties.endswith(b"\x02") or not properties else b"\x02"
    return properties + separator + stamps


def rolled_draft(record: StoredRecord, enqueue_ms: int, now_ms: int) -> RecordDraft:
    """Return the copy of a parked record for the timer topic, from where it is put on the wheel again.

    Raises:
        PoisonError: The properties take too many bytes.
    """
    properties = decode_properties(record.properties_bytes)
    times = parse_number(properties.get(Property.TIMER_ROLL_TIMES)) or 0
    properties[Property.TIMER_ROLL_TIMES] = str(max(times, 0) + 1)
    properties[Property.TIMER_ENQUEUE_MS] = str(enqueue_ms)
    properties[Property.TIMER_DEQUEUE_MS] = str(now_ms)
    encoded = encode_properties(properties)
    if len(encoded) > MAX_PROPERTIES_BYTES:
        encoded = _with_stamps(record.properties_bytes, b"")
    return copy_of(record, TIMER_TOPIC, 0, encoded)


def dead_letter_draft(record: StoredRecord) -> RecordDraft:
    """Return the copy of a poison record for operators. The longest properties are left out if they are too many."""
    properties = record.properties_bytes
    if len(properties) > MAX_PROPERTIES_BYTES:
        kept = decode_properties(properties)
        while len(properties) > MAX_PROPERTIES_BYTES:
            del kept[max(kept, key=lambda name: len(kept[name]))]
            properties = encode_properties(kept)
    return copy_of(record, UNDELIVERABLE_TOPIC, 0, properties)


def copy_of(record: StoredRecord, topic: str, queue_id: int, properties: bytes) -> RecordDraft:
    """Return a copy of *record* that replaces it: in another topic, with other properties, the rest unchanged."""
    return RecordDraft(
        topic,
        queue_id,
        record.body,
        properties,
        tags_code(find_property(properties, TAGS)),
        flag=record.flag,
        sys_flag=record.sys_flag & _KEPT_FLAGS,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.physical_offset + 1,
        body_crc=record.body_crc,
    )


def released_source(record: StoredRecord) -> int | None:
    """Return the physical offset of the delayed record that *record* replaced; None if it is no such copy.

    A committed transaction uses the same field; its flags show that.
    """
    if record.prepared_transaction_offset <= 0 or record.sys_flag & SysFlag.TRANSACTION_MASK:
        return None
    is_copy = record.topic in (TIMER_TOPIC, UNDELIVERABLE_TOPIC, find_property(record.properties_bytes, REAL_TOPIC))
    return record.prepared_transaction_offset - 1 if is_copy else None


_log = get_logger("mqtemplate.delay")

MAX_RELEASE_COUNT = 1_000
"""Messages in one append. More due messages are left for the next step."""
_MAX_RELEASE_BYTES = 4 << 20
_MAX_ADDED_BYTES = 256  # more bytes of a copy than of its record: a longer topic, stamps
_FEWEST_ALIKE = 32
"""Fewest records of one shape for which building one array is cheaper than building each copy (measured)."""


class Releaser:
    """Builds copies of due records and appends them.

    A record that cannot be released is logged and counted. If it is readable, its copy goes to the dead-letter topic.
    It never blocks the other messages.

    Args:
        source_topic: System topic of the due records. A record of another topic is not released.
        service: Name of the delay service, for log events.

    Attributes:
        end: Physical offset after the newest record that replaced a pending one.
    """

    def __init__(self, store: MessageStore, source_topic: str, service: str) -> None:
        self._store = store
        self._source_topic = source_topic
        self._service = service
        self.end = 0
        self._unconfirmed: set[str] = set()  # topics of appended copies whose consumers are not notified yet
        self._released = store.metrics.counter("delay.released")
        self._rolled = store.metrics.counter("delay.rolled")
        self._poison = store.metrics.counter("delay.poison")
        self._lag_ms = store.metrics.histogram("delay.lag_ms")

    def count_fitting(self, sizes: Sequence[int]) -> int:
        """Return how many records of these sizes fit into one append; at least one."""
        # A release is appended as a whole, and no file of the commit log may be too small for it.
        max_bytes = min(_MAX_RELEASE_BYTES, self._store.sizes.commit_log // 4)
        total = 0
        for count, size in enumerate(sizes[:MAX_RELEASE_COUNT]):
            total += size + _MAX_ADDED_BYTES
            if total > max_bytes and count:
                return count
        return min(len(sizes), MAX_RELEASE_COUNT)

    def release(
        self, due: Sequence[DueRecord], now_ms: int, due_ms: NDArray[np.int64]
    ) -> list[RecordDraft | AlikeCopies]:
        """Append the copies of *due*, all or none, and return them.

        Args:
            due_ms: Due times that the lag metric counts.

        Raises:
            StoreFullError: The disk is full. Nothing was released; call again later.
        """
        copies = self.copies(due, now_ms)
        if copies:
            self.end = self._append(copies)
            self._unconfirmed.update([each.topic for each in copies])
        rolled_count = sum([each.topic == TIMER_TOPIC for each in copies])
        dead_count = sum([each.topic == UNDELIVERABLE_TOPIC for each in copies])
        count = count_copies(copies)
        self._rolled.add(rolled_count)
        self._released.add(count - rolled_count - dead_count)
        if len(due_ms):
            lags_ms = self._store.clock.now_ms() - due_ms
            observe_all(self._lag_ms, lags_ms)
            _log.debug("message.released", service=self._service, count=count, lag_ms=int(lags_ms[0]))
        return copies

    def confirm(self, *, has_more: bool) -> None:
        """Notify the consumers of released messages once the copies are as durable as the flush mode requires.

        Args:
            has_more: More messages are due. Then do not wait for fsync: the next copies are built during the flush.
        """
        topics, self._unconfirmed = self._unconfirmed, set()
        if topics and has_more:
            self._store.confirm_async(self.end, topics)
        elif topics:
            self._store.confirm(self.end, topics)

    def _append(self, copies: Sequence[RecordDraft | AlikeCopies]) -> int:
        drafts = [each for each in copies if isinstance(each, RecordDraft)]
        if len(drafts) < len(copies):
            return self._store.put(ReleasedCopies(copies)).end
        try:
            return self._store.put(Drafts(drafts)).end
        except MessageError as exc:
            if len(drafts) > 1:
                raise
            source_offset = drafts[0].prepared_transaction_offset - 1
            self._reject(drafts[0].topic, source_offset, str(exc))
            return self._store.end_offset

    # --- copies --------------------------------------------------------------------------------

    def copies(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft | AlikeCopies]:
        """Return the copies of these records, in their order. Many alike records in a row become one `AlikeCopies`."""
        copies: list[RecordDraft | AlikeCopies] = []
        # Only records of one size can have one shape. Rolled and poison records are always copied one by one.
        sizes = np.array([0 if item.rolls or item.is_poison else item.size for item in due], np.int64)
        bounds = np.flatnonzero(np.diff(sizes, prepend=-1, append=-1)).tolist()
        for start, end in pairwise(bounds):
            same_size = due[start:end]
            copies += self._copies(same_size, now_ms) if sizes[start] else self._one_by_one(same_size, now_ms)
        return copies

    def _copies(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft | AlikeCopies]:
        """Return the copies of records of one size."""
        copies: list[RecordDraft | AlikeCopies] = []
        # A failed search for alike records costs a read of the window. So each failure doubles the step to the next
        # search and narrows the window to the fewest; a success widens it again.
        at, window, step = 0, len(due), _FEWEST_ALIKE
        while at < len(due):
            alike = self._alike(due[at : at + window], now_ms)
            if alike is None:
                copies += self._one_by_one(due[at : at + step], now_ms)
                at += step
                window, step = _FEWEST_ALIKE, 2 * step
            else:
                copies.append(alike)
                at += len(alike)
                window, step = 4 * len(alike), _FEWEST_ALIKE
        return copies

    def _one_by_one(self, due: Sequence[DueRecord], now_ms: int) -> list[RecordDraft]:
        drafts = [self._draft(item, now_ms) for item in due]
        return [draft for draft in drafts if draft is not None]

    def _alike(self, due: Sequence[DueRecord], now_ms: int) -> AlikeCopies | None:
        """Return the copies of the leading records that have one shape; None if they are few.

        A record with any fault ends them. `_draft` meets it next, and reports the fault.
        """
        if len(due) < _FEWEST_ALIKE:
            return None
        item = due[0]
        try:
            record = self._store.read(item.physical_offset, item.size)
            stamps = release_stamps(record, item, now_ms)
            draft = released_draft(record, stamps)
        except (CorruptRecordError, PoisonError):
            return None
        offsets = np.array([each.physical_offset for each in due], np.int64)
        rows = read_rows(self._store, offsets, item.size)
        if rows is None or record.topic != self._source_topic:
            return None
        shape = RecordShape(record, rows[0].tobytes())
        gap = _gap(record.properties_bytes, draft.properties, stamps)
        count = shape.count_matching(rows, offsets) if gap is not None else 0
        stamp_rows = _stamp_rows(record, due[:count], now_ms) if count >= _FEWEST_ALIKE else None
        if gap is None or stamp_rows is None:
            return None
        columns = slice(shape.properties_at + gap.start, shape.properties_at + gap.stop)
        return AlikeCopies(draft, shape, rows[:count], columns, stamp_rows)

    def _draft(self, item: DueRecord, now_ms: int) -> RecordDraft | None:
        try:
            record = self._store.read(item.physical_offset, item.size)
        except CorruptRecordError as exc:
            self._reject(self._source_topic, item.physical_offset, exc.reason, due=item.due_ms)
            return None
        if record.topic != self._source_topic:
            reason = f"the record at this offset belongs to topic {record.topic}"
            self._reject(self._source_topic, item.physical_offset, reason, due=item.due_ms)
            return None
        try:
            if item.is_poison:
                raise PoisonError("its deliver time is missing or not a number")
            if item.rolls:
                return rolled_draft(record, item.enqueue_ms, now_ms)
            return released_draft(record, release_stamps(record, item, now_ms))
        except PoisonError as exc:
            self._reject(self._source_topic, item.physical_offset, str(exc), record, due=item.due_ms)
            return dead_letter_draft(record)

    def _reject(
        self, topic: str, physical_offset: int, reason: str, record: StoredRecord | None = None, **fields: int
    ) -> None:
        self._poison.add()
        if record is not None:
            fields |= {"queue": record.queue_id, "offset": record.queue_offset}
        _log.error(
            "message.rejected",
            reason=reason,
            topic=topic,
            physical_offset=physical_offset,
            dead_letter_topic=None if record is None else UNDELIVERABLE_TOPIC,
            **fields,
        )


def count_copies(copies: Iterable[RecordDraft | AlikeCopies]) -> int:
    """Return the number of records in *copies*."""
    return sum([1 if isinstance(each, RecordDraft) else len(each) for each in copies])


def read_rows(store: MessageStore, physical_offsets: NDArray[np.int64], size: int) -> NDArray[np.uint8] | None:
    """Read *size* bytes at each physical offset, unchecked, as rows; None if the log does not have them all."""
    data = read_records(store.read_bytes, physical_offsets.tolist(), size)
    return None if data is None else np.frombuffer(data, np.uint8).reshape(-1, size)


def _stamp_rows(record: StoredRecord, due: Sequence[DueRecord], now_ms: int) -> np.ndarray | None:
    """Return the stamps of copies of records like *record*: one row for all, or one each; None if lengths differ."""
    # A spike has few distinct times, so stamps are encoded once for each.
    times = [(item.due_ms, item.enqueue_ms) for item in due]
    first = dict(zip(times, due, strict=True))
    stamps = {each: release_stamps(record, item, now_ms) for each, item in first.items()}
    if len(set(map(len, stamps.values()))) > 1:
        return None
    rows = [stamps[each] for each in times] if len(set(stamps.values())) > 1 else list(stamps.values())[:1]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def _gap(properties: bytes, copied: bytes, stamps: bytes) -> slice | None:
    """Return the part of *properties* that a copy leaves out: the level's delay, and nothing of a timer's.

    Returns:
        None if the copy's properties are not the rest and *stamps*. Then records cannot be copied by columns.
    """
    length = len(properties) + len(stamps) - len(copied)
    at = properties.rfind(LEVEL_DELAY_PAIR) + 1 if length else len(properties)
    kept = properties[:at] + properties[at + length :]
    return slice(at, at + length) if length >= 0 and copied == kept + stamps else None
