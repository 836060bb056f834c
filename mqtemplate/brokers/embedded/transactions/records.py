"""What transactions write: half messages, marks that one is done, and what takes its place. No state, no I/O.

The forms are RocketMQ's, so that its broker goes on with our folder and we with its. A half message lies in
``RMQ_SYS_TRANS_HALF_TOPIC``, with the topic it is for as a property. A mark in ``RMQ_SYS_TRANS_OP_HALF_TOPIC`` names,
in its body, the half messages that are done, by their queue offsets and separated by commas.

One thing is added. A mark and what takes the half message's place are written together, the mark first, and a process
that dies may leave the mark alone. So the mark tells, in ``__FOLLOWED``, the id of the message that has to be next in
the log.

Source: ``TransactionalMessageBridge``, ``TransactionalMessageUtil``, ``EndTransactionProcessor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from mqtemplate.delay import strip_broker_properties
from mqtemplate.java_hash import tags_code
from mqtemplate.message import Property, create_unique_id
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import FOLLOWED, TAGS, UNIQ_KEY, decode_properties, encode_properties, find_property
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC

CHECK_MAX_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
"""As which consumer group the progress in both topics is kept."""

_REMOVE_TAG = "d"
_KEPT_FLAGS = ~SysFlag.TRANSACTION_MASK
_ONLY_OURS = (Property.REAL_TOPIC, Property.REAL_QID, Property.TRANSACTION_PREPARED_QUEUE_OFFSET)


class HalfTimes(NamedTuple):
    """What a half message says about being asked for.

    Attributes:
        checks: How often it was asked for.
        immunity_ms: It may not be asked for before it is so old; 0 for the broker's own time.
        first_offset: The half queue offset that it had first; None if it still has that.
    """

    checks: int
    immunity_ms: int
    first_offset: int | None


def half_draft(draft: RecordDraft) -> RecordDraft:
    """The half message for a message on its way to ``draft.topic``; a delay it asks for stays a mere property."""
    properties = dict(strip_broker_properties(decode_properties(draft.properties)))
    unique_id = properties.setdefault(Property.UNIQ_KEY, create_unique_id())
    properties |= {
        Property.TRANSACTION_PREPARED: "true",
        Property.TRANSACTION_ID: unique_id,
        Property.REAL_TOPIC: draft.topic,
        Property.REAL_QID: str(draft.queue_id),
    }
    for name in (Property.TRANSACTION_CHECK_TIMES, Property.TRANSACTION_PREPARED_QUEUE_OFFSET):
        properties.pop(name, None)
    return replace(
        draft,
        topic=HALF_TOPIC,
        queue_id=0,
        properties=encode_properties(properties),
        sys_flag=draft.sys_flag & _KEPT_FLAGS,
        delay_ms=-1,
    )


def op_draft(half_offset: int, successor: RecordDraft | None, now_ms: int) -> RecordDraft:
    """The mark that one half message is done.

    Args:
        successor: What takes its place, and is written right behind this.
    """
    properties = {Property.TAGS: _REMOVE_TAG, Property.UNIQ_KEY: create_unique_id()}
    if successor is not None and (unique_id := find_property(successor.properties, UNIQ_KEY)) is not None:
        properties[Property.FOLLOWED] = unique_id
    body = b"%d," % half_offset
    return RecordDraft(
        OP_TOPIC, 0, body, encode_properties(properties), tags_code=tags_code(_REMOVE_TAG), born_timestamp=now_ms
    )


def offsets_in(op: StoredRecord) -> list[int]:
    """The half queue offsets that a mark names; what is no mark names none."""
    if find_property(op.properties_bytes, TAGS) != _REMOVE_TAG:
        return []
    return [int(word) for word in op.body.split(b",") if word.isdigit()]


def is_announced(op: StoredRecord) -> bool:
    """Whether a mark tells that something follows it."""
    return find_property(op.properties_bytes, FOLLOWED) is not None


def follows(op: StoredRecord, record: StoredRecord) -> bool:
    """Whether *record*, which lies behind a mark, is what the mark tells of."""
    announced = find_property(op.properties_bytes, FOLLOWED)
    return record.topic != OP_TOPIC and find_property(record.properties_bytes, UNIQ_KEY) == announced


def half_times(properties: bytes) -> HalfTimes:
    """What a half message with these properties says about being asked for; what is no number counts as not said."""

    def number(name: str) -> int | None:
        text = find_property(properties, name.encode())
        return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else None

    return HalfTimes(
        number(Property.TRANSACTION_CHECK_TIMES) or 0,
        (number(Property.CHECK_IMMUNITY_TIME) or 0) * 1_000,
        number(Property.TRANSACTION_PREPARED_QUEUE_OFFSET),
    )


def renewed_draft(half: StoredRecord, checks: int) -> RecordDraft:
    """The half message again, at the end of its queue, now asked for *checks* times."""
    properties = decode_properties(half.properties_bytes) | {Property.TRANSACTION_CHECK_TIMES: str(checks)}
    properties.setdefault(Property.TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
    return _copy(half, HALF_TOPIC, properties)


def discarded_draft(half: StoredRecord) -> RecordDraft:
    """The half message for people to look at, since nobody told what became of its transaction."""
    return _copy(half, CHECK_MAX_TOPIC, decode_properties(half.properties_bytes))


def committed_properties(half: StoredRecord) -> dict[str, str]:
    """The properties that a half message is delivered with."""
    return {name: value for name, value in decode_properties(half.properties_bytes).items() if name not in _ONLY_OURS}


def _copy(half: StoredRecord, topic: str, properties: Mapping[str, str]) -> RecordDraft:
    return RecordDraft(
        topic,
        0,
        half.body,
        encode_properties(properties),
        tags_code=tags_code(properties.get(Property.TAGS)),
        flag=half.flag,
        sys_flag=half.sys_flag & _KEPT_FLAGS,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.physical_offset,
        body_crc=half.body_crc,
    )
