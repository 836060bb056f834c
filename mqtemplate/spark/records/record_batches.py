"""Commit log records as Arrow record batches, without a Python object for each record."""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from itertools import accumulate, pairwise, repeat
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
from mqtemplate.record.columns import RecordColumns, gather
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import CHECK_NAME, SysFlag
from mqtemplate.spark.records.blocks import RecordBlock

_POLYNOMIAL = 0xEDB8_8320
_WORD = 4
LARGEST_IN_RUN = 2_048
"""Largest body whose `top_bits` are computed: above it, a sum of its own takes less time."""


def crcs(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each cell of a binary array."""
    offsets, data = cell_parts(cells)
    view = data.data  # its slices copy nothing
    return np.array([crc32(view[start:end]) for start, end in pairwise(offsets.tolist())], np.uint32)


def top_bits(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the highest bit of the CRC-32 of each cell of at most `LARGEST_IN_RUN` bytes, as its lowest bit.

    RocketMQ does not store this bit. It is the parity of some bits of the cell, which depend on their distance from the
    end only, and of a bit that depends on the length only.
    """
    offsets, data = cell_parts(cells)
    lengths, starts = np.diff(offsets), offsets[:-1]
    from_end, of_length = _parity_bits()
    found: npt.NDArray[np.uint8] = np.zeros(len(lengths), np.uint8)
    if len(data) and (lengths == lengths[0]).all():
        counted = data.reshape(len(lengths), -1) & from_end[-lengths[0] :]
        found = np.bitwise_xor.reduceat(counted.reshape(-1), starts)
    elif len(data):
        filled = lengths > 0  # an empty cell would get the bits of the next one
        counted = data & cell_parts(_ends_of_parity_bits().take(pa.array(lengths)))[1]
        found[filled] = np.bitwise_xor.reduceat(counted, starts[filled])
    for shift in (4, 2, 1):
        found ^= found >> np.uint8(shift)
    bits: npt.NDArray[np.uint32] = ((found & 1) ^ of_length[lengths]).astype(np.uint32)
    return bits


@cache
def _parity_bits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the bits of a cell that count, up to the last byte of one with the largest size, and those of lengths."""
    bits, state = np.empty(8 * LARGEST_IN_RUN, np.uint8), _POLYNOMIAL
    for distance in range(len(bits)):
        bits[distance] = state >> 31
        state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
    of_length = accumulate(repeat(b"\0", LARGEST_IN_RUN), lambda crc, byte: crc32(byte, crc), initial=0)
    return np.packbits(bits)[::-1].copy(), np.array([crc >> 31 for crc in of_length], np.uint8)


@cache
def _ends_of_parity_bits() -> pa.Array:
    """Return the bits that count in a cell of each length, from 0 to the largest."""
    from_end, _ = _parity_bits()
    return pa.array(
        [from_end[LARGEST_IN_RUN - length :].tobytes() for length in range(LARGEST_IN_RUN + 1)], pa.binary()
    )


def run_matches(cells: pa.Array, sums: npt.NDArray[np.uint32]) -> bool:
    """Return True if rows have the stated CRC-32s: one sum over all rows.

    The sum of each row is combined by XOR with the first four bytes of the next one, and removed again afterwards. It
    takes the register to the value that it starts with. So each row begins as if it were the first, and the sum over
    all rows is that of the last one. A wrong row leaves another register, and no later byte can correct it. Several
    wrong rows cancel each other in one of 2**32 cases, as any error may go undetected.

    Returns:
        False also if a row has one to three bytes: then each row must be compared.

    Args:
        cells: The cells of all rows, the same number in each row. No other array uses their memory.
        sums: One for each row.
    """
    offsets, data = cell_parts(cells)
    offsets = offsets[:: len(cells) // len(sums)]
    lengths = np.diff(offsets)
    if not lengths.all():  # the sum of a row without bytes is 0
        if sums[lengths == 0].any():
            return False
        offsets, sums, lengths = (
            np.append(offsets[:-1][lengths > 0], offsets[-1]),
            sums[lengths > 0],
            lengths[lengths > 0],
        )
    if not len(sums):
        return True
    if lengths.min() < _WORD:
        return False
    words: npt.NDArray[np.uint32] = np.ndarray((len(data) - _WORD + 1,), "<u4", buffer=data.data, strides=(1,))
    size = int(lengths[0])
    following = slice(size, None, size) if (lengths == size).all() else offsets[1:-1]
    words[following] ^= sums[:-1]
    found = crc32(data)
    words[following] ^= sums[:-1]
    return bool(found == sums[-1])


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
            if run_matches(cells.take(pa.array(np.arange(0, len(cells), 2))), stated):
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
            "queueId": lambda: pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
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
            of_rows = np.arange(number, self._CELLS * len(self._at), self._CELLS)
            cells = self._taken[number] = self._all_cells.take(pa.array(of_rows))
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


def number_column(texts: pa.Array) -> pa.Array:
    """Return a column of texts as numbers of 64 bits; null for any other text, since any program may write it."""
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
        encoded = _with_last_separator(encoded)
        self._count = len(encoded)
        offsets, self._data = cell_parts(encoded)
        # One entry for each pair of all messages: its start, its first 0x01, its 0x02, and the row of its message.
        starts, middles, stops = _pairs(self._data)
        counts = np.diff(np.searchsorted(stops, offsets))
        counted = (middles > starts) & (middles < stops - 1)  # neither the name nor the value is empty
        if not counted.all():
            rows = np.repeat(np.arange(self._count), counts)[counted]
            starts, middles, stops = starts[counted], middles[counted], stops[counted]
            counts = np.bincount(rows, minlength=self._count)
        self._starts, self._middles, self._stops, self._counts = starts, middles, stops, counts
        # Four cells a pair: name, 0x01, value, and 0x02 up to the next name.
        self._cells = adjacent_cells(self._data, starts, middles, middles + 1, stops)

    def value(self, name: str) -> pa.Array:
        """Return one property of each message as a string column; null where it is missing."""
        pairs = self._pairs_named(name.encode())
        if not len(pairs):
            return pa.nulls(self._count, pa.string())
        if self._common_names is not None:
            return text(self._cells.take(pa.array(4 * pairs + 2)))
        at = np.full(self._count, -1)
        at[self._rows[pairs]] = pairs  # for equal names in one message, numpy keeps the last assignment
        return text(self._cells.take(pa.array(4 * at + 2, mask=at < 0)))

    def maps(self) -> pa.Array:
        """Return all properties of each message as a column of maps."""
        # The check of a record that another broker copied does not belong to the message.
        copied_checks = self._pairs_named(CHECK_NAME.encode())
        if self._common_names is not None and not len(copied_checks):
            values = text(self._cells.take(pa.array(np.arange(2, 4 * len(self._starts), 4))))
            offsets = np.append(0, np.cumsum(self._counts)).astype(np.int32)
            return pa.MapArray.from_arrays(pa.array(offsets), _repeated(self._common_names, self._count), values)
        pairs = np.setdiff1d(self._last_of_each_name(), copied_checks)
        offsets = np.searchsorted(self._rows[pairs], np.arange(self._count + 1)).astype(np.int32)
        names, values = (text(self._cells.take(pa.array(4 * pairs + cell))) for cell in (0, 2))
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        """Row of the message of each pair."""
        return np.repeat(np.arange(self._count), self._counts)

    @cached_property
    def _common_names(self) -> list[bytes] | None:
        """Names of each message, if all have the same ones in the same order, each once; else None."""
        pairs = int(self._counts[0]) if self._count else 0
        if not pairs or (self._counts != pairs).any():
            return None
        lengths = (self._middles - self._starts).reshape(-1, pairs)
        if (lengths != lengths[0]).any():
            return None
        names = [
            self._data[start:end].tobytes() for start, end in zip(self._starts, self._middles[:pairs], strict=False)
        ]
        for pair, name in enumerate(names):
            if not self._equal(self._starts[pair::pairs], name).all():
                return None
        return names if len(set(names)) == pairs else None

    def _pairs_named(self, name: bytes) -> npt.NDArray[np.int64]:
        if self._common_names is not None:
            names = self._common_names
            return np.arange(names.index(name), len(self._starts), len(names)) if name in names else np.arange(0)
        pairs = np.flatnonzero((self._middles - self._starts == len(name)) & (self._data[self._starts] == name[0]))
        return pairs[self._equal(self._starts[pairs], name)]

    def _equal(self, at: npt.NDArray[np.int64], name: bytes) -> npt.NDArray[np.bool_]:
        """Return where the bytes at some positions are *name*."""
        size = len(name)
        if not len(at):
            return np.empty(0, np.bool_)
        every: npt.NDArray[Any] = np.ndarray(
            (len(self._data) - size + 1,), f"V{size}", buffer=self._data.data, strides=(1,)
        )
        same: npt.NDArray[np.bool_] = every[at] == np.void(name)
        return same

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


def adjacent_cells(data: npt.NDArray[np.uint8], *starts: npt.NDArray[np.int64]) -> pa.Array:
    """Return *data* as one binary array, without a copy; a cell ends where the next one starts.

    Args:
        starts: Start of the first cell of each row, of its second cell, and so on.
    """
    bounds = np.stack(starts, axis=1, dtype=np.int32, casting="same_kind").reshape(-1)
    offsets = np.append(bounds, np.int32(len(data)))
    return pa.Array.from_buffers(pa.binary(), len(bounds), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def text(cells: pa.Array) -> pa.Array:
    """Return binary cells as strings. Bytes that are not UTF-8 are replaced as in Java: the JVM must not get them."""
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [None if cell is None else cell.decode("utf-8", "replace") for cell in cells.to_pylist()]
        return pa.array(decoded, pa.string())


def _with_last_separator(encoded: pa.Array) -> pa.Array:
    """Return the cells with 0x02 at the end of each one that is not empty. An extra 0x02 is an empty pair."""
    offsets, data = cell_parts(encoded)
    filled = offsets[1:] > offsets[:-1]
    if (data[offsets[1:][filled] - 1] == _PAIR_END).all():
        return encoded
    return pc.binary_join_element_wise(encoded, pa.scalar(bytes([_PAIR_END])), pa.scalar(b""))


def cell_parts(cells: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the offsets and bytes of a binary array that starts at the start of its buffers."""
    _, offsets, data = cells.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(cells) + 1).astype(np.int64)
    return bounds, np.frombuffer(data, np.uint8, int(bounds[-1])) if data is not None else np.empty(0, np.uint8)


def _pairs(data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return start, first 0x01 and 0x02 of each pair; -1 or a later position for a pair without 0x01."""
    separators = np.flatnonzero(data - np.uint8(_NAME_END) <= _PAIR_END - _NAME_END)
    middles, stops = separators[::2], separators[1::2]
    is_usual = not len(separators) % 2 and (data[middles] == _NAME_END).all() and (data[stops] == _PAIR_END).all()
    if not is_usual:
        stops = separators[data[separators] == _PAIR_END]
    starts = np.append(0, stops[:-1] + 1)[: len(stops)]
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
