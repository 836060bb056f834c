"""Many records at once: their headers, lengths and checksums as numpy arrays.

The recovery, pulls, releases and Spark verify records here. `parse_record` is the same for one record: it decides the
rare cases, and the tests compare each function with it.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import crc32
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, StoredRecord, UnverifiedError, decode_topic, parse_record
from mqtemplate.record.layout import BODY_AT, CHECK_SIZE, MAGIC_V1, MAGIC_V2, SMALLEST_RECORD, V6_EXTRA, SysFlag
from mqtemplate.record.properties import DELAY, TIMER_OUT_MS, may_have_property

Rows: TypeAlias = NDArray[np.uint8]
"""Bytes of records of one size: a row for each record."""
Extra: TypeAlias = int | NDArray[np.int64]
"""A number for all records, or one for each."""

HEAD_DTYPE = np.dtype(layout.HEAD_FIELDS)  # type: ignore[call-overload]
_IPV4_HEAD_DTYPE = np.dtype(layout.IPV4_HEAD_FIELDS)  # type: ignore[call-overload]
_CHECK_START = np.frombuffer(layout.CHECK_START, np.uint8)
# The first eight bytes of a check as a number of this machine, without its first digit.
(_CHECK_NAME,) = np.frombuffer(layout.CHECK_START.ljust(8, b"\0"), np.uint64)
(_NAME_BITS,) = np.frombuffer(b"\xff" * len(layout.CHECK_START) + b"\0", np.uint64)

# --- rows and columns -------------------------------------------------------------------------------


def count_leading(is_valid: NDArray[np.bool_]) -> int:
    """Return the number of true values before the first false one."""
    return len(is_valid) if is_valid.all() else int(np.argmin(is_valid))


def read_column(rows: Rows, at: int, kind: str) -> NDArray[np.int64]:
    """Return the number at byte *at* of each row. *kind* is its numpy format, such as ``>i8``."""
    width = np.dtype(kind).itemsize
    numbers: NDArray[np.int64] = np.ascontiguousarray(rows[:, at : at + width]).view(kind)[:, 0].astype(np.int64)
    return numbers


def to_bytes(numbers: NDArray[np.int64], kind: str) -> Rows:
    """Return each number as a row of bytes."""
    return numbers.astype(kind).view(np.uint8).reshape(-1, np.dtype(kind).itemsize)


def to_rows(texts: Sequence[bytes]) -> Rows:
    """Return texts of one length as rows."""
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), len(texts[0]))


def row_bytes(rows: Rows) -> list[bytes]:
    """Return each row as bytes."""
    if not rows.shape[1]:
        return [b""] * len(rows)
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}")[:, 0].tolist()  # type: ignore[no-any-return]


def gather(data: Rows, kind: str | np.dtype[Any], at: NDArray[np.int64]) -> NDArray[Any]:
    """Return the value at each of these positions of *data*; any value where that is not in *data*.

    Overlapping views with one value at every byte: indexing them gathers big-endian numbers at any offset.
    """
    dtype = np.dtype(kind)
    plain = np.dtype(f"V{dtype.itemsize}") if dtype.names else dtype  # numpy copies a struct field by field
    last = len(data) - dtype.itemsize
    every: NDArray[Any] = np.ndarray((max(last + 1, 0),), plain, buffer=data.data, strides=(1,))
    return every[np.minimum(np.maximum(at, 0), last)].view(dtype)


# --- checksums of rows ------------------------------------------------------------------------------


def crcs(rows: Rows | Sequence[bytes]) -> NDArray[np.int64]:
    """Return the CRC-32 of each row.

    The bytes of a row are adjacent and not copied: a copy of large rows takes longer, since its memory is new.
    """
    return np.fromiter(map(crc32, rows), np.int64, len(rows))


def checks(crcs: NDArray[np.int64], physical_offsets: NDArray[np.int64]) -> Rows:
    """Return the checks of records at these offsets whose bytes before the check have these CRCs."""
    numbers = np.empty((len(crcs), 2), ">u4")
    numbers[:, 0], numbers[:, 1] = crcs, physical_offsets & 0xFFFF_FFFF
    rows = np.empty((len(crcs), CHECK_SIZE), np.uint8)
    rows[:, : layout.CHECK_CRC_AT] = _CHECK_START
    rows[:, layout.CHECK_CRC_AT : -1] = np.frombuffer(hexlify(numbers.tobytes()), np.uint8).reshape(len(crcs), 2 * 8)
    rows[:, -1] = 2
    return rows


def with_checks(around: Rows, body_at: int, bodies: Rows, physical_offsets: NDArray[np.int64]) -> Rows:
    """Return whole records.

    Args:
        around: All but the bodies and the checks.
        body_at: Position of the bodies.
    """
    body_end = body_at + bodies.shape[1]
    records = np.empty((len(around), around.shape[1] + bodies.shape[1] + CHECK_SIZE), np.uint8)
    records[:, :body_at] = around[:, :body_at]
    records[:, body_at:body_end] = bodies
    records[:, body_end:-CHECK_SIZE] = around[:, body_at:]
    records[:, -CHECK_SIZE:] = checks(crcs(around), physical_offsets)
    return records


def count_verified(rows: Rows, body_end: int, physical_offsets: NDArray[np.int64]) -> int:
    """Return the number of leading rows whose CRC of the body and whose check match.

    Args:
        rows: Records with IPv4 hosts, whose bodies all end at *body_end*.
        physical_offsets: Position of each record in the log; the check has it too.
    """
    check_at = rows.shape[1] - CHECK_SIZE
    around = np.concatenate((rows[:, :BODY_AT], rows[:, body_end:check_at]), axis=1)
    body_crcs = to_bytes(crcs(rows[:, BODY_AT:body_end]) & 0x7FFF_FFFF, ">u4")
    return min(
        count_equal(rows[:, layout.BODY_CRC_AT : layout.QUEUE_ID_AT], body_crcs),
        count_equal(rows[:, check_at:], checks(crcs(around), physical_offsets)),
    )


def count_equal(rows: Rows, expected: Rows) -> int:
    """Return the number of leading rows that are as expected: each as its own row, or all as the only one."""
    if not len(rows) or rows.tobytes() == expected.tobytes() * (len(rows) // len(expected)):
        return len(rows)  # mostly; that takes the least time
    return count_leading((rows == expected).all(axis=1))


# --- records at any positions -----------------------------------------------------------------------


class RecordColumns:
    """Headers of records anywhere in *data*, and the positions of their fields. The checksums are not compared.

    Args:
        data: Bytes of the log.
        at: Start of each record.
        sizes: Size of each, at least `SMALLEST_RECORD`; no record ends after *data*.
        physical_offsets: Position of each in the log.
        require: Called with a truth value for each record, and the reason why False means that a record is invalid. It
            raises an error, or notes the record: then its columns have any values.

    Attributes:
        heads: Of `HEAD_DTYPE`, up to the body of a record with IPv4 hosts.
        sys_flags: The sys flag of each record.
        tail_at: Position of the reconsume times; prepared transaction offset and body length follow.
        ends: Positions after the records.
        tails: The last `layout.CHECK_SIZE` bytes of each record.
        has_check: The record ends with a check: its own, or one that RocketMQ copied from another record.
        properties_end: Position of the check, or after the record.
    """

    def __init__(
        self,
        data: Rows,
        at: NDArray[np.int64],
        sizes: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
        require: Callable[[NDArray[np.bool_], str], None],
    ) -> None:
        self.data = data
        self.at, self.ends = at, at + sizes
        self.heads = gather(data, _IPV4_HEAD_DTYPE, at)
        magic = self.heads["magic"]
        is_v1 = magic == MAGIC_V1
        has_v2 = not is_v1.all()
        is_v2 = magic == MAGIC_V2 if has_v2 else False
        require(self.heads["size"] == sizes, "its length is not the one in the consume queue")
        require(is_v1 | is_v2, "it has no magic code of a record")
        require(self.heads["physical_offset"] == physical_offsets, "its own physical offset is another one")
        self.sys_flags = self.heads["sys_flag"].astype(np.int32)
        self._born_extra: Extra = 0
        hosts_extra: Extra = 0
        self._has_ipv6 = bool((self.sys_flags & layout.HOST_FLAGS).any())
        if self._has_ipv6:
            self._born_extra = np.where(self.sys_flags & SysFlag.BORN_HOST_V6, V6_EXTRA, 0)
            hosts_extra = self._born_extra + np.where(self.sys_flags & SysFlag.STORE_HOST_V6, V6_EXTRA, 0)
        self.tail_at = at + (layout.RECONSUME_TIMES_AT + hosts_extra)
        self.body_at = at + (BODY_AT + hosts_extra)
        # The lengths before the fields: body, topic, properties. If one is wrong, so are the next ones, and their sum.
        body_lengths = self._after_hosts("body_length", self.body_at - 4)
        self.body_end = self.body_at + body_lengths
        topic_lengths = gather(data, "u1", self.body_end).astype(np.int64)
        topic_length_size: Extra = 1
        if has_v2:
            topic_length_size = np.where(is_v2, 2, 1)
            topic_lengths = np.where(is_v2, gather(data, ">u2", self.body_end).astype(np.int64), topic_lengths)
        self.topic_at = self.body_end + topic_length_size
        self.topic_end = self.topic_at + topic_lengths
        self.properties_at = self.topic_end + 2
        properties_lengths = gather(data, ">i2", self.topic_end).astype(np.int64)
        require(
            (body_lengths >= 0) & (properties_lengths >= 0) & (self.properties_at + properties_lengths == self.ends),
            "the lengths inside it do not add up",
        )
        # Never in valid properties: the last sectors of the record were not written.
        check_at = self.ends - CHECK_SIZE
        self.tails: Rows = gather(data, f"V{CHECK_SIZE}", check_at).view(np.uint8).reshape(-1, CHECK_SIZE)
        require((self.tails[:, -1] != 0) | (self.properties_at == self.ends), "its end is missing")
        names = self.tails.view(np.uint64)[:, 0] & _NAME_BITS
        self.has_check: NDArray[np.bool_] = (names == _CHECK_NAME) & (check_at >= self.properties_at)
        self.properties_end = np.where(self.has_check, check_at, self.ends)

    def _after_hosts(self, name: str, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number of each header whose position *at* depends on the addresses before it."""
        if self._has_ipv6:
            return gather(self.data, _IPV4_HEAD_DTYPE[name], at).astype(np.int64)
        numbers: NDArray[np.int64] = self.heads[name].astype(np.int64)
        return numbers

    @property
    def store_timestamps(self) -> NDArray[np.int64]:
        return self._after_hosts("store_timestamp", self.at + (layout.STORE_TIMESTAMP_AT + self._born_extra))

    @property
    def store_host_at(self) -> NDArray[np.int64]:
        """Positions of the store hosts, which end at ``tail_at``."""
        return self.at + (layout.STORE_HOST_AT + self._born_extra)

    @property
    def reconsume_times(self) -> NDArray[np.int32]:
        return self._after_hosts("reconsume_times", self.tail_at).astype(np.int32)

    @property
    def prepared_transaction_offsets(self) -> NDArray[np.int64]:
        at = self.tail_at + (layout.PREPARED_OFFSET_AT - layout.RECONSUME_TIMES_AT)
        return self._after_hosts("prepared_transaction_offset", at)


