"""Commit log records as Arrow record batches, without a Python object for each record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import BodyTooLargeError, ConversionError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import crc32
from mqtemplate.message import Property, offset_msg_id
from mqtemplate.numbers import parse_number
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, parse_record, unpack_host
from mqtemplate.record.columns import RecordColumns, checks, gather
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.spark.records.blocks import RecordBlock
from mqtemplate.spark.records.property_columns import PropertyColumns, adjacent_cells, cell_parts

_TO_ZERO = np.uint32(0x6DD9_0A9D)
"""``crc32(x + w)`` is 0 if the four bytes *w*, the lowest first, are ``crc32(x) ^ _TO_ZERO``, and for no other *w*."""


def crcs(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each cell of a binary array."""
    offsets, data = cell_parts(cells)
    view = data.data  # its slices copy nothing
    return np.array([crc32(view[start:end]) for start, end in pairwise(offsets.tolist())], np.uint32)


def rows_match(parts: Sequence[pa.Array], stated: npt.NDArray[Any]) -> bool:
    """Return True if in each row the adjacent cells of *parts* have the stated CRC-32: one sum over all rows.

    After each row there are four bytes that take the sum to 0, if it is the stated one. So the next row begins as if it
    were the first, and the last sum is 0 too. A wrong row leaves another sum, and no later byte can make 0 of it again.
    Several wrong rows cancel each other in one of 2**32 cases, as any error may go undetected.
    """
    words = stated.astype("<u4") ^ _TO_ZERO
    bounds = np.arange(0, 4 * len(words) + 1, 4, dtype=np.int32)
    ends = pa.Array.from_buffers(pa.binary(), len(words), [None, pa.py_buffer(bounds), pa.py_buffer(words)])
    _, data = cell_parts(pc.binary_join_element_wise(*parts, ends, b""))
    return crc32(data) == 0


_log = get_logger("mqtemplate.spark")

