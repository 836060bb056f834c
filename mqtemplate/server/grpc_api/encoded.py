"""Frequent answers as bytes: protobuf takes several times as long to encode them."""

from __future__ import annotations

from mqtemplate.grpc_protos import protos

OK_STATUS = b"\x0a\x08\x08\xa0\x9c\x01\x12\x02OK"
"""Field 1, ``status``, of an answer and of its entries: 20000, ``OK``."""
_MAX_SHORT_ID = 48


def varint(number: int) -> bytes:
    """Return a number from 0 on as protobuf encodes it."""
    if number < 0x80:
        return bytes((number,))
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def ok_answer(message_id: str, queue_offset: int) -> bytes:
    """Return the answer to a send of one message that is stored and not delayed."""
    unique_id = message_id.encode()
    if len(unique_id) > _MAX_SHORT_ID:  # a length would have two bytes
        entry = protos.SendResultEntry(message_id=message_id, transaction_id=message_id, offset=queue_offset)
        rest = bytes(entry.SerializeToString())
        size = len(OK_STATUS) + len(rest)
        return b"%b\x12%b%b%b" % (OK_STATUS, varint(size), OK_STATUS, rest)
    return short_ok_answer(unique_id, queue_offset)


def short_ok_answer(unique_id: bytes, queue_offset: int) -> bytes:
    """Return the same answer for an id of up to 48 bytes."""
    size = len(unique_id)
    offset = b"\x20" + varint(queue_offset) if queue_offset else b""
    entry_size = 14 + 2 * size + len(offset)
    return b"%b\x12%c%b\x12%c%b\x1a%c%b%b" % (
        *(OK_STATUS, entry_size, OK_STATUS),
        *(size, unique_id, size, unique_id, offset),
    )


def ok_ack_answer(message_id: str, handle: str) -> bytes:
    """Return the answer to the acknowledgement of one message that is done."""
    unique_id, text = message_id.encode(), handle.encode()
    fields = (b"\x0a%b%b" % (varint(len(unique_id)), unique_id) if unique_id else b"", varint(len(text)), text)
    entry = b"%b\x12%b%b\x1a%b" % (*fields, OK_STATUS[1:])
    return b"%b\x12%b%b" % (OK_STATUS, varint(len(entry)), entry)
