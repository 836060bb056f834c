"""Records of transactions: half messages, op messages, and the records that replace a half message. No state, no I/O.

The records have RocketMQ's form, so RocketMQ can continue with our store directory, and we with RocketMQ's. A half
message is in ``RMQ_SYS_TRANS_HALF_TOPIC``, with its real topic as a property. An op message is in
``RMQ_SYS_TRANS_OP_HALF_TOPIC``. Its body has the queue offsets of half messages that are done, separated by commas.

There is one addition. The op message and the record that replaces the half message are one append, the op message
first. A process that is killed may leave only the op message. So the op message has, in ``__FOLLOWED``, the id of the
message that must be next in the log.

Source: ``TransactionalMessageBridge``, ``TransactionalMessageUtil``, ``EndTransactionProcessor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mqtemplate.hashes import tags_code
from mqtemplate.message import Property, copy_properties, create_unique_id
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import FOLLOWED, TAGS, UNIQ_KEY, decode_properties, encode_properties, find_property
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
"""Consumer group under which RocketMQ stores the progress in both topics."""

_REMOVE_TAG = "d"
_MAX_OFFSET_DIGITS = 19


class CheckProperties(NamedTuple):
    """Properties of a half message that its transaction checks use.

    Attributes:
        checks: Number of checks that were sent.
        immunity_ms: Age before which there is no check; 0 for the setting of the broker.
        first_offset: Queue offset that the half message was stored at first; None if it was not stored again.
    """

    checks: int
    immunity_ms: int
    first_offset: int | None


def half_properties(properties: Mapping[str, str], unique_id: str, group: str) -> dict[str, str]:
    """Return the properties of a half message, without its real topic and queue."""
    half = {
        **properties,
        Property.UNIQ_KEY: unique_id,
        Property.TRANSACTION_PREPARED: "true",
        Property.PRODUCER_GROUP: group,
        Property.TRANSACTION_ID: unique_id,
    }
    for name in (Property.TRANSACTION_CHECK_TIMES, Property.TRANSACTION_PREPARED_QUEUE_OFFSET):
        half.pop(name, None)
    return {name: value for name, value in half.items() if name and value}


def committed_properties(half: StoredRecord) -> dict[str, str]:
    """Return the properties that a half message is delivered with."""
    return copy_properties(
        decode_properties(half.properties_bytes),
        Property.REAL_TOPIC,
        Property.REAL_QID,
        Property.TRANSACTION_PREPARED_QUEUE_OFFSET,
    )


def check_properties(properties: bytes) -> CheckProperties:
    """Return the check properties among the encoded properties of a half message; an invalid number is ignored."""

    def number(name: str) -> int | None:
        found = parse_number(find_property(properties, name.encode()))
        return None if found is None or found < 0 else found

    return CheckProperties(
        number(Property.TRANSACTION_CHECK_TIMES) or 0,
        (number(Property.CHECK_IMMUNITY_TIME) or 0) * 1_000,
        number(Property.TRANSACTION_PREPARED_QUEUE_OFFSET),
    )


# --- op messages ------------------------------------------------------------------------------------


def op_draft(half_offset: int, successor: RecordDraft | None, now_ms: int) -> RecordDraft:
    """Return the op message for one half message that is done.

    Args:
        successor: The record that replaces the half message; it is stored right after the op message.
    """
    properties = {Property.TAGS: _REMOVE_TAG, Property.UNIQ_KEY: create_unique_id()}
    if successor is not None and (unique_id := find_property(successor.properties, UNIQ_KEY)) is not None:
        properties[Property.FOLLOWED] = unique_id
    body = b"%d," % half_offset
    return RecordDraft(
        OP_TOPIC, 0, body, encode_properties(properties), tags_code=tags_code(_REMOVE_TAG), born_timestamp=now_ms
    )


def half_offsets(op: StoredRecord) -> list[int]:
    """Return the queue offsets of the half messages that an op message marks as done; of another record, none."""
    if find_property(op.properties_bytes, TAGS) != _REMOVE_TAG:
        return []
    offsets = map(parse_number, op.body.decode("ascii", "replace").split(","))
    return [offset for offset in offsets if offset is not None and offset >= 0]


def has_successor(op: StoredRecord) -> bool:
    """Return True if an op message must be followed by another record."""
    return find_property(op.properties_bytes, FOLLOWED) is not None


def follows(op: StoredRecord, record: StoredRecord) -> bool:
    """Return True if *record* is the one that must follow an op message."""
    expected = find_property(op.properties_bytes, FOLLOWED)
    return record.topic != OP_TOPIC and find_property(record.properties_bytes, UNIQ_KEY) == expected


# --- records that replace a half message ------------------------------------------------------------


def renewed_draft(half: StoredRecord, checks: int) -> RecordDraft:
    """Return the half message with another number of checks. It is stored at the end of the half topic."""
    properties = decode_properties(half.properties_bytes) | {Property.TRANSACTION_CHECK_TIMES: str(checks)}
    properties.setdefault(Property.TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
    return copy_half(half, HALF_TOPIC, 0, encode_properties(properties))


def discarded_draft(half: StoredRecord) -> RecordDraft:
    """Return the half message for ``TRANS_CHECK_MAX_TIME_TOPIC``."""
    return copy_half(half, TRANS_CHECK_MAX_TIME_TOPIC, 0, encode_properties(decode_properties(half.properties_bytes)))


def copy_half(
    half: StoredRecord, topic: str, queue_id: int, properties: bytes, transaction_flag: int = 0
) -> RecordDraft:
    """Return a record with the body of a half message, which names the half message by its physical offset."""
    return RecordDraft(
        topic,
        queue_id,
        half.body,
        properties,
        tags_code=tags_code(find_property(properties, TAGS)),
        flag=half.flag,
        sys_flag=half.sys_flag & ~SysFlag.TRANSACTION_MASK | transaction_flag,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.physical_offset,
        body_crc=half.body_crc,
    )
