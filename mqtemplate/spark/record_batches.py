"""Commit log records as Arrow record batches, without a Python object for each record.

A window of the log *is* an Arrow binary array whose cells are header, body, topic, properties, next header, …
One int32 offsets buffer holds the start of each cell. Arrow's ``take`` copies the selected cells in C++, and numpy
gathers the numbers of the headers. Rare cases (a compressed body, text that is not UTF-8) are handled in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import BodyTooLargeError, ConversionError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes.checksum import crc32
from mqtemplate.message import Property, offset_msg_id
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, parse_record, unpack_host
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.spark.property_columns import PropertyColumns, adjacent_cells
from mqtemplate.spark.store_folder import LogWindow, StoreFolder

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

_ROWS = 8_192  # of a batch; from here to 32,768 rows the time per row is the same
_BYTES = 32 * 1024 * 1024  # of a batch; bodies may be megabytes
_LAST_MS = 2**63 // 1_000 - 1  # the last millisecond that a timestamp in microseconds can hold
_CODECS = {0x000: "zlib", 0x100: "lz4", 0x200: "zstd", 0x300: "zlib"}


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Units of one queue, and the values that all their rows share.

    Attributes:
        queue_offsets: Queue offset of each unit, ascending.
        units: Structured array of `CQ_UNIT_DTYPE`, one for each queue offset.
    """

    topic: str
    broker_name: str
    queue_id: int
    queue_offsets: npt.NDArray[np.int64]
    units: npt.NDArray[Any]

    def __getitem__(self, part: slice) -> QueueSlice:
        return QueueSlice(self.topic, self.broker_name, self.queue_id, self.queue_offsets[part], self.units[part])


