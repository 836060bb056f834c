"""Code 500,020: records of one queue as they are stored, for programs that parse many at once. Not in RocketMQ.

A pull returns 32 messages, each verified and copied on its own. A block has megabytes, and its receiver verifies the
records: unlike a pull it also has the checksum property, which covers all bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mqtemplate.message import MessageQueue
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.record_block import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.registration import answers
from mqtemplate.server.response import RefusedError
from mqtemplate.store.files.layout import PRE_BLANK_SIZE_MARK

_MAX_UNITS = 65_536


@dataclass(frozen=True, slots=True)
class RecordBlockProcessor:
    """Reader of records for one queue, without a look at their contents."""

    server: ServerParts

    @answers(RequestCode.GET_RECORD_BLOCK, slow=True)
    def _block(self, header: GetRecordBlockRequestHeader) -> tuple[GetRecordBlockResponseHeader, bytes]:
        self.server.topics.check_readable(header.topic, header.queue_id)
        queue = MessageQueue(header.topic, self.server.engine.name, header.queue_id)
        low, high = self.server.raw.reader.min_offset(queue), self.server.raw.reader.max_offset(queue)
        if not low <= header.queue_offset <= high:
            raise RefusedError(
                ResponseCode.PULL_OFFSET_MOVED,
                f"offset {header.queue_offset} is not stored: the queue has {low}..{high}",
            )
        records, at = self._read(header, min(high, header.end_offset))
        sizes = np.array([len(record) for record in records], ">i4")
        body = b"".join([struct.pack(">i", len(records)), sizes.tobytes(), *records])
        return GetRecordBlockResponseHeader(next_offset=at, min_offset=low, max_offset=high), body

    def _read(self, header: GetRecordBlockRequestHeader, end: int) -> tuple[list[bytes], int]:
        """Return the records, and the queue offset after them."""
        store, at = self.server.raw.store, header.queue_offset
        units = store.consume_queue(header.topic, header.queue_id).units(at, max(0, min(end - at, _MAX_UNITS)))
        sizes = units["size"].astype(np.int64)
        is_record = (sizes >= SMALLEST_RECORD) & (sizes != PRE_BLANK_SIZE_MARK)  # others are marks without a message
        count = _fitting(np.where(is_record, sizes, 0), max(1, min(header.max_bytes, MAX_BLOCK_BYTES)))
        records: list[bytes] = []
        pairs = zip(units["physical_offset"][:count].tolist(), sizes[:count].tolist(), strict=True)
        for number, ((physical_offset, size), counts) in enumerate(zip(pairs, is_record[:count].tolist(), strict=True)):
            if not counts:
                continue
            record = store.read_bytes(physical_offset, size)
            if not record:  # deleted by retention
                return records, at + number
            records.append(record)
        return records, at + count


def _fitting(sizes: npt.NDArray[np.int64], max_bytes: int) -> int:
    """Return the number of leading records that have *max_bytes* together; one at least, if there is one."""
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))))
