"""The timer log: one small unit for each message on the wheel."""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_left
from collections.abc import Iterator
from mmap import mmap
from typing import NamedTuple

import numpy as np

from mqtemplate.errors import StoreError
from mqtemplate.record.layout import MAGIC_BLANK
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue


class Magic:
    """Bits of ``TimerUnit.magic``. Source: RocketMQ ``TimerMessageStore.Magic.DEFAULT``, ….

    ``DONE`` is ours: the message is not pending here. RocketMQ accepts the bit and gives it no meaning.
    """

    DEFAULT = 1
    ROLL = 2
    DELETE = 4
    DONE = 8
    MASK = 0xF


DONE_RECORD_SIZE = 1
"""Ours, written beside `Magic.DONE`: RocketMQ reads no record of one byte, so it skips the unit like a lost message."""


class TimerUnit(NamedTuple):
    """One message on the wheel. Big-endian, 52 bytes.

    ==  ==  ===============  =================================================================
     0  i4  size             52
     4  i8  previous_pos     timer log offset of the previous unit of the slot, -1 for none
    12  i4  magic            bits: 1 default, 2 roll (parked, to be rolled), 4 delete marker, 8 done
    16  i8  write_time_ms    the clock when it was written, rounded down to a tick; a message with a priority has 1 ms
                             less, and 1 ms more in ``delay_ms``, see `have_priority`
    24  i4  delay_ms         slot time minus ``write_time_ms``
    28  i8  physical_offset  the record in the timer topic
    36  i4  record_size      bytes of that record; `DONE_RECORD_SIZE` once it is marked as done
    40  i4  topic_hash       Java hash of the real topic, 0 without one
    44  i8  tail             ours, see `seal_units`; RocketMQ writes 0 and does not read it
    ==  ==  ===============  =================================================================

    ``tail`` has the exact due time (ms) in its low 44 bits, 0 if only the record has it. The 20 bits above are a check
    of everything else.

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
    tail: int

    @property
    def slot_ms(self) -> int:
        """Slot that the unit is linked to."""
        return self.write_time_ms + self.delay_ms


_FORMAT = "iqiqiqiiq"  # i: 4 bytes, q: 8 bytes, for struct and for numpy
_UNIT = struct.Struct(f">{_FORMAT}")
TIMER_UNIT_SIZE = _UNIT.size
TIMER_UNIT_DTYPE = np.dtype([(name, f">{kind}") for name, kind in zip(TimerUnit._fields, _FORMAT, strict=True)])
assert TIMER_UNIT_SIZE == TIMER_UNIT_DTYPE.itemsize == 52

_DELIVER_BITS = 44
MAX_DELIVER_MS = (1 << _DELIVER_BITS) - 1
"""The latest due time that fits into a unit, in the year 2527."""
_MASK_64 = (1 << 64) - 1

# The same 52 bytes as words: five of 8 bytes, ``topic_hash``, ``tail``. Each is multiplied by an odd number without
# long runs of equal bits. So each single wrong bit of a word changes the high 20 bits of the sum, which are the check.
_WORDS = struct.Struct(">5QIQ")
_WORDS_DTYPE = np.dtype([("front", ">u8", 5), ("topic_hash", ">u4"), ("tail", ">u8")])
_FACTORS = tuple(0x9E3779B97F4A7C15 * factor & _MASK_64 for factor in (1, 3, 7, 13, 29, 37, 41))
_FACTOR_ARRAY = np.array(_FACTORS, np.uint64)


def unpack_unit(data: bytes | mmap, at: int = 0) -> TimerUnit | None:
    """Return the unit at *at*; None if it is missing or damaged."""
    unit = TimerUnit._make(_UNIT.unpack_from(data, at))
    if unit.size != TIMER_UNIT_SIZE or unit.magic & ~Magic.MASK:
        return None
    if unit.tail:  # RocketMQ's units have no check
        # The same sum as in `_checks`. For a single unit numpy takes ten times as long.
        *words, tail = _WORDS.unpack_from(data, at)
        words.append(tail & MAX_DELIVER_MS)
        total = sum([word * factor for word, factor in zip(words, _FACTORS, strict=True)]) & _MASK_64
        if tail >> _DELIVER_BITS != max(total >> _DELIVER_BITS, 1):
            return None
    return unit


def deliver_times(units: np.ndarray) -> np.ndarray:
    """Return the due time of each unit; 0 if only the record has it."""
    return np.asarray(units["tail"].astype(np.int64) & MAX_DELIVER_MS)


def slots_of(units: np.ndarray) -> np.ndarray:
    """Return `TimerUnit.slot_ms` of each unit."""
    return np.asarray(units["write_time_ms"].astype(np.int64) + units["delay_ms"])


def have_priority(units: np.ndarray, precision_ms: int) -> np.ndarray:
    """Return for each unit whether its message has a priority above 0, as far as the unit shows it.

    RocketMQ uses only the sum of write time and delay, and all bits of ``magic`` are taken: it stops its recovery at a
    unit with a further one (``TimerMessageStore.isMagicOK``). Its own units, and ticks of 1 ms, never show it.
    """
    if precision_ms < 2:
        return np.zeros(len(units), np.bool_)
    return np.asarray(units["write_time_ms"].astype(np.int64) % precision_ms == precision_ms - 1)


def create_units(
    arrivals: np.ndarray, slots_ms: np.ndarray, magic: np.ndarray, write_ms: int, precision_ms: int
) -> np.ndarray:
    """Return the units of messages, given as `ARRIVAL_DTYPE`, without their ``previous_pos`` and check."""
    units = np.empty(len(arrivals), TIMER_UNIT_DTYPE)
    # The slot may be before the write time, if the message is late, or more than four signed bytes after it, if the
    # clock was set back. Then the write time is adjusted: only its sum with the delay has a meaning.
    max_delay_ms = ((1 << 31) - 1) // precision_ms * precision_ms
    writes_ms = np.maximum(np.minimum(write_ms, slots_ms), slots_ms - max_delay_ms)
    if precision_ms > 1:
        writes_ms -= arrivals["has_priority"]
    units["size"] = TIMER_UNIT_SIZE
    units["magic"] = magic
    units["write_time_ms"] = writes_ms
    units["delay_ms"] = slots_ms - writes_ms
    units["physical_offset"] = arrivals["physical_offset"]
    units["record_size"] = arrivals["size"]
    units["topic_hash"] = arrivals["topic_hash"]
    fits = (arrivals["deliver_ms"] >= 0) & (arrivals["deliver_ms"] <= MAX_DELIVER_MS)
    units["tail"] = np.where(fits, arrivals["deliver_ms"], 0)
    return units


def seal_units(units: np.ndarray) -> None:
    """Write the check of each unit beside the due time in ``tail``."""
    deliver = deliver_times(units)
    units["tail"] = deliver  # clears an old check
    units["tail"] = deliver.view(np.uint64) | (_checks(units) << np.uint64(_DELIVER_BITS))


def are_valid(units: np.ndarray) -> np.ndarray:
    """Return for each unit whether it is one and undamaged. RocketMQ's units have no check; their form is compared."""
    has_form = (units["size"] == TIMER_UNIT_SIZE) & (units["magic"] & ~Magic.MASK == 0)
    found = units["tail"].astype(np.int64).view(np.uint64) >> np.uint64(_DELIVER_BITS)
    return np.asarray(has_form & ((found == _checks(units)) | (units["tail"] == 0)))


