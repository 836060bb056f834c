"""Messages in bodies: stored messages in responses to pulls and queries, and batches in sends.

A broker sends records of `mqtemplate.record.codec`, one after the other, without a count. A batch has these fields for
each message (big-endian; topic and queue are in the header of the request)::

     0  i4     total_size         size of this message, this field included
     4  i4     magic, body_crc    0 and 0: the broker computes them
    12  i4     flag               the application's number
    16  i4, B  body               never compressed
        i2, P  properties         of this message

Source: RocketMQ ``common: MessageDecoder``.

Headers carry the properties of a message as one text: ``name 0x01 value 0x02`` for each property, without escaping.
`mqtemplate.record.codec` has the same as bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import Message, MessageExt
from mqtemplate.record.codec import BadRecordError, parse_record, to_message_ext
from mqtemplate.record.compression import MAX_BODY_BYTES
from mqtemplate.record.layout import SMALLEST_RECORD, read_size_and_magic
from mqtemplate.record.properties import decode_properties, encode_properties


def encode_properties_text(properties: Mapping[str, str]) -> str:
    """Return all pairs as text. As in 5.x the last pair ends with a separator too; readers accept both.

    Raises:
        MessageError: A name or a value contains one of the two separators.
    """
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    if text.count("\x01") != len(properties) or text.count("\x02") != len(properties):
        bad = next(name for name, value in properties.items() if not {"\x01", "\x02"}.isdisjoint(name + value))
        raise MessageError(
            f"property {bad!r} has the character 0x01 or 0x02 in its name or its value; they separate properties on "
            "the wire, so put such data into the body"
        )
    return text


def decode_properties_text(text: str | None) -> dict[str, str]:
    """Return the pairs, without those that have no name or no value; as in Java the last of equal names counts."""
    properties = {}
    for pair in (text or "").split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


# --- messages in bodies ---------------------------------------------------------------------------


BATCH_FRONT_FIELDS = [(name, ">i4") for name in ("size", "magic", "body_crc", "flag", "body_length")]
"""The fields before the body, for a structured array of numpy."""

LONGEST_PROPERTIES = 32_767
_BATCH_FRONT = struct.Struct(">iiiii")
BATCH_FRONT = struct.Struct(">i8xii")
"""Total size, flag and body length: the fields before the body that a broker reads."""
_I4 = struct.Struct(">i")
_I2 = struct.Struct(">h")
_BATCH_SMALLEST = _BATCH_FRONT.size + _I2.size


BatchedMessage = tuple[bytes, bytes, int]
"""Body, encoded properties and flag of one message of a batch."""


class EncodedBatch(NamedTuple):
    """Messages of one topic as `encode_batch` returns them.

    Attributes:
        ends: End of each message in *data*, ascending.
    """

    topic: str
    data: memoryview
    ends: Sequence[int]


def decode_messages(body: bytes, broker_name: str, max_body_bytes: int = MAX_BODY_BYTES) -> list[MessageExt]:
    """Return the messages that a broker sent, with their bodies decompressed.

    A body that does not decompress, or that has more than *max_body_bytes*, stays as it is, and its message keeps the
    bit `SysFlag.COMPRESSED`: one such message must not block the others of its queue.

    Raises:
        RemoteProtocolError: The bytes are not records.
    """
    messages: list[MessageExt] = []
    at = 0
    while at < len(body):
        size = read_size_and_magic(body, at)[0] if len(body) - at >= SMALLEST_RECORD else 0
        if not SMALLEST_RECORD <= size <= len(body) - at:
            raise RemoteProtocolError(
                f"message {len(messages)} of the body has {size} bytes, {len(body) - at} bytes are left"
            )
        try:
            messages.append(to_message_ext(parse_record(body[at : at + size]), broker_name, max_body_bytes))
        except (BadRecordError, UnicodeDecodeError) as exc:
            raise RemoteProtocolError(f"message {len(messages)} of the body cannot be read: {exc}") from exc
        at += size
    return messages


def encode_batch(messages: Iterable[Message]) -> bytes:
    """Return the body of a send of several messages of one topic.

    Raises:
        MessageError: The properties of a message are too long.
    """
    return b"".join(map(encode_in_batch, messages))


def encode_in_batch(message: Message) -> bytes:
    """Return one message of a batch; a batch is one after the other.

    Raises:
        MessageError: Its properties are too long.
    """
    return join_in_batch(message.body, encode_properties(message.properties), message.flag)


def join_in_batch(body: bytes, properties: bytes, flag: int) -> bytes:
    """Do the same for a message with encoded properties."""
    if len(properties) > LONGEST_PROPERTIES:
        raise MessageError(
            f"keys, tags and properties take {len(properties)} bytes, allowed are {LONGEST_PROPERTIES}; "
            "move data into the body"
        )
    front = _BATCH_FRONT.pack(_BATCH_SMALLEST + len(body) + len(properties), 0, 0, flag, len(body))
    return b"".join((front, body, _I2.pack(len(properties)), properties))


def count_batch(body: bytes, at_most: int) -> int:
    """Return the number of messages that the sizes in a batch announce, counted up to one more than *at_most*.

    The messages are not read, so this takes little time: `decode_batch` finds out what is wrong with them.
    """
    count = at = 0
    last, read_size = len(body) - _BATCH_SMALLEST, _I4.unpack_from
    while at <= last and count <= at_most:
        at += max(read_size(body, at)[0], _BATCH_SMALLEST)
        count += 1
    return count


def decode_batch(body: bytes, topic: str) -> list[Message]:
    """Return the messages of a batch.

    Raises:
        RemoteProtocolError: The bytes are not a batch.
    """
    return [Message(topic, data, decode_properties(properties), flag) for data, properties, flag in split_batch(body)]


def split_batch(body: bytes) -> list[BatchedMessage]:
    """Return the messages of a batch with their properties as they are; errors as `decode_batch`."""
    messages: list[BatchedMessage] = []
    add, read_front, read_length = messages.append, BATCH_FRONT.unpack_from, _I2.unpack_from
    at, total = 0, len(body)
    while at < total:
        try:
            size, flag, body_length = read_front(body, at)
            body_at = at + _BATCH_FRONT.size
            body_end = body_at + body_length
            # A negative length must not make the next field be read before its own start.
            (length,) = read_length(body, body_end) if body_length >= 0 else (-1,)
        except struct.error:
            raise RemoteProtocolError(f"message {len(messages)} of the batch is cut off") from None
        properties_at = body_end + _I2.size
        end = properties_at + length
        if length < 0 or size != end - at or end > total:
            raise RemoteProtocolError(f"the lengths in message {len(messages)} of the batch do not add up to {size}")
        add((body[body_at:body_end], body[properties_at:end], flag))
        at = end
    return messages
