"""One index file: from the hash of a key to the records that have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.java_hash import java_string_hashes
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.layout import (
    INDEX_HEADER_SIZE,
    INDEX_SLOT_DTYPE,
    INDEX_UNIT_DTYPE,
    INDEX_UNIT_SIZE,
    IndexHeader,
    index_file_size,
    pack_index_header,
    unpack_index_header,
    unpack_index_unit,
)

_MOST_SECONDS = 0x7FFF_FFFF
_CLOCK_STEP_MS = 3_600_000
"""How far back a clock may have been set while upstream wrote; here store timestamps never go back."""


class KeyRows(NamedTuple):
    """Keys of records in the order of the log: three arrays of one length."""

    key_hashes: NDArray[np.int32]
    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]

    def part(self, start: int, end: int | None = None) -> KeyRows:
        key_hashes, physical_offsets, timestamps = self
        return KeyRows(key_hashes[start:end], physical_offsets[start:end], timestamps[start:end])


def index_key_hashes(keys: Sequence[str]) -> NDArray[np.int32]:
    """What an index file keeps of keys, each as ``topic#key``. Source: ``IndexFile.indexKeyHashMethod``."""
    return to_index_hashes(java_string_hashes(keys))


def to_index_hashes(hashes: NDArray[np.int32]) -> NDArray[np.int32]:
    """What becomes of the hashes of keys."""
    hashes = np.abs(hashes)
    hashes[hashes < 0] = 0  # the smallest number has no positive counterpart
    return hashes


