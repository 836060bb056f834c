"""The timing wheel: which messages fall due in which tick."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from mqtemplate.store.mapped_file import MappedFile

__all__ = ["DEFAULT_SLOTS_TOTAL", "SLOT_SIZE", "Slot", "TimerWheel", "wheel_file_size"]

DEFAULT_SLOTS_TOTAL = 7 * 86_400
"""Ticks in the window: seven days of seconds. Source: ``TimerMessageStore.TIMER_WHEEL_TTL_DAY``."""


class Slot(NamedTuple):
    """One tick. Big-endian, 32 bytes.

    ==  ==  =========  ==============================================================
     0  i8  time       the slot's time in ticks, not in ms: ``slot_ms / precision_ms``
     8  i8  first_pos  timer log offset of the first unit
    16  i8  last_pos   timer log offset of the newest unit; the chain goes back from it
    24  i4  num        units in the chain, about: for people, and for choosing how to read
    28  i4  magic      0
    ==  ==  =========  ==============================================================

    Source: RocketMQ ``store: Slot``.
    """

    time: int
    first_pos: int
    last_pos: int
    num: int
    magic: int


_SLOT = struct.Struct(">qqqii")
SLOT_SIZE = _SLOT.size
assert SLOT_SIZE == 32
_SLOT_DTYPE = np.dtype([("time", ">i8"), ("first_pos", ">i8"), ("last_pos", ">i8"), ("num", ">i4"), ("magic", ">i4")])
assert _SLOT_DTYPE.itemsize == SLOT_SIZE

_BLOCK_SLOTS = 4_096


def wheel_file_size(slots_total: int) -> int:
    """Twice the window, see `TimerWheel`."""
    return 2 * slots_total * SLOT_SIZE


class TimerWheel:
    """A ring of slots, one per tick of time to come, kept in a file.

    A slot holds no messages. It holds the two ends of a chain in the `TimerLog`: the units that fall due in
    that tick. The ring has twice *slots_total* slots, so that a reader running late and a writer at the far end
    of the window never meet in one slot.

    - A slot is live only if its own time is the time asked for; otherwise it is left from an earlier lap.
    - A slot is not cleared when it has been read: who reads remembers how far it came.
    - ``first_pos <= last_pos``, both timer log offsets; a chain is walked from last to first.
    - Not thread-safe: the `TimerMessageStore` owns it.

    Args:
        file: ``2 * slots_total * 32`` bytes.
        slots_total: Ticks in the window.
        precision_ms: Length of a tick. It must never change for a file.
    """

    def __init__(self, file: MappedFile, slots_total: int, precision_ms: int) -> None:
        self._file = file
        self._ring = 2 * slots_total
        self._precision_ms = precision_ms
        # Blocks of slots that something was ever linked in. A file made just now need not be looked through.
        times = np.empty(0, np.int64) if file.is_new else self._slots()["time"]
        self._blocks: set[int] = set(np.unique(times // _BLOCK_SLOTS).tolist())

    def get(self, slot_ms: int) -> Slot | None:
        """The slot of a time, if it is live."""
        time = slot_ms // self._precision_ms
        slot = Slot._make(_SLOT.unpack_from(self._file.view, time % self._ring * SLOT_SIZE))
        return slot if slot.time == time else None

    def link(self, slot_ms: int, position: int, count: int = 1) -> None:
        """Make the unit at *position* the newest of its slot; its own previous position is the caller's part."""
        time = slot_ms // self._precision_ms
        at = time % self._ring * SLOT_SIZE
        found, first_pos, _, num, _ = _SLOT.unpack_from(self._file.view, at)
        if found != time:
            first_pos, num = position, 0
        _SLOT.pack_into(self._file.view, at, time, first_pos, position, num + count, 0)
        self._blocks.add(time // _BLOCK_SLOTS)

    def last_pos(self, slot_ms: int) -> int:
        """The newest unit of a slot, -1 where there is none: what the next unit points back to."""
        slot = self.get(slot_ms)
        return -1 if slot is None else slot.last_pos

    def next_live(self, from_ms: int) -> int | None:
        """The first live slot at or after *from_ms*.

        Only blocks that something was ever linked in are looked at: a stride over the rest of an almost empty wheel
        would touch thousands of pages, for tens of milliseconds.
        """
        start = from_ms // self._precision_ms
        for block in sorted(block for block in self._blocks if block >= start // _BLOCK_SLOTS):
            begin = max(start, block * _BLOCK_SLOTS)
            found = self._first_live(begin, (block + 1) * _BLOCK_SLOTS - begin)
            if found is not None:
                return found * self._precision_ms
        return None

    def oldest_live(self, from_ms: int) -> int | None:
        """The first live slot at or after *from_ms*, however long ago that is. Looks at the whole ring."""
        times = self._slots()["time"]
        live = times[times >= from_ms // self._precision_ms]
        return int(live.min()) * self._precision_ms if live.size else None

    def slots_from(self, position: int) -> list[Slot]:
        """Every slot, live or not, whose newest unit stands at or behind a timer log offset."""
        slots = self._slots()
        found = slots[(slots["last_pos"] >= position) & (slots["time"] > 0)]
        return [Slot._make(slot) for slot in found.tolist()]

    def restore(self, slot: Slot) -> None:
        """Write a slot back as it was at an earlier time."""
        _SLOT.pack_into(self._file.view, slot.time % self._ring * SLOT_SIZE, *slot)
        self._blocks.add(slot.time // _BLOCK_SLOTS)

    def clear(self, slot: Slot) -> None:
        """Make a slot as if nothing had ever been linked there."""
        _SLOT.pack_into(self._file.view, slot.time % self._ring * SLOT_SIZE, 0, 0, 0, 0, 0)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _first_live(self, start: int, count: int) -> int | None:
        at = start % self._ring
        count_here = min(count, self._ring - at)
        times = self._slots(at, count_here)["time"]
        live = np.flatnonzero(times == np.arange(start, start + count_here))
        if live.size:
            return start + int(live[0])
        return self._first_live(start + count_here, count - count_here) if count > count_here else None

    def _slots(self, start: int = 0, count: int | None = None) -> np.ndarray:
        # made anew each time: a view that is kept would keep the map from being closed
        return np.frombuffer(self._file.view, _SLOT_DTYPE, self._ring if count is None else count, start * SLOT_SIZE)
