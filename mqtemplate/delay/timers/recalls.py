"""Which timers RocketMQ took back: a delete marker of its making names them, and will meet them in their slot."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import delete_keys, neighbours
from mqtemplate.delay.timers.slot_reader import due_times
from mqtemplate.delay.timers.timer_unit import MAGIC_DELETE, MAGIC_DONE, MAGIC_ROLL, TIMER_UNIT_SIZE, are_sound
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import NAME_VALUE_SEPARATOR, UNIQ_KEY, find_property
from mqtemplate.store import MessageStore

RECALLED_DTYPE = np.dtype([("physical_offset", "i8"), ("position", "i8"), ("final_ms", "i8")])
"""One message, where its unit stands in the timer log, and the slot in which it will be dropped."""
_UNIQ_KEY = re.compile(UNIQ_KEY + NAME_VALUE_SEPARATOR + rb"([^\x02]*)")


class TimerRecalls:
    """Tells of messages, before they are due, whether they will be dropped then.

    - A marker and its target have the same due time, so both come to the same final slot, wherever they are parked
      until then.
    - A marker that was written here says nothing: what that one names is withdrawn.
    - Where there is no marker nothing is read but units, once. Else the records are, once, of the final slots that
      have some, and of those parked that do not tell theirs in the unit.
    - Not thread-safe: the `TimerMessageStore` has the lock.
    """

    def __init__(self, files: TimerFiles, store: MessageStore) -> None:
        self._files = files
        self._store = store
        self._keys: dict[int, set[str]] | None = None  # final slot -> what markers name there, once somebody asked
        self._named = np.empty(0, RECALLED_DTYPE)
        self._is_current = False  # `_named` has all

    # --- what changes --------------------------------------------------------------------------

    def note(self, positions: np.ndarray, units: np.ndarray) -> None:
        """New units stand at these positions."""
        if self._keys is None:
            return
        self._take_markers(self._keys, units)
        if self._keys and self._is_current:
            self._named = np.concatenate([self._named, self._find(self._keys, positions, units)])

    def forget_before(self, read_ms: int) -> None:
        """The slots before it are closed."""
        if self._keys:
            self._keys = {final_ms: keys for final_ms, keys in self._keys.items() if final_ms >= read_ms}
            self._named = self._named[self._named["final_ms"] >= read_ms]

    # --- what is told --------------------------------------------------------------------------

    def names(self, final_ms: int, record: StoredRecord, read_ms: int) -> bool:
        """Whether a record that will come to this slot is recalled."""
        keys = self._keys_from(read_ms).get(final_ms)
        return keys is not None and find_property(record.properties_bytes, UNIQ_KEY) in keys

    def named(self, read_ms: int) -> np.ndarray:
        """All that is recalled, as `RECALLED_DTYPE` by physical offset; some of it may be gone for another reason.

        Args:
            read_ms: The first slot that is not closed.
        """
        keys = self._keys_from(read_ms)
        if not self._is_current:
            pieces = [self._find(keys, *piece) for piece in self._live_units(read_ms, 0)] if keys else []
            self._named = np.concatenate([np.empty(0, RECALLED_DTYPE), *pieces])
            self._is_current = True
        return self._named

    # --- reading -------------------------------------------------------------------------------

    def _keys_from(self, read_ms: int) -> dict[int, set[str]]:
        if self._keys is None:
            self._keys = {}
            for _, units in self._live_units(read_ms, MAGIC_DELETE):
                self._take_markers(self._keys, units)
        return self._keys

    def _live_units(self, read_ms: int, bit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The units of open slots and later ones that are not done, each piece with where they stand.

        Args:
            bit: `MAGIC_DELETE` for markers, 0 for messages.
        """
        first = self._files.wheel.first_position(read_ms)
        if first is None:
            return
        for begin, units in self._files.log.pieces(first, self._files.log.end):
            places = np.flatnonzero(units["magic"] & (MAGIC_DELETE | MAGIC_DONE) == bit)
            places = places[units["write_time_ms"][places] + units["delay_ms"][places] >= read_ms]
            yield begin + places * TIMER_UNIT_SIZE, units[places]

    def _take_markers(self, keys: dict[int, set[str]], units: np.ndarray) -> None:
        markers = units[units["magic"] & (MAGIC_DELETE | MAGIC_DONE) == MAGIC_DELETE]
        markers = markers[are_sound(markers)] if len(markers) else markers
        places = markers[["physical_offset", "record_size"]].tolist()
        for (physical_offset, size), final_ms in zip(places, self._final_slots(markers).tolist(), strict=True):
            named = delete_keys(self._store, physical_offset, size)
            known = keys.setdefault(final_ms, set())
            if not named <= known:  # a marker that was parked and is set on again says nothing new
                known |= named
                self._is_current = False

    def _find(self, keys: dict[int, set[str]], positions: np.ndarray, units: np.ndarray) -> np.ndarray:
        """Those of some units that are named, as `RECALLED_DTYPE`."""
        chosen = (units["magic"] & (MAGIC_DELETE | MAGIC_DONE) == 0) & are_sound(units)
        positions, units = positions[chosen], units[chosen]
        final_slots = self._final_slots(units)
        may_be_named = np.isin(final_slots, list(keys))
        found = np.empty(int(may_be_named.sum()), RECALLED_DTYPE)
        found["physical_offset"] = units["physical_offset"][may_be_named]
        found["position"] = positions[may_be_named]
        found["final_ms"] = final_slots[may_be_named]
        return np.asarray(found[self._bear_keys(found, units["record_size"][may_be_named].tolist(), keys)])

    def _final_slots(self, units: np.ndarray) -> np.ndarray:
        """Where units stand in the end."""
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        is_parked = units["magic"] & MAGIC_ROLL != 0
        precision_ms = self._files.settings.precision_ms
        times = due_times(units[is_parked], self._store, precision_ms)
        slots_ms[is_parked] = (times - 1) // precision_ms * precision_ms
        return np.asarray(slots_ms)

    def _bear_keys(self, rows: np.ndarray, sizes: list[int], keys: dict[int, set[str]]) -> np.ndarray:
        """For each of these records, which lie in the log in this order, whether it has a key named in its slot."""
        found = np.zeros(len(rows), np.bool_)
        wanted = {key.encode() for slot in np.unique(rows["final_ms"]).tolist() for key in keys[slot]}
        offsets, finals = rows["physical_offset"].tolist(), rows["final_ms"].tolist()
        for first, behind in neighbours(offsets, sizes):
            begin = offsets[first]
            data = self._store.read_bytes(begin, offsets[behind - 1] + sizes[behind - 1] - begin)
            for index in range(first, behind):
                at = offsets[index] - begin
                # a body may look like that, too; so the few that are found are read as records
                if not wanted.isdisjoint(_UNIQ_KEY.findall(data, at, at + sizes[index])):
                    found[index] = self._bears(offsets[index], sizes[index], keys[finals[index]])
        return found

    def _bears(self, physical_offset: int, size: int, keys: set[str]) -> bool:
        try:
            record = self._store.read(physical_offset, size)
        except CorruptRecordError:
            return False  # it is reported when it is due
        return find_property(record.properties_bytes, UNIQ_KEY) in keys
