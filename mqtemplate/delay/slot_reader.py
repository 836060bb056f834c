"""Reading one slot of the wheel into the near term."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import structlog

from mqtemplate.delay.near_term import NEAR_DTYPE
from mqtemplate.delay.timer_files import TimerFiles
from mqtemplate.delay.timer_intake import deliver_time
from mqtemplate.delay.timer_log import MAGIC_DELETE, MAGIC_ROLL, TIMER_UNIT_SIZE
from mqtemplate.delay.timer_wheel import Slot
from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import TIMER_TOPIC
from mqtemplate.store import MessageStore

__all__ = ["SlotContent", "contains", "read_slot"]

_log = structlog.stdlib.get_logger("mqtemplate.delay")

_DENSE = 8
"""Up to so many foreign units to one of the slot's, reading everything beats walking the chain."""


class SlotContent:
    """What one slot holds.

    Attributes:
        rows: Its messages, as `NearTerm` takes them.
        markers: Physical offset and size of each delete marker.
    """

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []
        self.markers: list[tuple[int, int]] = []

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, NEAR_DTYPE)

    def add(self, rows: np.ndarray) -> None:
        self._pieces.append(rows)


def read_slot(files: TimerFiles, store: MessageStore, slot_ms: int, released: np.ndarray) -> SlotContent:
    """The messages of one slot that are not handed over.

    Args:
        released: Sorted physical offsets of records that are.
    """
    content = SlotContent()
    slot = files.wheel.get(slot_ms)
    if slot is None:
        return content
    for units in _units_of(files, slot, slot_ms):
        units = units[~contains(released, units["physical_offset"])]
        # a marker that is parked itself is set on again like a message
        is_marker = (units["magic"] & (MAGIC_DELETE | MAGIC_ROLL)) == MAGIC_DELETE
        content.markers += units[["physical_offset", "record_size"]][is_marker].tolist()
        content.add(_rows_of(units[~is_marker], store, slot_ms, files.settings.precision_ms))
    return content


def contains(sorted_values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each of *wanted*, whether it is among *sorted_values*."""
    if not len(sorted_values):
        return np.zeros(len(wanted), np.bool_)
    places = np.searchsorted(sorted_values, wanted)
    places[places == len(sorted_values)] = 0
    return np.asarray(sorted_values[places] == wanted)


def _units_of(files: TimerFiles, slot: Slot, slot_ms: int) -> Iterator[np.ndarray]:
    span = (slot.last_pos - slot.first_pos) // TIMER_UNIT_SIZE + 1
    if span <= _DENSE * max(slot.num, 1):
        yield from files.log.scan(slot.first_pos, slot.last_pos, slot_ms)
    else:
        yield files.log.chain(slot.last_pos)


def _rows_of(units: np.ndarray, store: MessageStore, slot_ms: int, precision_ms: int) -> np.ndarray:
    rows = np.empty(len(units), NEAR_DTYPE)
    rows["physical_offset"] = units["physical_offset"]
    rows["size"] = units["record_size"]
    rows["enqueue_ms"] = units["write_time_ms"]
    rows["rolls"] = (units["magic"] & MAGIC_ROLL) != 0
    rows["due_ms"] = np.where(rows["rolls"], slot_ms + precision_ms, units["deliver_ms"])
    rows["is_poison"] = False
    for index in np.flatnonzero(rows["due_ms"] == 0).tolist():
        due_ms = _read_due(store, int(rows["physical_offset"][index]), int(rows["size"][index]), precision_ms)
        rows[index]["due_ms"], rows[index]["is_poison"] = (slot_ms, True) if due_ms is None else (due_ms, False)
    return rows


def _read_due(store: MessageStore, physical_offset: int, size: int, precision_ms: int) -> int | None:
    """The due time of a message whose unit does not tell it, as upstream's do not."""
    try:
        return deliver_time(store.read(physical_offset, size), precision_ms)
    except CorruptRecordError as exc:
        _log.error("delay.poison", topic=TIMER_TOPIC, physical_offset=physical_offset, reason=exc.reason)
        return None
