"""One message as bytes: the record that the commit log stores and a pull answers with.

All numbers are big-endian. ``B`` is the body's length, ``T`` the topic's, ``P`` the properties'; offsets
are those of a record with IPv4 hosts, each IPv6 host makes what follows it 12 bytes longer.

=====  ======  ===========================  =====================================================
    0  i4      total_size                   the whole record, this field included
    4  i4      magic                        V1 ``0xDAA320A7``; V2 ``0xDAA320AB``: two-byte topic length
    8  i4      body_crc                     CRC-32 of the stored body, top bit cleared
   12  i4      queue_id
   16  i4      flag                         the user's
   20  i8      queue_offset                 place in the queue, counted in messages
   28  i8      physical_offset              place of this record in the commit log, in bytes
   36  i4      sys_flag                     see `SysFlag`
   40  i8      born_timestamp               ms, by the sender
   48  8|20    born_host                    address, then the port as i4
   56  i8      store_timestamp              ms, by the broker
   64  8|20    store_host
   72  i4      reconsume_times
   76  i8      prepared_transaction_offset
   84  i4, B   body
       i1, T   topic                        V2: i2
       i2, P   properties                   ``name 0x01 value 0x02`` repeated, UTF-8
=====  ======  ===========================  =====================================================

``body_crc`` guards the body alone. So that a damaged topic, property or number is noticed too, a record written here
ends with one more property, 24 bytes: ``__CRC@ 0x01``, the CRC-32 of everything before it but the body as 8 hex digits,
the low half of ``physical_offset`` as 8 hex digits, ``0x02``. The offset tells the check of this record from one that
another broker copied along with the other properties. Readers who do not know it see a property; here it never leaves
this file.

Source: RocketMQ ``common: MessageDecoder``, ``store: MessageExtEncoder``.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from mqtemplate.checksum import crc32
from mqtemplate.compression import COMPRESSED_FLAG, COMPRESSION_MASK, decompress_body
from mqtemplate.errors import ConversionError, MessageError, UnsupportedError
from mqtemplate.message import HostAddress, MessageExt

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
MAGIC_BLANK = 0xCBD43194 - (1 << 32)
SMALLEST_RECORD = 91
"""Bytes of a record with IPv4 hosts and nothing in it."""
read_size_and_magic = struct.Struct(">ii").unpack_from
_V1_TOPIC_LONGEST = 127

_HEADER: struct.Struct = struct.Struct(">iiiiiqqiq8sq8siqi")
_HEADER_SIZE = _HEADER.size
assert _HEADER_SIZE == 88

_FIXED_FRONT = struct.Struct(">iiiiiqqiq")  # up to the born host
_FIXED_BACK = struct.Struct(">iqi")  # behind the store host
_I8 = struct.Struct(">q")
_I4 = struct.Struct(">i")
_I2 = struct.Struct(">h")


CHECK_NAME = "__CRC@"
CHECK_START = f"{CHECK_NAME}\x01".encode()
_CHECK = CHECK_START + b"%08x%08x\x02"
CHECK_SIZE = len(CHECK_START) + 17
MAX_PROPERTIES_BYTES = 32_767 - CHECK_SIZE
"""What a message's properties may take, encoded; the field's limit less the check."""
_FIXED_SIZE = _HEADER_SIZE - 16 + 2 + CHECK_SIZE  # a record without hosts, body, topic and properties
_OTHER_OFFSET = re.compile(rb"[0-9a-f]{8}\x02")


class SysFlag:
    """Bits of ``sys_flag``. Source: ``MessageSysFlag``."""

    COMPRESSED = COMPRESSED_FLAG
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    COMPRESSION_MASK = COMPRESSION_MASK


HOST_FLAGS = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
"""A record with one of them has a longer head. What a draft says of them does not count: its hosts do."""
_NOT_HOST_FLAGS = ~HOST_FLAGS


class BadRecordError(Exception):
    """Bytes that are not a whole record; who knows the file turns it into a `CorruptRecordError`."""


@dataclass(slots=True)
class RecordDraft:
    """A record before the log gives it its place: queue offset, physical offset, store timestamp.

    Attributes:
        properties: Encoded, see `encode_properties`.
        body_crc: Taken from *body* where None; a copy of a stored record brings it along.
        tags_code: What the consume queue keeps beside it.
        delay_ms: Not negative: the tags code becomes store timestamp + this, as the schedule topic keeps it.
    """

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    tags_code: int = 0
    delay_ms: int = -1
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x00\x00"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int | None = None

    def size(self, store_host: bytes) -> int:
        """Bytes the whole record will have."""
        topic = _encode_topic(self.topic)[1]
        hosts = len(self.born_host) + len(store_host)
        return _FIXED_SIZE + hosts + len(self.body) + len(topic) + len(self.properties)

    def encode(self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes) -> bytes:
        """The record, given its place.

        Raises:
            MessageError: Its properties take too much room.
        """
        body, properties, born_host = self.body, self.properties, self.born_host
        length = len(properties)
        if length > MAX_PROPERTIES_BYTES:
            raise MessageError(
                f"keys, tags and properties take {length} bytes, allowed are {MAX_PROPERTIES_BYTES}; "
                "move data into the body"
            )
        magic, topic = _encode_topic(self.topic)
        rest = b"".join((topic, (length + CHECK_SIZE).to_bytes(2, "big"), properties))
        pack = _HEADER.pack if len(born_host) + len(store_host) == 16 else _pack_v6_header
        head = pack(
            _FIXED_SIZE - 2 + len(born_host) + len(store_host) + len(body) + len(rest),
            magic,
            crc32(body) & 0x7FFF_FFFF if self.body_crc is None else self.body_crc,
            self.queue_id,
            self.flag,
            queue_offset,
            physical_offset,
            self.sys_flag & _NOT_HOST_FLAGS,
            self.born_timestamp,
            born_host,
            store_timestamp,
            store_host,
            self.reconsume_times,
            self.prepared_transaction_offset,
            len(body),
        )
        check = _CHECK % (crc32(rest, crc32(head)), physical_offset & 0xFFFF_FFFF)
        return b"".join((head, body, rest, check))


def _pack_v6_header(*fields: Any) -> bytes:
    born_host, store_timestamp, store_host = fields[9:12]
    sys_flag = fields[7]
    sys_flag |= SysFlag.BORN_HOST_V6 if len(born_host) == 20 else 0
    sys_flag |= SysFlag.STORE_HOST_V6 if len(store_host) == 20 else 0
    front = _FIXED_FRONT.pack(*fields[:7], sys_flag, fields[8])
    return b"".join((front, born_host, _I8.pack(store_timestamp), store_host, _FIXED_BACK.pack(*fields[12:])))


@lru_cache(maxsize=4_096)
def _encode_topic(topic: str) -> tuple[int, bytes]:
    name = topic.encode()
    if len(topic) > _V1_TOPIC_LONGEST:
        return MAGIC_V2, len(name).to_bytes(2, "big") + name
    return MAGIC_V1, len(name).to_bytes(1, "big") + name


class StoredRecord(NamedTuple):
    """One record, read. Hosts are raw: 4 or 16 address bytes, then the port as i4."""

    total_size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties_bytes: bytes

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.properties_bytes)


class Labelled(Protocol):
    """What a consume queue's tags code is made from: a `StoredRecord`, or a `RecordLabel`."""

    @property
    def topic(self) -> str: ...

    @property
    def properties_bytes(self) -> bytes: ...

    @property
    def store_timestamp(self) -> int: ...