class IndexFile:
    """A hash table in a file: a header, slots, and units that are chained by slot, the newest first.

    - Units are written as they come; header and slots of the file that is written to are kept in memory, and go to
      the file with `flush`, the units before the header. So the header on the disk never tells of units that are not.
    - Units lie in the order of the log, and a chain leads from a unit to one with a smaller number only, whatever
      the file holds.
    - Not thread-safe: the `IndexService` owns it.

    Args:
        file: `layout.index_file_size` bytes.
        name: Local time of its making, 17 digits.
        slots_total: ``max_hash_slot_num``.
        units_total: ``max_index_num``; unit 0 is never used, so one key less fits in.
    """

    def __init__(self, file: MappedFile, name: str, slots_total: int, units_total: int) -> None:
        assert file.size == index_file_size(slots_total, units_total)
        self._file = file
        self.name = name
        self._slots_total = slots_total
        self._units_total = units_total
        self._units_at = index_file_size(slots_total, 0)
        self._slots: NDArray[np.int32] | None = None
        self.header = unpack_index_header(file.view)
        self.flushed = self.header
        self.is_closed = False

    def begin_behind(self, previous: IndexHeader) -> None:
        """Start empty, where the file before ends."""
        timestamp, physical_offset = previous.end_timestamp, previous.end_physical_offset
        self._slots = np.zeros(self._slots_total, np.int32)
        self.header = IndexHeader(timestamp, timestamp, physical_offset, physical_offset)
        self._file.write(0, pack_index_header(self.header))

    @property
    def is_full(self) -> bool:
        return self.header.index_count >= self._units_total

    @property
    def unflushed(self) -> int:
        """How many units a power failure could take."""
        return self.header.index_count - self.flushed.index_count

    # --- writing -------------------------------------------------------------------------------

    def append(self, rows: KeyRows) -> int:
        """Write as many of the rows as there is room for; gives how many.

        The first record dates the file. (RocketMQ counts the seconds of the first unit from the end of the file before,
        which dates it too late by the pause between the two.)
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
        units = np.empty(count, INDEX_UNIT_DTYPE)
        units["key_hash"] = rows.key_hashes
        units["physical_offset"] = rows.physical_offsets
        units["seconds"] = np.clip((rows.timestamps - begin_ms) // 1_000, 0, _MOST_SECONDS)
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
        """For units sorted by slot: where each slot's run of them starts, and the unit that comes before each."""
        is_start = np.empty(len(slots), bool)
        is_start[0] = True
        np.not_equal(slots[1:], slots[:-1], out=is_start[1:])
        starts = np.flatnonzero(is_start)
        previous = np.empty_like(numbers)
        previous[1:] = numbers[:-1]
        newest = self._slot_table()[slots[starts]]
        previous[starts] = np.where((newest > 0) & (newest < self.header.index_count), newest, 0)
        return starts, previous

    def _slot_table(self) -> NDArray[np.int32]:
        """The slots, in memory: keys fall anywhere, and writing into a mapped page may wait for the disk."""
        if self._slots is None:
            stored = np.frombuffer(self._file.view[INDEX_HEADER_SIZE : self._units_at], INDEX_SLOT_DTYPE)
            self._slots = stored.astype(np.int32)
        return self._slots

    def keep_before(self, physical_end: int) -> int:
        """Keep the units from the first on that are sound and whose records begin before *physical_end*.

        Slots and chains are made anew from what is kept. The last one's time is known to the second, then.

        Returns:
            How many units went.
        """
        header = self.header
        kept = self._sound_rows(physical_end)
        gone = header.index_count - 1 - len(kept.key_hashes)
        self._slots = np.zeros(self._slots_total, np.int32)
        begin = (header.begin_timestamp, header.begin_physical_offset)
        self.header = IndexHeader(begin[0], begin[0], begin[1], begin[1])
        self.append(kept)
        if gone == 0:  # then the end's time stood there
            self.header = self.header._replace(end_timestamp=header.end_timestamp)
        self.flushed = IndexHeader()
        return gone

    def _sound_rows(self, physical_end: int) -> KeyRows:
        count = min(self.header.index_count, self._units_total)
        at = self._units_at + INDEX_UNIT_SIZE
        units = np.frombuffer(self._file.view[at : at + max(0, count - 1) * INDEX_UNIT_SIZE], INDEX_UNIT_DTYPE)
        offsets = units["physical_offset"].astype(np.int64)
        is_sound = (units["key_hash"] >= 0) & (units["seconds"] >= 0) & (offsets < physical_end)
        is_sound &= offsets >= np.append(self.header.begin_physical_offset, offsets[:-1])[: len(offsets)]
        sound = len(units) if is_sound.all() else int(np.argmin(is_sound))
        seconds = units["seconds"][:sound].astype(np.int64)
        seconds[:1] = 0  # upstream counts it from another begin
        return KeyRows(
            units["key_hash"][:sound].astype(np.int32),
            offsets[:sound],
            self.header.begin_timestamp + seconds * 1_000,
        )

    def flush(self) -> None:
        """Return when header, slots and units are on the disk."""
        if self.header == self.flushed:
            return
        self._file.flush()
        self._file.write(0, pack_index_header(self.header))
        if self._slots is not None:
            self._file.write(INDEX_HEADER_SIZE, self._slots.astype(INDEX_SLOT_DTYPE).tobytes())
        self._file.flush()
        self.flushed = self.header
        if self.is_full:
            self._slots = None

    # --- reading -------------------------------------------------------------------------------

    def may_hold(self, begin_ms: int, end_ms: int) -> bool:
        """Whether records of this span may be in it."""
        header = self.header
        return header.begin_timestamp - _CLOCK_STEP_MS <= end_ms and begin_ms <= header.end_timestamp + _CLOCK_STEP_MS

    def newest_unit(self, key_hash: int) -> int:
        """Where the chain of a key begins; 0 for none."""
        slot = key_hash % self._slots_total
        if self._slots is not None:
            return int(self._slots[slot])
        at = INDEX_HEADER_SIZE + slot * INDEX_SLOT_DTYPE.itemsize
        return int.from_bytes(self._file.view[at : at + INDEX_SLOT_DTYPE.itemsize], "big", signed=True)

    def walk(self, key_hash: int, unit: int, begin_ms: int, end_ms: int, hops: int) -> tuple[list[int], int]:
        """Physical offsets of units with this hash, newest first, that may have been stored in ``begin_ms..end_ms``.

        Args:
            unit: Where to begin: `newest_unit`, or what the call before gave.
            hops: How many units to look at.

        Returns:
            The offsets, and the unit to go on from; 0 at the chain's end.
        """
        found: list[int] = []
        view, units_at = self._file.view, self._units_at
        file_begin_ms = self.header.begin_timestamp
        longest = self._units_total
        while hops > 0 and 0 < unit < longest:
            hops -= 1
            stored_hash, physical_offset, seconds, previous = unpack_index_unit(view, units_at + unit * INDEX_UNIT_SIZE)
            # The first second holds what a clock that was set back has dated, and unit 1 counts from another begin.
            at_ms = file_begin_ms + seconds * 1_000
            is_dated = unit > 1 and 0 < seconds < _MOST_SECONDS
            if stored_hash == key_hash and (not is_dated or begin_ms - 1_000 < at_ms <= end_ms):
                found.append(physical_offset)
            if is_dated and at_ms + _CLOCK_STEP_MS < begin_ms:
                return found, 0
            unit, longest = previous, unit
        return found, unit if 0 < unit < longest else 0

    def close(self) -> None:
        self.is_closed = True
        self._file.close()

    def delete(self) -> None:
        self.is_closed = True
        self._file.delete()