def record_batches(
    folder: StoreFolder, queue: QueueSlice, schema: pa.Schema, max_body_bytes: int = MAX_BODY_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the records of *queue* in order, some thousand in a batch.

    Each record is checked: its length, magic code, own offset, the lengths inside, the CRC of its body, and the check
    that our own broker writes for the other bytes.

    Args:
        max_body_bytes: Largest body that is decompressed. A larger one stays compressed, and is logged.

    Raises:
        CorruptRecordError: A record is damaged; the text names the file and the physical offset.
        OffsetOutOfRangeError: The file of a record was deleted.
    """
    physical = queue.units["physical_offset"].astype(np.int64)
    if (np.diff(physical) <= 0).any():
        at = int(np.argmax(np.diff(physical) <= 0))
        where = f"consume queue {queue.queue_id} of {queue.topic}"
        raise CorruptRecordError(where, int(physical[at + 1]), "its units do not ascend")
    for window, part in folder.windows(physical):
        for piece in _pieces(queue.units["size"][part].astype(np.int64)):
            start = part.start
            chunk = queue[start + piece.start : start + piece.stop]
            yield _Records(window, chunk, max_body_bytes).batch(schema)


def _pieces(sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Split records into batches by rows and by bytes; each batch has at least one record."""
    ends = np.cumsum(sizes)
    at = 0
    while at < len(sizes):
        before = int(ends[at - 1]) if at else 0
        stop = min(at + _ROWS, int(np.searchsorted(ends, before + _BYTES, side="right")))
        yield slice(at, max(stop, at + 1))
        at = max(stop, at + 1)


class _Records:
    """Records of one commit log file, with computed offsets of all fields. `mqtemplate.record.codec` has the layout."""

    def __init__(self, window: LogWindow, queue: QueueSlice, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._queue, self._path = queue, window.path
        self._physical = queue.units["physical_offset"].astype(np.int64)
        self._sizes = queue.units["size"].astype(np.int64)
        first = int(self._physical[0]) - window.start
        last = min(int(self._physical[-1] + self._sizes[-1]) - window.start, len(window.data))
        self._data = window.data[first:last]
        self._at = self._physical - window.start - first
        self._require(
            (self._sizes >= layout.SMALLEST_RECORD) & (self._at + self._sizes <= len(self._data)),
            "its length exceeds the file, or is below the smallest record",
        )
        self._find_fields()
        self._check_sums()
        # Five cells a record: header, body, topic and lengths, properties, and check up to the next record.
        self._all_cells = adjacent_cells(
            self._data, self._at, self._body_at, self._body_end, self._properties_at, self._properties_end
        )

    def _find_fields(self) -> None:
        at, sizes = self._at, self._sizes
        magic = self._i4(at + layout.MAGIC_AT)
        self._require(self._i4(at) == sizes, "its length is not the one in the consume queue")
        self._require((magic == layout.MAGIC_V1) | (magic == layout.MAGIC_V2), "it has no magic code of a record")
        own_offset = self._i8(at + layout.PHYSICAL_OFFSET_AT)
        self._require(own_offset == self._physical, "its own physical offset is another one")
        self._sys_flags = self._i4(at + layout.SYS_FLAG_AT)
        self._born_extra = np.where(self._sys_flags & SysFlag.BORN_HOST_V6, layout.V6_EXTRA, 0)
        hosts_extra = self._born_extra + np.where(self._sys_flags & SysFlag.STORE_HOST_V6, layout.V6_EXTRA, 0)
        # The retries, then prepared transaction offset, body length, body.
        self._tail_at = at + layout.RECONSUME_TIMES_AT + hosts_extra
        self._body_at = at + layout.BODY_AT + hosts_extra
        topic_length_size = np.where(magic == layout.MAGIC_V2, 2, 1)
        end, reason = at + sizes, "the lengths inside it do not add up"
        self._require(self._body_at + topic_length_size + 2 <= end, reason)
        body_length = self._i4(self._body_at - 4)
        self._body_end = self._body_at + body_length
        self._require((body_length >= 0) & (self._body_end + topic_length_size + 2 <= end), reason)
        topic_length = np.where(magic == layout.MAGIC_V2, self._u2(self._body_end), self._data[self._body_end])
        properties_length_at = self._body_end + topic_length_size + topic_length
        self._require(properties_length_at + 2 <= end, reason)
        self._properties_at = properties_length_at + 2
        self._require(self._properties_at + self._u2(properties_length_at) == end, reason)
        self._require((self._properties_at == end) | (self._data[end - 1] != 0), "its end is missing")
        self._has_check = self._find_checks(end)
        self._properties_end = end - np.where(self._has_check, layout.CHECK_SIZE, 0)

    def _find_checks(self, end: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which records end with a check of all bytes except the body."""
        start = np.maximum(end - layout.CHECK_SIZE, self._at)
        expected = np.frombuffer(layout.CHECK_START, np.uint8)
        same = (self._data[start[:, None] + np.arange(len(expected))] == expected).all(axis=1)
        found: npt.NDArray[np.bool_] = same & (start >= self._properties_at)
        return found

    def _check_sums(self) -> None:
        data = self._data.data
        body_at, body_end = self._body_at.tolist(), self._body_end.tolist()
        spans = zip(body_at, body_end, strict=True)
        bodies = np.array([crc32(data[start:end]) for start, end in spans], np.uint32) & 0x7FFF_FFFF
        self._require(bodies == self._i4(self._at + layout.BODY_CRC_AT), "its body does not match its CRC-32")
        around = zip(self._at.tolist(), body_at, body_end, self._properties_end.tolist(), strict=True)
        rest = np.array([crc32(data[back:end], crc32(data[at:front])) for at, front, back, end in around], np.uint32)
        stated = self._hex8(self._properties_end + layout.CHECK_CRC_AT)
        for row in np.flatnonzero(self._has_check & (stated != rest)).tolist():
            self._parse_alone(row)

    def _parse_alone(self, row: int) -> None:
        """Check one record with `parse_record`: the bytes of a check may also be a property that was copied."""
        at = int(self._at[row])
        try:
            parse_record(self._data[at : at + int(self._sizes[row])].tobytes())
        except BadRecordError as exc:
            raise self._corrupt(row, str(exc)) from exc

    def _hex8(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return eight lower-case hex digits as a number; for other characters, any number."""
        positions = np.minimum(at[:, None] + np.arange(8), len(self._data) - 1)
        digits = self._data[positions].astype(np.int64)
        values = np.where(digits >= ord("a"), digits - ord("a") + 10, digits - ord("0"))
        numbers: npt.NDArray[np.int64] = values @ (1 << np.arange(28, -1, -4))
        return numbers

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns of *schema*; no other one is built."""
        columns = self._columns()
        return pa.RecordBatch.from_arrays([columns[name]() for name in schema.names], schema=schema)

    def _columns(self) -> dict[str, Callable[[], pa.Array]]:
        count, queue = len(self._at), self._queue
        return {
            "topic": lambda: pa.repeat(pa.scalar(queue.topic), count),
            "brokerName": lambda: pa.repeat(pa.scalar(queue.broker_name), count),
            "queueId": lambda: pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
            "queueOffset": lambda: pa.array(queue.queue_offsets, pa.int64()),
            "msgId": self._message_ids,
            "tags": lambda: self._properties.value(Property.TAGS),
            "keys": lambda: self._properties.value(Property.KEYS),
            "body": self._bodies,
            "flag": lambda: pa.array(self._i4(self._at + layout.FLAG_AT), pa.int32()),
            "properties": self._maps,
            "bornTimestamp": lambda: _timestamps(self._i8(self._at + layout.BORN_TIMESTAMP_AT)),
            "storeTimestamp": lambda: _timestamps(self._i8(self._at + layout.STORE_TIMESTAMP_AT + self._born_extra)),
            "deliverTimestamp": lambda: _deliver_timestamps(self._properties),
            "reconsumeTimes": lambda: pa.array(self._i4(self._tail_at), pa.int32()),
        }

    @cached_property
    def _properties(self) -> PropertyColumns:
        return PropertyColumns(self._cells(3))

    def _maps(self) -> pa.Array:
        return self._properties.maps()

    def _cells(self, number: int) -> pa.Array:
        """Return the cell with this number of each record; 1 is the body, 3 the properties."""
        return self._all_cells.take(pa.array(np.arange(number, 5 * len(self._at), 5)))

    def _bodies(self) -> pa.Array:
        bodies = self._cells(1)
        compressed = np.flatnonzero(self._sys_flags & SysFlag.COMPRESSED)
        if not len(compressed):
            return bodies
        plain = bodies.to_pylist()
        for row in compressed.tolist():
            plain[row] = self._decompress(row, plain[row])
        return pa.array(plain, pa.binary())

    def _decompress(self, row: int, body: bytes) -> bytes:
        flag, limit = int(self._sys_flags[row]), self._max_body_bytes
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
            file=str(self._path),
            physical_offset=int(self._physical[row]),
            max_bytes=limit,
            hint="the column body has it compressed; raise the option maxDecompressedSize",
        )
        return body

    def _message_ids(self) -> pa.Array:
        """Return the producer's ids; the broker's id for a message without one."""
        ids = self._properties.value(Property.UNIQ_KEY)
        if not ids.null_count:
            return ids
        known = ids.to_pylist()
        for row, unique in enumerate(known):
            if unique is None:
                host_at = self._at[row] + layout.STORE_HOST_AT + self._born_extra[row]
                host = self._data[host_at : self._tail_at[row]].tobytes()
                known[row] = offset_msg_id(unpack_host(host), int(self._physical[row]))
        return pa.array(known, pa.string())

    def _require(self, good: npt.NDArray[np.bool_], reason: str) -> None:
        if not good.all():
            raise self._corrupt(int(np.argmin(good)), reason)

    def _corrupt(self, row: int, reason: str) -> CorruptRecordError:
        return CorruptRecordError(self._path, int(self._physical[row]), reason)

    # Overlapping views with one number at every byte: indexing them gathers big-endian numbers at any offset.

    def _i8(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return _gather(self._data, ">i8", at).astype(np.int64)

    def _i4(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return _gather(self._data, ">i4", at).astype(np.int32)

    def _u2(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return _gather(self._data, ">u2", np.minimum(at, len(self._data) - 2)).astype(np.int64)


def _gather(data: npt.NDArray[np.uint8], kind: str, at: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    dtype = np.dtype(kind)
    every: npt.NDArray[Any] = np.ndarray((len(data) - dtype.itemsize + 1,), dtype, buffer=data.data, strides=(1,))
    return every[at]


def _timestamps(milliseconds: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(milliseconds * 1_000).view(_TIMESTAMP)


def _deliver_timestamps(properties: PropertyColumns) -> pa.Array:
    """Return the due time of messages that were delayed to a time and have been delivered to their real topic."""
    due = properties.value(Property.TIMER_DELIVER_MS)
    if due.null_count < len(due):
        due = pc.if_else(properties.value(Property.REAL_TOPIC).is_valid(), due, pa.scalar(None, pa.string()))
    try:
        milliseconds = due.cast(pa.int64())
    except pa.ArrowInvalid:  # another program wrote the property, and not as a number
        numbers = (None if text is None or not text.isdecimal() else int(text) for text in due.to_pylist())
        valid = [None if number is None or number > _LAST_MS else number for number in numbers]
        milliseconds = pa.array(valid, pa.int64())
    in_range = pc.less_equal(pc.abs(milliseconds), _LAST_MS)
    return pc.multiply(pc.if_else(in_range, milliseconds, None), 1_000).view(_TIMESTAMP)