def _checks(units: np.ndarray) -> np.ndarray:
    """Return the check of each unit, never 0. The check that is stored in ``tail`` is left out of the sum."""
    words = np.ascontiguousarray(units).view(_WORDS_DTYPE)
    sums = words["topic_hash"] * _FACTOR_ARRAY[5] + (words["tail"] & np.uint64(MAX_DELIVER_MS)) * _FACTOR_ARRAY[6]
    front = words["front"]
    for index in range(5):
        sums += front[:, index] * _FACTOR_ARRAY[index]
    return np.asarray(np.maximum(sums >> np.uint64(_DELIVER_BITS), np.uint64(1)))


_BLANK = struct.Struct(">iqi")  # bytes to the end of the file, 0, magic. Source: RocketMQ ``TimerLog``
_BLANK_SIZE = _BLANK.size
assert _BLANK_SIZE == 16

_PHYSICAL_OFFSET = struct.Struct(">q")
_OFFSET_AT = 28  # of `TimerUnit.physical_offset`

MIN_TIMER_LOG_SIZE = TIMER_UNIT_SIZE + _BLANK_SIZE
"""Bytes of a file that has space for one unit."""

_SCAN_UNITS = 1 << 16  # units in one piece: limits the memory for reading a large part of the log
_MARK_GAP = 4_096  # bytes between two marked units; up to this, one write of both is cheaper than two (measured)
_DENSE = 32
"""Units of other slots for each unit of a slot. Up to this, reading all of them is faster than following the chain."""
_MANY = 64
"""Units of a slot. Up to this, many slots are faster to read by following all their chains at once."""


