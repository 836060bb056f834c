"""Messages as they stand in bodies: what pulls, views and checks bring, and what a batch sends.

Brokers send records of `mqtemplate.record.codec` one after the other, without a count. A batch has, for each message
(big-endian; the broker knows topic and queue from the header)::

     0  i4     total_size         of this message, this field included
     4  i4     magic, body_crc    0 and 0: the broker makes them
    12  i4     flag               the user's
    16  i4, B  body               never compressed
        i2, P  properties         each message's own

Source: RocketMQ ``common: MessageDecoder``.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import HostAddress, Message, MessageExt
from mqtemplate.record.codec import BadRecordError, RecordDraft, pack_host, parse_record
from mqtemplate.record.layout import SMALLEST_RECORD, read_size_and_magic
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.record.properties import decode_properties, encode_properties

_BATCH_FRONT = struct.Struct(">iiiii")
_I2 = struct.Struct(">h")
_BATCH_SMALLEST = _BATCH_FRONT.size + _I2.size
_LONGEST_PROPERTIES = 32_767
_ID_LENGTHS = (32, 56)
_OFFSET_DIGITS = 16


def decode_messages(body: bytes, broker_name: str) -> list[MessageExt]:
    """The messages that a broker sent, their bodies unpacked.

    A body that cannot be unpacked stays as it is, and its message keeps the bit `SysFlag.COMPRESSED`, so that one such
    message does not hold up its queue.

    Raises:
        RemoteProtocolError: The bytes are not records.
    """
    messages: list[MessageExt] = []
    at = 0
    while at < len(body):
        size = read_size_and_magic(body, at)[0] if len(body) - at >= SMALLEST_RECORD else 0
        if not SMALLEST_RECORD <= size <= len(body) - at:
            raise RemoteProtocolError(
                f"message {len(messages)} of the body has {size} bytes, {len(body) - at} are there"
            )
        try:
            messages.append(_decode_message(body[at : at + size], broker_name))
        except (BadRecordError, UnicodeDecodeError) as exc:
            raise RemoteProtocolError(f"message {len(messages)} of the body cannot be read: {exc}") from exc
        at += size
    return messages


def _decode_message(data: bytes, broker_name: str) -> MessageExt:
    return to_message_ext(parse_record(data), broker_name)


def encode_message(message: MessageExt) -> bytes:
    """The record of a message, as a broker sends one that is not to be sent as it lies in the log.

    The body goes as it is: a message whose `SysFlag.COMPRESSED` is set must have it compressed.

    Raises:
        MessageError: Its properties take too much room.
    """
    draft = RecordDraft(
        message.topic,
        message.queue_id,
        message.body,
        encode_properties(message.properties),
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_timestamp=message.born_timestamp,
        born_host=pack_host(message.born_host),
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
    store_host = pack_host(message.store_host)
    return draft.encode(message.queue_offset, message.physical_offset, message.store_timestamp, store_host)


def encode_batch(messages: Iterable[Message]) -> bytes:
    """The body that sends several messages of one topic at once.

    Raises:
        MessageError: The properties of one take too much room.
    """
    parts: list[bytes] = []
    for message in messages:
        properties = encode_properties(message.properties)
        if len(properties) > _LONGEST_PROPERTIES:
            raise MessageError(
                f"keys, tags and properties take {len(properties)} bytes, allowed are {_LONGEST_PROPERTIES}; "
                "move data into the body"
            )
        size = _BATCH_SMALLEST + len(message.body) + len(properties)
        front = _BATCH_FRONT.pack(size, 0, 0, message.flag, len(message.body))
        parts += (front, message.body, _I2.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(body: bytes, topic: str) -> list[Message]:
    """The messages that a batch sends.

    Raises:
        RemoteProtocolError: The bytes are no batch.
    """
    messages: list[Message] = []
    at = 0
    while at < len(body):
        try:
            size, _, _, flag, body_length = _BATCH_FRONT.unpack_from(body, at)
            body_at = at + _BATCH_FRONT.size
            body_end = body_at + body_length
            (length,) = _I2.unpack_from(body, body_end) if body_length >= 0 else (-1,)
        except struct.error:
            raise RemoteProtocolError(f"message {len(messages)} of the batch is cut off") from None
        properties_at = body_end + _I2.size
        end = properties_at + length
        if length < 0 or size != end - at or end > len(body):
            raise RemoteProtocolError(f"the lengths in message {len(messages)} of the batch do not add up to {size}")
        properties = decode_properties(body[properties_at:end])
        messages.append(Message(topic, body[body_at:body_end], properties, flag))
        at = end
    return messages


def decode_offset_msg_id(text: str) -> tuple[HostAddress, int]:
    """The broker's address and the physical offset in an id that a broker gave; `mqtemplate.message.offset_msg_id`.

    Raises:
        RemoteProtocolError: It is none: a sender's id looks the same, a batch's is several, joined by commas.
    """
    try:
        if len(text) not in _ID_LENGTHS:
            raise ValueError(f"it has {len(text)} characters")
        host, physical_offset = bytes.fromhex(text[:-_OFFSET_DIGITS]), bytes.fromhex(text[-_OFFSET_DIGITS:])
        if len(host) + len(physical_offset) != len(text) // 2:
            raise ValueError("it has blanks in it")
    except ValueError as exc:
        raise RemoteProtocolError(
            f"{text[:80]!r} is no id that a broker gives ({exc}); those are 32 hex digits, or 56 with an IPv6 address"
        ) from exc
    family = socket.AF_INET if len(text) == 32 else socket.AF_INET6
    address = HostAddress(socket.inet_ntop(family, host[:-4]), int.from_bytes(host[-4:], "big"))
    return address, int.from_bytes(physical_offset, "big", signed=True)
