"""The timing wheel: one slot for each tick, with the messages that are due in it."""

from __future__ import annotations

import itertools
import mmap
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.store.files.mapped_files import MappedFile, only_zeros


class Slot(NamedTuple):
    """One tick. Big-endian, 32 bytes.

    ==  ==  =========  ==============================================================
     0  i8  time       the slot's time in ticks, not in ms: ``slot_ms / precision_ms``
     8  i8  first_pos  timer log offset of the first unit
    16  i8  last_pos   timer log offset of the newest unit; the chain leads back from it
    24  i4  num        units in the chain, minus two for each delete marker
    28  i4  magic      0
    ==  ==  =========  ==============================================================

    Source: RocketMQ ``store: Slot``.
    """

    time: int
    first_pos: int
    last_pos: int
    num: int
    magic: int


_FORMAT = "qqqii"  # q: 8 bytes, i: 4 bytes, for struct and for numpy
_SLOT = struct.Struct(f">{_FORMAT}")
SLOT_SIZE = _SLOT.size
SLOT_DTYPE = np.dtype([(name, f">{kind}") for name, kind in zip(Slot._fields, _FORMAT, strict=True)])
assert SLOT_SIZE == SLOT_DTYPE.itemsize == 32

_PAGE_SIZE = 4_096
_PAGE_SLOTS = _PAGE_SIZE // SLOT_SIZE
_BLOCK_SLOTS = 4_096
# Linux replaces freed pages by zeros (man madvise); macOS may keep their content. Some systems have larger pages.
_CAN_FREE = sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED") and mmap.PAGESIZE == _PAGE_SIZE
_LOADED_PAGES = 64  # pages that are read and summed at once

# Odd factors: a product modulo 2 ** 64 with an odd number loses no bit, so each wrong bit changes the sum.
_WORD_FACTORS = (np.arange(_PAGE_SIZE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C16)) + np.uint64(
    0xD6E8FEB86659FD93
)
_PAGE_FACTOR = 0xA0761D6478BD642E
_MASK_64 = (1 << 64) - 1


def wheel_file_size(slots_total: int) -> int:
    """Return the size of the wheel file: twice the window, see `TimerWheel`."""
    return 2 * slots_total * SLOT_SIZE


class Links(NamedTuple):
    """The plan for linking new units.

    Attributes:
        previous: For each unit, the position of the previous unit of its slot; -1 for none.
        slots: The slots after linking, as `SLOT_DTYPE`.
    """

    previous: np.ndarray
    slots: np.ndarray