class TimerLogDamageError(StoreError):
    """A unit is damaged. The files are rebuilt from the commit log when the broker starts the next time."""


class TimerLog:
    """Units in order of arrival, in files of one size.

    ::

        slot of 10:00:05           unit 0 <- unit 2 <- unit 3       (last_pos of the slot = unit 3)
        slot of 10:00:09                    unit 1

    - A position counts bytes over all files. A file ends with a blank of at least 16 bytes, so the last unit of a full
      file is always at the same position within the file.
    - Units are written in the order of their records, so ``physical_offset`` ascends.
    - ``end`` is set by the owner. The files are zero after it.
    - Reading a damaged unit before ``end`` raises `TimerLogDamageError`.
    - Not thread-safe: the `TimerMessageStore` holds its lock.

    Attributes:
        end: Position after the last unit.
    """

    def __init__(self, files: MappedFileQueue) -> None:
        self._files = files
        self._per_file = (files.file_size - _BLANK_SIZE) // TIMER_UNIT_SIZE
        self._units_end = self._per_file * TIMER_UNIT_SIZE  # within a file
        self._marked: set[int] = set()  # starts of files with units that were marked since the last `flush`
        self.end = 0
        self._found = -1  # position of the last unit that `find` found

    @property
    def start(self) -> int:
        """Position of the first unit that was not deleted."""
        return self._files.start

    @property
    def files_end(self) -> int:
        """Position after the last file."""
        return self._files.end

    # --- writing -------------------------------------------------------------------------------

    def next_positions(self, count: int) -> np.ndarray:
        """Return the positions of the next *count* units. Create new files, and end full ones, as needed.

        Raises:
            StoreFullError: There is no room for another file. The log is unchanged.
        """
        pieces = []
        position = self.end
        while count:
            start = self._skip_blank(position)
            if start >= self._files.end:
                self._files.append_file(start - start % self._files.file_size)
                if start != position:
                    file, file_start = self._file_at(position)
                    remaining = self._files.file_size - (position - file_start)
                    file.allocate(position - file_start + _BLANK_SIZE)
                    file.write(position - file_start, _BLANK.pack(remaining, 0, MAGIC_BLANK))
            taken = min(count, (self._units_end - start % self._files.file_size) // TIMER_UNIT_SIZE)
            position = start + taken * TIMER_UNIT_SIZE
            file, file_start = self._file_at(start)
            file.allocate(position - file_start)
            pieces.append(np.arange(start, position, TIMER_UNIT_SIZE))
            count -= taken
        return np.concatenate(pieces)

    def append(self, units: np.ndarray, positions: np.ndarray) -> None:
        """Seal units, and write them at the positions that `next_positions` returned."""
        seal_units(units)
        starts = positions - positions % self._files.file_size
        cuts = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(units)]
        for first, end in itertools.pairwise(cuts):
            file, start = self._file_at(int(positions[first]))
            file.write(int(positions[first]) - start, units[first:end].tobytes())
        self.end = int(positions[-1]) + TIMER_UNIT_SIZE

    def mark_done(self, positions: np.ndarray, from_ms: int = 0) -> None:
        """Mark units as done, for us and for RocketMQ. The next `flush` makes it durable.

        Args:
            positions: Ascending. Deleted and damaged units are skipped: a new check would make damage look valid.
            from_ms: Units of earlier slots are skipped.
        """
        positions = positions[positions >= self.start]
        units = self.gather(positions)
        chosen = (slots_of(units) >= from_ms) & are_valid(units)
        positions, units = positions[chosen], units[chosen]
        units["magic"] |= Magic.DONE
        units["record_size"] = DONE_RECORD_SIZE
        seal_units(units)
        self._overwrite(positions, units)

    def _overwrite(self, positions: np.ndarray, units: np.ndarray) -> None:
        """Overwrite units. Close ones are written at once, together with the units between them."""
        starts = positions - positions % self._files.file_size
        is_cut = (np.diff(positions) > _MARK_GAP) | (np.diff(starts) > 0)
        for first, end in itertools.pairwise([0, *(np.flatnonzero(is_cut) + 1).tolist(), len(units)]):
            if first == end:
                return  # there are no units
            run_start, run_end = int(positions[first]), int(positions[end - 1]) + TIMER_UNIT_SIZE
            file, start = self._file_at(run_start)
            run = np.frombuffer(bytearray(file.view[run_start - start : run_end - start]), TIMER_UNIT_DTYPE)
            run[(positions[first:end] - run_start) // TIMER_UNIT_SIZE] = units[first:end]
            file.write(run_start - start, run.tobytes())
            self._marked.add(start)

    # --- single units --------------------------------------------------------------------------

    def read(self, position: int) -> TimerUnit | None:
        """Return the unit at a position; None without a valid one."""
        found = self._files.find(position) if position >= 0 else None
        if found is None:
            return None
        file, start = found
        at = position - start
        return None if at % TIMER_UNIT_SIZE or at >= self._units_end else unpack_unit(file.view, at)

    def find(self, physical_offset: int) -> tuple[int, TimerUnit] | None:
        """Return the position and the unit of a record; None without a unit."""
        known = self.read(self._found) if self._found < self.end else None
        if known is not None and known.physical_offset == physical_offset:  # a change looks twice
            return self._found, known
        # Checking each unit that the search meets takes eight times as long (measured). So the found one is checked;
        # if damage misled the search, the other search reports it.
        numbers = range(self._number(self.start), self._number(self.end))
        found = bisect_left(numbers, physical_offset, key=self._unchecked_offset)
        if found < len(numbers):
            position = self._position(numbers[found])
            unit = self.read(position)
            if unit is not None and unit.physical_offset == physical_offset:
                self._found = position
                return position, unit
        position = self.position_after(physical_offset)
        unit = None if position == self.end else self._valid(position)
        return None if unit is None or unit.physical_offset != physical_offset else (position, unit)

    def _unchecked_offset(self, number: int) -> int:
        """Return the physical offset of a unit, damaged or not."""
        position = self._position(number)
        file, start = self._file_at(position)
        found: int = _PHYSICAL_OFFSET.unpack_from(file.view, position - start + _OFFSET_AT)[0]
        return found

    def position_after(self, physical_offset: int) -> int:
        """Return the position of the first unit whose record is at *physical_offset* or after it; `end` if none."""
        first = self._number(self.start)
        numbers = range(first, self._number(self.end))
        found = bisect_left(
            numbers, physical_offset, key=lambda number: self._valid(self._position(number)).physical_offset
        )
        return min(self._position(first + found), self.end)

    def last_position(self, end: int | None = None) -> int:
        """Return the position of the last unit before *end*, across the blank between files; -1 for none."""
        end = self.end if end is None else end
        position = self._position(self._number(end) - 1)
        return position if end > 0 and position >= self.start else -1

    def _number(self, position: int) -> int:
        """Return how many units fit before a position, counted from position 0."""
        file, within = divmod(position, self._files.file_size)
        return file * self._per_file + min(within // TIMER_UNIT_SIZE, self._per_file)

    def _position(self, number: int) -> int:
        file, within = divmod(number, self._per_file)
        return file * self._files.file_size + within * TIMER_UNIT_SIZE

    def _valid(self, position: int) -> TimerUnit:
        unit = self.read(position)
        if unit is None:
            raise TimerLogDamageError(f"timerlog: the unit at {position} is damaged")
        return unit

    # --- units of slots ------------------------------------------------------------------------

    def units_of_slot(
        self, first_pos: int, last_pos: int, count: int, slot_ms: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield positions and units of one slot, piece by piece, given the slot's fields.

        Raises:
            TimerLogDamageError: A unit is damaged.
        """
        span = (last_pos - first_pos) // TIMER_UNIT_SIZE + 1
        if span <= _DENSE * max(count, 1):
            yield from self.scan(first_pos, last_pos, slot_ms)
        else:
            yield self.chain(last_pos, slot_ms)

    def units_of_slots(self, slots: np.ndarray, precision_ms: int) -> np.ndarray:
        """Return the units of several slots, given as `SLOT_DTYPE`.

        Raises:
            TimerLogDamageError: A unit is damaged.
        """
        span = (slots["last_pos"] - slots["first_pos"]) // TIMER_UNIT_SIZE + 1
        is_scanned = (slots["num"] > _MANY) & (span <= _DENSE * slots["num"].astype(np.int64))
        pieces = [self.chains(slots["last_pos"][~is_scanned].astype(np.int64))]
        for time, first_pos, last_pos, _, _ in slots[is_scanned].tolist():
            pieces += [units for _, units in self.scan(first_pos, last_pos, time * precision_ms)]
        return np.concatenate(pieces)

    def chain(self, last_pos: int, slot_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and units of one slot, newest first, by following the chain.

        The chain ends where the log was deleted.
        """
        found: list[int] = []
        position = last_pos
        while position >= self.start and position >= 0:
            unit = self._valid(position)
            # A chain leads to lower positions only. Anything else is damage, and could be an endless loop.
            if unit.slot_ms != slot_ms or unit.previous_pos >= position:
                raise TimerLogDamageError(f"timerlog: the unit at {position} does not belong to the slot of {slot_ms}")
            found.append(position)
            position = unit.previous_pos
        positions = np.array(found, np.int64)
        return positions, self.gather(positions)

    def chains(self, last_positions: np.ndarray) -> np.ndarray:
        """Return the units of several slots by following all chains in parallel."""
        pieces = []
        positions = last_positions[last_positions >= self.start]
        while len(positions):
            units = self.gather(positions)
            if not (are_valid(units).all() and (units["previous_pos"] < positions).all()):
                raise TimerLogDamageError("timerlog: a chain of units is damaged")
            pieces.append(units)
            positions = units["previous_pos"].astype(np.int64)
            positions = positions[(positions >= self.start) & (positions >= 0)]
        return np.concatenate(pieces) if pieces else np.empty(0, TIMER_UNIT_DTYPE)

    def scan(self, first_pos: int, last_pos: int, slot_ms: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield positions and units of one slot, oldest first, by reading all units from its first to its last."""
        for position, units in self.pieces(first_pos, last_pos + TIMER_UNIT_SIZE):
            valid = are_valid(units)
            if not valid.all():
                raise TimerLogDamageError(
                    f"timerlog: the unit at {position + int(np.argmin(valid)) * TIMER_UNIT_SIZE} is damaged"
                )
            indexes = np.flatnonzero(slots_of(units) == slot_ms)
            yield position + indexes * TIMER_UNIT_SIZE, units[indexes]

    # --- many units ----------------------------------------------------------------------------

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """Return the units at some positions, in any order, damaged or not."""
        units = np.empty(len(positions), TIMER_UNIT_DTYPE)
        starts = positions - positions % self._files.file_size
        for start in np.unique(starts).tolist():
            chosen = starts == start
            at = (positions[chosen] - start) // TIMER_UNIT_SIZE
            units[chosen] = np.frombuffer(self._file_at(start)[0].view, TIMER_UNIT_DTYPE, self._per_file)[at]
        return units

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all units from one position up to another, in order, each piece with the position of its first unit.

        A piece is a part of one file.
        """
        position = max(start, self.start)
        while position < end and (found := self._files.find(position)) is not None:
            file, file_start = found
            at, stop = position - file_start, min(self._units_end, end - file_start)
            if at >= stop:  # the blank
                position = file_start + self._files.file_size
                continue
            count = min((stop - at) // TIMER_UNIT_SIZE, _SCAN_UNITS)
            yield position, np.frombuffer(file.view, TIMER_UNIT_DTYPE, count, at)
            position += count * TIMER_UNIT_SIZE

    # --- files ---------------------------------------------------------------------------------

    def truncate(self, end: int) -> None:
        """Delete the units from *end* on."""
        self._files.truncate(end)
        self.end = end

    def delete_before(self, position: int) -> int:
        """Delete the files that end at *position* or before it, but never the last. Return how many were deleted."""
        return self._files.delete_before(position)

    def file_ends(self) -> list[int]:
        """Return the end of each file but the last."""
        return self._files.starts[1:]

    def flush(self, start: int, end: int) -> None:
        """Return once the units of ``start..end``, and all marks, are on disk."""
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
        """Close the files."""
        self._files.close()

    def _file_at(self, position: int) -> tuple[MappedFile, int]:
        found = self._files.find(position)
        assert found is not None, "the log itself returned this position"
        return found

    def _skip_blank(self, position: int) -> int:
        """Return *position*, or the start of the next file if no unit and blank fit at *position*."""
        within = position % self._files.file_size
        return position if within < self._units_end else position - within + self._files.file_size
