"""Copy many records at once: records of one shape are the rows of one array.

When a thousand delayed messages are due together, the delay services copy them to their real topics. Done with arrays,
that costs little more than one copy.

Records have one *shape* if they differ only in bytes that decide nothing: bodies, some numbers of the header, and
values of properties that the copy does not depend on. Lengths, flags, topic, and names and order of the properties are
equal. Then the decisions for the first record hold for all, and each field is in the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import tags_code
from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows, count_leading, read_column, to_bytes
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import BODY_AT, BODY_LENGTH_AT, CHECK_SIZE, PHYSICAL_OFFSET_AT
from mqtemplate.record.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    value_spans,
)
from mqtemplate.record.row_checks import checks, crcs, row_bytes

_MAX_QUEUE_ID_DIGITS = 9  # more might not fit into the i4 of the header
_NO_COLUMNS = slice(0, 0)


class RecordShape:
    """The common shape of all records like *first*.

    Args:
        first: A verified record with a check at its end.
        data: Its bytes.

    Attributes:
        is_plain: Other records can be compared with it. False with IPv6 hosts, without a check, or with irregular
            properties.
        queue_id: Columns of the real queue id.
        tags: Columns of the tags.
    """

    def __init__(self, first: StoredRecord, data: bytes) -> None:
        self.size = len(data)
        self._row = np.frombuffer(data, np.uint8)
        self._body_end = BODY_AT + len(first.body)
        self.properties_end = self.size - CHECK_SIZE
        self.properties_at = self.properties_end - len(first.properties_bytes)
        values = value_spans(data[: self.properties_end], self.properties_at)
        self.queue_id = values.get(REAL_QID, _NO_COLUMNS)
        self.tags = values.get(TAGS, _NO_COLUMNS)
        self.is_plain = (
            bool(values)
            and first.properties_bytes.endswith(PROPERTY_SEPARATOR)
            and data.startswith(layout.CHECK_START, self.properties_end)
            and self.properties_at > self._body_end
            and not first.sys_flag & layout.HOST_FLAGS
            and first.magic == layout.MAGIC_V1
        )
        is_fixed = np.zeros(self.size, np.bool_)
        is_fixed[: layout.BODY_CRC_AT] = True  # size and magic
        is_fixed[layout.SYS_FLAG_AT : layout.BORN_TIMESTAMP_AT] = True
        is_fixed[BODY_LENGTH_AT:BODY_AT] = True
        is_fixed[self._body_end : self.properties_end] = True
        for name, value in values.items():
            is_fixed[value] = name == REAL_TOPIC  # all copies go to one topic
        self._fixed = np.flatnonzero(is_fixed)
        self._free = self.properties_at + np.flatnonzero(~is_fixed[self.properties_at : self.properties_end])

    def count_matching(self, rows: Rows, physical_offsets: NDArray[np.int64]) -> int:
        """Return the number of leading rows that are valid records of this shape at these physical offsets."""
        if not self.is_plain:
            return 0
        free = rows[:, self._free]
        matches = (rows[:, self._fixed] == self._row[self._fixed]).all(axis=1)
        matches &= ((free != NAME_VALUE_SEPARATOR[0]) & (free != PROPERTY_SEPARATOR[0])).all(axis=1)
        digits = rows[:, self.queue_id]
        matches &= ((digits >= ord("0")) & (digits <= ord("9"))).all(axis=1)
        matches &= 0 < digits.shape[1] <= _MAX_QUEUE_ID_DIGITS
        matches &= read_column(rows, PHYSICAL_OFFSET_AT, ">i8") == physical_offsets
        count = count_leading(matches)
        return count_leading(self._matches_crc(rows[:count], physical_offsets[:count]))

    def _matches_crc(self, rows: Rows, physical_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        body_crc = crcs(rows[:, BODY_AT : self._body_end]) & 0x7FFF_FFFF
        around = np.concatenate((rows[:, :BODY_AT], rows[:, self._body_end : self.properties_end]), axis=1)
        check = checks(crcs(around), physical_offsets)
        matches: NDArray[np.bool_] = (rows[:, self.properties_end :] == check).all(axis=1)
        matches &= body_crc == read_column(rows, layout.BODY_CRC_AT, ">u4")
        return matches


class RecordRun:
    """Copies of records of one shape, before the commit log assigns their offsets; a row for each record.

    Args:
        draft: The copy of the first record.
        shape: Shape of the source records.
        rows: The source records, counted by `RecordShape.count_matching`.
        gap: Columns of properties that the copies do not have.
        stamps: Properties that the copies have in addition: one row for all copies, or one for each.

    Attributes:
        topic: Topic of all copies.
        queue_ids: Queue of each copy.
        tags_codes: Value for the consume queue unit of each copy.
    """

    def __init__(self, draft: RecordDraft, shape: RecordShape, rows: Rows, gap: slice, stamps: Rows) -> None:
        self.topic = draft.topic
        self._draft = draft
        self._rows = rows
        self._body_end = BODY_AT + len(draft.body)
        self._kept = (slice(shape.properties_at, gap.start), slice(gap.stop, shape.properties_end))
        self._stamps = stamps
        digits = rows[:, shape.queue_id].astype(np.int64) - ord("0")
        self.queue_ids: NDArray[np.int64] = digits @ 10 ** np.arange(digits.shape[1] - 1, -1, -1)
        self.tags_codes = np.full(len(rows), draft.tags_code, np.int64)
        tags = rows[:, shape.tags]
        if (tags != tags[:1]).any():
            self.tags_codes[:] = [tags_code(each.decode("utf-8", "replace")) for each in row_bytes(tags)]

    def __len__(self) -> int:
        return len(self._rows)

    def queues(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each queue id with the rows for that queue."""
        for queue_id in np.unique(self.queue_ids).tolist():
            yield queue_id, np.flatnonzero(self.queue_ids == queue_id)

    def encode(
        self, queue_offsets: NDArray[np.int64], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> bytes:
        """Return the adjacent records, the first at *physical_offset*: the bytes of `RecordDraft.encode` for each."""
        first = self._draft.encode(int(queue_offsets[0]), physical_offset, store_timestamp, store_host)
        count, size = len(self), len(first)
        physical_offsets = physical_offset + size * np.arange(count)
        extra = len(store_host) - layout.V4_HOST_SIZE  # the sources have IPv4 hosts; this broker may have IPv6
        header_end = BODY_AT + extra
        body_end = header_end + len(self._draft.body)
        around = self._around_body(np.frombuffer(first, np.uint8), header_end, body_end)
        around[:, layout.QUEUE_ID_AT : layout.FLAG_AT] = to_bytes(self.queue_ids, ">i4")
        around[:, layout.QUEUE_OFFSET_AT : PHYSICAL_OFFSET_AT] = to_bytes(queue_offsets, ">i8")
        around[:, PHYSICAL_OFFSET_AT : layout.SYS_FLAG_AT] = to_bytes(physical_offsets, ">i8")
        # A copy links to its source: physical offset + 1, see `mqtemplate.delay.release`.
        links = read_column(self._rows, PHYSICAL_OFFSET_AT, ">i8") + 1
        around[:, layout.PREPARED_OFFSET_AT + extra : BODY_LENGTH_AT + extra] = to_bytes(links, ">i8")
        records = np.empty((count, size), np.uint8)
        records[:, :header_end] = around[:, :header_end]
        records[:, header_end:body_end] = self._rows[:, BODY_AT : self._body_end]
        records[:, body_end:-CHECK_SIZE] = around[:, header_end:]
        records[:, -CHECK_SIZE:] = checks(crcs(around), physical_offsets)
        return records.tobytes()

    def _around_body(self, first: NDArray[np.uint8], header_end: int, body_end: int) -> Rows:
        """Return the records without body and check. Offsets and links are still those of the first."""
        rows, extra = self._rows, header_end - BODY_AT
        around = np.empty((len(rows), len(first) - (body_end - header_end) - CHECK_SIZE), np.uint8)
        around[:, :header_end] = first[:header_end]
        around[:, header_end:] = first[body_end:-CHECK_SIZE]
        for start, end, shift in (
            (layout.BODY_CRC_AT, layout.QUEUE_ID_AT, 0),
            (layout.FLAG_AT, layout.QUEUE_OFFSET_AT, 0),
            (layout.BORN_TIMESTAMP_AT, layout.STORE_TIMESTAMP_AT, 0),  # with the born host
            (layout.RECONSUME_TIMES_AT, layout.PREPARED_OFFSET_AT, extra),
        ):
            around[:, start + shift : end + shift] = rows[:, start:end]
        end = around.shape[1]
        for part in (self._stamps, rows[:, self._kept[1]], rows[:, self._kept[0]]):  # from the last column back
            start = end - part.shape[1]
            around[:, start:end] = part
            end = start
        return around
