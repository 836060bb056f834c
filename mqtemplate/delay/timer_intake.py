"""Reading the timer topic: what each new message asks for."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from mqtemplate.delay.divert import slot_of
from mqtemplate.delay.timer_log import MAGIC_DEFAULT, MAGIC_DELETE
from mqtemplate.errors import CorruptRecordError
from mqtemplate.java_hash import java_string_hash
from mqtemplate.message import TIMER_TOPIC
from mqtemplate.record import StoredRecord, find_property
from mqtemplate.store import MessageStore

__all__ = ["Arrival", "delete_keys", "deliver_time", "read_arrival", "roll_slot"]

_log = structlog.stdlib.get_logger("mqtemplate.delay")


class Arrival(NamedTuple):
    """One message of the timer topic.

    Attributes:
        slot_ms: Its slot; for one whose time cannot be read, 0.
        deliver_ms: When it is due; 0 likewise.
        magic: Bits of the timer log: a message, or a delete marker.
    """

    physical_offset: int
    size: int
    slot_ms: int
    deliver_ms: int
    topic_hash: int
    magic: int


def read_arrival(store: MessageStore, physical_offset: int, size: int, precision_ms: int) -> Arrival | None:
    """Read one message of the timer topic; None, and a line in the log, if its record is damaged."""
    try:
        record = store.read(physical_offset, size)
    except CorruptRecordError as exc:
        _log.error("delay.poison", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)
        return None
    properties = record.properties_bytes
    deliver_ms = deliver_time(record, precision_ms)
    slot_ms = 0 if deliver_ms is None else slot_of(deliver_ms, precision_ms)
    topic_hash = java_string_hash(find_property(properties, b"REAL_TOPIC") or "")
    magic = MAGIC_DEFAULT | MAGIC_DELETE if b"TIMER_DEL_UNIQKEY\x01" in properties else MAGIC_DEFAULT
    return Arrival(physical_offset, size, slot_ms, deliver_ms or 0, topic_hash, magic)


def deliver_time(record: StoredRecord, precision_ms: int) -> int | None:
    """When a message of the timer topic is due; None if nobody can tell.

    Our messages carry the millisecond. Upstream's carry the slot, and maybe what the sender asked for: then it is
    the latest time of the slot that agrees with both, so never too early.
    """
    properties = record.properties_bytes
    deliver_ms = _number(properties, b"TIMER_DELIVER_MS")
    slot_ms = _number(properties, b"TIMER_OUT_MS")
    if slot_ms is None:
        return deliver_ms
    # slot < deliver <= slot + precision
    if deliver_ms is not None and 0 < deliver_ms - slot_ms <= precision_ms:
        return deliver_ms
    delay_s, delay_ms = _number(properties, b"TIMER_DELAY_SEC"), _number(properties, b"TIMER_DELAY_MS")
    latest_ms = slot_ms + precision_ms
    if delay_s is not None:
        return min(max(record.store_timestamp + delay_s * 1_000, slot_ms + 1), latest_ms)
    if delay_ms is not None:
        return min(max(record.store_timestamp + delay_ms, slot_ms + 1), latest_ms)
    return latest_ms


def _number(properties: bytes, name: bytes) -> int | None:
    text = find_property(properties, name)
    return int(text) if text and len(text) <= 18 and text.isascii() and text.isdecimal() else None


def roll_slot(slot_ms: int, physical_offset: int, write_ms: int, precision_ms: int, window_slots: int) -> int | None:
    """Where a message is parked whose slot lies beyond the window; None if it does not.

    Somewhere in the second half of the window, by its place in the log: many messages of one far time do not
    meet in one slot before it.
    """
    if slot_ms - write_ms < window_slots * precision_ms:
        return None
    half = window_slots // 2
    spread = (physical_offset * 0x9E37_79B9_7F4A_7C15 >> 32) % (window_slots - half)
    return write_ms + (half + spread) * precision_ms


def delete_keys(store: MessageStore, physical_offset: int, size: int) -> set[str]:
    """What a delete marker names: the target's key, in both forms that brokers have written."""
    try:
        properties = store.read(physical_offset, size).properties_bytes
    except CorruptRecordError as exc:
        _log.error("delay.poison", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)
        return set()
    key = find_property(properties, b"TIMER_DEL_UNIQKEY") or ""
    topic = find_property(properties, b"REAL_TOPIC") or ""
    return {key, key.removeprefix(f"{topic}+")} - {""}
