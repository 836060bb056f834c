"""Timers that RocketMQ recalled: a delete marker names them, and meets them in their slot."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import TimerKey, TimerTopicReader, timer_key
from mqtemplate.delay.timers.settings import slot_of
from mqtemplate.delay.timers.timer_unit import TIMER_UNIT_SIZE, Magic, are_valid, slots_of
from mqtemplate.record.codec import StoredRecord

RECALLED_DTYPE = np.dtype([("physical_offset", "i8"), ("position", "i8"), ("final_ms", "i8")])
"""One message, the position of its unit in the timer log, and the slot in which it will be deleted."""
_UNIQ_KEY = re.compile(rb"UNIQ_KEY\x01([^\x02]*)")


class TimerRecalls:
    """Predicts which pending messages a delete marker of RocketMQ will delete.

    - A marker and its message have one due time, so both reach one final slot, wherever they are parked before.
    - Our own markers do not count: their messages were removed when the markers were appended.
    - Without markers, only units are read, each once. With markers, the records of their final slots are read once, and
      those of parked units without a due time.
    - Not thread-safe: the `TimerMessageStore` holds its lock.
    """

    def __init__(self, files: TimerFiles, reader: TimerTopicReader) -> None:
        self._wheel = files.wheel
        self._log = files.log
        self._reader = reader
        self._precision_ms = files.settings.precision_ms
        self._start = -1  # position of the first unit of an open slot or later; -1 before the first call
        self._markers_end = 0  # the markers before this position are in `_keys`
        self._keys: dict[int, set[TimerKey]] = {}  # final slot -> messages that markers name there
        self._recalled = np.empty(0, RECALLED_DTYPE)
        self._recalled_end = 0  # the messages before this position were compared with all of `_keys`

    def is_recalled(self, final_ms: int, record: StoredRecord, read_ms: int) -> bool:
        """Return True if a marker names *record*, whose final slot is *final_ms*."""
        ids = self._markers(read_ms).get(final_ms)
        return ids is not None and timer_key(record) in ids

    def recalled(self, read_ms: int) -> np.ndarray:
        """Return all recalled messages, as `RECALLED_DTYPE` by physical offset. Some may be gone for another reason.

        Args:
            read_ms: The first slot that is not closed.
        """
        keys = self._markers(read_ms)
        if keys:
            pieces = [self._find(keys, *piece) for piece in self._units(self._recalled_end, read_ms, 0)]
            self._recalled_end = self._log.end
            self._recalled = np.concatenate([self._recalled, *pieces])
        self._recalled = self._recalled[self._recalled["final_ms"] >= read_ms]
        return self._recalled

    # --- reading -------------------------------------------------------------------------------

    def _markers(self, read_ms: int) -> dict[int, set[TimerKey]]:
        """Read the markers that were added since the last call. Return the messages that markers name, by slot."""
        if self._start < 0:
            first = self._wheel.first_position(read_ms)
            self._start = self._markers_end = self._recalled_end = self._log.end if first is None else first
        self._keys = {final_ms: ids for final_ms, ids in self._keys.items() if final_ms >= read_ms}
        for _, units in self._units(self._markers_end, read_ms, Magic.DELETE):
            self._add_markers(units[are_valid(units)])
        self._markers_end = self._log.end
        return self._keys

    def _units(self, start: int, read_ms: int, bit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield positions and units that are not done and not in a closed slot, piece by piece.

        Args:
            bit: `Magic.DELETE` for markers, 0 for messages.
        """
        for position, units in self._log.pieces(start, self._log.end):
            indexes = np.flatnonzero(units["magic"] & (Magic.DELETE | Magic.DONE) == bit)
            if len(indexes):  # most pieces have no markers
                indexes = indexes[slots_of(units[indexes]) >= read_ms]
                yield position + indexes * TIMER_UNIT_SIZE, units[indexes]

    def _add_markers(self, markers: np.ndarray) -> None:
        rows = zip(
            markers["physical_offset"].tolist(),
            markers["record_size"].tolist(),
            self._final_slots(markers).tolist(),
            strict=True,
        )
        for physical_offset, size, final_ms in rows:
            named = self._reader.delete_keys(physical_offset, size)
            known = self._keys.setdefault(final_ms, set())
            if not named <= known:  # a rolled marker names nothing new
                known |= named
                # The new marker may name any earlier message: compare all of them again.
                self._recalled, self._recalled_end = self._recalled[:0], self._start

    def _find(self, keys: dict[int, set[TimerKey]], positions: np.ndarray, units: np.ndarray) -> np.ndarray:
        """Return the recalled ones of some units, as `RECALLED_DTYPE`."""
        valid = are_valid(units)
        positions, units = positions[valid], units[valid]
        final_slots = self._final_slots(units)
        may_be_named = np.isin(final_slots, list(keys))
        found = np.empty(int(may_be_named.sum()), RECALLED_DTYPE)
        found["physical_offset"] = units["physical_offset"][may_be_named]
        found["position"] = positions[may_be_named]
        found["final_ms"] = final_slots[may_be_named]
        return np.asarray(found[self._have_keys(found, units["record_size"][may_be_named].tolist(), keys)])

    def _final_slots(self, units: np.ndarray) -> np.ndarray:
        """Return the slots from which messages are released, parked or not."""
        slots_ms = slots_of(units)
        is_parked = units["magic"] & Magic.ROLL != 0
        slots_ms[is_parked] = slot_of(self._reader.due_times(units[is_parked]), self._precision_ms)
        return slots_ms

    def _have_keys(self, rows: np.ndarray, sizes: list[int], keys: dict[int, set[TimerKey]]) -> np.ndarray:
        """Return for each of these records, given in the order of the log, whether a marker of its slot names it."""
        found = np.zeros(len(rows), np.bool_)
        wanted = {msg_id.encode() for slot_ms in np.unique(rows["final_ms"]).tolist() for _, msg_id in keys[slot_ms]}
        offsets, final_slots = rows["physical_offset"].tolist(), rows["final_ms"].tolist()
        for first, end, data in self._reader.groups(offsets, sizes):
            for index in range(first, end):
                at = offsets[index] - offsets[first]
                # A search in the raw bytes is fast, but also finds keys in bodies. So the few hits are read as records.
                if not wanted.isdisjoint(_UNIQ_KEY.findall(data, at, at + sizes[index])):
                    found[index] = self._reader.unique_key(offsets[index], sizes[index]) in keys[final_slots[index]]
        return found
