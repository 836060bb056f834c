"""Many copies at once: records of one shape as the rows of one array, so that a thousand cost little more than one.

Records have one *shape* if they differ only in what decides nothing: their bodies, numbers of their header, and values
of properties that nobody looks at. Lengths, names and order of the properties, topic and flags are the same. What was
decided for the first of them is right for all then, and each part lies in the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.checksum import crc32
from mqtemplate.java_hash import tags_code
from mqtemplate.record.codec import CHECK_SIZE, CHECK_START, MAGIC_V1, RecordDraft, StoredRecord, SysFlag

_Bytes2D = NDArray[np.uint8]

_HEADER_SIZE = 88  # with IPv4 hosts; see `mqtemplate.record.codec` for the columns
_MOST_DIGITS = 9  # of a queue id that surely fits into four bytes
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)
_CHECK_START = np.frombuffer(CHECK_START, np.uint8)


class _Value(NamedTuple):
    """Where the value of a property lies in the record."""

    begin: int
    end: int


class RecordShape:
    """What all records like *first* have in common.

    Args:
        first: A record that was checked, with the check that is written here at its end.

    Attributes:
        is_plain: Others can be told to be like it: else it has IPv6 hosts, another check, or odd properties.
    """

    def __init__(self, first: StoredRecord, data: bytes) -> None:
        self.first = first
        self.size = len(data)
        self._row = np.frombuffer(data, np.uint8)
        self._body_end = _HEADER_SIZE + len(first.body)
        self.properties_end = self.size - CHECK_SIZE
        self.properties_at = self.properties_end - len(first.properties_bytes)
        self._is_fixed = np.zeros(self.size, np.bool_)
        for begin, end in ((0, 8), (36, 40), (84, _HEADER_SIZE), (self._body_end, self.properties_at)):
            self._is_fixed[begin:end] = True
        values = self._read_properties()
        has_own_check = data.startswith(CHECK_START, self.properties_end) and self.properties_at > self._body_end
        has_v4_hosts = not first.sys_flag & (SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)
        self.queue_id = values.get(b"REAL_QID", _Value(0, 0))
        self.tags = values.get(b"TAGS")
        self.is_plain = bool(values) and has_own_check and has_v4_hosts and first.magic == MAGIC_V1
        self._fixed = np.flatnonzero(self._is_fixed)
        self._free = np.arange(self.properties_at, self.properties_end)
        self._free = self._free[~self._is_fixed[self._free]]

    def _read_properties(self) -> dict[bytes, _Value]:
        """Where the values are; the rest is fixed. None where two have one name, or the list is not regular."""
        values: dict[bytes, _Value] = {}
        at = self.properties_at
        *pairs, rest = self.first.properties_bytes.split(b"\x02")
        self._is_fixed[at : self.properties_end] = True
        for pair in pairs:
            name, separator, value = pair.partition(b"\x01")
            if not separator or b"\x01" in value or name in values:
                return {}
            begin = at + len(name) + 1
            at += len(pair) + 1
            values[name] = _Value(begin, at - 1)
            if name != b"REAL_TOPIC":
                self._is_fixed[begin : at - 1] = False
        return {} if rest else values

    def count_alike(self, rows: _Bytes2D, physical_offsets: NDArray[np.int64]) -> int:
        """How many rows, from the first on, are sound records of this shape that lie at these places."""
        if not self.is_plain:
            return 0
        free = rows[:, self._free]
        is_alike = (rows[:, self._fixed] == self._row[self._fixed]).all(axis=1)
        is_alike &= ((free != 1) & (free != 2)).all(axis=1)
        digits = rows[:, self.queue_id.begin : self.queue_id.end]
        is_alike &= ((digits >= ord("0")) & (digits <= ord("9"))).all(axis=1) & (0 < digits.shape[1] <= _MOST_DIGITS)
        is_alike &= _numbers(rows, 28, ">i8") == physical_offsets
        count = _count_true(is_alike)
        return _count_true(self._matches_crc(rows[:count], physical_offsets[:count]))

    def _matches_crc(self, rows: _Bytes2D, physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        body_crc = _crcs(rows[:, _HEADER_SIZE : self._body_end]) & 0x7FFF_FFFF
        around = np.concatenate((rows[:, :_HEADER_SIZE], rows[:, self._body_end : self.properties_end]), axis=1)
        check = _checks(_crcs(around), physical_offsets)
        matches: NDArray[np.bool_] = (rows[:, self.properties_end :] == check).all(axis=1)
        matches &= body_crc == _numbers(rows, 8, ">u4")
        return matches


class RecordRun:
    """Copies of records of one shape, before the log gives them their places; a row a record.

    Args:
        draft: The copy of the first.
        shape: Of the records.
        rows: The records, counted by `RecordShape.count_alike`.
        gap: Columns of properties that the copies do not have.
        stamps: What the copies' properties have more, one row for all or one for each.

    Attributes:
        topic: Where all of them go.
        queue_ids: The queue of each.
        tags_codes: What the consume queue keeps beside each.
    """

    def __init__(self, draft: RecordDraft, shape: RecordShape, rows: _Bytes2D, gap: slice, stamps: _Bytes2D) -> None:
        self.topic = draft.topic
        self._draft = draft
        self._rows = rows
        self._body_end = _HEADER_SIZE + len(draft.body)
        self._kept = (slice(shape.properties_at, gap.start), slice(gap.stop, shape.properties_end))
        self._stamps = stamps
        digits = rows[:, shape.queue_id.begin : shape.queue_id.end].astype(np.int64) - ord("0")
        self.queue_ids: NDArray[np.int64] = digits @ 10 ** np.arange(digits.shape[1] - 1, -1, -1)
        self.tags_codes = np.full(len(rows), draft.tags_code, np.int64)
        tags = rows[:0] if shape.tags is None else rows[:, shape.tags.begin : shape.tags.end]
        if (tags != tags[:1]).any():
            self.tags_codes[:] = [tags_code(each.decode("utf-8", "replace")) for each in _as_bytes(tags)]

    def __len__(self) -> int:
        return len(self._rows)

    def size(self, store_host: bytes) -> int:
        """Bytes of all of them."""
        return len(self) * self._draft.size(store_host)

    def queues(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each queue, and which rows go there."""
        first = int(self.queue_ids[0])
        if (self.queue_ids == first).all():
            yield first, np.arange(len(self))
            return
        for queue_id in np.unique(self.queue_ids).tolist():
            yield queue_id, np.flatnonzero(self.queue_ids == queue_id)

    def encode(
        self, queue_offsets: NDArray[np.int64], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> bytes:
        """The records one behind the other, given the place of the first, as `RecordDraft.encode` makes each."""
        first = self._draft.encode(int(queue_offsets[0]), physical_offset, store_timestamp, store_host)
        count, size = len(self), len(first)
        offsets = physical_offset + size * np.arange(count)
        longer = len(store_host) - 8
        head_end = _HEADER_SIZE + longer
        copy_body_end = head_end + len(self._draft.body)
        around = self._around(np.frombuffer(first, np.uint8), head_end, copy_body_end)
        around[:, 12:16] = _big_endian(self.queue_ids, ">i4")
        around[:, 20:28] = _big_endian(queue_offsets, ">i8")
        around[:, 28:36] = _big_endian(offsets, ">i8")
        around[:, 76 + longer : 84 + longer] = _big_endian(_numbers(self._rows, 28, ">i8") + 1, ">i8")
        records = np.empty((count, size), np.uint8)
        records[:, :head_end] = around[:, :head_end]
        records[:, head_end:copy_body_end] = self._rows[:, _HEADER_SIZE : self._body_end]
        records[:, copy_body_end:-CHECK_SIZE] = around[:, head_end:]
        records[:, -CHECK_SIZE:] = _checks(_crcs(around), offsets)
        return records.tobytes()

    def _around(self, first: NDArray[np.uint8], head_end: int, body_end: int) -> _Bytes2D:
        """All but body and check; numbers that the place decides are still those of the first."""
        rows = self._rows
        around = np.empty((len(rows), len(first) - (body_end - head_end) - CHECK_SIZE), np.uint8)
        around[:, :head_end] = first[:head_end]
        around[:, head_end:] = first[body_end:-CHECK_SIZE]
        for begin, end in ((8, 12), (16, 20), (40, 56)):  # body CRC, flag, who sent it and when
            around[:, begin:end] = rows[:, begin:end]
        around[:, head_end - 16 : head_end - 12] = rows[:, 72:76]  # reconsume times
        at = around.shape[1]
        for part in (self._stamps, rows[:, self._kept[1]], rows[:, self._kept[0]]):
            begin = at - part.shape[1]
            around[:, begin:at] = part
            at = begin
        return around


def _as_bytes(rows: _Bytes2D) -> list[bytes]:
    if not rows.shape[1]:
        return [b""] * len(rows)
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}")[:, 0].tolist()  # type: ignore[no-any-return]


