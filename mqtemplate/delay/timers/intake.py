"""Reading the timer topic: what each new message asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import structlog

from mqtemplate.delay.divert import slot_of
from mqtemplate.delay.timers.timer_unit import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_DONE
from mqtemplate.errors import CorruptRecordError
from mqtemplate.java_hash import java_string_hash
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import HEAD, HOST_FLAGS, MAGIC_V1
from mqtemplate.record.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    REAL_TOPIC,
    REPLACED_LEVEL,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    find_property,
)
from mqtemplate.store import MessageStore
from mqtemplate.topics import TIMER_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.delay")

ARRIVAL_DTYPE = np.dtype(
    [
        ("physical_offset", "i8"),
        ("size", "i4"),
        ("slot_ms", "i8"),
        ("deliver_ms", "i8"),
        ("topic_hash", "i4"),
        ("magic", "i4"),
    ]
)
"""One message of the timer topic.

``deliver_ms`` is when it is due, `NO_TIME_MS` where nobody can tell. ``magic`` are bits of the timer log: a message, or
a delete marker; one that was written here is done, since what it names was taken out at the same moment.
"""

NO_TIME_MS = -1

_MOST_BYTES = 1 << 20  # read at once

_TOPIC = bytes([len(TIMER_TOPIC)]) + TIMER_TOPIC.encode()
_BEFORE_PROPERTIES = HEAD.size + len(_TOPIC) + 2

_OUT_MS, _DELIVER_MS, _DELAY_MS, _DELAY_SEC, _REAL_TOPIC, _DEL_UNIQKEY = (
    PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR
    for name in (TIMER_OUT_MS, TIMER_DELIVER_MS, TIMER_DELAY_MS, TIMER_DELAY_SEC, REAL_TOPIC, TIMER_DEL_UNIQKEY)
)

_HASHES: dict[bytes, int] = {}
_NAMES: dict[int, str] = {}
_MOST_HASHES = 4_096


def read_arrivals(
    store: MessageStore, physical_offsets: Sequence[int], sizes: Sequence[int], precision_ms: int
) -> np.ndarray:
    """Read messages of the timer topic, which lie in the log in this order, as `ARRIVAL_DTYPE`.

    Bodies and sums are left to the release. One whose head is no record's is left out, with a line in the log.
    """
    rows = []
    for first, behind in neighbours(physical_offsets, sizes):
        begin = physical_offsets[first]
        data = store.read_bytes(begin, physical_offsets[behind - 1] + sizes[behind - 1] - begin)
        for physical_offset, size in zip(physical_offsets[first:behind], sizes[first:behind], strict=True):
            row = _read_plain(data, physical_offset - begin, physical_offset, size, precision_ms)
            if row is None:
                row = _read_other(store, physical_offset, size, precision_ms)
            if row is not None:
                rows.append(row)
    return np.array(rows, ARRIVAL_DTYPE)


def neighbours(physical_offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Which records are read together, from an index up to another: neighbours, if not too much lies between them."""
    first, wanted = 0, 0
    for index, (physical_offset, size) in enumerate(zip(physical_offsets, sizes, strict=True)):
        span = physical_offset + size - physical_offsets[first]
        if index > first and (span > _MOST_BYTES or span > 4 * (wanted + size) + 4_096):
            yield first, index
            first, wanted = index, 0
        wanted += size
    if physical_offsets:
        yield first, len(physical_offsets)


_Row = tuple[int, int, int, int, int, int]


def _read_plain(data: bytes, at: int, physical_offset: int, size: int, precision_ms: int) -> _Row | None:
    """A record as almost all are, V1 with IPv4 hosts; None for another one, or for none."""
    if at + size > len(data) or size < _BEFORE_PROPERTIES:
        return None
    found_size, magic, found_offset, flags, store_timestamp, prepared, body_length = HEAD.unpack_from(data, at)
    topic_at = at + HEAD.size + body_length
    if (
        found_size != size
        or magic != MAGIC_V1
        or found_offset != physical_offset
        or flags & HOST_FLAGS
        or not 0 <= body_length <= size - _BEFORE_PROPERTIES
        or not data.startswith(_TOPIC, topic_at)
    ):
        return None
    properties = data[topic_at + len(_TOPIC) + 2 : at + size]
    return _row(properties, physical_offset, size, store_timestamp, prepared, precision_ms)


def _read_other(store: MessageStore, physical_offset: int, size: int, precision_ms: int) -> _Row | None:
    try:
        record = store.read(physical_offset, size)
    except CorruptRecordError as exc:
        _log.error("delay.poison", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)
        return None
    prepared = record.prepared_transaction_offset
    return _row(record.properties_bytes, physical_offset, size, record.store_timestamp, prepared, precision_ms)


