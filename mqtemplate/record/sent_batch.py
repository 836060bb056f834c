"""The messages of a producer's batch as the rows of one array: with arrays each costs half as much as alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes.checksum import crc32
from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows, to_bytes
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.record.row_checks import checks, crcs, row_bytes


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

    def encode(self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes) -> Rows:
        """Return the adjacent records, a row for each: the bytes of `RecordDraft.encode` for each message.

        Args:
            queue_offset, physical_offset: Of the first record.

        Raises:
            MessageError: As `RecordDraft.encode`.
        """
        first = self.first.encode(queue_offset, physical_offset, store_timestamp, store_host)
        count, size = len(self), len(first)
        numbers = np.arange(count)
        physical_offsets = physical_offset + size * numbers
        properties_at = size - CHECK_SIZE - len(self.first.properties)
        id_at = properties_at + self.id_at
        body_at = layout.HEADERS[layout.host_flags(self.first.born_host, store_host)].size
        body_end = body_at + self.bodies.shape[1]
        records = np.empty((count, size), np.uint8)
        row = np.frombuffer(first, np.uint8)
        records[:, :body_at], records[:, body_end:] = row[:body_at], row[body_end:]
        records[:, body_at:body_end] = self.bodies
        records[:, id_at : id_at + self.ids.shape[1]] = self.ids
        records[:, layout.BODY_CRC_AT : layout.QUEUE_ID_AT] = to_bytes(crcs(self.bodies) & 0x7FFF_FFFF, ">u4")
        records[:, layout.QUEUE_OFFSET_AT : layout.PHYSICAL_OFFSET_AT] = to_bytes(queue_offset + numbers, ">i8")
        records[:, layout.PHYSICAL_OFFSET_AT : layout.SYS_FLAG_AT] = to_bytes(physical_offsets, ">i8")
        around = _crcs_around(records, body_at, body_end)
        records[:, -CHECK_SIZE:] = checks(around, physical_offsets)
        return records


def _crcs_around(records: Rows, body_at: int, body_end: int) -> NDArray[np.int64]:
    """Return the CRC-32 of each record without its body and its check."""
    heads, rests = row_bytes(records[:, :body_at]), row_bytes(records[:, body_end:-CHECK_SIZE])
    return np.fromiter(map(crc32, rests, map(crc32, heads)), np.int64, len(records))