class RecordLabel(NamedTuple):
    """As much of a record as its tags code is made from; see `Labelled`."""

    topic: str
    properties_bytes: bytes
    store_timestamp: int


def parse_record(data: bytes, *, verifies: bool = True) -> StoredRecord:
    """Read the record that *data* begins with.

    Args:
        verifies: Compare its sums; else only its lengths must add up.

    Raises:
        BadRecordError: It is not whole; the text says what is wrong.
    """
    if len(data) < _HEADER_SIZE:
        raise BadRecordError(f"{len(data)} bytes are fewer than a header has")
    fields: tuple[Any, ...] = _HEADER.unpack_from(data)
    size, magic, sys_flag = fields[0], fields[1], fields[7]
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise BadRecordError(f"magic {magic & 0xFFFF_FFFF:#010x} is not a record's")
    if size > len(data):
        raise BadRecordError(f"size {size} reaches over the {len(data)} bytes that are there")
    at = _HEADER_SIZE
    if sys_flag & (SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6):
        fields, at = _unpack_v6_header(data, sys_flag)
    body_end = at + fields[14]
    topic_at = body_end + (1 if magic == MAGIC_V1 else 2)
    if fields[14] < 0 or topic_at > size:
        raise BadRecordError(f"body length {fields[14]} does not fit into a record of {size} bytes")
    topic_end = topic_at + int.from_bytes(data[body_end:topic_at], "big")
    properties_at = topic_end + 2
    if properties_at > size or properties_at + _I2.unpack_from(data, topic_end)[0] != size:
        raise BadRecordError(f"the lengths inside do not add up to its size {size}")
    body = data[at:body_end]
    properties = data[properties_at:size]
    if properties.endswith(b"\0"):
        raise BadRecordError("its end is missing")
    if properties.startswith(CHECK_START, -CHECK_SIZE):
        rest = data[body_end : size - CHECK_SIZE]
        if verifies:
            _verify(properties[-CHECK_SIZE:], crc32(rest, crc32(data[:at])), fields[6])
        properties = properties[:-CHECK_SIZE]
    if verifies and crc32(body) & 0x7FFF_FFFF != fields[2]:
        raise BadRecordError("its body does not match its CRC-32")
    return StoredRecord._make((*fields[:14], body, decode_topic(data[topic_at:topic_end]), properties))


