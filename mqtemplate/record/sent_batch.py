"""The messages of a producer's batch as the rows of one array: with arrays each costs half as much as alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.record.row_checks import checks, crcs, row_bytes

_HEAD = np.dtype(layout.HEAD_FIELDS)  # type: ignore[call-overload]


@dataclass(slots=True)
class SentBatch:
    """Messages of one queue that differ in their bodies and ids only; all bodies have one length, and all ids.

    Attributes:
        first: Record of the first message.
        bodies, ids: A row for each message.
        id_at: Start of the id in the encoded properties.
    """

    first: RecordDraft
    bodies: Rows
    ids: Rows
    id_at: int

    def __len__(self) -> int:
        return len(self.bodies)

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

    def encode(self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes) -> Rows:
        """Return the adjacent records, a row for each: the bytes of `RecordDraft.encode` for each message.

        Args:
            queue_offset, physical_offset: Of the first record.

        Raises:
            MessageError: As `RecordDraft.encode`.
        """
        first = self.first.encode(queue_offset, physical_offset, store_timestamp, store_host)
        body_at = layout.HEADERS[layout.host_flags(self.first.born_host, store_host)].size
        body_end, size = body_at + self.bodies.shape[1], len(first)
        numbers = np.arange(len(self))
        physical_offsets = physical_offset + size * numbers
        around = self._around_body(np.frombuffer(first, np.uint8), body_at, body_end)
        heads = np.ndarray(len(self), _HEAD, around.data, strides=around.strides[:1])
        heads["body_crc"] = crcs(self.bodies) & 0x7FFF_FFFF
        heads["queue_offset"] = queue_offset + numbers
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
