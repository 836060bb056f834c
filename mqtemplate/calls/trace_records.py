"""Trace records: one line for each event of a message, as RocketMQ's tools read them.

::

    Pub       time region group topic msg_id tags keys store_host body_bytes cost_ms type offset_msg_id success
    SubBefore time region group request_id msg_id retries keys
    SubAfter  request_id msg_id cost_ms success keys code [time group]
    EndTransaction time region group topic msg_id tags keys store_host type transaction_id state from_check

The byte 1 is between fields, the byte 2 after each record. A missing text is ``null``, as Java writes it. Source:
RocketMQ ``client: TraceDataEncoder``, ``TraceConstants``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from mqtemplate.message import split_keys

FIELD_END = "\x01"
RECORD_END = "\x02"


class TraceMessageType(IntEnum):
    """Kind of a sent message. Source: ``common: MessageType``, by position."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """Result of a handler. Source: ``client: ConsumeReturnType``, by position."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


class TraceRecord(NamedTuple):
    """One record, and the keys by which the trace topic finds it.

    Attributes:
        region: Region of the broker; the trace topics of a cloud provider contain it.
    """

    text: str
    keys: tuple[str, ...]
    region: str


def sent_record(
    *,
    time_ms: int,
    region: str,
    group: str,
    topic: str,
    msg_id: str,
    tags: str | None,
    keys: str | None,
    store_host: str,
    body_bytes: int,
    cost_ms: int,
    kind: TraceMessageType,
    offset_msg_id: str,
    success: bool,
) -> TraceRecord:
    """Return the record of one sent message."""
    fields = ("Pub", time_ms, region, group, topic, msg_id, tags, keys, store_host, body_bytes, cost_ms, int(kind))
    return TraceRecord(_joined(*fields, offset_msg_id, success), _keys(msg_id, keys), region)


def transaction_record(
    *,
    time_ms: int,
    region: str,
    group: str,
    topic: str,
    msg_id: str,
    tags: str | None,
    keys: str | None,
    store_host: str,
    transaction_id: str | None,
    state: str,
) -> TraceRecord:
    """Return the record of the end of a transaction.

    Args:
        state: Name in RocketMQ: ``COMMIT_MESSAGE``, ``ROLLBACK_MESSAGE`` or ``UNKNOW``.
    """
    fields = ("EndTransaction", time_ms, region, group, topic, msg_id, tags, keys, store_host)
    text = _joined(*fields, int(TraceMessageType.COMMIT), transaction_id, state, False)
    return TraceRecord(text, _keys(msg_id, keys), region)


def before_record(
    *, time_ms: int, region: str, group: str, request_id: str, msg_id: str, retries: int, keys: str | None
) -> TraceRecord:
    """Return the record of a message before its handler is called."""
    fields = ("SubBefore", time_ms, region, group, request_id, msg_id, retries, keys)
    return TraceRecord(_joined(*fields), _keys(msg_id, keys), region)


def after_record(
    *,
    time_ms: int,
    region: str,
    group: str,
    request_id: str,
    msg_id: str,
    keys: str | None,
    cost_ms: int,
    code: ConsumeCode,
    is_cloud: bool = False,
) -> TraceRecord:
    """Return the record of a message after its handler has returned.

    Args:
        is_cloud: True: without time and group, as the trace topics of a cloud provider have them.
    """
    fields = ("SubAfter", request_id, msg_id, cost_ms, code is ConsumeCode.SUCCESS, keys, int(code))
    own = () if is_cloud else (time_ms, group)
    return TraceRecord(_joined(*fields, *own), _keys(msg_id, keys), region)


def _joined(*fields: object) -> str:
    return FIELD_END.join(map(_text, fields)) + RECORD_END


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys(msg_id: str, keys: str | None) -> tuple[str, ...]:
    return (msg_id, *split_keys(keys))
