"""One index file: a hash table from keys to records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.columns import count_leading
from mqtemplate.store import layout
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.layout import INDEX_UNIT_SIZE, IndexHeader

_MAX_SECONDS = 0x7FFF_FFFF
_CLOCK_STEP_MS = 3_600_000
"""Largest step back of the clock, in ms, that is assumed where RocketMQ wrote. Those of our own clock are noted."""


class KeyRows(NamedTuple):
    """Keys of records in the order of the log: three arrays of one length."""

    key_hashes: NDArray[np.int32]
    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]

    def part(self, start: int, end: int | None = None) -> KeyRows:
        """Return some of the rows."""
        key_hashes, physical_offsets, timestamps = self
        return KeyRows(key_hashes[start:end], physical_offsets[start:end], timestamps[start:end])


class IndexFile:
    """A hash table in a file: a header, slots, and units. The units of a slot form a chain, newest first.

    - Units are written at once. Header and slots of the current file are in memory. `flush` writes them after the
      units, so the header on the disk never counts units that are not there.
    - Units are in the order of the log. A chain only leads to units with smaller numbers, so it ends, whatever the file
      contains.
    - Not thread-safe: the `IndexService` owns it.

    Args:
        file: `layout.index_file_size` bytes.
        name: Local time of its creation, 17 digits.
        slots_total: ``max_hash_slot_num``.
        units_total: ``max_index_num``. Unit 0 is never used, so there is room for one key less.

    Attributes:
        flushed: The header on the disk.
    """

    def __init__(self, file: MappedFile, name: str, slots_total: int, units_total: int) -> None:
        assert file.size == layout.index_file_size(slots_total, units_total)
        self._file = file
        self.name = name
        self._slots_total = slots_total
        self._units_total = units_total
        self._units_at = layout.index_file_size(slots_total, 0)
        self._slots: NDArray[np.int32] | None = None
        self.header = layout.unpack_index_header(file.view)
        self.flushed = self.header
        self.is_closed = False

    def start_after(self, previous: IndexHeader) -> None:
        """Start empty, at the end of the previous file."""
        timestamp, physical_offset = previous.end_timestamp, previous.end_physical_offset
        self._slots = np.zeros(self._slots_total, np.int32)
        self.header = IndexHeader(timestamp, timestamp, physical_offset, physical_offset)
        self._file.allocate(self._units_at)
        self._file.write(0, layout.pack_index_header(self.header))

    @property
    def is_full(self) -> bool:
        """True if no key fits any more."""
        return self.header.index_count >= self._units_total

    @property
    def unflushed(self) -> int:
        """Number of units that a power failure may remove."""
        return self.header.index_count - self.flushed.index_count

    # --- writing -------------------------------------------------------------------------------

    def append(self, rows: KeyRows) -> int:
        """Write as many rows as fit. Return their number.

        The times in the file count from its first record. (RocketMQ counts the seconds of the first unit from the end
        of the previous file. That is too late by the pause between the two.)
        """
        first = self.header.index_count
        count = min(len(rows.key_hashes), self._units_total - first)
        if count <= 0:
            return 0
        rows = rows.part(0, count)
        begin_ms, begin_offset = self.header.begin_timestamp, self.header.begin_physical_offset
        if first == 1:
            begin_ms, begin_offset = int(rows.timestamps[0]), int(rows.physical_offsets[0])
        slots = rows.key_hashes % self._slots_total
        order = np.argsort(slots, kind="stable")
        numbers = np.arange(first, first + count, dtype=np.int32)
        units = np.empty(count, layout.INDEX_UNIT_DTYPE)
        units["key_hash"] = rows.key_hashes
        units["physical_offset"] = rows.physical_offsets
        units["seconds"] = np.clip((rows.timestamps - begin_ms) // 1_000, 0, _MAX_SECONDS)
        starts, previous = self._chain(slots[order], numbers[order])
        units["previous"][order] = previous
        self._file.write(self._units_at + first * INDEX_UNIT_SIZE, units.tobytes())

        ends = np.append(starts[1:], count) - 1
        self._slot_table()[slots[order][ends]] = numbers[order][ends]
        self.header = IndexHeader(
            begin_ms,
            int(rows.timestamps[-1]),
            begin_offset,
            int(rows.physical_offsets[-1]),
            self.header.hash_slot_count + int(np.count_nonzero(previous[starts] == 0)),
            first + count,
        )
        return count

    def _chain(
        self, slots: NDArray[np.int32], numbers: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return where the units of each slot start, and the previous unit of each. The units are sorted by slot."""
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        previous = np.empty_like(numbers)
        previous[1:] = numbers[:-1]
        newest = self._slot_table()[slots[starts]]
        previous[starts] = np.where((newest > 0) & (newest < self.header.index_count), newest, 0)
        return starts, previous

    def _slot_table(self) -> NDArray[np.int32]:
        """Return the slots, in memory: keys fall into any slot, and writing to a mapped page may block on the disk."""
        if self._slots is None:
            stored = np.frombuffer(self._file.view[layout.INDEX_HEADER_SIZE : self._units_at], layout.INDEX_SLOT_DTYPE)
            self._slots = stored.astype(np.int32)
        return self._slots

    def keep_before(self, physical_end: int) -> int:
        """Keep the leading units that are valid and whose records start before *physical_end*.

        Slots and chains are rebuilt from these units. The time of the last one is then known to the second only.

        Returns:
            The number of removed units.
        """
        header = self.header
        kept = self._valid_rows(physical_end)
        removed = header.index_count - 1 - len(kept.key_hashes)
        self._slots = np.zeros(self._slots_total, np.int32)
        begin_ms, begin_offset = header.begin_timestamp, header.begin_physical_offset
        self.header = IndexHeader(begin_ms, begin_ms, begin_offset, begin_offset)
        self.append(kept)
        if removed == 0:  # then the header has the exact time
            self.header = self.header._replace(end_timestamp=header.end_timestamp)
        self.flushed = IndexHeader()
        return removed

    def _valid_rows(self, physical_end: int) -> KeyRows:
        count = min(self.header.index_count, self._units_total)
        at = self._units_at + INDEX_UNIT_SIZE
        units = np.frombuffer(self._file.view[at : at + max(0, count - 1) * INDEX_UNIT_SIZE], layout.INDEX_UNIT_DTYPE)
        offsets = units["physical_offset"].astype(np.int64)
        is_valid = (units["key_hash"] >= 0) & (units["seconds"] >= 0) & (offsets < physical_end)
        is_valid &= offsets >= np.append(self.header.begin_physical_offset, offsets[:-1])[: len(offsets)]
        valid = count_leading(is_valid)
        seconds = units["seconds"][:valid].astype(np.int64)
        seconds[:1] = 0  # in RocketMQ's files it counts from another start, see `append`
        return KeyRows(
            units["key_hash"][:valid].astype(np.int32),
            offsets[:valid],
            self.header.begin_timestamp + seconds * 1_000,
        )

    def flush(self) -> None:
        """Return when units, header and slots are on the disk."""
        if self.header == self.flushed:
            return
        self._file.flush()  # the units first
        self._file.write(0, layout.pack_index_header(self.header))
        if self._slots is not None:
            self._file.write(layout.INDEX_HEADER_SIZE, self._slots.astype(layout.INDEX_SLOT_DTYPE).tobytes())
        self._file.flush()
        self.flushed = self.header
        if self.is_full:
            self._slots = None

    # --- reading -------------------------------------------------------------------------------

    def may_contain(self, begin_ms: int, end_ms: int) -> bool:
        """Return True if records of this span may be in the file."""
        header = self.header
        return header.begin_timestamp - _CLOCK_STEP_MS <= end_ms and begin_ms <= header.end_timestamp + _CLOCK_STEP_MS

    def newest_unit(self, key_hash: int) -> int:
        """Return the first unit of the chain of a key; 0 for none."""
        slot = key_hash % self._slots_total
        if self._slots is not None:
            return int(self._slots[slot])
        at = layout.INDEX_HEADER_SIZE + slot * layout.INDEX_SLOT_DTYPE.itemsize
        return int.from_bytes(self._file.view[at : at + layout.INDEX_SLOT_DTYPE.itemsize], "big", signed=True)

    def follow(self, key_hash: int, unit: int, begin_ms: int, end_ms: int, max_units: int) -> tuple[list[int], int]:
        """Follow a chain, and return the physical offsets of the units with this hash, newest first.

        Units that were certainly stored outside ``begin_ms..end_ms`` are left out.

        Args:
            unit: First unit: `newest_unit`, or the result of the previous call.
            max_units: Number of units to inspect.

        Returns:
            The offsets, and the unit to continue with; 0 at the end of the chain.
        """
        found: list[int] = []
        view, units_at = self._file.view, self._units_at
        file_begin_ms = self.header.begin_timestamp
        limit = self._units_total
        while max_units > 0 and 0 < unit < limit:
            max_units -= 1
            stored_hash, physical_offset, seconds, previous = layout.unpack_index_unit(
                view, units_at + unit * INDEX_UNIT_SIZE
            )
            # Second 0 also has the records of a clock that was set back, and unit 1 counts from another start.
            at_ms = file_begin_ms + seconds * 1_000
            has_time = unit > 1 and 0 < seconds < _MAX_SECONDS
            if stored_hash == key_hash and (not has_time or begin_ms - 1_000 < at_ms <= end_ms):
                found.append(physical_offset)
            if has_time and at_ms + _CLOCK_STEP_MS < begin_ms:
                return found, 0
            unit, limit = previous, unit
        return found, unit if 0 < unit < limit else 0

    def close(self) -> None:
        """Unmap the file."""
        self.is_closed = True
        self._file.close()

    def delete(self) -> None:
        """Unmap and remove the file."""
        self.is_closed = True
        self._file.delete()
