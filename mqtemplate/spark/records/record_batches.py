"""Commit log records as Arrow record batches, without a Python object for each record."""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import BodyTooLargeError, ConversionError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Property, offset_msg_id
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, parse_record, unpack_host
from mqtemplate.record.columns import RecordColumns, gather
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import CHECK_NAME, SysFlag
from mqtemplate.spark.records.arrow_arrays import (
    LARGEST_IN_RUN,
    TIMESTAMP,
    adjacent_cells,
    cell_parts,
    cells_of_rows,
    crcs,
    number_column,
    run_matches,
    text,
    timestamp_column,
    top_bits,
)
from mqtemplate.spark.records.blocks import RecordBlock

_log = get_logger("mqtemplate.spark")

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
        ("bornTimestamp", TIMESTAMP),
        ("storeTimestamp", TIMESTAMP),
        ("deliverTimestamp", TIMESTAMP),
        ("reconsumeTimes", pa.int32()),
    ]
)
"""Columns of the source; ``deliverTimestamp`` is null unless the message was delayed to a time."""

_U8 = np.uint64
_CODECS = {0x000: "zlib", 0x100: "lz4", 0x200: "zstd", 0x300: "zlib"}


def record_batches(
    blocks: Iterable[RecordBlock],
    schema: pa.Schema,
    max_body_bytes: int = MAX_BODY_BYTES,
    *,
    check_crcs: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of each block as one batch.

    Each record is checked: its length, magic code, own offset, the lengths inside, the CRC of its body, and the check
    that our own broker writes for the other bytes.

    Args:
        max_body_bytes: Largest body that is decompressed. A larger one stays compressed, and is logged.
        check_crcs: False leaves out the CRC and the check: bytes that have changed inside of a record are returned.

    Raises:
        CorruptRecordError: A record is damaged; the text names the file and the physical offset.
    """
    for block in blocks:
        yield Records(block, max_body_bytes, check_crcs=check_crcs).batch(schema)


class Records:
    """Records of one block, with computed offsets of all fields. `mqtemplate.record.layout` has the layout.

    Raises:
        CorruptRecordError: A record is damaged.
    """

    # A record has five cells: its header, body, topic and lengths, properties, and the check with the bytes up to the
    # next record.
    HEADER, BODY, TOPIC, PROPERTIES, _CELLS = 0, 1, 2, 3, 5

    def __init__(self, block: RecordBlock, max_body_bytes: int = MAX_BODY_BYTES, *, check_crcs: bool = True) -> None:
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
        starts = (self._at, fields.body_at, fields.body_end, fields.properties_at, fields.properties_end)
        self._all_cells = adjacent_cells(self._data, *starts)
        if check_crcs:
            self._check_bodies()
            self._check_other_bytes()

    def _check_bodies(self) -> None:
        """Compare the CRC of each body: by one sum if all are small, and one by one if that is another one."""
        bodies, fields = self.cells(self.BODY), self._fields
        if (fields.body_end - fields.body_at).max() <= LARGEST_IN_RUN:
            sums = fields.heads["body_crc"].astype(np.uint32) | top_bits(bodies) << np.uint32(31)
            if run_matches(bodies, sums):
                return
        self._require(crcs(bodies) & 0x7FFF_FFFF == fields.heads["body_crc"], "its body does not match its CRC-32")

    def _check_other_bytes(self) -> None:
        """Compare the CRC of the bytes around each body where a check states it."""
        if not self._has_check.any():
            return
        stated, is_exact = self._stated_checks()
        if is_exact.all():
            fields = self._fields
            cells = adjacent_cells(self._data, self._at, fields.body_at, fields.body_end, fields.properties_end)
            if run_matches(cells_of_rows(cells, 0, 2), stated, restore=False):
                return
        around = pc.binary_join_element_wise(*map(self.cells, (self.HEADER, self.TOPIC, self.PROPERTIES)), b"")
        for row in np.flatnonzero(self._has_check & ~(is_exact & (stated == crcs(around)))).tolist():
            self._parse_alone(row)

    def _stated_checks(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return the sum in the check of each record, and True where there is a check for its offset.

        Other characters than digits may give a number, too: so the digits are compared as bytes.
        """
        digits = np.ascontiguousarray(self._fields.tails[:, layout.CHECK_CRC_AT : -1])
        numbers = np.empty((len(digits), 2), ">u4")
        numbers[:, 0] = _hex8(digits[:, : layout.CHECK_OFFSET_AT - layout.CHECK_CRC_AT])
        numbers[:, 1] = self._block.physical_offsets & 0xFFFF_FFFF
        expected, is_exact = hexlify(numbers.data), self._has_check & (self._fields.tails[:, -1] == _PAIR_END)
        if digits.tobytes() != expected:
            is_exact &= (digits == np.frombuffer(expected, np.uint8).reshape(digits.shape)).all(axis=1)
        return numbers[:, 0].astype(np.uint32), is_exact

    def _parse_alone(self, row: int) -> None:
        """Check one record with `parse_record`: the bytes of a check may also be a property that was copied."""
        at = int(self._at[row])
        try:
            parse_record(self._data[at : at + int(self._sizes[row])].tobytes())
        except BadRecordError as exc:
            raise self._corrupt(row, str(exc)) from exc

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns of *schema*; no other one is built."""
        columns = self._columns()
        return pa.RecordBatch.from_arrays([columns[name]() for name in schema.names], schema=schema)

    def _columns(self) -> dict[str, Callable[[], pa.Array]]:
        count, queue = len(self._at), self._block.queue
        return {
            "topic": lambda: pa.repeat(pa.scalar(queue.topic), count),
            "brokerName": lambda: pa.repeat(pa.scalar(queue.broker_name), count),
            "queueId": lambda: pa.array(np.full(count, queue.queue_id, np.int32)),
            "queueOffset": lambda: pa.array(self._block.queue_offsets, pa.int64()),
            "msgId": self._message_ids,
            "tags": lambda: self.properties.value(Property.TAGS),
            "keys": lambda: self.properties.value(Property.KEYS),
            "body": self._bodies,
            "flag": lambda: pa.array(self._fields.heads["flag"].astype(np.int32)),
            "properties": lambda: PropertyColumns.maps(self.properties),
            "bornTimestamp": lambda: timestamp_column(pa.array(self._fields.heads["born_timestamp"].astype(np.int64))),
            "storeTimestamp": lambda: timestamp_column(pa.array(self._fields.store_timestamps)),
            "deliverTimestamp": lambda: _deliver_timestamps(self.properties),
            "reconsumeTimes": lambda: pa.array(self._fields.reconsume_times, pa.int32()),
        }

    @cached_property
    def properties(self) -> PropertyColumns:
        """The properties of the messages."""
        return PropertyColumns(self.cells(self.PROPERTIES))

    def cells(self, number: int) -> pa.Array:
        """Return the cell with this number of each record, such as `Records.BODY`."""
        cells = self._taken.get(number)
        if cells is None:
            cells = self._taken[number] = cells_of_rows(self._all_cells, number, self._CELLS)
        return cells

    def _bodies(self) -> pa.Array:
        bodies = self.cells(self.BODY)
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


def _hex8(texts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return rows of eight lower-case hex digits as numbers; for other characters, any numbers."""
    digits = np.ascontiguousarray(texts).view(">u8")[:, 0].astype(np.uint64)
    # One byte a digit: a letter has bit 6 and its low four bits are 1 to 6. Then two digits a byte, and so on.
    values = (digits & _U8(0x0F0F_0F0F_0F0F_0F0F)) + (digits >> _U8(6) & _U8(0x0101_0101_0101_0101)) * _U8(9)
    values = (values | values >> _U8(4)) & _U8(0x00FF_00FF_00FF_00FF)
    values = (values | values >> _U8(8)) & _U8(0x0000_FFFF_0000_FFFF)
    numbers: npt.NDArray[np.uint64] = (values | values >> _U8(16)) & _U8(0xFFFF_FFFF)
    return numbers


def _deliver_timestamps(properties: PropertyColumns) -> pa.Array:
    """Return the due time of messages that were delayed to a time and have been delivered to their real topic."""
    due = properties.value(Property.TIMER_DELIVER_MS)
    if due.null_count == len(due):
        return pa.nulls(len(due), TIMESTAMP)
    due = pc.if_else(properties.value(Property.REAL_TOPIC).is_valid(), due, pa.scalar(None, pa.string()))
    return timestamp_column(number_column(due))


_NAME_END, _PAIR_END = 0x01, 0x02


class PropertyColumns:
    """Properties of a batch of messages, ``name 0x01 value 0x02 …`` each.

    They are parsed as RocketMQ does (``MessageDecoder.string2messageProperties``): the last separator may be missing,
    the first 0x01 ends the name, a pair without a name or without a value is ignored, and a later pair replaces an
    earlier one of the same name.

    A producer usually gives all its messages the same names in the same order. Then one message says where each name
    is, and no other name is compared.

    Args:
        encoded: Arrow binary array with one cell for each message.
    """

    def __init__(self, encoded: pa.Array) -> None:
        self._count = len(encoded)
        offsets, data = cell_parts(encoded)
        pairs = _pairs(data)
        if not _ends_each(offsets, pairs[-1]) and (complete := _with_last_separator(encoded)) is not encoded:
            offsets, data = cell_parts(complete)
            pairs = _pairs(data)
        self._data = data
        # One entry for each pair of all messages: its start, its first 0x01, its 0x02; and how many a message has.
        self._starts, self._middles, self._stops = pairs
        if _ends_each(offsets, self._stops):
            self._counts = np.full(self._count, len(self._stops) // self._count)
        else:
            self._counts = np.diff(np.searchsorted(self._stops, offsets))
        counted = (self._middles > self._starts) & (self._middles < self._stops - 1)  # name and value are not empty
        if not counted.all():
            rows = self._rows[counted]
            self._starts, self._middles, self._stops = (each[counted] for each in pairs)
            self._counts = np.bincount(rows, minlength=self._count)
            del self._rows
        self._known_common: dict[int, bool] = {}

    def value(self, name: str) -> pa.Array:
        """Return one property of each message as a string column; null where it is missing."""
        encoded = name.encode()
        same_size = [pair for pair, common in enumerate(self._first_names) if len(common) == len(encoded)]
        if self._first_names and all(map(self._is_common, same_size)):
            found = [pair for pair in same_size if self._first_names[pair] == encoded]
            if not found:
                return pa.nulls(self._count, pa.string())
            every = slice(found[-1], None, len(self._first_names))
            return text(cells_of_rows(adjacent_cells(self._data, self._middles[every] + 1, self._stops[every]), 0, 2))
        pairs = self._pairs_named(encoded)
        if not len(pairs):
            return pa.nulls(self._count, pa.string())
        at = np.full(self._count, -1)
        at[self._rows[pairs]] = pairs  # for equal names in one message, numpy keeps the last assignment
        return text(self._cells.take(pa.array(4 * at + 2, mask=at < 0)))

    def maps(self) -> pa.Array:
        """Return all properties of each message as a column of maps."""
        # The check of a record that another broker copied does not belong to the message.
        check = CHECK_NAME.encode()
        if self._common_names is not None and check not in self._common_names:
            values = text(cells_of_rows(self._cells, 2, 4))
            offsets = np.append(0, np.cumsum(self._counts)).astype(np.int32)
            return pa.MapArray.from_arrays(pa.array(offsets), _repeated(self._common_names, self._count), values)
        pairs = np.setdiff1d(self._last_of_each_name(), self._pairs_named(check))
        offsets = np.searchsorted(self._rows[pairs], np.arange(self._count + 1)).astype(np.int32)
        names, values = (text(self._cells.take(pa.array(4 * pairs + cell))) for cell in (0, 2))
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        """Row of the message of each pair."""
        return np.repeat(np.arange(self._count), self._counts)

    @cached_property
    def _cells(self) -> pa.Array:
        """Four cells a pair: name, 0x01, value, and 0x02 up to the next name."""
        return adjacent_cells(self._data, self._starts, self._middles, self._middles + 1, self._stops)

    @cached_property
    def _first_names(self) -> list[bytes]:
        """Names of the first message, if the other messages have as many with the same lengths; else none."""
        pairs = int(self._counts[0]) if self._count else 0
        if not pairs or (self._counts != pairs).any():
            return []
        lengths = (self._middles - self._starts).reshape(-1, pairs)
        if (lengths != lengths[0]).any():
            return []
        bounds = zip(self._starts[:pairs].tolist(), self._middles[:pairs].tolist(), strict=True)
        return [self._data[start:end].tobytes() for start, end in bounds]

    def _is_common(self, pair: int) -> bool:
        """Return True if this name of the first message is at the same place of each message."""
        if pair not in self._known_common:
            names = self._first_names
            found = self._texts(self._starts[pair :: len(names)], len(names[pair]))
            self._known_common[pair] = found.tobytes() == names[pair] * self._count
        return self._known_common[pair]

    @cached_property
    def _common_names(self) -> list[bytes] | None:
        """Names of each message, if all have the same ones in the same order, each once; else None."""
        names = self._first_names
        is_common = bool(names) and len(set(names)) == len(names) and all(map(self._is_common, range(len(names))))
        return names if is_common else None

    def _pairs_named(self, name: bytes) -> npt.NDArray[np.int64]:
        pairs = np.flatnonzero((self._middles - self._starts == len(name)) & (self._data[self._starts] == name[0]))
        is_named: npt.NDArray[np.bool_] = self._texts(self._starts[pairs], len(name)) == np.void(name)
        return pairs[is_named]

    def _texts(self, at: npt.NDArray[np.int64], size: int) -> npt.NDArray[Any]:
        """Return so many bytes at each of some positions."""
        if not len(at):
            return np.empty(0, f"V{size}")
        return gather(self._data, f"V{size}", at)

    def _last_of_each_name(self) -> npt.NDArray[np.int64]:
        """Return the indices of the pairs, without those that a later pair of the same message and name replaces."""
        every = np.arange(len(self._starts))
        marks = np.sort(self._name_marks())
        if (marks[1:] != marks[:-1]).all():
            return every
        names = self._cells.take(pa.array(4 * every)).to_pylist()
        last = {(row, name): pair for pair, (row, name) in enumerate(zip(self._rows.tolist(), names, strict=True))}
        return np.array(sorted(last.values()), np.int64)

    def _name_marks(self) -> npt.NDArray[np.uint64]:
        """Return a number for each pair: equal for equal names in one message, and rarely equal otherwise.

        It consists of the row of the message, the length of the name, and its first and last two bytes. Names that
        differ only in their middle get equal numbers, which costs time and nothing else.
        """
        lengths = self._middles - self._starts
        head = self._data[self._starts].astype(np.uint64)
        second = self._data[np.minimum(self._starts + 1, self._middles - 1)].astype(np.uint64)
        tail = self._data[self._middles - 1].astype(np.uint64)
        before = self._data[np.maximum(self._middles - 2, self._starts)].astype(np.uint64)
        mark = head << np.uint64(24) | second << np.uint64(16) | before << np.uint64(8) | tail
        mark = mark ^ (lengths.astype(np.uint64) << np.uint64(16))
        marks: npt.NDArray[np.uint64] = mark | self._rows.astype(np.uint64) << np.uint64(32)
        return marks


def _ends_each(offsets: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> bool:
    """Return True if all messages have the same number of separators 0x02, the last one at the end."""
    pairs = len(stops) // max(len(offsets) - 1, 1)
    return bool(pairs) and np.array_equal(stops[pairs - 1 :: pairs] + 1, offsets[1:])


def _with_last_separator(encoded: pa.Array) -> pa.Array:
    """Return the cells with 0x02 at the end of each one that is not empty. An extra 0x02 is an empty pair."""
    offsets, data = cell_parts(encoded)
    filled = offsets[1:] > offsets[:-1]
    if (data[offsets[1:][filled] - 1] == _PAIR_END).all():
        return encoded
    return pc.binary_join_element_wise(encoded, pa.scalar(bytes([_PAIR_END])), pa.scalar(b""))


def _pairs(data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return start, first 0x01 and 0x02 of each pair; -1 or a later position for a pair without 0x01."""
    separators = np.flatnonzero(data - np.uint8(_NAME_END) <= _PAIR_END - _NAME_END)
    middles, stops = separators[::2], separators[1::2]
    is_usual = not len(separators) % 2 and (data[middles] == _NAME_END).all() and (data[stops] == _PAIR_END).all()
    if not is_usual:
        stops = separators[data[separators] == _PAIR_END]
    starts = np.zeros(len(stops), np.int64)
    np.add(stops[:-1], 1, out=starts[1:])
    if not is_usual:
        middles = _first_after(separators[data[separators] == _NAME_END], starts)
    return starts, middles, stops


def _repeated(names: list[bytes], times: int) -> pa.Array:
    """Return a string array with all names, so many times."""
    data = np.tile(np.frombuffer(b"".join(names), np.uint8), times)
    sizes = np.tile(np.array([len(name) for name in names], np.int32), times)
    offsets = np.append(np.int32(0), np.cumsum(sizes, dtype=np.int32))
    return text(pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)]))


def _first_after(positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return, for each start, the first of the ascending *positions* at or after it; -1 if there is none."""
    found = np.searchsorted(positions, starts)
    return np.append(positions, -1)[found]
