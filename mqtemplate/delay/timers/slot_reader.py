"""Reading one slot of the wheel into the near term."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mqtemplate.delay.delay_store import WAITING_DTYPE
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import NO_TIME_MS, read_arrivals
from mqtemplate.delay.timers.near_term import NEAR_DTYPE
from mqtemplate.delay.timers.timer_log import TimerLog
from mqtemplate.delay.timers.timer_unit import MAGIC_DELETE, MAGIC_DONE, MAGIC_ROLL, TIMER_UNIT_SIZE, deliver_times
from mqtemplate.delay.timers.timer_wheel import Slot
from mqtemplate.store import MessageStore

_DENSE = 32
"""Up to so many foreign units to one of the slot's, reading everything beats walking the chain."""
_MANY = 64
"""Short chains of many slots are walked side by side."""


class SlotContent:
    """What one slot holds.

    Attributes:
        rows: Its messages, as `NearTerm` takes them.
        left: Positions of the units of those that something took the place of, and that do not say so.
        markers: Physical offset and size of each delete marker that was not written here.
        parked_markers: Physical offsets of those of them that are parked, and among the messages.
    """

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        self._left: list[np.ndarray] = []
        self.markers: list[tuple[int, int]] = []
        self.parked_markers: list[int] = []

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, NEAR_DTYPE)

    @property
    def left(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *self._left])

    def add(self, rows: np.ndarray, left: np.ndarray) -> None:
        self._pieces.append(rows)
        self._left.append(left)


def read_slot(
    files: TimerFiles, store: MessageStore, slot_ms: int, is_done: Callable[[np.ndarray], np.ndarray]
) -> SlotContent:
    """The messages of one slot that are not handed over.

    Args:
        is_done: Tells of units, for each, whether something took the place of its message.

    Raises:
        TimerLogDamageError: A unit is damaged.
    """
    content = SlotContent()
    slot = files.wheel.get(slot_ms)
    if slot is None:
        return content
    for positions, units in _units_of(files, slot, slot_ms):
        chosen = units["magic"] & MAGIC_DONE == 0
        positions, units = positions[chosen], units[chosen]
        done = is_done(units)
        # a marker that is parked itself is set on again like a message
        is_marker = (units["magic"] & (MAGIC_DELETE | MAGIC_ROLL)) == MAGIC_DELETE
        content.markers += units[["physical_offset", "record_size"]][is_marker & ~done].tolist()
        is_row = ~(is_marker | done)
        rest = units[is_row]
        content.parked_markers += rest["physical_offset"][rest["magic"] & MAGIC_DELETE != 0].tolist()
        rows = _rows_of(rest, store, files.settings.precision_ms)
        rows["position"] = positions[is_row]
        content.add(rows, positions[done & ~is_marker])
    return content


def contains(sorted_values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each of *wanted*, whether it is among *sorted_values*."""
    if not len(sorted_values):
        return np.zeros(len(wanted), np.bool_)
    places = np.searchsorted(sorted_values, wanted)
    places[places == len(sorted_values)] = 0
    return np.asarray(sorted_values[places] == wanted)


def _units_of(files: TimerFiles, slot: Slot, slot_ms: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The units of one slot, each piece with where they stand."""
    span = (slot.last_pos - slot.first_pos) // TIMER_UNIT_SIZE + 1
    if span <= _DENSE * max(slot.num, 1):
        yield from files.log.scan(slot.first_pos, slot.last_pos, slot_ms)
    else:
        yield files.log.chain(slot.last_pos, slot_ms)


def units_of_slots(log: TimerLog, slots: np.ndarray, precision_ms: int) -> np.ndarray:
    """The units of several slots, given as `SLOT_DTYPE`.

    Raises:
        TimerLogDamageError: A unit is damaged.
    """
    span = (slots["last_pos"] - slots["first_pos"]) // TIMER_UNIT_SIZE + 1
    is_scanned = (slots["num"] > _MANY) & (span <= _DENSE * slots["num"].astype(np.int64))
    pieces = [log.chains(slots["last_pos"][~is_scanned].astype(np.int64))]
    for time, first_pos, last_pos, _, _ in slots[is_scanned].tolist():
        pieces += [units for _, units in log.scan(first_pos, last_pos, time * precision_ms)]
    return np.concatenate(pieces)


def _rows_of(units: np.ndarray, store: MessageStore, precision_ms: int) -> np.ndarray:
    rows = np.zeros(len(units), NEAR_DTYPE)
    rows["physical_offset"] = units["physical_offset"]
    rows["size"] = units["record_size"]
    rows["enqueue_ms"] = units["write_time_ms"]
    rows["rolls"] = (units["magic"] & MAGIC_ROLL) != 0
    slots_ms = _slots_ms(units)
    times = due_times(units, store, precision_ms)
    rows["is_poison"] = times == NO_TIME_MS
    rows["due_ms"] = np.where(rows["rolls"], slots_ms + precision_ms, np.where(rows["is_poison"], slots_ms, times))
    return rows


def waiting_rows(units: np.ndarray, store: MessageStore, precision_ms: int) -> np.ndarray:
    """Units as `WAITING_DTYPE`: due when they go to their real topics, whether they are parked or not."""
    rows = np.empty(len(units), WAITING_DTYPE)
    rows["physical_offset"] = units["physical_offset"]
    rows["size"] = units["record_size"]
    rows["topic_hash"] = units["topic_hash"]
    times = due_times(units, store, precision_ms)
    rows["due_ms"] = np.where(times == NO_TIME_MS, _slots_ms(units), times)
    return rows


def _slots_ms(units: np.ndarray) -> np.ndarray:
    return np.asarray(units["write_time_ms"].astype(np.int64) + units["delay_ms"])


def due_times(units: np.ndarray, store: MessageStore, precision_ms: int) -> np.ndarray:
    """When units are due; `NO_TIME_MS` where nobody can tell. Asks the records of those that do not say, as upstream's
    do not."""
    times = deliver_times(units)
    silent = np.flatnonzero(times == 0)
    if len(silent):
        silent = silent[np.argsort(units["physical_offset"][silent])]
        physical_offsets = units["physical_offset"][silent].astype(np.int64)
        found = read_arrivals(store, physical_offsets.tolist(), units["record_size"][silent].tolist(), precision_ms)
        times[silent] = NO_TIME_MS
        times[silent[np.searchsorted(physical_offsets, found["physical_offset"])]] = found["deliver_ms"]
    return times
