"""The timer log: one small unit for each message on the wheel."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import numpy as np

from mqtemplate.delay.timers.timer_unit import (
    DONE_RECORD_SIZE,
    MAGIC_DONE,
    TIMER_UNIT_DTYPE,
    TIMER_UNIT_SIZE,
    TimerUnit,
    are_sound,
    seal_units,
    unpack_unit,
)
from mqtemplate.errors import StoreError
from mqtemplate.record.layout import MAGIC_BLANK
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue

_BLANK = struct.Struct(">iqi")
_BLANK_SIZE = _BLANK.size
assert _BLANK_SIZE == 16

_SCAN_UNITS = 1 << 16  # at once: bounds the memory that reading much of the log takes
_MARK_GAP = 4_096  # bytes between two marks that are cheaper written along than skipped


class TimerLogDamageError(StoreError):
    """A unit is not what was written there. The log can be made anew from the commit log, and is."""


class TimerLog:
    """Units, in the order they came, in files of one size.

    ::

        slot of 10:00:05           unit 0 <- unit 2 <- unit 3       (last_pos of the slot = unit 3)
        slot of 10:00:09                    unit 1

    - A position counts bytes over all files. A file ends with a blank of at least 16 bytes, so that the last
      unit of a full file always stands at the same place.
    - Units are written in the order of their records, so ``physical_offset`` ascends.
    - ``end`` is what the owner says it is: the files are zero behind it.
    - A unit before ``end`` that is damaged raises `TimerLogDamageError` whoever meets it.
    - Not thread-safe: the `TimerMessageStore` owns it.

    Args:
        files: Where the units are.
        end: Position behind the last unit.
    """

    def __init__(self, files: MappedFileQueue, end: int = 0) -> None:
        self._files = files
        self._per_file = (files.file_size - _BLANK_SIZE) // TIMER_UNIT_SIZE
        self._units_end = self._per_file * TIMER_UNIT_SIZE  # within a file
        self._marked: set[int] = set()  # first positions of files with units changed since the last `flush`
        self.end = end

    @property
    def begin(self) -> int:
        """Position of the first unit that is still there."""
        return self._files.start

    @property
    def files_end(self) -> int:
        return self._files.end

    # --- writing -------------------------------------------------------------------------------

    def next_positions(self, count: int) -> np.ndarray:
        """Where the next *count* units will stand. Makes new files, and ends full ones, if it must.

        Raises:
            StoreFullError: There is no room for another file; the log is as before.
        """
        pieces = []
        position = self.end
        while count:
            start = self._skip_blank(position)
            if start >= self._files.end:
                self._files.append_file(start - start % self._files.file_size)
                if start != position:
                    self._write_blank(position)
            taken = min(count, (self._units_end - start % self._files.file_size) // TIMER_UNIT_SIZE)
            position = start + taken * TIMER_UNIT_SIZE
            pieces.append(np.arange(start, position, TIMER_UNIT_SIZE))
            count -= taken
        return np.concatenate(pieces)

    def append(self, units: np.ndarray, positions: np.ndarray) -> None:
        """Seal units, and write them at the positions that `next_positions` gave."""
        seal_units(units)
        starts = positions - positions % self._files.file_size
        cuts = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(units)]
        for first, behind in itertools.pairwise(cuts):
            file, start = self._file_at(int(positions[first]))
            file.write(int(positions[first]) - start, units[first:behind].tobytes())
        self.end = int(positions[-1]) + TIMER_UNIT_SIZE

    def mark_done(self, positions: np.ndarray, from_ms: int = 0) -> None:
        """Note in units that nobody need look at them any more, RocketMQ neither. It lasts from the next `flush` on.

        Args:
            positions: Ascending. Where the log was cleaned away, or a unit is damaged, nothing is noted.
            from_ms: Units of slots before it are left as they are.
        """
        positions = positions[positions >= self.begin]
        units = self.gather(positions)
        chosen = (units["write_time_ms"] + units["delay_ms"] >= from_ms) & are_sound(units)
        positions, units = positions[chosen], units[chosen]
        units["magic"] |= MAGIC_DONE
        units["record_size"] = DONE_RECORD_SIZE
        seal_units(units)
        self._overwrite(positions, units)

    def _overwrite(self, positions: np.ndarray, units: np.ndarray) -> None:
        """Put units in the place of others, with what stands between those that are close together."""
        starts = positions - positions % self._files.file_size
        is_cut = (np.diff(positions) > _MARK_GAP) | (np.diff(starts) > 0)
        for first, behind in itertools.pairwise([0, *(np.flatnonzero(is_cut) + 1).tolist(), len(units)]):
            if first == behind:
                return  # there are none
            begin, end = int(positions[first]), int(positions[behind - 1]) + TIMER_UNIT_SIZE
            file, start = self._file_at(begin)
            run = np.frombuffer(bytearray(file.view[begin - start : end - start]), TIMER_UNIT_DTYPE)
            run[(positions[first:behind] - begin) // TIMER_UNIT_SIZE] = units[first:behind]
            file.write(begin - start, run.tobytes())
            self._marked.add(start)

    # --- single units --------------------------------------------------------------------------

    def read(self, position: int) -> TimerUnit | None:
        """The unit at a position; None where there is no valid one."""
        found = self._files.find(position) if position >= 0 else None
        if found is None:
            return None
        file, start = found
        at = position - start
        return None if at % TIMER_UNIT_SIZE or at >= self._units_end else unpack_unit(file.view, at)

    def find(self, physical_offset: int) -> tuple[int, TimerUnit] | None:
        """The unit of a record, and where it stands. Takes one look for each doubling of the log's length."""
        low, high = self._number(self.begin), self._number(self.end)
        while low < high:
            middle = (low + high) // 2
            position = self._position(middle)
            unit = self._sound(position)
            if unit.physical_offset == physical_offset:
                return position, unit
            if unit.physical_offset < physical_offset:
                low = middle + 1
            else:
                high = middle
        return None

    def position_after(self, physical_offset: int) -> int:
        """Where the first unit stands whose record is at *physical_offset* or behind it; `end` if none does."""
        low, high = self._number(self.begin), self._number(self.end)
        while low < high:
            middle = (low + high) // 2
            if self._sound(self._position(middle)).physical_offset < physical_offset:
                low = middle + 1
            else:
                high = middle
        return min(self._position(low), self.end)

    def last_position(self, end: int | None = None) -> int:
        """Where the last unit before *end* stands, over the blank between files; -1 for none."""
        end = self.end if end is None else end
        position = self._position(self._number(end) - 1)
        return position if end > 0 and position >= self.begin else -1

    def _number(self, position: int) -> int:
        """How many units fit before a position, in files that are all there."""
        file, within = divmod(position, self._files.file_size)
        return file * self._per_file + min(within // TIMER_UNIT_SIZE, self._per_file)

    def _position(self, number: int) -> int:
        file, within = divmod(number, self._per_file)
        return file * self._files.file_size + within * TIMER_UNIT_SIZE

    def _sound(self, position: int) -> TimerUnit:
        unit = self.read(position)
        if unit is None:
            raise TimerLogDamageError(f"timerlog: the unit at {position} is damaged")
        return unit

    # --- many units ----------------------------------------------------------------------------

    def chain(self, last_pos: int, slot_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the units of one slot stand, and they themselves, newest first, by walking back.

        Ends where the log was cleaned away.
        """
        found: list[int] = []
        position = last_pos
        while position >= self.begin and position >= 0:
            unit = self._sound(position)
            if unit.slot_ms != slot_ms or unit.previous_pos >= position:
                raise TimerLogDamageError(f"timerlog: the unit at {position} is no part of the slot of {slot_ms}")
            found.append(position)
            position = unit.previous_pos
        positions = np.array(found, np.int64)
        return positions, self.gather(positions)

    def chains(self, last_positions: np.ndarray) -> np.ndarray:
        """The units of several slots, by walking all of them back side by side."""
        pieces = []
        positions = last_positions[last_positions >= self.begin]
        while len(positions):
            units = self.gather(positions)
            if not (are_sound(units).all() and (units["previous_pos"] < positions).all()):
                raise TimerLogDamageError("timerlog: a chain of units is damaged")
            pieces.append(units)
            positions = units["previous_pos"].astype(np.int64)
            positions = positions[(positions >= self.begin) & (positions >= 0)]
        return np.concatenate(pieces) if pieces else np.empty(0, TIMER_UNIT_DTYPE)

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """The units at some positions, in any order, damaged or not."""
        units = np.empty(len(positions), TIMER_UNIT_DTYPE)
        starts = positions - positions % self._files.file_size
        for start in np.unique(starts).tolist():
            chosen = starts == start
            at = (positions[chosen] - start) // TIMER_UNIT_SIZE
            units[chosen] = np.frombuffer(self._file_at(start)[0].view, TIMER_UNIT_DTYPE, self._per_file)[at]
        return units

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """All units from one position up to another, in order: pieces of a file, each with where it begins."""
        position = max(begin, self.begin)
        while position < end and (found := self._files.find(position)) is not None:
            file, start = found
            at, stop = position - start, min(self._units_end, end - start)
            if at >= stop:
                position = start + self._files.file_size
                continue
            count = min((stop - at) // TIMER_UNIT_SIZE, _SCAN_UNITS)
            yield position, np.frombuffer(file.view, TIMER_UNIT_DTYPE, count, at)
            position += count * TIMER_UNIT_SIZE

    def scan(self, first_pos: int, last_pos: int, slot_ms: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same, oldest first and in pieces, by reading everything from the slot's first unit to its last.

        Cheaper than a walk where the units of a slot lie close together.
        """
        for position, units in self.pieces(first_pos, last_pos + TIMER_UNIT_SIZE):
            sound = are_sound(units)
            if not sound.all():
                raise TimerLogDamageError(
                    f"timerlog: the unit at {position + int(np.argmin(sound)) * TIMER_UNIT_SIZE} is damaged"
                )
            places = np.flatnonzero(units["write_time_ms"] + units["delay_ms"] == slot_ms)
            yield position + places * TIMER_UNIT_SIZE, units[places]

    # --- files ---------------------------------------------------------------------------------

    def truncate(self, end: int) -> None:
        """Forget what was written from *end* on."""
        self._files.truncate(end)
        self.end = end

    def delete_before(self, position: int) -> int:
        """Delete the files that end at *position* or before it, but never the last; gives how many went."""
        return self._files.delete_before(position)

    def file_ends(self) -> list[int]:
        """Where each file but the last ends."""
        return self._files.starts[1:]

    def flush(self, start: int, end: int) -> None:
        """Return when the units of ``start..end``, and all marks, are on the disk."""
        marked, self._marked = self._marked, set()
        try:
            self._files.flush(start, end)
            for file_start in sorted(marked):
                if file_start + self._files.file_size <= start or file_start >= end:
                    self._files.flush(file_start, file_start + 1)
        except BaseException:
            self._marked |= marked
            raise

    def close(self) -> None:
        self._files.close()

    def _file_at(self, position: int) -> tuple[MappedFile, int]:
        found = self._files.find(position)
        assert found is not None, "positions come from the log itself"
        return found

    def _skip_blank(self, position: int) -> int:
        """The position itself, or the next file's first if no unit and blank fit behind it."""
        within = position % self._files.file_size
        return position if within < self._units_end else position - within + self._files.file_size

    def _write_blank(self, position: int) -> None:
        found = self._files.find(position)
        if found is not None:
            file, start = found
            at = position - start
            file.write(at, _BLANK.pack(self._files.file_size - at, 0, MAGIC_BLANK))
