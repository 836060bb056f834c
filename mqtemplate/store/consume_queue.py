"""One queue of a topic: where its messages lie in the commit log, in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqtemplate.store.layout import (
    CQ_UNIT_DTYPE,
    CQ_UNIT_SIZE,
    DONE_SIZE_MARK,
    PRE_BLANK_SIZE_MARK,
    CqUnit,
    iter_cq_units,
    pack_cq_unit_into,
    unpack_cq_unit,
)
from mqtemplate.store.mapped_file_queue import MappedFileQueue

__all__ = ["ConsumeQueue"]


class ConsumeQueue:
    """Units of 20 bytes; the unit's index is the message's queue offset.

    - ``min_offset <= max_offset``; units between them point at ascending physical offsets.
    - Derived from the commit log, and rebuilt from it after a crash.
    - One writer (the `MessageStore` under its lock); reading needs no lock.
    """

    def __init__(self, files: MappedFileQueue) -> None:
        self._files = files
        self._file_size = files.file_size
        assert self._file_size % CQ_UNIT_SIZE == 0
        self.min_offset = 0
        self.max_offset = 0
        self._flushed_offset = 0
        self._load()

    def _load(self) -> None:
        if not self._files.files:
            self._open_at(0)
            return
        last = np.frombuffer(self._files.files[-1].view[:], CQ_UNIT_DTYPE)
        filled = int(np.argmax(last["size"] <= 0)) if (last["size"] <= 0).any() else len(last)
        self.min_offset = self._first_message()
        self._open_at(self._files.starts[-1] // CQ_UNIT_SIZE + filled)
        self._flushed_offset = self.max_offset

    def _first_message(self) -> int:
        """Upstream fills the places before a queue's first message with a mark; they hold no message."""
        first = np.frombuffer(self._files.files[0].view[:], CQ_UNIT_DTYPE)
        return self._files.begin // CQ_UNIT_SIZE + int(np.argmax(first["size"] != PRE_BLANK_SIZE_MARK))

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
            self._files.append_file(self.max_offset * CQ_UNIT_SIZE)
        self._open_at(self.max_offset)

    def append(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Write the unit at ``max_offset``; `reserve` has seen to its place."""
        if self._at >= self._file_size:
            self._open_at(self.max_offset)
        pack_cq_unit_into(self._view, self._at, physical_offset, size, tags_code)  # type: ignore[arg-type]
        self._at += CQ_UNIT_SIZE
        self.max_offset += 1

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

    def mark_done(self, queue_offset: int) -> None:
        """Note in the unit that its message need not be handed over, see `DONE_SIZE_MARK`; lasts once flushed."""
        unit = self.unit(queue_offset)
        found = self._files.find(queue_offset * CQ_UNIT_SIZE)
        assert found is not None
        at = queue_offset * CQ_UNIT_SIZE - found[1]
        pack_cq_unit_into(found[0].view, at, unit.physical_offset, DONE_SIZE_MARK, unit.tags_code)
        self._flushed_offset = min(self._flushed_offset, queue_offset)

    def delete_before(self, physical_begin: int) -> int:
        """Forget the units of records before *physical_begin*, which the log has no more; gives how many files went.

        If that is all of them, the queue is empty, and goes on counting where it is. A file goes when its last unit
        points there; the last file stays. The owner holds the lock that `append` is called under.
        """
        self.min_offset = self.first_at("physical_offset", physical_begin)  # first, so that readers look no further back
        return self._files.delete_before(self.min_offset * CQ_UNIT_SIZE)

    def truncate_behind(self, physical_end: int) -> None:
        """Forget the units of records that begin at *physical_end* or behind it."""
        kept = self.first_at("physical_offset", physical_end)
        if kept < self.max_offset:
            self._files.truncate(kept * CQ_UNIT_SIZE)
            self._open_at(kept)
            self._flushed_offset = min(self._flushed_offset, kept)

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
