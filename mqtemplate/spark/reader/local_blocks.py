"""Blocks of records from a store folder: windows of the memory-mapped commit log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import MessageQueue
from mqtemplate.spark.reader.record_block import RecordBlock, pieces
from mqtemplate.spark.store_folder import LogWindow, StoreFolder
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.topics import SCHEDULE_TOPIC


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Units of one queue.

    Attributes:
        queue_offsets: Queue offset of each unit, ascending.
        units: Structured array of `CQ_UNIT_DTYPE`, one for each queue offset.
    """

    queue: MessageQueue
    queue_offsets: npt.NDArray[np.int64]
    units: npt.NDArray[Any]

    def __getitem__(self, part: slice | npt.NDArray[np.bool_]) -> QueueSlice:
        return QueueSlice(self.queue, self.queue_offsets[part], self.units[part])


def local_blocks(folder: StoreFolder, queue: QueueSlice) -> Iterator[RecordBlock]:
    """Yield the records of *queue* in order.

    A unit of the schedule topic may be marked as done: its message was cancelled, rescheduled or delivered early, and
    it is left out.

    Raises:
        CorruptRecordError: The units do not ascend, or a record exceeds its file.
        OffsetOutOfRangeError: The file of a record was deleted.
    """
    if queue.queue.topic == SCHEDULE_TOPIC:
        queue = queue[queue.units["size"] != DONE_SIZE_MARK]
    physical = queue.units["physical_offset"].astype(np.int64)
    if (np.diff(physical) <= 0).any():
        at = int(np.argmax(np.diff(physical) <= 0))
        where = f"consume queue {queue.queue.queue_id} of {queue.queue.topic}"
        raise CorruptRecordError(where, int(physical[at + 1]), "its units do not ascend")
    for window, part in folder.windows(physical):
        for piece in pieces(queue.units["size"][part].astype(np.int64)):
            start = part.start
            yield _block(window, queue[start + piece.start : start + piece.stop])


def _block(window: LogWindow, queue: QueueSlice) -> RecordBlock:
    physical = queue.units["physical_offset"].astype(np.int64)
    sizes = queue.units["size"].astype(np.int64)
    first = int(physical[0]) - window.start
    last = min(int(physical[-1] + sizes[-1]) - window.start, len(window.data))
    return RecordBlock(
        queue=queue.queue,
        data=window.data[first:last],
        at=physical - window.start - first,
        sizes=sizes,
        queue_offsets=queue.queue_offsets,
        physical_offsets=physical,
        source=window.path,
    )
