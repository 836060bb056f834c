"""Many records as the rows of one array: messages of producers' batches, and copies of delayed records that are due.

With arrays each message of a batch costs half as much as alone. When a thousand delayed messages are due together, the
delay services copy them to their real topics; done with arrays, that costs little more than one copy.

Records have one *shape* if they differ only in bytes that decide nothing: bodies, some numbers of the header, and
values of properties that the copy does not depend on. Lengths, flags, topic, and names and order of the properties are
equal. Then the decisions for the first record hold for all, and each field is in the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import tags_code
from mqtemplate.record import layout
from mqtemplate.record.appends import IndexEntries, PutBatch, QueueRows
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.columns import (
    HEAD_DTYPE,
    Rows,
    count_leading,
    count_verified,
    crcs,
    read_column,
    row_bytes,
    to_bytes,
    with_checks,
)
from mqtemplate.record.layout import BODY_AT, BODY_LENGTH_AT, CHECK_SIZE, PHYSICAL_OFFSET_AT
from mqtemplate.record.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    value_spans,
)


class BatchOrigin(NamedTuple):
    """Queue and time of birth of the messages of one batch."""

    queue_id: int
    born_timestamp: int


@dataclass(slots=True)
class UniformBatch:
    """Messages of one topic that differ in their bodies and ids only; all bodies have one length, and all ids.

    They may come from several batches, which have the same number of messages each. See `NewRecords`.

    Attributes:
        first: Record of the first message.
        bodies, ids: A row for each message.
        id_at: Start of the id in the encoded properties.
        origins: Of each batch; empty for one batch, whose origin is in *first*.
    """

    first: RecordDraft
    bodies: Rows
    ids: Rows
    id_at: int
    origins: Sequence[BatchOrigin] = ()

    def __len__(self) -> int:
        return len(self.bodies)

    def queues(self) -> list[QueueRows]:
        queue_ids = [origin.queue_id for origin in self.origins] or [self.first.queue_id]
        count = len(self) // len(queue_ids)
        rows = [range(start, start + count) for start in range(0, len(self), count)]
        return [QueueRows(self.first.topic, *each) for each in zip(queue_ids, rows, strict=True)]

    def tags_codes(self, store_timestamp: int) -> NDArray[np.int64]:
        return np.full(len(self), self.first.tags_code_at(store_timestamp), np.int64)

    def index_entries(self, puts: PutBatch) -> IndexEntries:
        properties = self._properties() if self.first.indexed_properties else b""
        return IndexEntries([puts.physical_offsets[0]], [puts.end], [len(self)], [self.first.topic], [properties])

    def _properties(self) -> bytes:
        """Return the encoded properties of all messages, joined."""
        text, (count, size) = self.first.properties, self.ids.shape
        rows = np.empty((count, len(text)), np.uint8)
        rows[:] = np.frombuffer(text, np.uint8)
        rows[:, self.id_at : self.id_at + size] = self.ids
        return rows.tobytes()

    def msg_ids(self) -> bytes:
        """Return the ids, joined by commas."""
        count, size = self.ids.shape
        rows = np.full((count, size + 1), ord(","), np.uint8)
        rows[:, :size] = self.ids
        return rows.tobytes()[:-1]

    def encode_at(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[memoryview, PutBatch]:
        records = self.encode(queue_offsets, physical_offset, store_timestamp, store_host)
        (total, size), count = records.shape, len(self) // len(queue_offsets)
        offsets = range(physical_offset, physical_offset + total * size, size)
        each_queue_offset = [offset for start in queue_offsets for offset in range(start, start + count)]
        puts = PutBatch(offsets, [size] * total, each_queue_offset, store_timestamp)
        return records.data.cast("B"), puts  # without a copy

    def encode(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> Rows:
        """Return a row for each record: the bytes of `RecordDraft.encode` for each message. See `encode_at`."""
        first = self.first.encode(queue_offsets[0], physical_offset, store_timestamp, store_host)
        body_at = layout.HEADERS[layout.host_flags(self.first.born_host, store_host)].size
        body_end, size = body_at + self.bodies.shape[1], len(first)
        physical_offsets = physical_offset + size * np.arange(len(self))
        around = self._around_body(np.frombuffer(first, np.uint8), body_at, body_end)
        heads = np.ndarray(len(self), HEAD_DTYPE, around.data, strides=around.strides[:1])
        heads["body_crc"] = crcs(self.bodies) & 0x7FFF_FFFF
        heads["physical_offset"] = physical_offsets
        by_batch = heads.reshape(len(queue_offsets), -1)
        by_batch["queue_offset"] = np.add.outer(queue_offsets, np.arange(by_batch.shape[1]))
        if self.origins:
            by_batch["queue_id"], by_batch["born_timestamp"] = np.array(self.origins).T[:, :, None]
        return with_checks(around, body_at, self.bodies, physical_offsets)

    def _around_body(self, first: NDArray[np.uint8], body_at: int, body_end: int) -> Rows:
        """Return the records without body and check. They have the body CRC and the offsets of the first."""
        front, back = first[:body_at], first[body_end:-CHECK_SIZE]
        around = np.empty((len(self), len(front) + len(back)), np.uint8)
        around[:, :body_at], around[:, body_at:] = front, back
        id_at = around.shape[1] - len(self.first.properties) + self.id_at
        around[:, id_at : id_at + self.ids.shape[1]] = self.ids
        return around


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
        return count_verified(rows[:count], self._body_end, physical_offsets[:count])


class AlikeCopies:
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
        codes: Value for the consume queue unit of each copy.
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
        self.codes = np.full(len(rows), draft.tags_code, np.int64)
        tags = rows[:, shape.tags]
        if (tags != tags[:1]).any():
            self.codes[:] = [tags_code(each.decode("utf-8", "replace")) for each in row_bytes(tags)]

    def __len__(self) -> int:
        return len(self._rows)

    def queues(self) -> list[QueueRows]:
        """Return each queue with the rows for that queue."""
        return [
            QueueRows(self.topic, queue_id, np.flatnonzero(self.queue_ids == queue_id))
            for queue_id in np.unique(self.queue_ids).tolist()
        ]

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
        # A copy links to its source: physical offset + 1, see `mqtemplate.delay.copies`.
        links = read_column(self._rows, PHYSICAL_OFFSET_AT, ">i8") + 1
        around[:, layout.PREPARED_OFFSET_AT + extra : BODY_LENGTH_AT + extra] = to_bytes(links, ">i8")
        return with_checks(around, header_end, self._rows[:, BODY_AT : self._body_end], physical_offsets).tobytes()

    def _around_body(self, first: NDArray[np.uint8], header_end: int, body_end: int) -> Rows:
        """Return the records without body and check. They have the offsets and the link of the first."""
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


class ReleasedCopies:
    """Copies of due records, see `NewRecords`: many alike ones as arrays, all others as drafts.

    The index reads copies from the log: their number is large at once, and the memory for recent records is for sends.
    """

    def __init__(self, parts: Sequence[RecordDraft | AlikeCopies]) -> None:
        self._parts = parts
        self._queues: list[tuple[int, QueueRows]] = []  # with the number of the part
        self._starts, total = list[int](), 0
        for number, part in enumerate(parts):
            self._starts.append(total)
            if isinstance(part, AlikeCopies):
                self._queues += [(number, each._replace(rows=np.asarray(each.rows) + total)) for each in part.queues()]
                total += len(part)
            else:
                self._queues.append((number, QueueRows(part.topic, part.queue_id, range(total, total + 1))))
                total += 1
        self._count = total

    def __len__(self) -> int:
        return self._count

    def queues(self) -> list[QueueRows]:
        return [rows for _, rows in self._queues]

    def encode_at(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[bytes, PutBatch]:
        each_offset = np.empty(len(self), np.int64)
        for start, (_, each) in zip(queue_offsets, self._queues, strict=True):
            each_offset[each.rows] = np.arange(start, start + len(each.rows))
        at, records, sizes = physical_offset, list[bytes](), np.empty(len(self), np.int64)
        for part, start in zip(self._parts, self._starts, strict=True):
            if isinstance(part, AlikeCopies):
                offsets = each_offset[start : start + len(part)]
                record, count = part.encode(offsets, at, store_timestamp, store_host), len(part)
            else:
                record, count = part.encode(int(each_offset[start]), at, store_timestamp, store_host), 1
            sizes[start : start + count] = len(record) // count
            records.append(record)
            at += len(record)
        offsets = physical_offset + np.cumsum(sizes) - sizes
        puts = PutBatch(offsets.tolist(), sizes.tolist(), each_offset.tolist(), store_timestamp)
        return b"".join(records), puts

    def tags_codes(self, store_timestamp: int) -> NDArray[np.int64]:
        codes = [
            part.codes if isinstance(part, AlikeCopies) else np.array([part.tags_code_at(store_timestamp)], np.int64)
            for part in self._parts
        ]
        return np.concatenate(codes)

    def index_entries(self, puts: PutBatch) -> None:
        return None
