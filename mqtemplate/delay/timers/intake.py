"""Reading records of the timer topic: due time, real topic, and delete markers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from mqtemplate.delay.settings import slot_of
from mqtemplate.delay.timers.timer_log import Magic, deliver_times
from mqtemplate.errors import CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import java_string_hash
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import HEAD, HOST_FLAGS, MAGIC_V1
from mqtemplate.record.properties import (
    NAME_VALUE_SEPARATOR,
    PRIORITY_PROPERTY,
    PROPERTY_SEPARATOR,
    REAL_TOPIC,
    REPLACED_LEVEL,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQ_KEY,
    find_property,
)
from mqtemplate.topics import TIMER_TOPIC

_log = get_logger("mqtemplate.delay")

ARRIVAL_DTYPE = np.dtype(
    [
        *(("physical_offset", "i8"), ("size", "i4"), ("deliver_ms", "i8"), ("topic_hash", "i4"), ("magic", "i4")),
        ("has_priority", "?"),
    ]
)
"""One message of the timer topic.

``deliver_ms`` is its due time, `NO_TIME_MS` without one. ``magic`` has the bits of its unit: a message, or a delete
marker. A marker that we wrote is done from the start: its message was removed when the marker was appended.
"""

NO_TIME_MS = -1

_MAX_READ_BYTES = 1 << 20

_TOPIC = bytes([len(TIMER_TOPIC)]) + TIMER_TOPIC.encode()
_BEFORE_PROPERTIES = HEAD.size + len(_TOPIC) + 2

MAX_PRIORITY = (1 << 31) - 1
_MAX_KEPT_BYTES = 64
_PRIORITY = PRIORITY_PROPERTY.encode() + NAME_VALUE_SEPARATOR
_OUT_MS, _DELIVER_MS, _DELAY_MS, _DELAY_SEC, _REAL_TOPIC, _DEL_UNIQKEY = (
    PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR
    for name in (TIMER_OUT_MS, TIMER_DELIVER_MS, TIMER_DELAY_MS, TIMER_DELAY_SEC, REAL_TOPIC, TIMER_DEL_UNIQKEY)
)


_Row = tuple[int, int, int, int, bool, bytes]  # physical offset, size, deliver_ms, magic, has_priority, real topic


TimerKey: TypeAlias = tuple[str, str]
"""Real topic and message id of a timer."""


def timer_key(record: StoredRecord) -> TimerKey:
    """Return the key of a message of the timer topic; a missing part is empty."""
    properties = record.properties_bytes
    return find_property(properties, REAL_TOPIC) or "", find_property(properties, UNIQ_KEY) or ""


class Arrivals(NamedTuple):
    """Messages of the timer topic.

    Attributes:
        rows: Array of `ARRIVAL_DTYPE`.
        topics: The real topic of each, encoded; empty without one.
    """

    rows: np.ndarray
    topics: Sequence[bytes]


class LogRecords(Protocol):
    """The records of the commit log. A `MessageStore`."""

    def read(self, physical_offset: int, size: int) -> StoredRecord: ...
    def read_bytes(self, physical_offset: int, size: int) -> bytes: ...


class TimerTopicReader:
    """Reads what the timers need from records of the timer topic.

    Args:
        precision_ms: Length of a slot.
    """

    def __init__(self, log: LogRecords, precision_ms: int) -> None:
        self._log = log
        self._precision_ms = precision_ms

    # --- many records --------------------------------------------------------------------------

    def read(self, physical_offsets: Sequence[int], sizes: Sequence[int]) -> Arrivals:
        """Read records, given in the order of the log. Bodies and checks are left to the release.

        A record with an unreadable head is logged and left out.
        """
        rows: list[_Row] = []
        for first, end, data in self.groups(physical_offsets, sizes):
            start = physical_offsets[first]
            for physical_offset, size in zip(physical_offsets[first:end], sizes[first:end], strict=True):
                row = self._read_plain(data, physical_offset - start, physical_offset, size)
                if row is None:
                    row = self._read_other(physical_offset, size)
                if row is not None:
                    rows.append(row)
        return self._arrivals(rows)

    def _arrivals(self, rows: Sequence[_Row]) -> Arrivals:
        arrivals = np.empty(len(rows), ARRIVAL_DTYPE)
        if not rows:
            return Arrivals(arrivals, ())
        offsets, sizes, deliver_ms, magic, has_priority, topics = zip(*rows, strict=True)
        hashes = {topic: java_string_hash(topic.decode("utf-8", "replace")) for topic in set(topics)}
        arrivals["physical_offset"], arrivals["size"] = offsets, sizes
        arrivals["deliver_ms"], arrivals["magic"], arrivals["has_priority"] = deliver_ms, magic, has_priority
        arrivals["topic_hash"] = list(map(hashes.__getitem__, topics))
        return Arrivals(arrivals, topics)

    def arrival_slots(self, arrivals: np.ndarray) -> np.ndarray:
        """Return the slots of messages, given as `ARRIVAL_DTYPE`; 0 for those without a due time."""
        times = arrivals["deliver_ms"]
        return np.where(times == NO_TIME_MS, 0, slot_of(times, self._precision_ms))

    def groups(self, physical_offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, bytes]]:
        """Yield groups of records that are close together in the log: first index, end index, bytes."""
        cuts, wanted = [0], 0
        for index, (physical_offset, size) in enumerate(zip(physical_offsets, sizes, strict=True)):
            span = physical_offset + size - physical_offsets[cuts[-1]]
            # One read of a group pays off as long as at least a quarter of its bytes is used.
            if wanted and (span > _MAX_READ_BYTES or span > 4 * (wanted + size) + 4_096):
                cuts.append(index)
                wanted = 0
            wanted += size
        for first, end in pairwise([*cuts, len(physical_offsets)] if physical_offsets else []):
            start = physical_offsets[first]
            yield first, end, self._log.read_bytes(start, physical_offsets[end - 1] + sizes[end - 1] - start)

    def due_times(self, units: np.ndarray) -> np.ndarray:
        """Return the due times of units; `NO_TIME_MS` for those without one.

        RocketMQ's units do not have the due time. Their records are read.
        """
        times = deliver_times(units)
        unknown = np.flatnonzero(times == 0)
        if len(unknown):
            unknown = unknown[np.argsort(units["physical_offset"][unknown])]
            physical_offsets = units["physical_offset"][unknown].astype(np.int64)
            found = self.read(physical_offsets.tolist(), units["record_size"][unknown].tolist()).rows
            times[unknown] = NO_TIME_MS
            times[unknown[np.searchsorted(physical_offsets, found["physical_offset"])]] = found["deliver_ms"]
        return times

    def keys_of(self, rows: np.ndarray, name: bytes) -> tuple[list[bytes], np.ndarray]:
        """Return for each of *rows* the value of a property, empty without it, and the priority of the message.

        Args:
            rows: Array with a ``physical_offset`` and a ``size``.
            name: Name of the property; empty for none.
        """
        order = np.argsort(rows["physical_offset"])
        offsets, sizes = rows["physical_offset"][order].tolist(), rows["size"][order].tolist()
        keys, priorities = [b""] * len(rows), np.zeros(len(rows), np.int64)
        wanted = name + NAME_VALUE_SEPARATOR
        for first, end, data in self.groups(offsets, sizes):
            for index, at in enumerate(order[first:end].tolist(), start=first):
                properties = self._properties(data, offsets[index] - offsets[first], offsets[index], sizes[index])
                if name and (value := _value(properties, wanted)):
                    keys[at] = value if len(value) <= _MAX_KEPT_BYTES else hashlib.sha256(value).digest()
                if _PRIORITY in properties:
                    priorities[at] = _priority(b"\x02" + properties)
        return keys, priorities

    def _properties(self, data: bytes, at: int, physical_offset: int, size: int) -> bytes:
        """Return the encoded properties of a record; empty if it is unreadable: its release reports that."""
        if at + size <= len(data) and size >= _BEFORE_PROPERTIES:
            found_size, magic, found_offset, flags, _, _, body_length = HEAD.unpack_from(data, at)
            topic_at = at + HEAD.size + body_length
            is_plain = found_size == size and magic == MAGIC_V1 and found_offset == physical_offset
            if is_plain and not flags & HOST_FLAGS and body_length >= 0 and data.startswith(_TOPIC, topic_at):
                return data[topic_at + len(_TOPIC) + 2 : at + size]
        try:
            return self._log.read(physical_offset, size).properties_bytes
        except CorruptRecordError:
            return b""

    # --- one record ----------------------------------------------------------------------------

    def deliver_time(self, record: StoredRecord) -> int | None:
        """Return the due time of a message of the timer topic; None without one.

        Our records have the millisecond. RocketMQ's have the slot, and maybe the delay that the producer set: then the
        due time is the latest one that fits both, so never too early.
        """
        return self._deliver_time(b"\x02" + record.properties_bytes, record.store_timestamp)

    def unique_key(self, physical_offset: int, size: int) -> TimerKey | None:
        """Return the key of a record; None if it is unreadable: its release reports that."""
        try:
            return timer_key(self._log.read(physical_offset, size))
        except CorruptRecordError:
            return None

    def delete_keys(self, physical_offset: int, size: int) -> set[TimerKey]:
        """Return the message that a delete marker names, in both forms that brokers write.

        A marker has the topic of its message (RocketMQ: ``RecallMessageProcessor``). RocketMQ 5.5 compares only the id,
        so there a client that may send to one topic can delete the timers of all others.
        """
        try:
            properties = self._log.read(physical_offset, size).properties_bytes
        except CorruptRecordError as exc:
            self._reject(physical_offset, exc)
            return set()
        # RocketMQ 5.3 writes "topic+id", 5.5 the id alone unless appendTopicForTimerDeleteKey is set.
        key = find_property(properties, TIMER_DEL_UNIQKEY) or ""
        topic = find_property(properties, REAL_TOPIC) or ""
        return {(topic, each) for each in (key, key.removeprefix(f"{topic}+")) if each}

    # --- bytes ---------------------------------------------------------------------------------

    def _read_plain(self, data: bytes, at: int, physical_offset: int, size: int) -> _Row | None:
        """Read a record of the usual form, V1 with IPv4 hosts; None for any other bytes."""
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
        return self._row(properties, physical_offset, size, store_timestamp, prepared)

    def _read_other(self, physical_offset: int, size: int) -> _Row | None:
        try:
            record = self._log.read(physical_offset, size)
        except CorruptRecordError as exc:
            self._reject(physical_offset, exc)
            return None
        prepared = record.prepared_transaction_offset
        return self._row(record.properties_bytes, physical_offset, size, record.store_timestamp, prepared)

    def _row(
        self, properties: bytes, physical_offset: int, size: int, store_timestamp: int, prepared: int
    ) -> _Row | None:
        properties = b"\x02" + properties  # so that the first property starts like the others
        deliver_ms = self._deliver_time(properties, store_timestamp)
        magic = Magic.DEFAULT
        if _DEL_UNIQKEY in properties:
            magic |= Magic.DELETE
            # RocketMQ's markers have BORN_TIMESTAMP. They stay in force also after retention has copied them forward,
            # which sets the two other fields as in our markers.
            if prepared > 0 and b"\x02BORN_TIMESTAMP\x01" not in properties:
                replaced_level = find_property(properties, REPLACED_LEVEL)
                if replaced_level not in (None, "0"):
                    return None  # the message had a level, and was never on the wheel
                magic |= Magic.DEFAULT if replaced_level is None else Magic.DONE
        at = properties.find(_REAL_TOPIC)
        topic = b"" if at < 0 else properties[at + len(_REAL_TOPIC) : properties.find(b"\x02", at + 1)]
        due_ms = NO_TIME_MS if deliver_ms is None else deliver_ms
        return physical_offset, size, due_ms, magic, _PRIORITY in properties and _priority(properties) > 0, topic

    def _deliver_time(self, properties: bytes, store_timestamp: int) -> int | None:
        deliver_ms = _number(properties, _DELIVER_MS)
        slot_ms = _number(properties, _OUT_MS)
        if slot_ms is None:
            return deliver_ms
        latest_ms = slot_ms + self._precision_ms  # a slot covers slot < deliver <= slot + precision
        if deliver_ms is not None and slot_ms < deliver_ms <= latest_ms:
            return deliver_ms
        delay_s, delay_ms = _number(properties, _DELAY_SEC), _number(properties, _DELAY_MS)
        if delay_s is not None:
            return min(max(store_timestamp + delay_s * 1_000, slot_ms + 1), latest_ms)
        if delay_ms is not None:
            return min(max(store_timestamp + delay_ms, slot_ms + 1), latest_ms)
        return latest_ms

    def _reject(self, physical_offset: int, exc: CorruptRecordError) -> None:
        _log.error("message.rejected", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)


def _value(properties: bytes, wanted: bytes) -> bytes:
    """Return the value of a property, given its name and the separator; empty without it."""
    at = 0 if properties.startswith(wanted) else properties.find(PROPERTY_SEPARATOR + wanted) + 1
    if not at and not properties.startswith(wanted):
        return b""
    at += len(wanted)
    end = properties.find(PROPERTY_SEPARATOR, at)
    return properties[at:end] if end >= 0 else properties[at:]


def _priority(properties: bytes) -> int:
    """Return the priority of a message; 0 without one. *properties* begin with a separator."""
    return min(_number(properties, PROPERTY_SEPARATOR + _PRIORITY) or 0, MAX_PRIORITY)


def _number(properties: bytes, name: bytes) -> int | None:
    at = properties.find(name)
    if at < 0:
        return None
    at += len(name)
    end = properties.find(b"\x02", at)
    text = properties[at:end] if end >= 0 else properties[at:]
    return int(text) if text.isdigit() and len(text) <= 18 else None
