"""The timer log: one small unit for each message on the wheel."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mqtemplate.record import MAGIC_BLANK
from mqtemplate.store.mapped_file_queue import MappedFileQueue

__all__ = [
    "MAGIC_DEFAULT",
    "MAGIC_DELETE",
    "MAGIC_ROLL",
    "TIMER_UNIT_DTYPE",
    "TIMER_UNIT_SIZE",
    "TimerLog",
    "TimerUnit",
]

MAGIC_DEFAULT = 1
MAGIC_ROLL = 2
MAGIC_DELETE = 4
_MAGIC_MASK = 0xF


class TimerUnit(NamedTuple):
    """One message on the wheel. Big-endian, 52 bytes.

    ==  ==  ===============  =================================================================
     0  i4  size             52
     4  i8  previous_pos     timer log offset of the unit before in the same slot, -1 for none
    12  i4  magic            bits: 1 default, 2 roll (parked, to be set on again), 4 delete marker
    16  i8  write_time_ms    the clock when it was written, rounded down to a tick
    24  i4  delay_ms         slot time minus ``write_time_ms``
    28  i8  physical_offset  the record in the timer topic
    36  i4  record_size      bytes of that record
    40  i4  topic_hash       Java hash of the real topic, 0 if there is none
    44  i8  deliver_ms       ours: the exact due time; upstream writes 0 and reads nothing here
    ==  ==  ===============  =================================================================

    Source: RocketMQ ``store: TimerLog``.
    """

    size: int
    previous_pos: int
    magic: int
    write_time_ms: int
    delay_ms: int
    physical_offset: int
    record_size: int
    topic_hash: int
    deliver_ms: int

    @property
    def slot_ms(self) -> int:
        return self.write_time_ms + self.delay_ms


_UNIT = struct.Struct(">iqiqiqiiq")
TIMER_UNIT_SIZE = _UNIT.size
assert TIMER_UNIT_SIZE == 52
TIMER_UNIT_DTYPE = np.dtype(
    [
        ("size", ">i4"),
        ("previous_pos", ">i8"),
        ("magic", ">i4"),
        ("write_time_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_size", ">i4"),
        ("topic_hash", ">i4"),
        ("deliver_ms", ">i8"),
    ]
)
assert TIMER_UNIT_DTYPE.itemsize == TIMER_UNIT_SIZE

_BLANK = struct.Struct(">iqi")
_BLANK_SIZE = _BLANK.size
assert _BLANK_SIZE == 16

_SCAN_UNITS = 1 << 16  # at once: bounds the memory that reading a large slot takes


class TimerLog:
    """Units, in the order they came, in files of one size.

    ::

        slot of 10:00:05           unit 0 <- unit 2 <- unit 3       (last_pos of the slot = unit 3)
        slot of 10:00:09                    unit 1

    - A position counts bytes over all files. A file ends with a blank of at least 16 bytes, so that the last
      unit of a full file always stands at the same place.
    - Units are written in the order of their records, so ``physical_offset`` ascends.
    - ``end`` is what the owner says it is: the files are zero behind it.
    - Not thread-safe: the `TimerMessageStore` owns it.

    Args:
        files: Where the units are.
        end: Position behind the last unit.
    """

    def __init__(self, files: MappedFileQueue, end: int = 0) -> None:
        self._files = files
        self._per_file = (files.file_size - _BLANK_SIZE) // TIMER_UNIT_SIZE
        self._units_end = self._per_file * TIMER_UNIT_SIZE  # within a file
        self.end = end

    @property
    def begin(self) -> int:
        """Position of the first unit that is still there."""
        return self._files.begin

    @property
    def files_end(self) -> int:
        return self._files.end

    def next_position(self) -> int:
        """Where the next unit will stand. Makes a new file, and ends the full one, if it must.

        Raises:
            StoreFullError: There is no room for another file; the log is as before.
        """
        position = self._skip_blank(self.end)
        if position >= self._files.end:
            self._files.append_file(position - position % self._files.file_size)
            if position != self.end:
                self._write_blank()
        self.end = position
        return position

    def append(self, unit: TimerUnit) -> None:
        """Write a unit at `next_position`, which must have been asked for."""
        found = self._files.find(self.end)
        assert found is not None, "next_position() makes the file"
        file, start = found
        _UNIT.pack_into(file.view, self.end - start, *unit)
        self.end += TIMER_UNIT_SIZE

    def read(self, position: int) -> TimerUnit | None:
        """The unit at a position; None where there is no valid one."""
        found = self._files.find(position) if position >= 0 else None
        if found is None:
            return None
        file, start = found
        at = position - start
        if at % TIMER_UNIT_SIZE or at >= self._units_end:
            return None
        unit = TimerUnit._make(_UNIT.unpack_from(file.view, at))
        return unit if unit.size == TIMER_UNIT_SIZE and unit.magic & ~_MAGIC_MASK == 0 else None

    def last_position(self, end: int | None = None) -> int:
        """Where the last unit before *end* stands, over the blank between files; -1 for none."""
        end = self.end if end is None else end
        within = end % self._files.file_size
        position = end - TIMER_UNIT_SIZE if within else end - self._files.file_size + self._units_end - TIMER_UNIT_SIZE
        if within > self._units_end:
            position = end - within + self._units_end - TIMER_UNIT_SIZE
        return position if end > 0 and position >= self.begin else -1

    def chain(self, last_pos: int) -> np.ndarray:
        """The units of one slot, newest first, by walking back. Ends where the log was cleaned away."""
        found: list[bytes] = []
        position = last_pos
        while (unit := self.read(position)) is not None:
            found.append(_UNIT.pack(*unit))
            if unit.previous_pos >= position:
                break  # a damaged chain must not become a ring
            position = unit.previous_pos
        return np.frombuffer(b"".join(found), TIMER_UNIT_DTYPE)

    def scan(self, first_pos: int, last_pos: int, slot_ms: int) -> Iterator[np.ndarray]:
        """The units of one slot, oldest first and in pieces, by reading everything from its first to its last.

        Cheaper than a walk where the units of a slot lie close together.
        """
        position = max(first_pos, self.begin)
        while position <= last_pos and (found := self._files.find(position)) is not None:
            file, start = found
            at, stop = position - start, min(self._units_end, last_pos + TIMER_UNIT_SIZE - start)
            if at >= stop:
                position = start + self._files.file_size
                continue
            count = min((stop - at) // TIMER_UNIT_SIZE, _SCAN_UNITS)
            units = np.frombuffer(file.view, TIMER_UNIT_DTYPE, count, at)
            valid = (units["size"] == TIMER_UNIT_SIZE) & (units["magic"] & ~_MAGIC_MASK == 0)
            yield units[valid & (units["write_time_ms"] + units["delay_ms"] == slot_ms)]
            position += count * TIMER_UNIT_SIZE

    def truncate(self, end: int) -> None:
        """Forget what was written from *end* on."""
        self._files.truncate(end)
        self.end = end

    def flush(self, start: int, end: int) -> None:
        self._files.flush(start, end)

    def close(self) -> None:
        self._files.close()

    def _skip_blank(self, position: int) -> int:
        """The position itself, or the next file's first if no unit and blank fit behind it."""
        within = position % self._files.file_size
        return position if within < self._units_end else position - within + self._files.file_size

    def _write_blank(self) -> None:
        found = self._files.find(self.end)
        if found is not None:
            file, start = found
            at = self.end - start
            _BLANK.pack_into(file.view, at, self._files.file_size - at, 0, MAGIC_BLANK)
