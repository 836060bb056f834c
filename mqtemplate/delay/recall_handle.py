"""The handle of a delayed message: a producer stores it to cancel or reschedule the message."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, NamedTuple

from mqtemplate.errors import MessageError
from mqtemplate.message import key_text
from mqtemplate.numbers import parse_number
from mqtemplate.record.properties import TIMER_OUT_MS, UNIQ_KEY, find_property
from mqtemplate.user_code import shown

if TYPE_CHECKING:
    from mqtemplate.record.appends import PutResult
    from mqtemplate.record.codec import RecordDraft

_VERSION = "v1"


class RecallHandle(NamedTuple):
    """The contents of a handle.

    Attributes:
        topic: The real topic.
        deliver_ms: For a timer one more than its slot, as in RocketMQ; for a level the first due time.
        physical_offset: Physical offset of the first delayed record; -1 in a handle from RocketMQ.
    """

    topic: str
    broker_name: str
    deliver_ms: int
    msg_id: str
    physical_offset: int = -1


def encode_handle(handle: RecallHandle) -> str:
    """Encode a handle: URL-safe Base64 of ``v1 topic broker time id offset``.

    RocketMQ has no offset, and ignores a sixth word. Source: ``RecallMessageHandle.HandleV1``.
    """
    words = handle if handle.physical_offset >= 0 else handle[:-1]
    return base64.urlsafe_b64encode(" ".join((_VERSION, *map(str, words))).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Decode a handle of this broker or of RocketMQ.

    Raises:
        MessageError: *text* is not a handle.
    """
    try:
        words = base64.urlsafe_b64decode(text.encode()).decode().split(" ")
        version, topic, broker_name, time_text, *rest = words
        if version != _VERSION:
            raise ValueError(f"its version is {version!r}")
        # A producer may choose an id with spaces; only handles without an offset have one word from there on.
        msg_id, offset_text = (rest[0], "-1") if len(rest) == 1 else (" ".join(rest[:-1]), rest[-1])
        deliver_ms, physical_offset = parse_number(time_text), parse_number(offset_text)
        if deliver_ms is None or physical_offset is None:
            raise ValueError("its time or its offset is not a number")
        return RecallHandle(topic, broker_name, deliver_ms, msg_id, physical_offset)
    except (binascii.Error, ValueError, IndexError) as exc:
        raise MessageError(
            f"{shown(text)} is not a handle of a pending message ({exc}); pass SendResult.handle unchanged, or key=..."
        ) from exc


def check_selection(handle: object, key: object) -> str | None:
    """Check the arguments that name pending messages, and return the key as text.

    Raises:
        MessageError: Neither or both are given, *handle* is not text, or *key* is not one word.
    """
    if (handle is None) == (key is None):
        raise MessageError("name the pending message by its handle or by key=..., and by one of them")
    if handle is not None and not isinstance(handle, str):
        kind = type(handle).__name__
        raise MessageError(f"a handle must be the text in SendResult.handle, got {kind} {shown(handle)}")
    return None if key is None else key_text(key)


def new_handle(topic: str, broker_name: str, draft: RecordDraft, put: PutResult) -> str | None:
    """Return the handle of a message for *topic* whose record was just appended; None if it is not delayed."""
    if draft.topic == topic:
        return None
    due_ms = put.store_timestamp + draft.delay_ms
    return handle_of(topic, broker_name, draft.properties, due_ms, put.physical_offset)


def handle_of(topic: str, broker_name: str, properties: bytes, due_ms: int, physical_offset: int) -> str:
    """Return the handle of the delayed message whose record is at *physical_offset*.

    Args:
        topic: The real topic.
        properties: The properties of the record.
    """
    slot_ms = parse_number(find_property(properties, TIMER_OUT_MS))
    time_ms = due_ms if slot_ms is None else slot_ms + 1
    msg_id = find_property(properties, UNIQ_KEY) or ""
    return encode_handle(RecallHandle(topic, broker_name, time_ms, msg_id, physical_offset))
