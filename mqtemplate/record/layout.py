"""Layout of a record of the commit log: offsets, struct objects, fields for numpy, magic numbers and flags.

All numbers are big-endian. ``B`` is the length of the body, ``T`` of the topic, ``P`` of the properties. The offsets
apply to a record with IPv4 hosts. Each IPv6 host moves the fields after it by `V6_EXTRA` bytes.

=====  ======  ===========================  =====================================================
    0  i4      total_size                   size of the whole record, this field included
    4  i4      magic                        V1 ``0xDAA320A7``; V2 ``0xDAA320AB``: two-byte topic length
    8  i4      body_crc                     CRC-32 of the stored body, top bit cleared
   12  i4      queue_id
   16  i4      flag                         the user's
   20  i8      queue_offset                 position in the queue, counted in messages
   28  i8      physical_offset              position of this record in the commit log, in bytes
   36  i4      sys_flag                     see `SysFlag`
   40  i8      born_timestamp               ms, set by the producer
   48  8|20    born_host                    address, then the port as i4
   56  i8      store_timestamp              ms, set by the broker
   64  8|20    store_host
   72  i4      reconsume_times
   76  i8      prepared_transaction_offset
   84  i4, B   body
       i1, T   topic                        V2: i2
       i2, P   properties                   ``name 0x01 value 0x02`` repeated, UTF-8
=====  ======  ===========================  =====================================================

``body_crc`` covers the body only. A record written by mqtemplate therefore ends with one more property, the *check*. It
detects damage in the topic, the properties and the numbers:

==  ==  ==========================================================================
 0   7  ``__CRC@ 0x01``
 7   8  CRC-32 of all bytes before the check except the body, in hex digits
15   8  low 32 bits of ``physical_offset``, in hex digits
23   1  ``0x02``
==  ==  ==========================================================================

RocketMQ may copy the check together with the other properties into another record. The offset tells such a copy from
the record's own check. To RocketMQ the check is an unknown property. It is never returned to a client.

Source: RocketMQ ``common: MessageDecoder``, ``store: MessageExtEncoder``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
MAGIC_BLANK = 0xCBD43194 - (1 << 32)
"""Magic of the blank that ends a commit log file. Source: ``CommitLog.BLANK_MAGIC_CODE``."""
MAX_V1_TOPIC_CHARACTERS = 127


class SysFlag:
    """Bits of ``sys_flag``. Source: ``MessageSysFlag``."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    COMPRESSION_MASK = 0x700
    SEQUENCED = 0x100_0000
    """Of this library: the record has the property `Property.SEQUENCE`. RocketMQ uses bits 0 to 10."""
    CONTINUED = 0x200_0000
    """Of this library: the next record belongs to the same append. A recovery cuts off such records if the last record
    of the append is missing. Copies do not have it."""
    OF_CLIENTS = COMPRESSED | MULTI_TAGS | COMPRESSION_MASK
    """Bits that a client may set: they describe the body. The others describe the record, such as its transaction: they
    would hide a message from a recovery. A half message is known by its properties."""


HOST_FLAGS = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
"""Flags of a record with a longer header. They follow from the hosts; a `RecordDraft` cannot set them."""

# --- the header: everything up to the body ----------------------------------------------------------

MAGIC_AT = 4
BODY_CRC_AT = 8
QUEUE_ID_AT = 12
FLAG_AT = 16
QUEUE_OFFSET_AT = 20
PHYSICAL_OFFSET_AT = 28
SYS_FLAG_AT = 36
BORN_TIMESTAMP_AT = 40
BORN_HOST_AT = 48
STORE_TIMESTAMP_AT = 56
STORE_HOST_AT = 64
RECONSUME_TIMES_AT = 72
PREPARED_OFFSET_AT = 76
BODY_LENGTH_AT = 84
BODY_AT = 88
V4_HOST_SIZE = 8
V6_HOST_SIZE = 20
V6_EXTRA = V6_HOST_SIZE - V4_HOST_SIZE


