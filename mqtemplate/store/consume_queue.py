"""The consume queues: the positions of the messages of each queue in the commit log, in order.

A bounded number of queues is mapped, so that topics do not take all descriptors.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mqtemplate.errors import StoreError
from mqtemplate.numbers import parse_number
from mqtemplate.record.appends import NewRecords, PutBatch
from mqtemplate.record.columns import count_leading
from mqtemplate.store.files import layout
from mqtemplate.store.files.layout import CQ_UNIT_DTYPE, CQ_UNIT_SIZE, CqUnit
from mqtemplate.store.files.mapped_files import MappedFileQueue
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.topics import is_file_name

_SECOND_CHANCES = 16


class MappedQueues:
    """Releases the files of the queue that was mapped first, except those that got messages since then.

    Not thread-safe: the writer of the queues calls it, under the lock of the store.

    Args:
        max_mapped: Largest number of queues with mapped files. Each takes two descriptors.
    """

    def __init__(self, max_mapped: int) -> None:
        self._max_mapped = max_mapped
        self._queues: OrderedDict[ConsumeQueue, int] = OrderedDict()  # queue -> its max_offset when it was noted

    def __len__(self) -> int:
        """Return the number of queues with mapped files."""
        return len(self._queues)

    def note(self, queue: ConsumeQueue) -> None:
        """Note that the files of *queue* were mapped, and release the files of another one if there are too many."""
        self._queues.pop(queue, None)
        while len(self._queues) >= self._max_mapped:
            self._release_one()
        self._queues[queue] = queue.max_offset

    def _release_one(self) -> None:
        for _ in range(_SECOND_CHANCES):
            queue, noted = self._queues.popitem(last=False)
            if queue.max_offset == noted:
                break
            self._queues[queue] = queue.max_offset  # it is in use
        else:
            queue, _ = self._queues.popitem(last=False)
        queue.release()


_LOOK_AHEAD = 4_096
"""Units inspected after the first empty one. If one of them is not empty, the file is damaged."""


_LOWEST = -(1 << 63)


class ConsumeQueue:
    """Units of 20 bytes. The index of a unit is the queue offset of its message.

    - ``min_offset <= max_offset``. The units between them point at ascending physical offsets.
    - The queue is derived from the commit log, and rebuilt from it after a crash.
    - There is one writer, the `MessageStore` under its lock. Reading needs no lock.
    - Its files are unmapped while many other queues are in use. Then each read opens the file.

    Args:
        mapped: Releases the files of this queue or of another one. By default they stay mapped.

    Attributes:
        files: The mapped files.
        was_cut: A damaged part at the end was removed at the load. The recovery has to rebuild it.
    """

    def __init__(self, files: MappedFileQueue, mapped: MappedQueues | None = None) -> None:
        self.files = files
        self._mapped = MappedQueues(sys.maxsize) if mapped is None else mapped
        self._file_size = files.file_size
        assert self._file_size % CQ_UNIT_SIZE == 0
        self.min_offset = 0
        self.max_offset = 0
        self.was_cut = False
        self._flushed_offset = 0
        self._load()
        if files.files:
            self._mapped.note(self)

    # --- loading -------------------------------------------------------------------------------

    def _load(self) -> None:
        """Find both ends. Units after an empty one cannot be valid; they are removed and rebuilt."""
        files = self.files.files
        if not files:
            self.was_cut = self.files.is_short
            self._open_at(0)
            return
        self.min_offset = self._first_message()
        last = len(files) - 1
        while last and files[last].view[:CQ_UNIT_SIZE] in (bytes(CQ_UNIT_SIZE), layout.NO_UNIT_YET):
            last -= 1  # created ahead and never used
        end = self.files.starts[last] // CQ_UNIT_SIZE + self._count_valid(last)
        self.was_cut |= self.files.is_short
        self._open_at(max(end, self.min_offset))
        self._flushed_offset = self.max_offset
        if self.was_cut:
            self.files.truncate(self.max_offset * CQ_UNIT_SIZE)
            self._open_at(self.max_offset)

    def _count_valid(self, index: int) -> int:
        """Return the number of leading units that can be valid: their physical offsets ascend, then zeros follow."""
        units = self._file_units(index)
        count = count_leading(units["size"] > 0)
        first = max(0, self.min_offset - self.files.starts[index] // CQ_UNIT_SIZE)
        descents = np.flatnonzero(np.diff(units["physical_offset"][first:count].astype(np.int64)) < 0)
        if len(descents):  # one of the two units is wrong, so keep neither
            self.was_cut = True
            return first + int(descents[0])
        self.was_cut = bool(units[count : count + _LOOK_AHEAD]["size"].any())
        return count

    def _first_message(self) -> int:
        """Return the queue offset of the first message. RocketMQ marks the units before it (fillPreBlank)."""
        first = self.files.start // CQ_UNIT_SIZE
        if layout.unpack_cq_unit(self.files.files[0].view).size != layout.PRE_BLANK_SIZE_MARK:
            return first
        return first + count_leading(self._file_units(0)["size"] == layout.PRE_BLANK_SIZE_MARK)

    def _file_units(self, index: int) -> NDArray[np.void]:
        return np.frombuffer(self.files.files[index].read(0, self._file_size), CQ_UNIT_DTYPE)

    def _open_at(self, max_offset: int) -> None:
        """Continue writing at *max_offset*."""
        self.max_offset = max_offset
        found = self.files.find(max_offset * CQ_UNIT_SIZE)
        is_mapped = found is not None and found[0].is_mapped
        self._view = found[0].view if found is not None and is_mapped else None
        # Units may be written before it, within the file.
        self._limit = found[0].allocated if found is not None and is_mapped else 0
        self._at = max_offset * CQ_UNIT_SIZE - (self.files.start if found is None else found[1])

    # --- appending -----------------------------------------------------------------------------

    def reserve(self, count: int) -> None:
        """Create the files for *count* more units, and allocate their space.

        Raises:
            StoreFullError: There is no space for them.
        """
        if self._at + count * CQ_UNIT_SIZE <= self._limit:
            return
        start, end = self.max_offset * CQ_UNIT_SIZE, (self.max_offset + count) * CQ_UNIT_SIZE
        while not self.files.files or self.files.end < end:
            self._append_file(start)
        while start < end:
            found = self.files.find(start)
            assert found is not None, "the files up to the last unit exist"
            file, file_start = found
            file.allocate(min(end - file_start, self._file_size))
            start = file_start + self._file_size
        self._open_at(self.max_offset)
        self._mapped.note(self)

    def create_first_file(self) -> None:
        """Create the first file of a new queue, which no other thread uses yet, with space for the first unit.

        Raises:
            StoreFullError: There is no space for it.
        """
        self._append_file(0)
        self._open_at(0)

    def _append_file(self, start: int) -> None:
        file = self.files.append_file(start)
        file.view[:CQ_UNIT_SIZE] = layout.NO_UNIT_YET

    def release(self) -> None:
        """Unmap the files until the next unit is written."""
        self._view, self._limit = None, 0
        for file in self.files.files:
            file.release()

    def append(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Write the unit at ``max_offset``. The caller has called `reserve`."""
        if self._at >= self._file_size:
            self._open_at(self.max_offset)
        layout.pack_cq_unit_into(self._view, self._at, physical_offset, size, tags_code)  # type: ignore[arg-type]
        self._at += CQ_UNIT_SIZE
        self.max_offset += 1

    def append_all(
        self,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        tags_codes: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Write several units at ``max_offset``.

        Raises:
            StoreFullError: There is no space for them; nothing was written.
        """
        self.reserve(len(sizes))
        self.append_units(encode_units(physical_offsets, sizes, tags_codes))

    def append_units(self, units: bytes) -> None:
        """Write encoded units at ``max_offset``. The caller has called `reserve`."""
        done = 0
        while done < len(units):
            if self._at >= self._file_size:
                self._open_at(self.max_offset)
            piece = units[done : done + self._file_size - self._at]
            self._view[self._at : self._at + len(piece)] = piece  # type: ignore[index]
            done += len(piece)
            self._at += len(piece)
            self.max_offset += len(piece) // CQ_UNIT_SIZE

    # --- reading -------------------------------------------------------------------------------

    def unit(self, queue_offset: int) -> CqUnit:
        """Return one unit.

        Raises:
            IndexError: There is no unit at *queue_offset*.
        """
        if not self.min_offset <= queue_offset < self.max_offset:
            raise IndexError(f"queue offset {queue_offset} is not in {self.min_offset}..{self.max_offset - 1}")
        data = self.files.read(queue_offset * CQ_UNIT_SIZE, CQ_UNIT_SIZE)
        if not data:
            raise IndexError(f"queue offset {queue_offset} was deleted while it was read")
        return layout.unpack_cq_unit(data)

    def units(self, queue_offset: int, count: int) -> NDArray[np.void]:
        """Return up to *count* units from *queue_offset* on: fewer at a file's end, none from ``max_offset`` on."""
        return np.frombuffer(self.unit_bytes(queue_offset, count), CQ_UNIT_DTYPE)

    def unit_tuples(self, queue_offset: int, count: int) -> list[tuple[int, int, int]]:
        """Return the same as plain tuples, which is faster for the few units of one pull."""
        return list(layout.iter_cq_units(self.unit_bytes(queue_offset, count)))

    def unit_bytes(self, queue_offset: int, count: int) -> bytes:
        """Return the same as the bytes in the file."""
        count = min(count, self.max_offset - queue_offset)
        if count <= 0 or queue_offset < self.min_offset:
            return b""
        return self.files.read(queue_offset * CQ_UNIT_SIZE, count * CQ_UNIT_SIZE)  # b"" if deleted meanwhile

    def has_units_of(self, queue_offset: int, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
        """Return True if the units from *queue_offset* on point at these records, or are marked as done."""
        done = 0
        while done < len(sizes):
            units = self.units(queue_offset + done, len(sizes) - done)
            end = done + len(units)
            is_same = (units["size"] == sizes[done:end]) | (units["size"] == layout.DONE_SIZE_MARK)
            if not len(units) or not (is_same & (units["physical_offset"] == physical_offsets[done:end])).all():
                return False
            done = end
        return True

    def first_at(self, field: str, value: int) -> int:
        """Return the first queue offset whose *field* is at least *value*; ``max_offset`` if not found.

        Args:
            field: A field whose values ascend.
        """

        def value_at(queue_offset: int) -> int:
            try:
                return int(getattr(self.unit(queue_offset), field))
            except IndexError:  # deleted during the search, so it is before the rest
                return _LOWEST

        offsets = range(self.min_offset, self.max_offset)
        return offsets.start + bisect_left(offsets, value, key=value_at)

    def end_before(self, physical_end: int) -> int:
        """Return the queue offset after the last unit of a record that starts before *physical_end*.

        Searches from the end: the readers of a queue are mostly there.
        """

        def physical_offset_at(queue_offset: int) -> int:
            try:
                return self.unit(queue_offset).physical_offset
            except IndexError:  # deleted meanwhile, so it is before the rest
                return _LOWEST

        high = self.max_offset
        step = 1
        while (low := max(high - step, self.min_offset)) < high and physical_offset_at(low) >= physical_end:
            high = low
            step *= 2
        return low + bisect_left(range(low, high), physical_end, key=physical_offset_at)

    # --- changing units ------------------------------------------------------------------------

    def overwrite(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> None:
        """Replace a unit. The change is durable after the next `flush`."""
        found = self.files.find(queue_offset * CQ_UNIT_SIZE)
        assert found is not None
        layout.pack_cq_unit_into(
            found[0].map(), queue_offset * CQ_UNIT_SIZE - found[1], physical_offset, size, tags_code
        )
        self._flushed_offset = min(self._flushed_offset, queue_offset)

    def mark_done(self, queue_offset: int) -> None:
        """Mark a unit with `layout.DONE_SIZE_MARK`: its message is not delivered. Durable after the next `flush`."""
        unit = self.unit(queue_offset)
        self.overwrite(queue_offset, unit.physical_offset, layout.DONE_SIZE_MARK, unit.tags_code)

    def delete_before(self, physical_start: int) -> int:
        """Remove the units of records before *physical_start*, which the log no longer has.

        A file is deleted when all its units point there, but never the last file. Return the number of files.
        """
        keep_from = self.files.start
        for index, start in enumerate(self.files.starts[:-1]):
            if self._file_units(index)["physical_offset"].max() >= physical_start:
                break
            keep_from = start + self._file_size
        deleted = self.files.delete_before(keep_from)
        self.min_offset = max(self.min_offset, self.files.start // CQ_UNIT_SIZE)
        while len(units := self.units(self.min_offset, _LOOK_AHEAD)):
            count = count_leading(units["physical_offset"] < physical_start)
            self.min_offset += count
            if count < len(units):
                break
        return deleted

    def truncate(self, queue_offset: int) -> None:
        """Remove the units from *queue_offset* on."""
        if queue_offset < self.max_offset:
            self.files.truncate(queue_offset * CQ_UNIT_SIZE)
            self._open_at(queue_offset)
            self._flushed_offset = min(self._flushed_offset, queue_offset)

    def truncate_at_hole(self, physical_end: int) -> None:
        """Remove the units that a power failure may have damaged.

        Units of records before *physical_end* were flushed. Any later unit may be missing, so the valid ones end at the
        first that cannot be one of the flushed: it is empty, it points backwards, or past *physical_end*.
        """
        at, newest = self.min_offset, -1
        while len(units := self.units(at, self._file_size // CQ_UNIT_SIZE)):
            offsets = units["physical_offset"].astype(np.int64)
            is_valid = (np.diff(offsets, prepend=newest) >= 0) & (units["size"] > 0) & (offsets < physical_end)
            if not is_valid.all():
                self.truncate(at + count_leading(is_valid))
                return
            at, newest = at + len(units), int(offsets[-1])

    def clear(self, start: int = 0) -> None:
        """Remove all units. The next message gets queue offset *start*.

        The first file is the one that contains *start*. The units before it get RocketMQ's mark.
        """
        self.files.truncate(0)
        first = start - start % (self._file_size // CQ_UNIT_SIZE)
        self._flushed_offset = first
        self._open_at(first)
        if start > first:
            self.reserve(start - first + 1)
        while self.max_offset < start:
            self.append(0, layout.PRE_BLANK_SIZE_MARK, 0)
        self.min_offset = start

    # --- durability ----------------------------------------------------------------------------

    def mark_rebuilt(self) -> None:
        """Note that the recovery has read the log for the missing units. An empty queue gets a file as well."""
        if self.was_cut:
            self.was_cut = False
            self.reserve(1)

    def mark_unflushed(self, physical_start: int) -> None:
        """Let the next `flush` write the units from this record on. After a crash they may not be on the disk."""
        self._flushed_offset = min(self._flushed_offset, self.end_before(physical_start))

    def flush(self) -> None:
        """Return when all units are on the disk."""
        if self._flushed_offset < self.max_offset:
            end = self.max_offset
            self.files.flush(self._flushed_offset * CQ_UNIT_SIZE, end * CQ_UNIT_SIZE)
            self._flushed_offset = end


class QueueTable:
    """The consume queues of a store. The caller holds the lock of the store, except for `create`.

    Args:
        max_mapped: Largest number of queues with mapped files.
        lock: The lock of the store.

    Attributes:
        queues: All queues that exist.
    """

    def __init__(self, store_files: StoreFiles, max_mapped: int, lock: threading.Lock) -> None:
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._store_files = store_files
        self._mapped = MappedQueues(max_mapped)
        self._lock = lock
        self._creation_ended = threading.Condition(lock)
        self._in_creation: set[tuple[str, int]] = set()  # queues whose file is created now
        self._file_size = 0
        self._setting = ""

    def load(self, file_size: int, setting: str) -> None:
        """Open all queues in the folder.

        Args:
            setting: Configuration key of the size, for the error message; empty if the size was taken from the files.

        Raises:
            StoreFormatError: The files have another size.
        """
        self._file_size, self._setting = file_size, setting
        for topic in self._store_files.list_folders("consumequeue"):
            for queue_id in self._store_files.list_folders(f"consumequeue/{topic}"):
                if (number := parse_number(queue_id)) is not None and 0 <= number < 1 << 31:
                    self.open(topic, number)

    def open(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue. If it is missing, add it without a file; if its file is created now, wait for that."""
        key = topic, queue_id
        found = self.queues.get(key)
        if found is not None:
            return found
        while key in self._in_creation:
            self._creation_ended.wait()
        if key not in self.queues:
            self.queues[key] = self._new(topic, queue_id)
        return self.queues[key]

    def create(self, topic: str, queue_id: int) -> None:
        """Add a queue with its file, unless it exists. The lock is free while a busy disk takes its time for the file.

        Raises:
            StoreFullError: There is no space for the file.
        """
        key = topic, queue_id
        with self._lock:
            if key in self.queues or key in self._in_creation:
                return
            self._in_creation.add(key)
        created = None
        try:
            queue = self._new(topic, queue_id)
            queue.create_first_file()
            created = queue
        finally:
            with self._lock:
                self._in_creation.remove(key)
                self._creation_ended.notify_all()
                if created is not None:
                    self.queues[key] = created
                    self._mapped.note(created)

    def allocated_bytes(self) -> int:
        """Return the disk space of all queues."""
        return sum(file.allocated for queue in list(self.queues.values()) for file in queue.files.files)

    def counts_before(self, physical_end: int) -> dict[str, int]:
        """Return the number of units of each topic that point before *physical_end*."""
        counts: dict[str, int] = {}
        for (topic, _), queue in list(self.queues.items()):
            if queue.min_offset < queue.max_offset and (count := queue.end_before(physical_end) - queue.min_offset):
                counts[topic] = counts.get(topic, 0) + count
        return counts

    def _new(self, topic: str, queue_id: int) -> ConsumeQueue:
        if not is_file_name(topic):
            raise StoreError(f"topic {topic[:40]!r} has no queues: it cannot be the name of a folder; use another name")
        files = self._store_files.mapped_queue(
            f"consumequeue/{topic}/{queue_id}", self._file_size, setting=self._setting, rebuildable=True
        )
        return ConsumeQueue(files, self._mapped)


def encode_units(
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int64] | int,
    tags_codes: Sequence[int] | NDArray[np.int64] | int,
) -> bytes:
    """Return adjacent units. A single size or tags code applies to all."""
    units = np.empty(len(physical_offsets), CQ_UNIT_DTYPE)
    units["physical_offset"], units["size"], units["tags_code"] = physical_offsets, sizes, tags_codes
    return units.tobytes()


def encode_units_of(records: NewRecords, puts: PutBatch) -> bytes:
    """Return the unit of each record, in the order of the log."""
    codes, offsets = records.tags_codes(puts.store_timestamp), puts.physical_offsets
    if isinstance(codes, list):
        return b"".join(map(layout.pack_cq_unit, offsets, puts.sizes, codes))
    if isinstance(offsets, range):  # records of one size
        return encode_units(np.arange(offsets.start, offsets.stop, offsets.step), offsets.step, codes)
    return encode_units(np.array(offsets), np.array(puts.sizes), codes)


def units_of_rows(units: bytes, rows: Sequence[int] | NDArray[np.intp]) -> bytes:
    """Return those of the encoded *units* that have these numbers."""
    if isinstance(rows, range):
        return units[CQ_UNIT_SIZE * rows.start : CQ_UNIT_SIZE * rows.stop]
    if isinstance(rows, list):
        return b"".join([units[CQ_UNIT_SIZE * row : CQ_UNIT_SIZE * row + CQ_UNIT_SIZE] for row in rows])
    return np.frombuffer(units, CQ_UNIT_DTYPE)[rows].tobytes()
