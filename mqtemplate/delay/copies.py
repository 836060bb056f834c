"""Copies of delayed records that are due, and the link from a copy to the record it replaces.

Appending the copy under the real topic *is* the release; no other file has to agree. A copy stores one more than the
physical offset of the delayed record in ``prepared_transaction_offset``, a field that ordinary records do not use. So a
recovery reads from the commit log alone which delayed records were released. `Releaser` appends the copies.
"""

from __future__ import annotations

from functools import lru_cache

from mqtemplate.delay.pending_rows import DueRecord
from mqtemplate.errors import DestinationError
from mqtemplate.hashes import tags_code
from mqtemplate.message import Property
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import RecordDraft, StoredRecord
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
from mqtemplate.topics import HAND_OVER_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC, check_topic

LEVEL_DELAY_PAIR, _DELIVER_PAIR, _REAL_TOPIC_PAIR, _REAL_QID_PAIR = (
    PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR
    for name in (LEVEL_DELAY_MS, TIMER_DELIVER_MS, REAL_TOPIC, REAL_QID)
)
"""Start of a property that is not the first one."""
_DELIVER_FORMAT = property_format(TIMER_DELIVER_MS)
_TIMER_FORMAT = property_format(TIMER_ENQUEUE_MS) + property_format(TIMER_DEQUEUE_MS)
_KEPT_FLAGS = ~(SysFlag.TRANSACTION_MASK | SysFlag.CONTINUED)
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
        return properties  # stamps are for information only, so a full record gets none
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
    """Return the physical offset of the delayed record that *record* replaced; None if it is another record.

    A committed transaction uses the same field; its flags show that.
    """
    if record.prepared_transaction_offset <= 0 or record.sys_flag & SysFlag.TRANSACTION_MASK:
        return None
    real_topic = find_property(record.properties_bytes, REAL_TOPIC)
    is_copy = record.topic in (TIMER_TOPIC, UNDELIVERABLE_TOPIC, HAND_OVER_TOPIC, real_topic)
    return record.prepared_transaction_offset - 1 if is_copy else None