def _header(host_flags: int) -> struct.Struct:
    born = V6_HOST_SIZE if host_flags & SysFlag.BORN_HOST_V6 else V4_HOST_SIZE
    store = V6_HOST_SIZE if host_flags & SysFlag.STORE_HOST_V6 else V4_HOST_SIZE
    return struct.Struct(f">iiiiiqqiq{born}sq{store}siqi")


def host_flags(born_host: bytes, store_host: bytes) -> int:
    """Return the `HOST_FLAGS` of a record with these hosts."""
    born = SysFlag.BORN_HOST_V6 if len(born_host) == V6_HOST_SIZE else 0
    return born | (SysFlag.STORE_HOST_V6 if len(store_host) == V6_HOST_SIZE else 0)


HEADERS = {flags: _header(flags) for flags in (0, SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6, HOST_FLAGS)}
"""All fields from ``total_size`` to the body length, by the `HOST_FLAGS` that are set."""
HEADER = HEADERS[0]
assert HEADER.size == BODY_AT
SMALLEST_RECORD = BODY_AT + 1 + 2
"""Bytes of a record with IPv4 hosts and empty body, topic and properties."""

HEAD = struct.Struct(">ii20xqi16xq12xqi")
"""Fields of the header that are enough to read record by record, for a record with IPv4 hosts.

Total size, magic, physical offset, sys flag, store timestamp, prepared transaction offset, body length.
"""
assert HEAD.size == BODY_AT

_HEAD_FIELDS = (
    ("size", ">i4", 0),
    ("magic", ">i4", MAGIC_AT),
    ("body_crc", ">i4", BODY_CRC_AT),
    ("queue_id", ">i4", QUEUE_ID_AT),
    ("flag", ">i4", FLAG_AT),
    ("queue_offset", ">i8", QUEUE_OFFSET_AT),
    ("physical_offset", ">i8", PHYSICAL_OFFSET_AT),
    ("sys_flag", ">i4", SYS_FLAG_AT),
    ("born_timestamp", ">i8", BORN_TIMESTAMP_AT),
)
_FIELDS_AFTER_HOSTS = (
    ("store_timestamp", ">i8", STORE_TIMESTAMP_AT),
    ("reconsume_times", ">i4", RECONSUME_TIMES_AT),
    ("prepared_transaction_offset", ">i8", PREPARED_OFFSET_AT),
    ("body_length", ">i4", BODY_LENGTH_AT),
)


def _numpy_fields(fields: Iterable[tuple[str, str, int]], size: int) -> dict[str, Any]:
    names, formats, offsets = map(list, zip(*fields, strict=True))
    return {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}


HEAD_FIELDS = _numpy_fields(_HEAD_FIELDS, BORN_HOST_AT)
"""Fields before the born host, as ``numpy.dtype`` takes them. (A client imports this module, but needs no numpy.)"""
IPV4_HEAD_FIELDS = _numpy_fields((*_HEAD_FIELDS, *_FIELDS_AFTER_HOSTS), BODY_AT)
"""The same, with those up to the body of a record with IPv4 hosts."""

_SIZE_AND_MAGIC = struct.Struct(">ii")
read_size_and_magic = _SIZE_AND_MAGIC.unpack_from
read_size = struct.Struct(">i").unpack_from
read_properties_length = struct.Struct(">h").unpack_from

BLANK_SIZE = _SIZE_AND_MAGIC.size
"""Bytes reserved at the end of each commit log file for the blank."""


def pack_blank(remaining_bytes: int) -> bytes:
    """Return the blank that ends a commit log file when the next record does not fit: remaining bytes, magic."""
    return _SIZE_AND_MAGIC.pack(remaining_bytes, MAGIC_BLANK)


# --- the check: the last property of our records ----------------------------------------------------

CHECK_NAME = "__CRC@"
CHECK_START = f"{CHECK_NAME}\x01".encode()
CHECK_FORMAT = CHECK_START + b"%08x%08x\x02"
CHECK_CRC_AT = len(CHECK_START)
CHECK_OFFSET_AT = CHECK_CRC_AT + 8
CHECK_SIZE = CHECK_OFFSET_AT + 9
MAX_PROPERTIES_BYTES = 32_767 - CHECK_SIZE
"""Limit of a message's encoded properties: the largest value of the length field, less the check."""