def _verify(check: bytes, crc: int, physical_offset: int) -> None:
    """Compare the check that a record ends with, unless another broker copied it from another record."""
    if check == _check_of(crc, physical_offset):
        return
    is_own = check[15:] == _check_of(0, physical_offset)[15:]
    if is_own or not _OTHER_OFFSET.fullmatch(check[15:]):
        raise BadRecordError("it does not match its CRC-32")


def _unpack_v6_header(data: bytes, sys_flag: int) -> tuple[tuple[Any, ...], int]:
    born_length = 20 if sys_flag & SysFlag.BORN_HOST_V6 else 8
    store_length = 20 if sys_flag & SysFlag.STORE_HOST_V6 else 8
    born_at = _FIXED_FRONT.size
    store_timestamp_at = born_at + born_length
    store_at = store_timestamp_at + 8
    back_at = store_at + store_length
    if back_at + _FIXED_BACK.size > len(data):
        raise BadRecordError(f"{len(data)} bytes are fewer than its header has")
    fields = (
        *_FIXED_FRONT.unpack_from(data),
        bytes(data[born_at:store_timestamp_at]),
        *_I8.unpack_from(data, store_timestamp_at),
        bytes(data[store_at:back_at]),
        *_FIXED_BACK.unpack_from(data, back_at),
    )
    return fields, back_at + _FIXED_BACK.size


@lru_cache(maxsize=4_096)
def decode_topic(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as exc:
        raise BadRecordError("the topic is not UTF-8") from exc


def without_check(data: bytes, record: StoredRecord) -> bytes:
    """*data*, which *record* was read from, as other brokers write records: without the check that ours end with."""
    properties = record.properties_bytes
    check_at = record.total_size - CHECK_SIZE
    length_at = check_at - len(properties) - 2
    if not data.startswith(CHECK_START, check_at) or _I2.unpack_from(data, length_at)[0] == len(properties):
        return data
    return b"".join((_I4.pack(check_at), data[4:length_at], _I2.pack(len(properties)), properties))


def _check_of(crc: int, physical_offset: int) -> bytes:
    """The last bytes of a record at *physical_offset* whose other bytes have the CRC-32 *crc*."""
    return _CHECK % (crc, physical_offset & 0xFFFF_FFFF)


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """``name 0x01 value 0x02`` for each pair, UTF-8."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()]).encode()


def decode_properties(data: bytes) -> dict[str, str]:
    """The pairs in *data*; what has no name or no value is left out, as upstream does."""
    properties = {}
    for pair in data.decode("utf-8", "replace").split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            properties[name] = value
    properties.pop(CHECK_NAME, None)  # a copy that another broker made of one of our records
    return properties


def find_property(data: bytes, name: bytes) -> str | None:
    """The value of one property, without decoding the others."""
    start = data.find(name + b"\x01")
    if start > 0 and data[start - 1] != 2:  # the end of a longer name, or of a value
        start = data.find(b"\x02" + name + b"\x01") + 1 or -1
    if start < 0:
        return None
    start += len(name) + 1
    end = data.find(b"\x02", start)
    value = data[start:end] if end >= 0 else data[start:]
    try:
        return value.decode() or None
    except UnicodeDecodeError:
        return value.decode("utf-8", "replace")


def pack_host(host: HostAddress) -> bytes:
    """Address bytes, then the port as i4."""
    family = socket.AF_INET6 if ":" in host.ip else socket.AF_INET
    return socket.inet_pton(family, host.ip) + host.port.to_bytes(4, "big")


@lru_cache(maxsize=4_096)
def unpack_host(data: bytes) -> HostAddress:
    family = socket.AF_INET if len(data) == 8 else socket.AF_INET6
    return HostAddress(socket.inet_ntop(family, data[:-4]), int.from_bytes(data[-4:], "big"))


def to_message_ext(record: StoredRecord, broker_name: str) -> MessageExt:
    """The message in a record, its body unpacked if it was compressed.

    A body that cannot be unpacked stays as it is, and its message keeps the bit `SysFlag.COMPRESSED`, so that one such
    message does not hold up its queue.
    """
    body, sys_flag = record.body, record.sys_flag
    if sys_flag & SysFlag.COMPRESSED:
        body, sys_flag = _unpacked(record)
    return MessageExt(
        record.topic,
        body,
        decode_properties(record.properties_bytes),
        record.flag,
        broker_name=broker_name,
        queue_id=record.queue_id,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        store_size=record.total_size,
        sys_flag=sys_flag,
        body_crc=record.body_crc,
        born_timestamp=record.born_timestamp,
        born_host=unpack_host(record.born_host),
        store_timestamp=record.store_timestamp,
        store_host=unpack_host(record.store_host),
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
    )


def _unpacked(record: StoredRecord) -> tuple[bytes, int]:
    """The body as it was sent, and the flags that are true of it."""
    try:
        return decompress_body(record.body, record.sys_flag), record.sys_flag & ~SysFlag.COMPRESSED
    except (ConversionError, UnsupportedError):
        return record.body, record.sys_flag
