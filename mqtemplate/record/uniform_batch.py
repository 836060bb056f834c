"""The messages of a producer's batches as the rows of one array: with arrays each costs half as much as alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record import layout
from mqtemplate.record.appends import IndexEntries, PutBatch, QueueRows
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import HEAD_DTYPE, Rows, crcs, with_checks
from mqtemplate.record.layout import CHECK_SIZE


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
        origins: Of each batch; empty for one batch, whose origin is that of *first*.
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
        """Return the records without body and check. Body CRCs and offsets are still those of the first."""
        front, back = first[:body_at], first[body_end:-CHECK_SIZE]
        around = np.empty((len(self), len(front) + len(back)), np.uint8)
        around[:, :body_at], around[:, body_at:] = front, back
        id_at = around.shape[1] - len(self.first.properties) + self.id_at
        around[:, id_at : id_at + self.ids.shape[1]] = self.ids
        return around
