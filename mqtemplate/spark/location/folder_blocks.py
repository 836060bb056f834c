"""Messages of a store folder on this machine, or on a file system that all machines share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mqtemplate.errors import CorruptRecordError, SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.spark.location.folder import LogWindow, StoreFolder
from mqtemplate.spark.records.blocks import RecordBlock, pieces
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange
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


_UNITS_AT_ONCE = 65_536
_SAMPLES = 16
_UNITS_A_SAMPLE = 256


@dataclass(slots=True)
class FolderBlocks:
    """Messages of a store folder. The broker may use the folder: it is read without a lock, and nothing is written.

    Args:
        store: The folder.
        broker_name: Name of the broker; the folder does not contain it.
    """

    store: str
    broker_name: str
    _durable_until: int = 0

    @property
    def _folder(self) -> StoreFolder:
        return StoreFolder(self.store)

    # --- queues and offsets --------------------------------------------------------------------

    def topics(self) -> set[str]:
        """See `Blocks.topics`."""
        return {*self._folder.topics(), *self._config("topics.json").get("topicConfigTable", {})}

    def queues(self, topic: str) -> list[MessageQueue]:
        """See `Blocks.queues`."""
        return [MessageQueue(topic, self.broker_name, queue_id) for queue_id in self._folder.queue_ids(topic)]

    def min_offset(self, queue: MessageQueue) -> int:
        """See `Blocks.min_offset`."""
        return self._folder.min_offset(queue.topic, queue.queue_id)

    def max_offset(self, queue: MessageQueue) -> int:
        """See `Blocks.max_offset`."""
        return self._folder.max_offset(queue.topic, queue.queue_id)

    def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """See `Blocks.search_offset`."""
        return self._folder.search_offset(queue.topic, queue.queue_id, timestamp_ms)

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        """See `Blocks.committed`."""
        table = self._config("consumerOffset.json").get("offsetTable", {})
        offset = table.get(f"{queue.topic}@{group}", {}).get(str(queue.queue_id))
        return None if offset is None else int(offset)

    def commit(self, group: str, offsets: OffsetTable) -> None:
        """Commit through the owner of the folder, to which the file with the offsets belongs, if it has a server."""
        # Only the process of a query commits. The package for executors follows imports, and does not need this one.
        import_module("mqtemplate.spark.location.connection").commit_group_offsets(self.store, group, offsets)

    def make_durable(self, latest: OffsetTable) -> None:
        """Flush the commit log up to the last of these messages."""
        end = 0
        for queue, offset in latest.items():
            if offset:
                (unit,) = self._folder.units(queue.topic, queue.queue_id, offset - 1, offset)
                end = max(end, int(unit["physical_offset"]) + int(unit["size"]))
        if end > self._durable_until:
            self._folder.make_durable(self._durable_until, end)
            self._durable_until = end

    def message_bytes(self, found: QueueRange) -> float:
        """Return the average size of the records that some of the units state."""
        folder, count = self._folder, len(found)
        if count <= _SAMPLES * _UNITS_A_SAMPLE:
            sizes = folder.units(found.topic, found.queue_id, found.start, found.end)["size"]
            return float(sizes.mean())
        starts = np.linspace(found.start, found.end - _UNITS_A_SAMPLE, _SAMPLES).astype(np.int64)
        samples = [
            folder.units(found.topic, found.queue_id, start, start + _UNITS_A_SAMPLE)["size"].mean()
            for start in starts.tolist()
        ]
        return float(np.mean(samples))

    def where(self) -> str:
        """See `Blocks.where`."""
        return "The folder was cleaned, replaced, or lost its newest messages"

    def _config(self, name: str) -> dict[str, Any]:
        from mqtemplate.store.files.folder_store_files import FolderStoreFiles
        from mqtemplate.store.tables import read_table

        return read_table(FolderStoreFiles(Path(self.store)), f"config/{name}")

    # --- tasks ---------------------------------------------------------------------------------

    def identity(self, found: QueueRange) -> str:
        """Return a hash of the header of the last record: its position, its times, and the CRC of its body."""
        return _identity(self._folder, found)

    def check_identity(self, found: QueueRange, identity: str) -> None:
        """Compare that header with the one that was planned."""
        machine = socket.gethostname()
        advice = "give all machines the same folder, or read over the network with the option nameServer"
        try:
            folder = self._folder
        except SparkError as exc:
            raise SparkError(f"the task on {machine}: {exc}. {advice}") from exc
        if _identity(folder, found) != identity:
            raise SparkError(
                f"the task on {machine}: the store folder {self.store!r} is another store than was planned: "
                f"message {found.end - 1} of {found.topic}, queue {found.queue_id}, differs or is missing; {advice}"
            )

    def blocks(self, found: QueueRange, tag_codes: npt.NDArray[np.int64] | None) -> Iterator[RecordBlock]:
        """Yield windows of the memory-mapped commit log."""
        for part in found.split(_UNITS_AT_ONCE):
            units = self._folder.units(part.topic, part.queue_id, part.start, part.end)
            queue = QueueSlice(found.queue, np.arange(part.start, part.end), units)
            if tag_codes is not None and found.topic != SCHEDULE_TOPIC:  # there the field has the due time
                # A unit has only the hash of the tag, and different tags may have equal hashes.
                queue = queue[np.isin(units["tags_code"], tag_codes)]
            yield from local_blocks(self._folder, queue)


def _identity(folder: StoreFolder, found: QueueRange) -> str:
    return blake2b(folder.record_head(found.topic, found.queue_id, found.end - 1), digest_size=8).hexdigest()
