"""Encode a record of the commit log, and parse one. `mqtemplate.record.layout` has the table of its bytes."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import add
from typing import Any, NamedTuple

from mqtemplate.errors import ConversionError, MessageError, UnsupportedError
from mqtemplate.hashes import crc32
from mqtemplate.message import HostAddress, MessageExt, PackedBody
from mqtemplate.record import layout
from mqtemplate.record.appends import IndexEntries, PutBatch, PutResult, QueueRows
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties
from mqtemplate.topics import is_file_name

_NOT_HOST_FLAGS = ~layout.HOST_FLAGS
_V4_HOSTS_SIZE = 2 * layout.V4_HOST_SIZE
_TRANSACTION_MASK, _ROLLED_BACK = layout.SysFlag.TRANSACTION_MASK, layout.SysFlag.TRANSACTION_ROLLBACK
_OFFSET_OF_A_CHECK = re.compile(rb"[0-9a-f]{8}\x02")


class BadRecordError(Exception):
    """The bytes are not a whole valid record. Code that knows the file raises `CorruptRecordError` instead."""


class UnverifiedError(Exception):
    """Records whose checksums were not compared are damaged, or contradict each other: all have to be verified."""


class PendingRequest(NamedTuple):
    """Request of a new message that at most one message of its topic is pending under a key.

    Attributes:
        topic: Topic of the message, to which the key belongs.
        on_pending: A value of `OnPending`.
        no_later_ms: Longest time from the first send to the delivery of a message that is postponed.
    """

    topic: str
    key: str
    on_pending: str
    no_later_ms: int | None = None


@dataclass(slots=True)
class RecordDraft:
    """A record before the commit log assigns queue offset, physical offset and store timestamp.

    Attributes:
        properties: Encoded, see `encode_properties`.
        tags_code: Value for the consume queue unit.
        born_host: Address bytes, then the port as i4.
        delay_ms: If not negative, the tags code is store timestamp + *delay_ms*, as in the schedule topic.
        body_crc: None computes it from *body*. A copy of a stored record reuses the stored one.
        pending: Not part of the record. The send path decides about the message that is pending under the key.
    """

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    tags_code: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x00\x00"
    reconsume_times: int = 0
    delay_ms: int = -1
    prepared_transaction_offset: int = 0
    body_crc: int | None = None
    pending: PendingRequest | None = None

    def encode(self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes) -> bytes:
        """Return the bytes of the record.

        Raises:
            MessageError: The properties exceed `layout.MAX_PROPERTIES_BYTES`.
        """
        body, properties, born_host = self.body, self.properties, self.born_host
        length = len(properties)
        if length > layout.MAX_PROPERTIES_BYTES:
            raise MessageError(
                f"keys, tags and properties take {length} bytes, allowed are {layout.MAX_PROPERTIES_BYTES}; "
                "move data into the body"
            )
        magic, topic = _encode_topic(self.topic)
        rest = b"".join((topic, (length + layout.CHECK_SIZE).to_bytes(2, "big"), properties))
        has_v4_hosts = len(born_host) + len(store_host) == _V4_HOSTS_SIZE
        host_flags = 0 if has_v4_hosts else layout.host_flags(born_host, store_host)
        header = layout.HEADERS[host_flags]
        head = header.pack(
            header.size + len(body) + len(rest) + layout.CHECK_SIZE,
            magic,
            crc32(body) & 0x7FFF_FFFF if self.body_crc is None else self.body_crc,
            self.queue_id,
            self.flag,
            queue_offset,
            physical_offset,
            self.sys_flag & _NOT_HOST_FLAGS | host_flags,
            self.born_timestamp,
            born_host,
            store_timestamp,
            store_host,
            self.reconsume_times,
            self.prepared_transaction_offset,
            len(body),
        )
        check = layout.CHECK_FORMAT % (crc32(rest, crc32(head)), physical_offset & 0xFFFF_FFFF)
        return b"".join((head, body, rest, check))

    def encode_at(
        self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[bytes, PutResult]:
        """Return the bytes of the record, and its position. Errors as in `encode`."""
        record = self.encode(queue_offset, physical_offset, store_timestamp, store_host)
        return record, PutResult(physical_offset, len(record), queue_offset, store_timestamp)

    def tags_code_at(self, store_timestamp: int) -> int:
        """Return the value for the consume queue unit of the stored record."""
        return self.tags_code if self.delay_ms < 0 else store_timestamp + self.delay_ms

    @property
    def indexed_properties(self) -> bytes:
        """The properties that the index reads: none of a transaction that was rolled back."""
        return b"" if self.sys_flag & _TRANSACTION_MASK == _ROLLED_BACK else self.properties


class DraftPair(NamedTuple):
    """Two records of one queue, which are appended together. `Drafts` takes twice the time for them."""

    first: RecordDraft
    second: RecordDraft

    def encode_at(
        self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[bytes, tuple[PutResult, PutResult]]:
        """Return the bytes of both, and their positions. Errors as in `RecordDraft.encode`."""
        first = self.first.encode(queue_offset, physical_offset, store_timestamp, store_host)
        size = len(first)
        second = self.second.encode(queue_offset + 1, physical_offset + size, store_timestamp, store_host)
        return first + second, (
            PutResult(physical_offset, size, queue_offset, store_timestamp),
            PutResult(physical_offset + size, len(second), queue_offset + 1, store_timestamp),
        )


class Drafts:
    """Several records of any queues, see `NewRecords`."""

    def __init__(self, drafts: Sequence[RecordDraft]) -> None:
        self._drafts = drafts
        self._queues = self._rows_by_queue()

    def __len__(self) -> int:
        return len(self._drafts)

    def queues(self) -> list[QueueRows]:
        return self._queues

    def _rows_by_queue(self) -> list[QueueRows]:
        topic, queue_id = self._drafts[0].topic, self._drafts[0].queue_id
        for draft in self._drafts:  # a loop takes half the time of a generator
            if draft.queue_id != queue_id or draft.topic != topic:
                break
        else:
            return [QueueRows(topic, queue_id, range(len(self._drafts)))]  # as batches of producers are
        rows: dict[tuple[str, int], list[int]] = {}
        for row, draft in enumerate(self._drafts):
            key = draft.topic, draft.queue_id
            if key in rows:
                rows[key].append(row)
            else:
                rows[key] = [row]
        return [QueueRows(*key, numbers) for key, numbers in rows.items()]

    def encode_at(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[bytes, PutBatch]:
        at, records, offsets = physical_offset, [], []
        each_queue_offset = self._each_queue_offset(queue_offsets)
        for draft, queue_offset in zip(self._drafts, each_queue_offset, strict=True):
            record = draft.encode(queue_offset, at, store_timestamp, store_host)
            offsets.append(at)
            records.append(record)
            at += len(record)
        return b"".join(records), PutBatch(offsets, list(map(len, records)), each_queue_offset, store_timestamp)

    def _each_queue_offset(self, starts: Sequence[int]) -> Sequence[int]:
        if len(starts) == 1:
            return range(starts[0], starts[0] + len(self._drafts))
        each = [0] * len(self._drafts)
        for start, (_, _, rows) in zip(starts, self._queues, strict=True):
            for queue_offset, row in enumerate(rows, start):
                each[row] = queue_offset
        return each

    def tags_codes(self, store_timestamp: int) -> list[int]:
        return [each.tags_code if each.delay_ms < 0 else store_timestamp + each.delay_ms for each in self._drafts]

    def index_entries(self, puts: PutBatch) -> IndexEntries:
        topics = [each.topic for each in self._drafts]
        properties = [
            b"" if each.sys_flag & _TRANSACTION_MASK == _ROLLED_BACK else each.properties for each in self._drafts
        ]
        ends = map(add, puts.physical_offsets, puts.sizes)
        return IndexEntries(puts.physical_offsets, ends, repeat(1, len(topics)), topics, properties)


@lru_cache(maxsize=4_096)
def _encode_topic(topic: str) -> tuple[int, bytes]:
    """Return the magic that the topic requires, and the topic after its length."""
    name = topic.encode()
    if len(topic) > layout.MAX_V1_TOPIC_CHARACTERS:
        return layout.MAGIC_V2, len(name).to_bytes(2, "big") + name
    return layout.MAGIC_V1, len(name).to_bytes(1, "big") + name


class EncodedMessage(NamedTuple):
    """A message whose properties are encoded and come from an application only: no delay, no id."""

    topic: str
    body: bytes
    properties: bytes
    flag: int


class StoredRecord(NamedTuple):
    """A parsed record. Hosts are raw: 4 or 16 address bytes, then the port as i4."""

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

    def position_fields(self) -> dict[str, object]:
        """Return its position as fields of a log event."""
        return {
            "topic": self.topic,
            "queue": self.queue_id,
            "offset": self.queue_offset,
            "physical_offset": self.physical_offset,
        }


def parse_record(data: bytes, *, verify: bool = True) -> StoredRecord:
    """Parse the record at the start of *data*.

    Args:
        verify: Compare the checksums. Without that only the lengths must match.

    Raises:
        BadRecordError: The bytes are not a whole valid record; the text says why.
    """
    if len(data) < layout.BODY_AT:
        raise BadRecordError(f"{len(data)} bytes are fewer than a header has")
    fields: tuple[Any, ...] = layout.HEADER.unpack_from(data)
    size, magic, host_flags = fields[0], fields[1], fields[7] & layout.HOST_FLAGS
    if magic not in (layout.MAGIC_V1, layout.MAGIC_V2):
        raise BadRecordError(f"magic {magic & 0xFFFF_FFFF:#010x} is not a record's")
    if size > len(data):
        raise BadRecordError(f"size {size} exceeds the {len(data)} bytes found")
    at = layout.BODY_AT
    if host_flags:
        at = layout.HEADERS[host_flags].size
        if at > len(data):
            raise BadRecordError(f"{len(data)} bytes are fewer than a header with IPv6 hosts has")
        fields = layout.HEADERS[host_flags].unpack_from(data)
    body_end = at + fields[14]
    topic_at = body_end + (1 if magic == layout.MAGIC_V1 else 2)
    if fields[14] < 0 or topic_at > size:
        raise BadRecordError(f"body length {fields[14]} does not fit into a record of {size} bytes")
    topic_end = topic_at + int.from_bytes(data[body_end:topic_at], "big")
    properties_at = topic_end + 2
    if properties_at > size or properties_at + layout.read_properties_length(data, topic_end)[0] != size:
        raise BadRecordError(f"the lengths inside do not add up to its size {size}")
    body = data[at:body_end]
    properties = data[properties_at:size]
    if properties.endswith(b"\0"):  # never in valid properties: the last sectors of the record were not written
        raise BadRecordError("its end is missing")
    if properties.startswith(layout.CHECK_START, -layout.CHECK_SIZE):
        if verify:
            rest = data[body_end : size - layout.CHECK_SIZE]
            _verify_check(properties[-layout.CHECK_SIZE :], crc32(rest, crc32(data[:at])), fields[6])
        properties = properties[: -layout.CHECK_SIZE]
    if verify and crc32(body) & 0x7FFF_FFFF != fields[2]:
        raise BadRecordError("its body does not match its CRC-32")
    return StoredRecord._make((*fields[:14], body, decode_topic(data[topic_at:topic_end]), properties))


def _verify_check(check: bytes, crc: int, physical_offset: int) -> None:
    """Compare the check at the end of a record, unless RocketMQ copied it from another record."""
    expected = layout.CHECK_FORMAT % (crc, physical_offset & 0xFFFF_FFFF)
    if check == expected:
        return
    found_offset = check[layout.CHECK_OFFSET_AT :]
    if found_offset == expected[layout.CHECK_OFFSET_AT :] or not _OFFSET_OF_A_CHECK.fullmatch(found_offset):
        raise BadRecordError("it does not match its CRC-32")


@lru_cache(maxsize=4_096)
def decode_topic(name: bytes) -> str:
    """Return the topic.

    Raises:
        BadRecordError: It is not UTF-8, or cannot be the name of a folder.
    """
    try:
        topic = name.decode()
    except UnicodeDecodeError as exc:
        raise BadRecordError("the topic is not UTF-8") from exc
    if not is_file_name(topic):
        raise BadRecordError(f"its topic {topic[:40]!r} is not a legal name")
    return topic


def without_check(data: bytes, record: StoredRecord) -> bytes:
    """Return *data*, the bytes of *record*, without the check: as RocketMQ would have written the record."""
    properties = record.properties_bytes
    check_at = record.total_size - layout.CHECK_SIZE
    length_at = check_at - len(properties) - 2
    length = len(properties).to_bytes(2, "big")
    if not data.startswith(layout.CHECK_START, check_at) or data[length_at : length_at + 2] == length:
        return data
    return b"".join((check_at.to_bytes(4, "big"), data[4:length_at], length, properties))


def read_without_check(data: bytes, topic: str, queue_id: int, queue_offset: int, physical_offset: int) -> bytes | None:
    """Return the one whole record in *data* as `without_check` does, verified.

    Several times as fast as `parse_record`. None if the record is another one, has no check or IPv6 hosts, or is
    invalid: then `parse_record` finds out what it is.
    """
    size = len(data)
    if size < layout.BODY_AT:
        return None
    fields = layout.HEADER.unpack_from(data)
    magic, name = _encode_topic(topic)
    if fields[:2] != (size, magic) or fields[3] != queue_id or fields[5:7] != (queue_offset, physical_offset):
        return None
    body_end, check_at = layout.BODY_AT + fields[14], size - layout.CHECK_SIZE
    length_at = body_end + len(name)
    properties_at = length_at + 2
    if (
        fields[7] & layout.HOST_FLAGS
        or not layout.BODY_AT <= body_end <= properties_at <= check_at
        or not data.startswith(name, body_end)
        or layout.read_properties_length(data, length_at)[0] != size - properties_at
        or crc32(data[layout.BODY_AT : body_end]) & 0x7FFF_FFFF != fields[2]
    ):
        return None
    crc = crc32(data[body_end:check_at], crc32(data[: layout.BODY_AT]))
    if data[check_at:] != layout.CHECK_FORMAT % (crc, physical_offset & 0xFFFF_FFFF):
        return None
    length = (check_at - properties_at).to_bytes(2, "big")
    return b"".join((check_at.to_bytes(4, "big"), data[4:length_at], length, data[properties_at:check_at]))


def pack_host(host: HostAddress) -> bytes:
    """Return the address bytes, then the port as i4."""
    family = socket.AF_INET6 if ":" in host.ip else socket.AF_INET
    return socket.inet_pton(family, host.ip) + host.port.to_bytes(4, "big")


@lru_cache(maxsize=4_096)
def unpack_host(data: bytes) -> HostAddress:
    """Return the address in the host field of a record."""
    family = socket.AF_INET if len(data) == layout.V4_HOST_SIZE else socket.AF_INET6
    return HostAddress(socket.inet_ntop(family, data[:-4]), int.from_bytes(data[-4:], "big"))


def to_message_ext(record: StoredRecord, broker_name: str, max_body_bytes: int = MAX_BODY_BYTES) -> MessageExt:
    """Return the message of a record, with its body decompressed.

    A body that cannot be decompressed stays as it is, as a `PackedBody`, and its message keeps the flag
    `SysFlag.COMPRESSED`. One such message must not stop the consumption of its queue.

    Args:
        max_body_bytes: Largest body that is decompressed.
    """
    body, sys_flag = record.body, record.sys_flag
    if sys_flag & SysFlag.COMPRESSED:
        body, sys_flag = _decompress(record, max_body_bytes)
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


def _decompress(record: StoredRecord, max_body_bytes: int) -> tuple[bytes, int]:
    """Return the body as the producer passed it, and the flags that describe it."""
    try:
        body = decompress_body(record.body, record.sys_flag, max_body_bytes)
        return body, record.sys_flag & ~SysFlag.COMPRESSED
    except (ConversionError, UnsupportedError) as exc:
        return PackedBody(record.body, str(exc)), record.sys_flag