def _crcs(rows: _Bytes2D) -> NDArray[np.int64]:
    return np.fromiter(map(crc32, _as_bytes(rows)), np.int64, len(rows))


def _checks(crcs: NDArray[np.int64], physical_offsets: NDArray[np.int64]) -> _Bytes2D:
    """The last bytes of records at these places whose other bytes have these sums."""
    checks = np.empty((len(crcs), CHECK_SIZE), np.uint8)
    checks[:, : len(_CHECK_START)] = _CHECK_START
    checks[:, len(_CHECK_START) : -9] = _HEX[_big_endian(crcs, ">u4")].reshape(-1, 8)
    checks[:, -9:-1] = _HEX[_big_endian(physical_offsets & 0xFFFF_FFFF, ">u4")].reshape(-1, 8)
    checks[:, -1] = 2
    return checks


def _numbers(rows: _Bytes2D, column: int, kind: str) -> NDArray[np.int64]:
    width = np.dtype(kind).itemsize
    numbers: NDArray[np.int64] = (
        np.ascontiguousarray(rows[:, column : column + width]).view(kind)[:, 0].astype(np.int64)
    )
    return numbers


def _big_endian(numbers: NDArray[np.int64], kind: str) -> _Bytes2D:
    return numbers.astype(kind).view(np.uint8).reshape(-1, np.dtype(kind).itemsize)


def _count_true(column: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(column) if column.all() else int(np.argmin(column))
