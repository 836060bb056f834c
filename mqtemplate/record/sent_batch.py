"""The messages of a producer's batches as the rows of one array: with arrays each costs half as much as alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.record.row_checks import checks, crcs, row_bytes

_HEAD = np.dtype(layout.HEAD_FIELDS)  # type: ignore[call-overload]


class BatchOrigin(NamedTuple):
    """Queue and time of birth of the messages of one batch."""

    queue_id: int
    born_timestamp: int


@dataclass(slots=True)
class SentBatch:
    """Messages of one topic that differ in their bodies and ids only; all bodies have one length, and all ids.

    They may be those of several batches, which have the same number of messages each.

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

    @property
    def queue_ids(self) -> list[int]:
        """Queue of each batch."""
        return [origin.queue_id for origin in self.origins] or [self.first.queue_id]

    @property
    def messages_per_batch(self) -> int:
        return len(self) // (len(self.origins) or 1)

    def properties(self) -> list[bytes]:
        """Return the encoded properties of each message."""
        text, id_end = self.first.properties, self.id_at + self.ids.shape[1]
        front, back = text[: self.id_at], text[id_end:]
        return [front + each + back for each in row_bytes(self.ids)]

    def msg_ids(self) -> bytes:
        """Return the ids, joined by commas."""
        count, size = self.ids.shape
        rows = np.full((count, size + 1), ord(","), np.uint8)
        rows[:, :size] = self.ids
        return rows.tobytes()[:-1]

    def encode(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> Rows:
        """Return the adjacent records, a row for each: the bytes of `RecordDraft.encode` for each message.

        Args:
            queue_offsets: Of the first record of each batch.
            physical_offset: Of the first record.

        Raises:
            MessageError: As `RecordDraft.encode`.
        """
        first = self.first.encode(queue_offsets[0], physical_offset, store_timestamp, store_host)
        body_at = layout.HEADERS[layout.host_flags(self.first.born_host, store_host)].size
        body_end, size = body_at + self.bodies.shape[1], len(first)
        physical_offsets = physical_offset + size * np.arange(len(self))
        around = self._around_body(np.frombuffer(first, np.uint8), body_at, body_end)
        heads = np.ndarray(len(self), _HEAD, around.data, strides=around.strides[:1])
        heads["body_crc"] = crcs(self.bodies) & 0x7FFF_FFFF
        count = self.messages_per_batch
        heads["queue_offset"] = (np.array(queue_offsets)[:, None] + np.arange(count)).ravel()
        if self.origins:
            heads["queue_id"], heads["born_timestamp"] = np.repeat(np.array(self.origins), count, axis=0).T
        heads["physical_offset"] = physical_offsets
        records = np.empty((len(self), size), np.uint8)
        records[:, :body_at] = around[:, :body_at]
        records[:, body_at:body_end] = self.bodies
        records[:, body_end:-CHECK_SIZE] = around[:, body_at:]
        records[:, -CHECK_SIZE:] = checks(crcs(around), physical_offsets)
        return records

    def _around_body(self, first: NDArray[np.uint8], body_at: int, body_end: int) -> Rows:
        """Return the records without body and check. Body CRCs and offsets are still those of the first."""
        front, back = first[:body_at], first[body_end:-CHECK_SIZE]
        around = np.empty((len(self), len(front) + len(back)), np.uint8)
        around[:, :body_at], around[:, body_at:] = front, back
        id_at = around.shape[1] - len(self.first.properties) + self.id_at
        around[:, id_at : id_at + self.ids.shape[1]] = self.ids
        return around