class RecordBatch:
    """Adjacent, whole records, as the recovery reads the whole log. Each array has one row for each record.

    Args:
        data: Bytes of the log. The batch ends before the first record that is incomplete or invalid.
        physical_offset: Of the first byte of *data*.
        verify: Compare the checksums. Without it only sizes, magic codes and own offsets are checked.

    Attributes:
        is_verified: The checksums were compared.
        byte_count: Size of all records together.
        has_check: The record ends with the check of `mqtemplate.record.layout`. RocketMQ wrote those without.
        topic_names: The topics of the records, each once.
        topic_number: Position of each record's topic in *topic_names*.
        properties_size: Bytes of the encoded properties, with the check.
    """

    def __init__(self, data: bytes, physical_offset: int, *, verify: bool = True) -> None:
        self._data = data
        self.is_verified = verify
        starts = _find_records(data)
        at, sizes = starts[:-1], np.diff(starts)
        is_valid = np.ones(len(at), np.bool_)

        def note(good: NDArray[np.bool_], reason: str) -> None:
            np.logical_and(is_valid, good, out=is_valid)

        columns = RecordColumns(np.frombuffer(data, np.uint8), at, sizes, at + physical_offset, note)
        count = count_leading(is_valid)
        count, is_own_check = self._verify(columns, count) if verify else (count, _has_own_check(columns))
        self.topic_names, self.topic_number = self._number_topics(columns, count)
        rows = slice(len(self.topic_number))
        self._at, self.size, self.has_check = at[rows], sizes[rows], is_own_check[rows]
        heads = columns.heads[rows]
        self.queue_id, self.queue_offset = heads["queue_id"].astype(np.int64), heads["queue_offset"].astype(np.int64)
        self.physical_offset = at[rows] + physical_offset
        self.sys_flag = heads["sys_flag"].astype(np.int64)
        self.store_timestamp = columns.store_timestamps[rows]
        self.prepared_transaction_offset = columns.prepared_transaction_offsets[rows]
        self._properties_at = columns.properties_at[rows]
        self.properties_size = columns.ends[rows] - self._properties_at
        self.byte_count = int(starts[len(self)])

    def __len__(self) -> int:
        return len(self.topic_number)

    @property
    def topics(self) -> list[str]:
        """Topic of each record."""
        return [self.topic_names[number] for number in self.topic_number.tolist()]

    def properties(self, row: int) -> bytes:
        """Return the encoded properties of one record, without the check."""
        start = int(self._properties_at[row])
        return self._data[start : start + int(self.properties_size[row]) - CHECK_SIZE * bool(self.has_check[row])]

    def properties_rows(self, rows: NDArray[np.intp], size: int) -> Rows:
        """Return the encoded properties of these records, which all have this size, with their checks."""
        if not size:
            return np.empty((len(rows), 0), np.uint8)
        found = gather(np.frombuffer(self._data, np.uint8), f"V{size}", self._properties_at[rows])
        return found.view(np.uint8).reshape(len(rows), size)

    def record(self, row: int) -> StoredRecord:
        """Return one record, verified.

        Raises:
            UnverifiedError: The batch was not verified, and this record is damaged.
        """
        start = int(self._at[row])
        try:
            return parse_record(self._data[start : start + int(self.size[row])], verify=not self.is_verified)
        except BadRecordError as exc:
            raise UnverifiedError(f"the record at physical offset {self.physical_offset[row]}: {exc}") from exc

    def rows_by_queue(self) -> dict[tuple[str, int], NDArray[np.int64]]:
        """Return the rows of each queue, in order. Prepared and rolled back transactions have no unit in any queue."""
        kind = self.sys_flag & SysFlag.TRANSACTION_MASK
        rows = np.flatnonzero((kind != SysFlag.TRANSACTION_PREPARED) & (kind != SysFlag.TRANSACTION_ROLLBACK))
        if not len(rows):
            return {}
        key = self.topic_number[rows] << 32 | self.queue_id[rows] & 0xFFFF_FFFF  # a queue id is an i4
        order = np.argsort(key, kind="stable")  # keeps the order within each queue
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
        groups = {}
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            group = rows[order[start:end]]
            groups[self.topic_names[self.topic_number[group[0]]], int(self.queue_id[group[0]])] = group
        return groups

    def replacing_rows(self) -> NDArray[np.int64]:
        """Return the rows that replace a delayed record, or may do so because RocketMQ wrote them; and sequenced ones.

        A copy made by mqtemplate has a ``prepared_transaction_offset``. RocketMQ's copies have no such link.
        """
        replaces = (self.prepared_transaction_offset != 0) | (self.sys_flag & SysFlag.SEQUENCED != 0)
        for row in np.flatnonzero(~self.has_check & ~replaces).tolist():
            properties = self.properties(row)
            replaces[row] = may_have_property(properties, DELAY) or may_have_property(properties, TIMER_OUT_MS)
        return np.flatnonzero(replaces)

    def _verify(self, columns: RecordColumns, count: int) -> tuple[int, NDArray[np.bool_]]:
        """Return how many of the first *count* records have valid checksums, and which have a check of their own."""
        data, rows = self._data, slice(count)
        bodies = zip(columns.body_at[rows].tolist(), columns.body_end[rows].tolist(), strict=True)
        body_crcs = crcs([data[start:end] for start, end in bodies])
        is_valid = body_crcs & 0x7FFF_FFFF == columns.heads["body_crc"][rows]
        is_own_check = columns.has_check[rows].copy()
        checked = np.flatnonzero(is_own_check)
        spans = (columns.at, columns.body_at, columns.body_end, columns.properties_end)
        around = [
            crc32(data[body_end:check_at], crc32(data[at:body_at]))
            for at, body_at, body_end, check_at in zip(*(each[checked].tolist() for each in spans), strict=True)
        ]
        found = gather(columns.data, f"V{CHECK_SIZE}", columns.properties_end[checked])
        offsets = columns.heads["physical_offset"][checked].astype(np.int64)
        is_equal = found == checks(np.array(around, np.int64), offsets).view(f"V{CHECK_SIZE}")[:, 0]
        for row in checked[~is_equal].tolist():
            is_own_check[row] = False  # perhaps its last property is a check copied from another record
            try:
                parse_record(data[columns.at[row] : columns.ends[row]])
            except BadRecordError:
                is_valid[row] = False
                break
        return count_leading(is_valid), is_own_check

    def _number_topics(self, columns: RecordColumns, count: int) -> tuple[list[str], NDArray[np.int64]]:
        """Return the topics, and the number of each record's topic, up to the first that is not UTF-8."""
        numbers = np.zeros(count, np.int64)
        at, sizes = columns.topic_at[:count], (columns.topic_end - columns.topic_at)[:count]
        known: dict[bytes, int] = {}
        for size in np.unique(sizes).tolist():
            rows = np.flatnonzero(sizes == size)
            texts = gather(columns.data, f"V{size}", at[rows]) if size else np.zeros(len(rows), "V1")
            found = texts[:1] if (texts == texts[0]).all() else texts
            of_text = [known.setdefault(text[:size], len(known)) for text in found.tolist()]
            numbers[rows] = of_text
        names = list[str]()
        for number, text in enumerate(known):
            try:
                names.append(decode_topic(text))
            except BadRecordError:
                names.append("")
                numbers = numbers[: count_leading(numbers != number)]
        return names, numbers


def _has_own_check(columns: RecordColumns) -> NDArray[np.bool_]:
    """Return which records have a check with their own offset. RocketMQ may have copied one of another record."""
    numbers = columns.heads["physical_offset"].astype(np.int64) & 0xFFFF_FFFF
    expected = np.frombuffer(hexlify(numbers.astype(">u4").tobytes()), "V8")
    found = gather(columns.data, "V8", columns.properties_end + layout.CHECK_OFFSET_AT)
    own: NDArray[np.bool_] = columns.has_check & (found == expected)
    return own


def _find_records(data: bytes) -> NDArray[np.int64]:
    """Return the start of each whole record, found by the sizes alone, and the end of the last one."""
    starts = [0]
    at, last, unpack, add = 0, len(data) - SMALLEST_RECORD, layout.read_size, starts.append
    while at <= last:
        (size,) = unpack(data, at)
        if size < SMALLEST_RECORD:
            break
        at += size
        add(at)
    if at > len(data):
        del starts[-1]
    return np.array(starts, np.int64)
