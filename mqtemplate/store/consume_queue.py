"""One queue of a topic: where its messages lie in the commit log, in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.layout import (
    CQ_UNIT_DTYPE,
    CQ_UNIT_SIZE,
    DONE_SIZE_MARK,
    NO_UNIT_YET,
    PRE_BLANK_SIZE_MARK,
    CqUnit,
    iter_cq_units,
    pack_cq_unit_into,
    unpack_cq_unit,
)

_LOOK_BEHIND = 4_096
"""So many units behind a place without one are looked at: where there is one, the queue does not end at that place."""


class ConsumeQueue:
    """Units of 20 bytes; the unit's index is the message's queue offset.

    - ``min_offset <= max_offset``; units between them point at ascending physical offsets.
    - Derived from the commit log, and rebuilt from it after a crash.
    - One writer (the `MessageStore` under its lock); reading needs no lock.

    Attributes:
        was_cut: It was found damaged, and lacks what came from there on. The recovery has to make that again.
    """

    def __init__(self, files: MappedFileQueue) -> None:
        self._files = files
        self._file_size = files.file_size
        assert self._file_size % CQ_UNIT_SIZE == 0
        self.min_offset = 0
        self.max_offset = 0
        self.was_cut = False
        self._flushed_offset = 0
        self._load()

    def _load(self) -> None:
        """Find both ends. What lies behind a place without a unit is no queue: it is cut off, to be made again."""
        files = self._files.files
        if not files:
            self.was_cut = self._files.is_short
            self._open_at(0)
            return
        self.min_offset = self._first_message()
        last = len(files) - 1
        while last and files[last].view[:CQ_UNIT_SIZE] in (bytes(CQ_UNIT_SIZE), NO_UNIT_YET):
            last -= 1  # made ahead, and never used
        end = self._files.starts[last] // CQ_UNIT_SIZE + self._count_sound(last)
        self.was_cut |= self._files.is_short
        self._open_at(max(end, self.min_offset))
        self._flushed_offset = self.max_offset
        if self.was_cut:
            self._files.truncate(self.max_offset * CQ_UNIT_SIZE)
            self._open_at(self.max_offset)

    def _count_sound(self, index: int) -> int:
        """How many units from the begin of a file on can be what was written: physical offsets ascend, then zeros."""
        units = np.frombuffer(self._files.files[index].view[:], CQ_UNIT_DTYPE)
        count = _count_filled(units)
        begins_at = max(0, self.min_offset - self._files.starts[index] // CQ_UNIT_SIZE)
        falls = np.flatnonzero(np.diff(units["physical_offset"][begins_at:count].astype(np.int64)) < 0)
        if len(falls):  # one of the two beside it is wrong
            self.was_cut = True
            return begins_at + int(falls[0])
        self.was_cut = bool(units[count : count + _LOOK_BEHIND]["size"].any())
        return count

    def _first_message(self) -> int:
        """Upstream fills the places before a queue's first message with a mark; they hold no message."""
        begin = self._files.begin // CQ_UNIT_SIZE
        if unpack_cq_unit(self._files.files[0].view).size != PRE_BLANK_SIZE_MARK:
            return begin
        first = np.frombuffer(self._files.files[0].view[:], CQ_UNIT_DTYPE)
        return begin + int(np.argmax(first["size"] != PRE_BLANK_SIZE_MARK))

    def _open_at(self, max_offset: int) -> None:
        """Go on writing at *max_offset*."""
        self.max_offset = max_offset
        found = self._files.find(max_offset * CQ_UNIT_SIZE)
        self._view = None if found is None else found[0].view
        self._at = max_offset * CQ_UNIT_SIZE - (self._files.begin if found is None else found[1])

    def reserve(self, count: int) -> None:
        """Have the files for *count* more units.

        Raises:
            StoreFullError: One could not be made.
        """
        if self._view is not None and self._at + count * CQ_UNIT_SIZE <= self._file_size:
            return
        while not self._files.files or self._files.end < (self.max_offset + count) * CQ_UNIT_SIZE:
            file = self._files.append_file(self.max_offset * CQ_UNIT_SIZE)
            file.view[:CQ_UNIT_SIZE] = NO_UNIT_YET
        self._open_at(self.max_offset)

    def append(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Write the unit at ``max_offset``; `reserve` has seen to its place."""
        if self._at >= self._file_size:
            self._open_at(self.max_offset)
        pack_cq_unit_into(self._view, self._at, physical_offset, size, tags_code)  # type: ignore[arg-type]
        self._at += CQ_UNIT_SIZE
        self.max_offset += 1

    def append_all(
        self,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        tags_codes: Sequence[int] | NDArray[np.int64],
    ) -> None:
        """`reserve` and `append` for many.

        Raises:
            StoreFullError: There is no room for them; none was written.
        """
        units = np.empty(len(sizes), CQ_UNIT_DTYPE)
        units["physical_offset"], units["size"], units["tags_code"] = physical_offsets, sizes, tags_codes
        self.reserve(len(units))
        data, done = units.tobytes(), 0
        while done < len(data):
            if self._at >= self._file_size:
                self._open_at(self.max_offset)
            piece = data[done : done + self._file_size - self._at]
            self._view[self._at : self._at + len(piece)] = piece  # type: ignore[index]
            done += len(piece)
            self._at += len(piece)
            self.max_offset += len(piece) // CQ_UNIT_SIZE

    def holds(self, queue_offset: int, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
        """Whether the units from *queue_offset* on point at these records; some may be marked as done."""
        done = 0
        while done < len(sizes):
            units = self.units(queue_offset + done, len(sizes) - done)
            end = done + len(units)
            is_same = (units["size"] == sizes[done:end]) | (units["size"] == DONE_SIZE_MARK)
            if not len(units) or not (is_same & (units["physical_offset"] == physical_offsets[done:end])).all():
                return False
            done = end
        return True

    def unit(self, queue_offset: int) -> CqUnit:
        """One unit.

        Raises:
            IndexError: There is none at *queue_offset*.
        """
        if not self.min_offset <= queue_offset < self.max_offset:
            raise IndexError(f"queue offset {queue_offset} is not in {self.min_offset}..{self.max_offset - 1}")
        found = self._files.find(queue_offset * CQ_UNIT_SIZE)
        if found is None:
            raise IndexError(f"queue offset {queue_offset} was deleted at this moment")
        return unpack_cq_unit(found[0].view, queue_offset * CQ_UNIT_SIZE - found[1])

    def units(self, queue_offset: int, count: int) -> NDArray[np.void]:
        """Up to *count* units from *queue_offset* on; fewer at a file's end, none behind ``max_offset``."""
        return np.frombuffer(self._unit_bytes(queue_offset, count), CQ_UNIT_DTYPE)

    def unit_tuples(self, queue_offset: int, count: int) -> list[tuple[int, int, int]]:
        """The same as plain tuples, which is quicker for the few that one pull reads."""
        return list(iter_cq_units(self._unit_bytes(queue_offset, count)))

    def _unit_bytes(self, queue_offset: int, count: int) -> bytes:
        count = min(count, self.max_offset - queue_offset)
        if count <= 0 or queue_offset < self.min_offset:
            return b""
        found = self._files.find(queue_offset * CQ_UNIT_SIZE)
        if found is None:  # deleted at this moment
            return b""
        at = queue_offset * CQ_UNIT_SIZE - found[1]
        return found[0].view[at : min(at + count * CQ_UNIT_SIZE, self._file_size)]

    def first_at(self, field: str, value: int) -> int:
        """The first queue offset whose *field* (one that ascends) is not below *value*; ``max_offset`` if none is."""
        low, high = self.min_offset, self.max_offset
        while low < high:
            middle = (low + high) // 2
            if self._is_below(middle, field, value):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_below(self, queue_offset: int, field: str, value: int) -> bool:
        try:
            return bool(getattr(self.unit(queue_offset), field) < value)
        except IndexError:  # deleted since the search began, so it is before what is left
            return True

    def end_before(self, physical_end: int) -> int:
        """One past the last unit of a record that begins before *physical_end*; looks from the end on."""
        high = self.max_offset
        step = 1
        while (low := max(high - step, self.min_offset)) < high and self.unit(low).physical_offset >= physical_end:
            high = low
            step *= 2
        while low < high:
            middle = (low + high) // 2
            if self.unit(middle).physical_offset < physical_end:
                low = middle + 1
            else:
                high = middle
        return low

    def rewrite(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> None:
        """Put another unit where one is. Lasts from the next `flush`."""
        found = self._files.find(queue_offset * CQ_UNIT_SIZE)
        assert found is not None
        pack_cq_unit_into(found[0].view, queue_offset * CQ_UNIT_SIZE - found[1], physical_offset, size, tags_code)
        self._flushed_offset = min(self._flushed_offset, queue_offset)

    def mark_done(self, queue_offset: int) -> None:
        """Note in the unit that its message need not be handed over, see `DONE_SIZE_MARK`; lasts once flushed."""
        unit = self.unit(queue_offset)
        self.rewrite(queue_offset, unit.physical_offset, DONE_SIZE_MARK, unit.tags_code)

    def delete_before(self, physical_begin: int) -> int:
        """Forget the units of records before *physical_begin*, which the log has no more; gives how many files went.

        A file goes when all its units point there; the last file stays.
        """
        kept = self._files.begin
        for file, start in zip(self._files.files[:-1], self._files.starts[:-1], strict=True):
            units = np.frombuffer(file.view[:], CQ_UNIT_DTYPE)
            if units["physical_offset"].max() >= physical_begin:
                break
            kept = start + self._file_size
        deleted = self._files.delete_before(kept)
        self.min_offset = max(self.min_offset, self._files.begin // CQ_UNIT_SIZE)
        while len(units := self.units(self.min_offset, _LOOK_BEHIND)):
            is_there = units["physical_offset"] >= physical_begin
            self.min_offset += int(np.argmax(is_there)) if is_there.any() else len(units)
            if is_there.any():
                break
        return deleted

    def truncate_after(self, physical_end: int) -> None:
        """Forget the units of records that begin at *physical_end* or behind it."""
        self.cut(self.end_before(physical_end))

    def cut_at_hole(self, physical_end: int) -> None:
        """The same after a power failure, which may have taken any of the units behind that place: those before
        *physical_end* are known to be on the disk, and end at the first that cannot be one of them."""
        at, newest = self.min_offset, -1
        while len(units := self.units(at, self._file_size // CQ_UNIT_SIZE)):
            offsets = units["physical_offset"].astype(np.int64)
            falls = np.diff(offsets, prepend=newest) < 0
            is_hole = falls | (units["size"] <= 0) | (offsets >= physical_end)
            if is_hole.any():
                self.cut(at + int(np.argmax(is_hole)))
                return
            at, newest = at + len(units), int(offsets[-1])

    def cut(self, queue_offset: int) -> None:
        """Forget the units from *queue_offset* on."""
        if queue_offset < self.max_offset:
            self._files.truncate(queue_offset * CQ_UNIT_SIZE)
            self._open_at(queue_offset)
            self._flushed_offset = min(self._flushed_offset, queue_offset)

    def mended(self) -> None:
        """The log was read for what this queue lacked. It has a file now, though it may be empty."""
        if self.was_cut:
            self.was_cut = False
            self.reserve(1)

    def flush_again(self, physical_begin: int) -> None:
        """Let the next `flush` write the units from this record on, though they were found in their files."""
        self._flushed_offset = min(self._flushed_offset, self.end_before(physical_begin))

    def clear(self) -> None:
        """Forget everything."""
        self._files.truncate(0)
        self.min_offset = self._flushed_offset = 0
        self._open_at(0)

    def begin_at(self, queue_offset: int) -> None:
        """Let an empty queue begin at *queue_offset*: what came before it is gone from the log.

        The first file is the one that *queue_offset* would lie in; the places before it get upstream's mark.
        """
        per_file = self._file_size // CQ_UNIT_SIZE
        blanks = queue_offset % per_file
        self._open_at(queue_offset - blanks)
        self.reserve(blanks + 1)
        for _ in range(blanks):
            self.append(0, PRE_BLANK_SIZE_MARK, 0)
        self.min_offset = queue_offset

    def flush(self) -> None:
        """Return when every unit is on the disk."""
        if self._flushed_offset < self.max_offset:
            end = self.max_offset
            self._files.flush(self._flushed_offset * CQ_UNIT_SIZE, end * CQ_UNIT_SIZE)
            self._flushed_offset = end

    def close(self) -> None:
        self._files.close()


def _count_filled(units: NDArray[np.void]) -> int:
    """How many units come before the first place without one."""
    is_empty = units["size"] <= 0
    return int(np.argmax(is_empty)) if is_empty.any() else len(units)
