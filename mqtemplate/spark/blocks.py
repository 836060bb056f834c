"""A store folder, read beside the process that owns it."""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mqtemplate.errors import CorruptRecordError, OffsetOutOfRangeError, SparkError
from mqtemplate.record.layout import STORE_TIMESTAMP_AT, SYS_FLAG_AT, V6_EXTRA, SysFlag
from mqtemplate.store.layout import CQ_UNIT_DTYPE, CQ_UNIT_SIZE, PRE_BLANK_SIZE_MARK

_MARKS_OF_A_STORE = ("commitlog", "lock")  # a broker that was started but got no message has only the second


class Segment(NamedTuple):
    """One file of a file queue: the position of its first byte, counted over all files, and where it is."""

    start: int
    path: Path


@dataclass(frozen=True, slots=True)
class LogWindow:
    """One commit log file, mapped read-only.

    Attributes:
        start: Physical offset of its first byte.
        data: Its bytes; the mapping lives as long as this array.
    """

    start: int
    path: Path
    data: npt.NDArray[np.uint8]


class LocalBlocks:
    """Consume queues and commit log of a folder, for a reader that is not their owner.

    It takes no lock, writes nothing and keeps nothing open but mappings of the commit log, so the owner
    may append, roll and delete as it likes. Sizes are those of the files found.

    - The owner writes a record first and its unit after it; a unit that is seen has a whole record.
    - A queue ends at its first unit with size <= 0: files are made full of zeros.
    - Within one machine the page cache is shared, so a unit may be seen a moment before the owner has
      flushed its record. `make_durable` closes that gap: what it covered outlives a power failure.

    Args:
        store: The folder of an embedded broker that has been started at least once, or of a real one.

    Raises:
        SparkError: There is no such folder, or it is not a store.
    """

    def __init__(self, store: str | Path) -> None:
        self.store = Path(store)
        self._log_folder = self.store / "commitlog"
        self._queue_folder = self.store / "consumequeue"
        if not any((self.store / name).exists() for name in _MARKS_OF_A_STORE):
            what = "is not a store (it has no 'commitlog' or 'lock')" if self.store.is_dir() else "does not exist"
            raise SparkError(
                f"store folder {str(self.store)!r} {what}; give the folder of an embedded broker that was started"
            )

    # --- what there is -------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The topics that have a consume queue, sorted."""
        return sorted(_folders(self._queue_folder))

    def queue_ids(self, topic: str) -> list[int]:
        """The queues of *topic* that have a consume queue, sorted; none for a topic that has got no message."""
        return sorted(int(name) for name in _folders(self._queue_folder / topic) if name.isdecimal())

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last unit that can be seen."""
        for segment in reversed(_segments(self._queue_folder / topic / str(queue_id))):
            with _OpenFile(segment.path) as file:
                if count := _first_true(file.size // CQ_UNIT_SIZE, lambda unit: file.unit(unit)[1] <= 0):
                    return segment.start // CQ_UNIT_SIZE + count
        first = next(iter(_segments(self._queue_folder / topic / str(queue_id))), None)
        return first.start // CQ_UNIT_SIZE if first else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The first unit whose record is still in the commit log; the maximum if none is."""
        segments = _segments(self._queue_folder / topic / str(queue_id))
        if not segments:
            return 0
        log_start = next(iter(self.log_segments()), Segment(0, self._log_folder)).start
        first, end = segments[0].start // CQ_UNIT_SIZE, self.max_offset(topic, queue_id)

        def is_there(number: int) -> bool:
            (unit,) = self.units(topic, queue_id, first + number, first + number + 1)
            return bool(unit["size"] != PRE_BLANK_SIZE_MARK and unit["physical_offset"] >= log_start)

        if first == end or is_there(0):
            return first
        return first + _first_true(end - first, is_there)

    def units(self, topic: str, queue_id: int, start: int, end: int) -> npt.NDArray[Any]:
        """The units ``start <= queue offset < end`` as a structured array of `CQ_UNIT_DTYPE`.

        Raises:
            OffsetOutOfRangeError: A file that held them is gone, or they were never written.
        """
        folder = self._queue_folder / topic / str(queue_id)
        data = _read_span(_segments(folder), start * CQ_UNIT_SIZE, end * CQ_UNIT_SIZE)
        units: npt.NDArray[Any] = np.frombuffer(data, CQ_UNIT_DTYPE, len(data) // CQ_UNIT_SIZE)
        if len(units) < end - start or (len(units) and int(units["size"].min()) <= 0):
            first = self.min_offset(topic, queue_id) if len(units) < end - start else start
            raise OffsetOutOfRangeError(
                f"{topic}, queue {queue_id}: offsets {start} to {end} are not all there: "
                f"the queue goes from {first} to {self.max_offset(topic, queue_id)}",
                first,
            )
        return units

    def search_offset(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The first queue offset stored at or after *timestamp_ms*; the maximum if none is."""
        first, end = self.min_offset(topic, queue_id), self.max_offset(topic, queue_id)

        def is_late_enough(n: int) -> bool:
            (unit,) = self.units(topic, queue_id, first + n, first + n + 1)
            return self._store_timestamp(int(unit["physical_offset"])) >= timestamp_ms

        return first + _first_true(end - first, is_late_enough)

    # --- the commit log ------------------------------------------------------------------------

    def log_segments(self) -> list[Segment]:
        """The commit log's files, oldest first."""
        return _segments(self._log_folder)

    def windows(self, physical_offsets: npt.NDArray[np.int64]) -> Iterable[tuple[LogWindow, slice]]:
        """The commit log files that hold records, and which of the ascending *physical_offsets* each one holds.

        Raises:
            OffsetOutOfRangeError: The oldest of the files is gone.
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
            yield _map(segments[index]), slice(at, stop)
            at = stop

    def make_durable(self, physical_start: int, physical_end: int) -> None:
        """Return when the commit log from *physical_start* to *physical_end* is on the disk.

        Flushing needs no right to write; a clean file costs microseconds.
        """
        segments = self.log_segments()
        for segment, following in zip(segments, [*(s.start for s in segments[1:]), physical_end], strict=True):
            if segment.start < physical_end and following > physical_start:
                _flush(segment.path)

    def _store_timestamp(self, physical_offset: int) -> int:
        segments = self.log_segments()
        head = _read_span(segments, physical_offset, physical_offset + STORE_TIMESTAMP_AT + V6_EXTRA + 8)
        if len(head) < STORE_TIMESTAMP_AT + V6_EXTRA + 8:
            raise CorruptRecordError(self._log_folder, physical_offset, "it lies outside the commit log")
        sys_flag = int.from_bytes(head[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big")
        at = STORE_TIMESTAMP_AT + (V6_EXTRA if sys_flag & SysFlag.BORN_HOST_V6 else 0)
        return int.from_bytes(head[at : at + 8], "big", signed=True)


class _OpenFile:
    """A file opened for reading only, closed when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _OpenFile:
        self._fd = os.open(self._path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self._fd, count, at)

    def unit(self, number: int) -> tuple[int, int, int]:
        (unit,) = np.frombuffer(self.read(number * CQ_UNIT_SIZE, CQ_UNIT_SIZE), CQ_UNIT_DTYPE)
        return int(unit["physical_offset"]), int(unit["size"]), int(unit["tags_code"])


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:  # nothing was ever put there
        return []


def _segments(folder: Path) -> list[Segment]:
    """The files of a file queue in order; names that are not 20 digits are not part of it."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if len(entry.name) == 20 and entry.name.isdecimal())
    except FileNotFoundError:  # a queue that was never written
        return []
    return [Segment(int(name), folder / name) for name in names]


def _read_span(segments: list[Segment], start: int, end: int) -> bytes:
    """The bytes from *start* to *end*, over file borders; fewer if a file was deleted or the last one ends before."""
    pieces = []
    first = bisect_right([segment.start for segment in segments], start) - 1
    for index in range(max(0, first), len(segments)):
        segment = segments[index]
        if segment.start >= end:
            break
        with _OpenFile(segment.path) as file:
            pieces.append(file.read(max(0, start - segment.start), end - max(start, segment.start)))
    return b"".join(pieces)


def _first_true(count: int, predicate: Callable[[int], bool]) -> int:
    """The first number below *count* for which *predicate* holds, as it does for all behind; *count* if for none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if predicate(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _map(segment: Segment) -> LogWindow:
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except ValueError as exc:
        raise CorruptRecordError(segment.path, segment.start, "the file is empty") from exc
    finally:
        os.close(fd)
    return LogWindow(segment.start, segment.path, np.frombuffer(mapping, np.uint8))


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EROFS, errno.EINVAL):  # a file system nobody can write has nothing to flush
            raise
    finally:
        os.close(fd)