def _row(
    properties: bytes, physical_offset: int, size: int, store_timestamp: int, prepared: int, precision_ms: int
) -> _Row | None:
    properties = b"\x02" + properties  # so that each begins alike
    deliver_ms = _deliver_time(properties, store_timestamp, precision_ms)
    if deliver_ms is None:
        slot_ms, deliver_ms = 0, NO_TIME_MS
    else:
        slot_ms = slot_of(deliver_ms, precision_ms)
    magic = MAGIC_DEFAULT
    if _DEL_UNIQKEY in properties:
        magic |= MAGIC_DELETE
        if prepared > 0 and b"\x02BORN_TIMESTAMP\x01" not in properties:  # RocketMQ's have it
            steered = find_property(properties, REPLACED_LEVEL)
            if steered not in (None, "0"):
                return None  # the message waited by level, and never was on the wheel
            magic |= MAGIC_DEFAULT if steered is None else MAGIC_DONE
    return physical_offset, size, slot_ms, deliver_ms, _topic_hash(properties), magic


def _topic_hash(properties: bytes) -> int:
    at = properties.find(_REAL_TOPIC)
    name = b"" if at < 0 else properties[at + len(_REAL_TOPIC) : properties.find(b"\x02", at + 1)]
    found = _HASHES.get(name)
    if found is None:
        if len(_HASHES) >= _MOST_HASHES:
            _HASHES.clear()
            _NAMES.clear()
        text = name.decode("utf-8", "replace")
        found = _HASHES[name] = java_string_hash(text)
        _NAMES[found] = text
    return found


def topic_names(topic_hashes: np.ndarray) -> Counter[str]:
    """How often each topic is among these, which `read_arrivals` gave just now; those without a topic do not count."""
    found, counts = np.unique(topic_hashes, return_counts=True)
    rows = zip(found.tolist(), counts.tolist(), strict=True)
    return Counter({name: count for topic_hash, count in rows if (name := _NAMES.get(topic_hash))})


def deliver_time(record: StoredRecord, precision_ms: int) -> int | None:
    """When a message of the timer topic is due; None if nobody can tell.

    Our messages carry the millisecond. Upstream's carry the slot, and maybe what the sender asked for: then it is
    the latest time of the slot that agrees with both, so never too early.
    """
    return _deliver_time(b"\x02" + record.properties_bytes, record.store_timestamp, precision_ms)


def _deliver_time(properties: bytes, store_timestamp: int, precision_ms: int) -> int | None:
    deliver_ms = _number(properties, _DELIVER_MS)
    slot_ms = _number(properties, _OUT_MS)
    if slot_ms is None:
        return deliver_ms
    # slot < deliver <= slot + precision
    if deliver_ms is not None and 0 < deliver_ms - slot_ms <= precision_ms:
        return deliver_ms
    delay_s, delay_ms = _number(properties, _DELAY_SEC), _number(properties, _DELAY_MS)
    latest_ms = slot_ms + precision_ms
    if delay_s is not None:
        return min(max(store_timestamp + delay_s * 1_000, slot_ms + 1), latest_ms)
    if delay_ms is not None:
        return min(max(store_timestamp + delay_ms, slot_ms + 1), latest_ms)
    return latest_ms


def _number(properties: bytes, name: bytes) -> int | None:
    at = properties.find(name)
    if at < 0:
        return None
    at += len(name)
    end = properties.find(b"\x02", at)
    text = properties[at:end] if end >= 0 else properties[at:]
    return int(text) if text.isdigit() and len(text) <= 18 else None


def roll_slots(
    slots_ms: np.ndarray, physical_offsets: np.ndarray, write_ms: int, precision_ms: int, window_slots: int
) -> np.ndarray:
    """Where messages are parked whose slots lie beyond the window; -1 for those whose do not.

    Somewhere in the second half of the window, by their places in the log: many messages of one far time do not
    meet in one slot before it.
    """
    half = window_slots // 2
    mixed = physical_offsets.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) >> np.uint64(32)
    spread = (mixed % np.uint64(window_slots - half)).astype(np.int64)
    parked_ms = write_ms + (half + spread) * precision_ms
    return np.where(slots_ms - write_ms < window_slots * precision_ms, -1, parked_ms)


def delete_keys(store: MessageStore, physical_offset: int, size: int) -> set[str]:
    """What a delete marker names: the target's key, in both forms that brokers have written."""
    try:
        properties = store.read(physical_offset, size).properties_bytes
    except CorruptRecordError as exc:
        _log.error("delay.poison", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)
        return set()
    key = find_property(properties, TIMER_DEL_UNIQKEY) or ""
    topic = find_property(properties, REAL_TOPIC) or ""
    return {key, key.removeprefix(f"{topic}+")} - {""}
