"""Many records at once: the headers of about a thousand records are parsed together with numpy.

The recovery reads the whole log this way. Each record gets the same checks as in `parse_record`.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import crc32
from mqtemplate.record import layout
from mqtemplate.record.arrays import count_leading
from mqtemplate.record.codec import BadRecordError, StoredRecord, decode_topic, parse_record
from mqtemplate.record.layout import CHECK_CRC_AT, CHECK_SIZE, MAGIC_V1, MAGIC_V2, SMALLEST_RECORD, V6_EXTRA, SysFlag

_HEAD = np.dtype(layout.HEAD_FIELDS)  # type: ignore[call-overload]
_HEAD_BYTES = np.arange(_HEAD.itemsize)
_CHECK_BYTES = np.arange(CHECK_SIZE)
_CHECK_START = np.frombuffer(layout.CHECK_START, np.uint8)
# Any other byte is larger than eight hex digits together, and eight of it still fit into 64 bits.
_HEX_VALUE = np.full(256, 1 << 33, np.int64)
_HEX_VALUE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_HEX_WEIGHT = 16 ** np.arange(7, -1, -1, dtype=np.int64)

RecordLabel = tuple[str, bytes, int]
"""The fields that determine a tags code: topic, encoded properties, store timestamp."""


class RecordBatch:
    """Adjacent, whole, verified records. Each array has one row for each record.

    Args:
        data: Bytes of the log. The batch ends before the first record that is incomplete or invalid.
        physical_offset: Of the first byte of *data*.

    Attributes:
        byte_count: Size of all records together.
        has_check: The record ends with the check of `mqtemplate.record.layout`. RocketMQ wrote those without.
        topics: Topic of each record.
    """

    def __init__(self, data: bytes, physical_offset: int) -> None:
        self._data = data
        self._raw = np.frombuffer(data, np.uint8)
        self._start = np.array(_record_starts(data), np.int64)
        self._read_header()
        is_valid = self._read_lengths()
        is_valid &= self.physical_offset == self._start + physical_offset
        self._truncate(count_leading(is_valid))
        is_plain = self._read_check()
        is_plain &= self._matches_crc()
        self._truncate(self._count_valid(is_plain))
        self.topics = self._decode_topics()
        self._truncate(len(self.topics))
        self._properties_at = self._topic_end + 2
        self._properties_end = self._end - np.where(self.has_check, CHECK_SIZE, 0)
        self.byte_count = int(self._end[-1]) if self.topics else 0

    def __len__(self) -> int:
        return len(self.topics)

    def properties(self, row: int) -> bytes:
        """Return the encoded properties of one record, without the check."""
        return self._data[self._properties_at[row] : self._properties_end[row]]

    def labels(self, rows: NDArray[np.int64]) -> list[RecordLabel]:
        """Return the fields that determine the tags codes of these rows."""
        columns = (rows, self._properties_at[rows], self._properties_end[rows], self.store_timestamp[rows])
        data, topics = self._data, self.topics
        return [
            (topics[row], data[start:end], timestamp)
            for row, start, end, timestamp in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def record(self, row: int) -> StoredRecord:
        """Return one record."""
        start = int(self._start[row])
        return parse_record(self._data[start : start + int(self.size[row])], verify=False)

    # --- reading -------------------------------------------------------------------------------

    def _read_header(self) -> None:
        start = self._start
        head = self._raw[start[:, None] + _HEAD_BYTES].view(_HEAD)[:, 0]

        def column(name: str) -> NDArray[np.int64]:
            return np.asarray(head[name].astype(np.int64))

        self.size, self._magic, self._body_crc = column("size"), column("magic"), column("body_crc")
        self.queue_id, self.queue_offset = column("queue_id"), column("queue_offset")
        self.physical_offset, self.sys_flag = column("physical_offset"), column("sys_flag")
        self._end = start + self.size
        after_born = start + np.where(self.sys_flag & SysFlag.BORN_HOST_V6, V6_EXTRA, 0)
        after_hosts = after_born + np.where(self.sys_flag & SysFlag.STORE_HOST_V6, V6_EXTRA, 0)
        self.store_timestamp = self._numbers(after_born + layout.STORE_TIMESTAMP_AT, 8)
        self.prepared_transaction_offset = self._numbers(after_hosts + layout.PREPARED_OFFSET_AT, 8)
        self._body_at = after_hosts + layout.BODY_AT
        self._body_end = self._body_at + self._numbers(after_hosts + layout.BODY_LENGTH_AT, 4)

    def _numbers(self, at: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the signed numbers of *width* bytes at these positions."""
        # A header with IPv6 hosts may end after the data: read any bytes, `_read_lengths` rejects the record.
        positions = np.minimum(at[:, None] + np.arange(width), max(len(self._raw) - 1, 0))
        numbers: NDArray[np.int64] = self._raw[positions].view(f">i{width}")[:, 0].astype(np.int64)
        return numbers

    def _read_lengths(self) -> NDArray[np.bool_]:
        """Find topic and properties. Return False for records whose lengths do not add up."""
        raw = self._raw
        is_v2 = self._magic == MAGIC_V2
        topic_at = self._body_end + np.where(is_v2, 2, 1)
        fits: NDArray[np.bool_] = (self._body_end >= self._body_at) & (topic_at <= self._end)
        at = np.where(fits, self._body_end, 0)
        length = raw[at].astype(np.int64)
        length = np.where(is_v2, length << 8 | raw[np.minimum(at + 1, len(raw) - 1)], length)
        self._topic_at, self._topic_end = topic_at, topic_at + length
        fits &= self._topic_end + 2 <= self._end
        properties_length = self._numbers(np.where(fits, self._topic_end, 0), 2)
        fits &= (properties_length >= 0) & (self._topic_end + 2 + properties_length == self._end)
        return fits

    def _truncate(self, count: int) -> None:
        """Drop the rows after the first *count*."""
        if count < len(self._start):
            for name, column in vars(self).items():
                if isinstance(column, np.ndarray) and name != "_raw":
                    setattr(self, name, column[:count])

    def _read_check(self) -> NDArray[np.bool_]:
        """Find the records with a check of their own. Return False where only `parse_record` can decide."""
        tail_at = np.maximum(self._end - CHECK_SIZE, 0)
        tail = self._raw[tail_at[:, None] + _CHECK_BYTES]
        has_start = (tail[:, :CHECK_CRC_AT] == _CHECK_START).all(axis=1) & (tail_at >= self._topic_end + 2)
        digits = _HEX_VALUE[tail[:, CHECK_CRC_AT:-1]]
        self._check_crc = digits[:, :8] @ _HEX_WEIGHT
        is_of_record = digits[:, 8:] @ _HEX_WEIGHT == self.physical_offset & 0xFFFF_FFFF
        self.has_check: NDArray[np.bool_] = has_start & is_of_record & (tail[:, -1] == 2)
        is_plain: NDArray[np.bool_] = ~has_start & (tail[:, -1] != 0)
        is_plain |= self.has_check
        return is_plain

    def _matches_crc(self) -> NDArray[np.bool_]:
        data = self._data
        bodies = zip(self._body_at.tolist(), self._body_end.tolist(), strict=True)
        body_crc = [crc32(data[start:end]) for start, end in bodies]
        matches: NDArray[np.bool_] = np.array(body_crc, np.int64) & 0x7FFF_FFFF == self._body_crc
        checked = np.flatnonzero(self.has_check)
        columns = (self._start, self._body_at, self._body_end, self._end - CHECK_SIZE)
        crc = [
            crc32(data[body_end:check], crc32(data[start:body]))
            for start, body, body_end, check in zip(*(column[checked].tolist() for column in columns), strict=True)
        ]
        matches[checked] &= np.array(crc, np.int64) == self._check_crc[checked]
        return matches

    def _count_valid(self, is_plain: NDArray[np.bool_]) -> int:
        """Return the number of valid records before the first invalid one. Parse those that are not plain."""
        for row in np.flatnonzero(~is_plain).tolist():
            try:
                parse_record(self._data[self._start[row] : self._end[row]])
            except BadRecordError:
                return int(row)
            self.has_check[row] = False  # its last property is a check copied from another record
        return len(is_plain)

    def _decode_topics(self) -> list[str]:
        """Return the topics up to the first that is not UTF-8."""
        data, topics = self._data, list[str]()
        with suppress(BadRecordError):
            for at, end in zip(self._topic_at.tolist(), self._topic_end.tolist(), strict=True):
                topics.append(decode_topic(data[at:end]))
        return topics


def _record_starts(data: bytes) -> list[int]:
    """Return the start of each record, found by the sizes alone."""
    starts = []
    at, last = 0, len(data) - SMALLEST_RECORD
    while at <= last:
        size, magic = layout.read_size_and_magic(data, at)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < SMALLEST_RECORD:
            break
        starts.append(at)
        at += size
    if at > len(data):
        starts.pop()  # it is not complete
    return starts