def _private_memory(size: int) -> mmap.mmap:
    """Return memory of zeros. On Windows it has no flags: memory without a file is always private to the process."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    return mmap.mmap(-1, size) if private is None else mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS)


class TimerWheel:
    """A ring of slots, one per future tick, stored in a file.

    A slot stores no messages, only the two ends of a chain in the `TimerLog`: the units that are due in that tick. The
    ring has twice *slots_total* slots, so that a late reader and a writer at the far end of the window never use the
    same slot.

    - A slot is live only if its own time is the requested time. Otherwise it is left from an earlier lap.
    - A slot is not cleared after it was read: the reader stores how far it has read.
    - ``first_pos <= last_pos``, both timer log offsets. A chain leads from last to first.
    - The slots are in private memory, in pages that exist only where something was linked. `write` writes the changed
      pages to the file. Until then the file stays as the last checkpoint describes it.
    - Not thread-safe: the `TimerMessageStore` holds its lock.

    Args:
        file: ``2 * slots_total * 32`` bytes.
        slots_total: Ticks in the window.
        precision_ms: Length of a tick. It must never change for a file.
        from_ms: Slots before this time are not loaded from the file.
    """

    def __init__(self, file: MappedFile, slots_total: int, precision_ms: int, from_ms: int = 0) -> None:
        self._file = file
        self._ring = 2 * slots_total
        self._precision_ms = precision_ms
        self._size = -(-wheel_file_size(slots_total) // _PAGE_SIZE) * _PAGE_SIZE
        self._memory = _private_memory(self._size)
        self._pages: dict[int, int] = {}  # page in memory -> the latest tick that was linked in it
        self._touched: set[int] = set()  # pages that differ from the file
        self._sums = np.zeros(self._size // _PAGE_SIZE, np.uint64)
        self._blocks: set[int] = set()  # blocks of ticks in which something was linked
        if not file.is_new and file.path is not None:
            self._load(from_ms // precision_ms)

    def _load(self, from_tick: int) -> None:
        for start, end in self._file.data_parts():
            for first in range(start // _PAGE_SIZE, -(-end // _PAGE_SIZE), _LOADED_PAGES):
                self._load_pages(first, self._file.read(first * _PAGE_SIZE, _LOADED_PAGES * _PAGE_SIZE), from_tick)
        for page in self._pages:
            times = self._slots(page * _PAGE_SLOTS, min(_PAGE_SLOTS, self._ring - page * _PAGE_SLOTS))["time"]
            self._blocks.update(np.unique(times // _BLOCK_SLOTS).tolist())

    def _load_pages(self, first: int, piece: bytes, from_tick: int) -> None:
        if only_zeros(piece):
            return  # a sum of zeros is 0
        piece += bytes(-len(piece) % _PAGE_SIZE)
        self._sums[first : first + len(piece) // _PAGE_SIZE] = _page_sums(piece)
        times = np.frombuffer(piece, SLOT_DTYPE)["time"].reshape(-1, _PAGE_SLOTS).max(axis=1)
        for page in np.flatnonzero(times >= max(from_tick, 1)).tolist():
            at = (first + page) * _PAGE_SIZE
            self._memory[at : at + _PAGE_SIZE] = piece[page * _PAGE_SIZE : (page + 1) * _PAGE_SIZE]
            self._pages[first + page] = int(times[page])

    # --- reading -------------------------------------------------------------------------------

    def get(self, slot_ms: int) -> Slot | None:
        """Return the slot of a time; None if it is not live."""
        time = slot_ms // self._precision_ms
        slot = Slot._make(_SLOT.unpack_from(self._memory, time % self._ring * SLOT_SIZE))
        return slot if slot.time == time else None

    def next_live(self, from_ms: int) -> int:
        """Return the time of the first live slot at or after *from_ms*, however far away; `NEVER_MS` without one."""
        found = next(self.live(from_ms, NEVER_MS), None)
        return NEVER_MS if found is None else int(found["time"][0]) * self._precision_ms

    def live(self, from_ms: int, before_ms: int) -> Iterator[np.ndarray]:
        """Yield the live slots of a span of time in order, in arrays of some thousand slots, as `SLOT_DTYPE`."""
        start, end = from_ms // self._precision_ms, -(-before_ms // self._precision_ms)
        # Only blocks in which something was linked are read. Reading all of an almost empty wheel would touch thousands
        # of pages, and take tens of milliseconds (measured).
        for block in sorted(block for block in self._blocks if block >= start // _BLOCK_SLOTS):
            ticks = np.arange(max(start, block * _BLOCK_SLOTS), min(end, (block + 1) * _BLOCK_SLOTS))
            slots = self._slots()[ticks % self._ring]
            slots = slots[slots["time"] == ticks]
            if len(slots):
                yield slots

    def first_position(self, from_ms: int) -> int | None:
        """Return the timer log offset of the first unit of all slots at or after *from_ms*; None without units."""
        slots = self._all_slots()
        live = slots["first_pos"][slots["time"] >= from_ms // self._precision_ms]
        return int(live.min()) if live.size else None

    def slots_from(self, position: int) -> list[Slot]:
        """Return each slot, live or not, whose newest unit is at a timer log offset or after it."""
        slots = self._all_slots()
        found = slots[(slots["last_pos"] >= position) & (slots["time"] > 0)]
        return [Slot._make(slot) for slot in found.tolist()]

    def _all_slots(self) -> np.ndarray:
        pieces = [self._slots(page * _PAGE_SLOTS, _PAGE_SLOTS) for page in sorted(self._pages)]
        return np.concatenate(pieces) if pieces else np.empty(0, SLOT_DTYPE)

    # --- linking -------------------------------------------------------------------------------

    def plan(self, slots_ms: np.ndarray, positions: np.ndarray, counts: np.ndarray) -> Links:
        """Return how linking units changes their slots. Nothing is changed yet.

        Args:
            slots_ms: The slot of each unit.
            positions: The position of each unit, ascending.
            counts: The amount that each adds to its slot's ``num``.
        """
        ticks = slots_ms // self._precision_ms
        order = np.argsort(ticks, kind="stable")  # stable: the units of one slot stay in the order of their positions
        sorted_ticks, sorted_positions = ticks[order], positions[order]
        is_first = np.ones(len(ticks), np.bool_)
        is_first[1:] = sorted_ticks[1:] != sorted_ticks[:-1]
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(ticks)) - 1
        found = self._slots()[sorted_ticks[firsts] % self._ring]
        is_live = found["time"] == sorted_ticks[firsts]
        slots = np.zeros(len(firsts), SLOT_DTYPE)
        slots["time"] = sorted_ticks[firsts]
        slots["first_pos"] = np.where(is_live, found["first_pos"], sorted_positions[firsts])
        slots["last_pos"] = sorted_positions[lasts]
        slots["num"] = np.where(is_live, found["num"], 0) + np.add.reduceat(counts[order], firsts)
        # The previous unit is the one before in sorted order; for the first of a slot, the slot's last unit so far.
        before = np.empty(len(ticks), np.int64)
        before[1:] = sorted_positions[:-1]
        before[firsts] = np.where(is_live, found["last_pos"], -1)
        previous = np.empty(len(ticks), np.int64)
        previous[order] = before
        return Links(previous, slots)

    def put(self, slots: np.ndarray) -> None:
        """Set slots to a new state: one that `plan` returned, or an earlier one."""
        at = slots["time"] % self._ring
        self._slots()[at] = slots
        pages = (at // _PAGE_SLOTS).tolist()
        self._touched.update(pages)
        self._pages.update(zip(pages, slots["time"].tolist(), strict=True))
        self._blocks.update(np.unique(slots["time"] // _BLOCK_SLOTS).tolist())

    def clear(self, slot: Slot) -> None:
        """Reset a slot to the state in which nothing was ever linked."""
        at = slot.time % self._ring
        self._slots()[at] = np.zeros((), SLOT_DTYPE)
        self._touched.add(at // _PAGE_SLOTS)

    def clear_all(self) -> None:
        """Reset every slot. The next `write` resets the file, too."""
        for page in self._pages:
            self._free(page)
        self._blocks.clear()
        self._touched.update(np.flatnonzero(self._sums).tolist(), self._pages)
        self._pages.clear()

    def forget_before(self, slot_ms: int) -> None:
        """Free the memory of pages that are past and equal to the file."""
        tick = slot_ms // self._precision_ms // _PAGE_SLOTS * _PAGE_SLOTS
        for page in [page for page, last in self._pages.items() if last < tick and page not in self._touched]:
            del self._pages[page]
            self._free(page)

    def _free(self, page: int) -> None:
        """Set a page to zero, and free its memory where that is possible."""
        if _CAN_FREE:
            self._memory.madvise(mmap.MADV_DONTNEED, page * _PAGE_SIZE, _PAGE_SIZE)
        else:
            self._memory[page * _PAGE_SIZE : (page + 1) * _PAGE_SIZE] = bytes(_PAGE_SIZE)

    # --- the file ------------------------------------------------------------------------------

    def changes(self) -> list[tuple[int, bytes]]:
        """Return number and content of the pages that differ from the file. Write them, or call `touch`."""
        touched, self._touched = sorted(self._touched), set()
        changed = [(page, self._memory[page * _PAGE_SIZE : (page + 1) * _PAGE_SIZE]) for page in touched]
        if changed:
            self._sums[touched] = _page_sums(b"".join([data for _, data in changed]))
        return changed

    @property
    def checksum(self) -> int:
        """Checksum of the file after all `changes` are written, as a signed 64-bit number."""
        pages = np.flatnonzero(self._sums)
        factors = pages.astype(np.uint64) * np.uint64(_PAGE_FACTOR) + np.uint64(_PAGE_FACTOR + 1)
        total = int((self._sums[pages] * factors).sum(dtype=np.uint64))
        return total - (1 << 64) if total >> 63 else total

    def touch(self, changes: list[tuple[int, bytes]]) -> None:
        """Count pages as changed again, because they were not written."""
        self._touched.update(page for page, _ in changes)

    def write(self, changes: list[tuple[int, bytes]]) -> None:
        """Write pages to the file, and flush it. Another thread may call `plan` and `link` at the same time.

        Raises:
            StoreError: The disk reports an error.
        """
        if not changes or self._file.path is None:
            return
        # Adjacent pages have one difference between page number and index: each such run is one write.
        for _, run in itertools.groupby(enumerate(changes), key=lambda item: item[1][0] - item[0]):
            pages = [change for _, change in run]
            at = pages[0][0] * _PAGE_SIZE
            self._file.write(at, b"".join([data for _, data in pages])[: self._file.size - at])
        self._file.flush()

    def close(self) -> None:
        """Close the file, and free the memory."""
        self._file.close()
        self._memory.close()

    def _slots(self, start: int = 0, count: int | None = None) -> np.ndarray:
        # A new view each time: a view that is kept would prevent closing the map.
        count = self._ring - start if count is None else min(count, self._ring - start)
        return np.frombuffer(self._memory, SLOT_DTYPE, count, start * SLOT_SIZE)


def _page_sums(data: bytes) -> np.ndarray:
    """Return one sum for each page; 0 for a page of zeros."""
    words = np.frombuffer(data, np.uint64).reshape(-1, _PAGE_SIZE // 8)
    return np.asarray((words * _WORD_FACTORS).sum(axis=1, dtype=np.uint64))