_TIMESTAMP = pa.timestamp("us", "UTC")
ARROW_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("brokerName", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("msgId", pa.string()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("body", pa.binary()),
        ("flag", pa.int32()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("bornTimestamp", _TIMESTAMP),
        ("storeTimestamp", _TIMESTAMP),
        ("deliverTimestamp", _TIMESTAMP),
        ("reconsumeTimes", pa.int32()),
    ]
)
"""Columns of the source; ``deliverTimestamp`` is null unless the message was delayed to a time."""

_FIRST_MS, _LAST_MS = -62_135_510_400_000, 253_402_214_400_000  # the years 1 to 9999, less a day for time zones
_U8 = np.uint64
_CODECS = {0x000: "zlib", 0x100: "lz4", 0x200: "zstd", 0x300: "zlib"}


def record_batches(
    blocks: Iterable[RecordBlock], schema: pa.Schema, max_body_bytes: int = MAX_BODY_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the records of each block as one batch.

    Each record is checked: its length, magic code, own offset, the lengths inside, the CRC of its body, and the check
    that our own broker writes for the other bytes.

    Args:
        max_body_bytes: Largest body that is decompressed. A larger one stays compressed, and is logged.

    Raises:
        CorruptRecordError: A record is damaged; the text names the file and the physical offset.
    """
    for block in blocks:
        yield Records(block, max_body_bytes).batch(schema)


class Records:
    """Records of one block, with computed offsets of all fields. `mqtemplate.record.layout` has the layout.

    Raises:
        CorruptRecordError: A record is damaged.
    """

    def __init__(self, block: RecordBlock, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._block = block
        self._max_body_bytes = max_body_bytes
        self._data, self._at, self._sizes = block.data, block.at, block.sizes
        self._taken: dict[int, pa.Array] = {}
        self._require(
            (self._sizes >= layout.SMALLEST_RECORD) & (self._at + self._sizes <= len(self._data)),
            "its length exceeds the file, or is below the smallest record",
        )
        self._fields = fields = RecordColumns(self._data, self._at, self._sizes, block.physical_offsets, self._require)
        self._has_check, self._properties_end = fields.has_check, fields.properties_end
        # Five cells a record: header, body, topic and lengths, properties, and check up to the next record.
        self._all_cells = adjacent_cells(
            self._data, self._at, fields.body_at, fields.body_end, fields.properties_at, fields.properties_end
        )
        self._check_sums()

    def _check_sums(self) -> None:
        """Compare the CRC of each body, and of the other bytes where a check states it. This takes most of the time."""
        bodies = crcs(self.cells(1)) & 0x7FFF_FFFF  # one bit is not stored, so `rows_match` cannot compare them
        self._require(bodies == self._fields.heads["body_crc"], "its body does not match its CRC-32")
        if not self._has_check.any():
            return
        parts = [self.cells(number) for number in (0, 2, 3)]
        stated = self._hex8(self._properties_end + layout.CHECK_CRC_AT)
        # Other characters than digits may give a number, too: so the check is compared as bytes.
        written = gather(self._data, f"V{layout.CHECK_SIZE}", self._properties_end)
        expected = checks(stated.astype(np.int64), self._block.physical_offsets).view(written.dtype)[:, 0]
        is_exact = written == expected
        if self._has_check.all() and is_exact.all() and rows_match(parts, stated):
            return
        rest = crcs(pc.binary_join_element_wise(*parts, b""))
        for row in np.flatnonzero(self._has_check & ~(is_exact & (stated == rest))).tolist():
            self._parse_alone(row)

    def _parse_alone(self, row: int) -> None:
        """Check one record with `parse_record`: the bytes of a check may also be a property that was copied."""
        at = int(self._at[row])
        try:
            parse_record(self._data[at : at + int(self._sizes[row])].tobytes())
        except BadRecordError as exc:
            raise self._corrupt(row, str(exc)) from exc

    def _hex8(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return eight lower-case hex digits as a number; for other characters, any number."""
        digits = gather(self._data, ">u8", at).astype(np.uint64)
        # One byte a digit: a letter has bit 6 and its low four bits are 1 to 6. Then two digits a byte, and so on.
        values = (digits & _U8(0x0F0F_0F0F_0F0F_0F0F)) + (digits >> _U8(6) & _U8(0x0101_0101_0101_0101)) * _U8(9)
        values = (values | values >> _U8(4)) & _U8(0x00FF_00FF_00FF_00FF)
        values = (values | values >> _U8(8)) & _U8(0x0000_FFFF_0000_FFFF)
        numbers: npt.NDArray[np.uint64] = (values | values >> _U8(16)) & _U8(0xFFFF_FFFF)
        return numbers

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns of *schema*; no other one is built."""
        columns = self._columns()
        return pa.RecordBatch.from_arrays([columns[name]() for name in schema.names], schema=schema)

    def _columns(self) -> dict[str, Callable[[], pa.Array]]:
        count, queue = len(self._at), self._block.queue
        return {
            "topic": lambda: pa.repeat(pa.scalar(queue.topic), count),
            "brokerName": lambda: pa.repeat(pa.scalar(queue.broker_name), count),
            "queueId": lambda: pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
            "queueOffset": lambda: pa.array(self._block.queue_offsets, pa.int64()),
            "msgId": self._message_ids,
            "tags": lambda: self.properties.value(Property.TAGS),
            "keys": lambda: self.properties.value(Property.KEYS),
            "body": self._bodies,
            "flag": lambda: pa.array(self._fields.heads["flag"].astype(np.int32)),
            "properties": self._maps,
            "bornTimestamp": lambda: timestamp_column(pa.array(self._fields.heads["born_timestamp"].astype(np.int64))),
            "storeTimestamp": lambda: timestamp_column(pa.array(self._fields.store_timestamps)),
            "deliverTimestamp": lambda: _deliver_timestamps(self.properties),
            "reconsumeTimes": lambda: pa.array(self._fields.reconsume_times, pa.int32()),
        }

    @cached_property
    def properties(self) -> PropertyColumns:
        """The properties of the messages."""
        return PropertyColumns(self.cells(3))

    def _maps(self) -> pa.Array:
        return self.properties.maps()

    def cells(self, number: int) -> pa.Array:
        """Return the cell with this number of each record: 0 header, 1 body, 2 topic and lengths, 3 properties."""
        cells = self._taken.get(number)
        if cells is None:
            cells = self._taken[number] = self._all_cells.take(pa.array(np.arange(number, 5 * len(self._at), 5)))
        return cells

    def _bodies(self) -> pa.Array:
        bodies = self.cells(1)
        compressed = np.flatnonzero(self._fields.sys_flags & SysFlag.COMPRESSED)
        if not len(compressed):
            return bodies
        plain = bodies.to_pylist()
        for row in compressed.tolist():
            plain[row] = self._decompress(row, plain[row])
        return pa.array(plain, pa.binary())

    def _decompress(self, row: int, body: bytes) -> bytes:
        flag, limit = int(self._fields.sys_flags[row]), self._max_body_bytes
        codec = _CODECS.get(flag & SysFlag.COMPRESSION_MASK)
        if codec is None:
            raise self._corrupt(row, f"its system flag {flag:#x} has no known compression")
        try:
            if codec == "zlib":
                return decompress_body(body, flag, limit)
            plain = bytes(pa.CompressedInputStream(pa.BufferReader(body), codec).read(limit + 1))
            if len(plain) <= limit:
                return plain
        except BodyTooLargeError:
            pass
        except (ConversionError, OSError) as exc:
            raise self._corrupt(row, f"its {codec} body cannot be decompressed: {exc}") from exc
        _log.warning(
            "spark.body_too_large",
            source=self._block.source,
            physical_offset=int(self._block.physical_offsets[row]),
            max_bytes=limit,
            hint="the column body has it compressed; raise the option maxDecompressedSize",
        )
        return body

    def _message_ids(self) -> pa.Array:
        """Return the producer's ids; the broker's id for a message without one."""
        ids = self.properties.value(Property.UNIQ_KEY)
        if not ids.null_count:
            return ids
        known, fields = ids.to_pylist(), self._fields
        starts, ends = fields.store_host_at, fields.tail_at
        for row, unique in enumerate(known):
            if unique is None:
                host = self._data[starts[row] : ends[row]].tobytes()
                known[row] = offset_msg_id(unpack_host(host), int(self._block.physical_offsets[row]))
        return pa.array(known, pa.string())

    def _require(self, good: npt.NDArray[np.bool_], reason: str) -> None:
        if not good.all():
            raise self._corrupt(int(np.argmin(good)), reason)

    def _corrupt(self, row: int, reason: str) -> CorruptRecordError:
        return CorruptRecordError(self._block.source, int(self._block.physical_offsets[row]), reason)

    def numbers(self, kind: str, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a number of each record, such as ``>i4``, at these positions in the data of the block."""
        return gather(self._data, kind, at).astype(np.int64)


def number_column(texts: pa.Array) -> pa.Array:
    """Return a column of texts as numbers of 64 bits; null for a text that is no number. Any program may write it."""
    try:
        return texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.array([parse_number(text) for text in texts.to_pylist()], pa.int64())


def timestamp_column(milliseconds: pa.Array) -> pa.Array:
    """Return times; null for one that `datetime` does not have: one such row would fail the whole query."""
    in_range = pc.and_(pc.greater_equal(milliseconds, _FIRST_MS), pc.less_equal(milliseconds, _LAST_MS))
    return pc.multiply(pc.if_else(in_range, milliseconds, None), 1_000).view(_TIMESTAMP)


def _deliver_timestamps(properties: PropertyColumns) -> pa.Array:
    """Return the due time of messages that were delayed to a time and have been delivered to their real topic."""
    due = properties.value(Property.TIMER_DELIVER_MS)
    if due.null_count == len(due):
        return pa.nulls(len(due), _TIMESTAMP)
    due = pc.if_else(properties.value(Property.REAL_TOPIC).is_valid(), due, pa.scalar(None, pa.string()))
    return timestamp_column(number_column(due))
