"""Store folder: consume queues and commit log, read while another process owns them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mqtemplate.clock import SystemClock
from mqtemplate.errors import CorruptRecordError, OffsetOutOfRangeError, SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.processes import absolute_path
from mqtemplate.record.layout import BODY_AT, STORE_TIMESTAMP_AT, SYS_FLAG_AT, V6_EXTRA, SysFlag
from mqtemplate.spark.records.blocks import RecordBlock, pieces
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange
from mqtemplate.store.checkpoint import NO_LIMIT_MS, ClockStep, ClockSteps
from mqtemplate.store.files.layout import (
    CHECKPOINT_SIZE,
    CQ_UNIT_DTYPE,
    CQ_UNIT_SIZE,
    DONE_SIZE_MARK,
    PRE_BLANK_SIZE_MARK,
    unpack_clock_steps,
)
from mqtemplate.topics import SCHEDULE_TOPIC

_STORE_ENTRIES = ("commitlog", "lock")  # a broker that was started but has no message has only the second one


class FileSpan(NamedTuple):
    """One file of a mapped file queue: position of its first byte, counted over all files, and path."""

    start: int
    path: Path


@dataclass(frozen=True, slots=True)
class LogWindow:
    """One commit log file, mapped for reading.

    Attributes:
        start: Physical offset of its first byte.
        data: Its bytes; the file stays mapped as long as this array exists.
    """

    start: int
    path: Path
    data: npt.NDArray[np.uint8]


class MappedFiles:
    """Commit log files that are mapped, at most so many bytes, and at least the last one.

    A task reads one queue after the other, and the records of all queues are in the same files. The kernel needs longer
    to map the pages of a file again than to copy the bodies of its records. A copy in another process is empty.
    """

    MAX_BYTES = 1 << 30

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ...], LogWindow] = {}

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, segment: FileSpan) -> LogWindow:
        """Return the mapping of a file; a new one if there is another file at this path now.

        Raises:
            CorruptRecordError: The file is empty.
        """
        with _open(segment.path) as fd:
            found = os.fstat(fd)
            key = (segment.start, found.st_dev, found.st_ino, found.st_size)
            window = self._windows.pop(key, None) or _map(segment, fd)
        self._windows[key] = window  # the last one was used last
        while len(self._windows) > 1 and sum(len(each.data) for each in self._windows.values()) > self.MAX_BYTES:
            del self._windows[next(iter(self._windows))]
        return window


class StoreFolder:
    """Consume queues and commit log of a folder, for a reader that does not own them.

    It takes no lock and writes nothing. It keeps nothing open except mappings of the commit log, so the owner may
    append, roll and delete files. The sizes of the files are read, not configured.

    - The owner writes a record before its unit, so a unit that can be read has a complete record.
    - A queue ends at its first unit with size <= 0: files are created full of zeros.
    - Processes of one machine share the page cache, so a unit may be read before the owner has flushed its record.
      `make_durable` flushes it: after the call, the record survives a power failure.

    Args:
        store: Folder of an embedded broker that was started at least once, or of a RocketMQ broker.
        mapped: Files that are mapped already.

    Raises:
        SparkError: The folder does not exist, or is not a store.
    """

    def __init__(self, store: str | Path, mapped: MappedFiles | None = None) -> None:
        self.store = absolute_path(store)
        self._mapped = MappedFiles() if mapped is None else mapped
        self._log_folder = self.store / "commitlog"
        self._queue_folder = self.store / "consumequeue"
        if not any((self.store / name).exists() for name in _STORE_ENTRIES):
            what = "is not a store (it has no 'commitlog' or 'lock')" if self.store.is_dir() else "does not exist"
            raise SparkError(
                f"store folder {str(self.store)!r} {what}; give the folder of an embedded broker that was started"
            )

    # --- consume queues ------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the topics that have a consume queue, sorted."""
        return sorted(each.name for each in _entries(self._queue_folder) if each.is_dir())

    def queue_ids(self, topic: str) -> list[int]:
        """Return the ids of the consume queues of *topic*, sorted; none if the topic never had a message."""
        entries = _entries(self._queue_folder / topic)
        return sorted(int(each.name) for each in entries if each.name.isdecimal() and each.is_dir())

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return one past the last queue offset that can be read."""
        segments = self._queue_segments(topic, queue_id)
        for segment in reversed(segments):
            if count := _count_units(segment.path):
                return segment.start // CQ_UNIT_SIZE + count
        return segments[0].start // CQ_UNIT_SIZE if segments else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the first queue offset whose record is still in the commit log; the maximum if there is none."""
        segments = self._queue_segments(topic, queue_id)
        if not segments:
            return 0
        log_start = next(iter(self.log_segments()), FileSpan(0, self._log_folder)).start
        first, end = segments[0].start // CQ_UNIT_SIZE, self.max_offset(topic, queue_id)

        def has_record(number: int) -> bool:
            (unit,) = self.units(topic, queue_id, first + number, first + number + 1)
            return bool(unit["size"] != PRE_BLANK_SIZE_MARK and unit["physical_offset"] >= log_start)

        if first == end or has_record(0):
            return first
        return first + _first_true(end - first, has_record)

    def units(self, topic: str, queue_id: int, start: int, end: int) -> npt.NDArray[Any]:
        """Return the units ``start <= queue offset < end`` as a structured array of `CQ_UNIT_DTYPE`.

        Raises:
            OffsetOutOfRangeError: Their file was deleted, or they were never written.
        """
        data = _read_span(self._queue_segments(topic, queue_id), start * CQ_UNIT_SIZE, end * CQ_UNIT_SIZE)
        units: npt.NDArray[Any] = np.frombuffer(data, CQ_UNIT_DTYPE, len(data) // CQ_UNIT_SIZE)
        if len(units) < end - start or (len(units) and int(units["size"].min()) <= 0):
            first = self.min_offset(topic, queue_id) if len(units) < end - start else start
            raise OffsetOutOfRangeError(
                f"{topic}, queue {queue_id}: offsets {start} to {end} are not all stored: "
                f"the queue goes from {first} to {self.max_offset(topic, queue_id)}",
                first,
            )
        return units

    def search_offset(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """Return the first queue offset stored at or after *timestamp_ms*; the maximum if there is none.

        See `ClockSteps.search` for records that were stored while the clock of the owner was ahead.
        """
        offsets = range(self.min_offset(topic, queue_id), self.max_offset(topic, queue_id))
        steps = self._clock_steps()
        now_ms = SystemClock().now_ms() if any(steps) else NO_LIMIT_MS

        def physical_offset(at: int) -> int:
            (unit,) = self.units(topic, queue_id, at, at + 1)
            return int(unit["physical_offset"])

        def first_from(wanted: int) -> int:
            return offsets.start + bisect_left(offsets, wanted, key=physical_offset)

        return steps.search(
            offsets, timestamp_ms, now_ms, lambda at: self._store_timestamp(physical_offset(at)), first_from
        )

    def _clock_steps(self) -> ClockSteps:
        """Return the steps back of the clock that the last checkpoint has."""
        try:
            page = (self.store / "checkpoint").read_bytes()
        except FileNotFoundError:
            return ClockSteps()
        return ClockSteps(map(ClockStep._make, unpack_clock_steps(page)) if len(page) == CHECKPOINT_SIZE else ())

    def record_head(self, topic: str, queue_id: int, queue_offset: int) -> bytes:
        """Return the position of a record and the first bytes of its header; nothing if there is no such record."""
        unit = _read_span(
            self._queue_segments(topic, queue_id), queue_offset * CQ_UNIT_SIZE, queue_offset * CQ_UNIT_SIZE + 8
        )
        at = int.from_bytes(unit, "big")
        return unit + _read_span(self.log_segments(), at, at + BODY_AT)

    def _queue_segments(self, topic: str, queue_id: int) -> list[FileSpan]:
        return _segments(self._queue_folder / topic / str(queue_id))

    # --- commit log ----------------------------------------------------------------------------

    def log_segments(self) -> list[FileSpan]:
        """Return the files of the commit log, oldest first."""
        return _segments(self._log_folder)

    def windows(self, physical_offsets: npt.NDArray[np.int64]) -> Iterable[tuple[LogWindow, slice]]:
        """Yield each commit log file that contains records, and the slice of the ascending *physical_offsets* in it.

        Raises:
            OffsetOutOfRangeError: The oldest of the files was deleted.
        """
        segments = self.log_segments()
        starts = [segment.start for segment in segments]
        at = 0
        while at < len(physical_offsets):
            index = bisect_right(starts, int(physical_offsets[at])) - 1
            if index < 0:
                raise OffsetOutOfRangeError(
                    f"physical offset {int(physical_offsets[at])} is before the commit log's start, "
                    f"{starts[0] if starts else 'which has no file'}: its file was deleted",
                    0,
                )
            beyond = starts[index + 1] if index + 1 < len(starts) else np.iinfo(np.int64).max
            stop = int(np.searchsorted(physical_offsets, beyond))
            yield self._mapped.window(segments[index]), slice(at, stop)
            at = stop

    def make_durable(self, physical_start: int, physical_end: int) -> None:
        """Flush the commit log from *physical_start* to *physical_end* to the disk.

        ``fdatasync`` needs no write permission; for a clean file it takes microseconds.
        """
        segments = self.log_segments()
        for segment, following in zip(segments, [*(s.start for s in segments[1:]), physical_end], strict=True):
            if segment.start < physical_end and following > physical_start:
                _flush(segment.path)

    def _store_timestamp(self, physical_offset: int) -> int:
        segments = self.log_segments()
        head = _read_span(segments, physical_offset, physical_offset + STORE_TIMESTAMP_AT + V6_EXTRA + 8)
        if len(head) < STORE_TIMESTAMP_AT + V6_EXTRA + 8:
            raise CorruptRecordError(self._log_folder, physical_offset, "it is outside the commit log")
        sys_flag = int.from_bytes(head[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big")
        at = STORE_TIMESTAMP_AT + (V6_EXTRA if sys_flag & SysFlag.BORN_HOST_V6 else 0)
        return int.from_bytes(head[at : at + 8], "big", signed=True)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open a file for reading inside a ``with`` block."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _count_units(path: Path) -> int:
    """Return the number of units before the first one with size <= 0, by binary search."""
    with _open(path) as fd:

        def is_empty(number: int) -> bool:
            (unit,) = np.frombuffer(os.pread(fd, CQ_UNIT_SIZE, number * CQ_UNIT_SIZE), CQ_UNIT_DTYPE)
            return bool(unit["size"] <= 0)

        return _first_true(os.fstat(fd).st_size // CQ_UNIT_SIZE, is_empty)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:  # no message was ever stored
        return []


def _segments(folder: Path) -> list[FileSpan]:
    """Return the files of a mapped file queue in order. Files whose names are not 20 digits do not belong to it."""
    names = sorted(each.name for each in _entries(folder) if len(each.name) == 20 and each.name.isdecimal())
    return [FileSpan(int(name), folder / name) for name in names]


def _read_span(segments: list[FileSpan], start: int, end: int) -> bytes:
    """Return the bytes from *start* to *end* of all files; fewer if a file was deleted or the last one is shorter."""
    pieces = []
    first = bisect_right([segment.start for segment in segments], start) - 1
    for segment in segments[max(0, first) :]:
        if segment.start >= end:
            break
        with _open(segment.path) as fd:
            pieces.append(os.pread(fd, end - max(start, segment.start), max(0, start - segment.start)))
    return b"".join(pieces)


def _first_true(count: int, predicate: Callable[[int], bool]) -> int:
    """Return the first number below *count* for which *predicate* is true; *count* if there is none.

    The predicate must be true for all numbers after the first one, too.
    """
    return bisect_left(range(count), True, key=predicate)


def _map(segment: FileSpan, fd: int) -> LogWindow:
    try:
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except ValueError as exc:
        raise CorruptRecordError(segment.path, segment.start, "the file is empty") from exc
    return LogWindow(segment.start, segment.path, np.frombuffer(mapping, np.uint8))


def _flush(path: Path) -> None:
    with _open(path) as fd:
        try:
            os.fdatasync(fd)
        except OSError as exc:
            if exc.errno not in (errno.EROFS, errno.EINVAL):  # a read-only file system has nothing to flush
                raise


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
    _mapped: MappedFiles = field(default_factory=MappedFiles, repr=False, compare=False)

    @property
    def _folder(self) -> StoreFolder:
        return StoreFolder(self.store, self._mapped)

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

    def commit(self, group: str, offsets: OffsetTable) -> OffsetTable:
        """Commit through the owner of the folder, to which the file with the offsets belongs, if it has a server."""
        # Only the process of a query commits. The package for executors follows imports, and does not need this one.
        connection = import_module("mqtemplate.spark.location.connection")
        ahead: OffsetTable = connection.commit_group_offsets(self.store, group, offsets)
        return ahead

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
