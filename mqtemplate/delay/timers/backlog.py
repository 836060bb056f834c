"""All timers that wait: on the wheel, and, of the slots that are open now, in the near term."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mqtemplate.delay.divert import slot_of
from mqtemplate.delay.release import WaitingRecord
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import NO_TIME_MS, delete_keys, deliver_time, roll_slots
from mqtemplate.delay.timers.near_term import NearTerm
from mqtemplate.delay.timers.recalls import TimerRecalls
from mqtemplate.delay.timers.replay import TimerReplay
from mqtemplate.delay.timers.slot_reader import contains, read_slot, units_of_slots, waiting_rows
from mqtemplate.delay.timers.timer_unit import (
    LATEST_DELIVER_MS,
    MAGIC_DELETE,
    MAGIC_DONE,
    MAGIC_ROLL,
    TIMER_UNIT_DTYPE,
    TIMER_UNIT_SIZE,
    TimerUnit,
)
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import UNIQ_KEY, find_property
from mqtemplate.store import MessageStore

_LONGEST_MS = (1 << 31) - 1  # what the four bytes of a unit's delay hold


class TimerBacklog:
    """Takes messages in, opens the slots that begin, closes those that are over, and knows where each message is.

    - Slots before ``read_ms`` are closed: everything in them is handed over. A message that comes for one of them is
      linked to the slot at ``read_ms``, where a restart finds it; its own due time still decides.
    - An open slot is in the near term, whole. Its units stay where they are.
    - ``withdrawn`` messages are not to be handed over, and their units do not say so yet: that is written with the next
      checkpoint, when the record that took their place is on the disk.
    - Not thread-safe: the `TimerMessageStore` has the lock.

    Args:
        files: Wheel and log, in one state.
        replay: What the commit log told at the start.
        read_ms: The first slot that is not closed.
    """

    def __init__(self, store: MessageStore, files: TimerFiles, replay: TimerReplay, read_ms: int) -> None:
        self._store = store
        self._replay = replay
        self._settings = files.settings
        self.files = files
        self.near = NearTerm()
        self.read_ms = read_ms
        self.open: dict[int, int] = {}  # slot -> end of the commit log when it opened: hand-overs from it lie behind
        self.next_slot_ms = files.wheel.oldest_live(read_ms)  # the first live slot that is not open
        self.must_open_ms = read_ms if files.wheel.get(read_ms) is not None else None  # late-comers are linked there
        self.withdrawn: dict[int, int] = {}  # physical offset -> position of the unit
        self._left = np.empty(0, np.int64)  # positions of units of open slots that are handed over and do not say so
        self._deleted: dict[int, set[str]] = {}  # open slot -> keys that RocketMQ's markers there name
        self._parked_markers: set[int] = set()  # of those in the near term
        self._recalls = TimerRecalls(files, store)
        self._count: int | None = None  # of all that are neither done nor markers, whether they are recalled or not

    # --- coming in -----------------------------------------------------------------------------

    def is_full(self, now_ms: int) -> bool:
        """Whether a slot that waits since long stands where the far end of the window would be written."""
        return self.first_slot(now_ms) <= now_ms + self._settings.window_ms - self._settings.turn_ms

    def first_slot(self, now_ms: int) -> int:
        """The first slot that has messages; that of now if it is later or there is none."""
        return min([*self.open, self._slot_at(now_ms), *([] if self.next_slot_ms is None else [self.next_slot_ms])])

    def leave_empty_slots(self, now_ms: int) -> None:
        """Count the slots before the first that has messages as closed, up to now."""
        self.read_ms = max(self.read_ms, self.first_slot(now_ms))

    def take_in(self, arrivals: np.ndarray, now_ms: int) -> None:
        """Put messages on the wheel, and into the near term if their slots are open.

        Raises:
            StoreFullError: There is no room for their units; nothing was put there.
        """
        slots_ms, magic = self._place(arrivals, now_ms)
        kept = ~((magic & MAGIC_DONE != 0) & (slots_ms < self.read_ms))  # our markers are for who opens the files later
        arrivals, slots_ms, magic = arrivals[kept], slots_ms[kept], magic[kept]
        if not len(arrivals):
            return
        is_late = slots_ms < self.read_ms
        slots_ms[is_late] = self.read_ms
        units = self._units(arrivals, slots_ms, magic, self._slot_at(now_ms))
        positions = self.files.log.next_positions(len(units))
        links = self.files.wheel.plan(slots_ms, positions, np.where(magic & MAGIC_DELETE, -1, 1))
        units["previous_pos"] = links.previous
        self.files.log.append(units, positions)
        self.files.wheel.link(links)
        self._recalls.note(positions, units)
        if is_late.any() and self.read_ms not in self.open:
            self.must_open_ms = self.read_ms  # though it may begin later, if the clock was set back
        if self._count is not None:
            self._count += int((magic & MAGIC_DELETE == 0).sum())
        is_open = np.isin(slots_ms, list(self.open))
        for index in np.flatnonzero(is_open & (magic & MAGIC_DONE == 0)).tolist():
            self._add_late(units[index], int(positions[index]), int(arrivals["deliver_ms"][index]))
        if not is_open.all():
            first = int(slots_ms[~is_open].min())
            self.next_slot_ms = first if self.next_slot_ms is None else min(self.next_slot_ms, first)

    def _place(self, arrivals: np.ndarray, now_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots of new messages and the bits of their units: far ones are parked on the way."""
        slots_ms, magic = arrivals["slot_ms"].copy(), arrivals["magic"].copy()
        parked_ms = roll_slots(
            slots_ms,
            arrivals["physical_offset"],
            self._slot_at(now_ms),
            self._settings.precision_ms,
            self._settings.roll_window_slots,
        )
        is_parked = parked_ms >= 0
        slots_ms[is_parked] = parked_ms[is_parked]
        magic[is_parked] |= MAGIC_ROLL
        slots_ms[is_parked & (magic & MAGIC_DONE != 0)] = -1  # a marker of ours belongs where it says, or nowhere
        return slots_ms, magic

    def _units(self, arrivals: np.ndarray, slots_ms: np.ndarray, magic: np.ndarray, write_ms: int) -> np.ndarray:
        units = np.empty(len(arrivals), TIMER_UNIT_DTYPE)
        longest_ms = _LONGEST_MS // self._settings.precision_ms * self._settings.precision_ms
        writes_ms = np.maximum(np.minimum(write_ms, slots_ms), slots_ms - longest_ms)
        units["size"] = TIMER_UNIT_SIZE
        units["magic"] = magic
        units["write_time_ms"] = writes_ms
        units["delay_ms"] = slots_ms - writes_ms
        units["physical_offset"] = arrivals["physical_offset"]
        units["record_size"] = arrivals["size"]
        units["topic_hash"] = arrivals["topic_hash"]
        known = (arrivals["deliver_ms"] >= 0) & (arrivals["deliver_ms"] <= LATEST_DELIVER_MS)
        units["tail"] = np.where(known, arrivals["deliver_ms"], 0)
        return units

    def _add_late(self, unit: np.void, position: int, deliver_ms: int) -> None:
        """A message for a slot that was read already."""
        _, _, magic, write_ms, delay_ms, physical_offset, size, _, _ = unit.tolist()
        slot_ms, rolls = write_ms + delay_ms, bool(magic & MAGIC_ROLL)
        if magic & MAGIC_DELETE:
            if not rolls:
                self._delete_by_key(physical_offset, size, slot_ms)
                return
            self._parked_markers.add(physical_offset)
        is_poison = deliver_ms == NO_TIME_MS
        due_ms = slot_ms + self._settings.precision_ms if rolls else slot_ms if is_poison else deliver_ms
        self.near.add(WaitingRecord(due_ms, physical_offset, size, write_ms, rolls, is_poison), position)

    def _delete_by_key(self, physical_offset: int, size: int, slot_ms: int) -> None:
        self._deleted.setdefault(slot_ms, set()).update(delete_keys(self._store, physical_offset, size))

    def _slot_at(self, time_ms: int) -> int:
        return time_ms // self._settings.precision_ms * self._settings.precision_ms

    # --- slots ---------------------------------------------------------------------------------

    def open_slots(self, now_ms: int, ahead_ms: int, enough: int) -> None:
        """Read the slots that begin within *ahead_ms*; of those that should be past only till *enough* is due."""
        if self.must_open_ms is not None and self.must_open_ms not in self.open:
            self._open_slot(self.must_open_ms)
        self.must_open_ms = None
        newest_ms = self._slot_at(now_ms + ahead_ms)
        while (slot_ms := self.next_slot_ms) is not None and slot_ms <= newest_ms:
            is_past = slot_ms + self._settings.precision_ms < now_ms
            if is_past and self.near.due_count(now_ms, enough) >= enough:
                return
            self._open_slot(slot_ms)

    def _open_slot(self, slot_ms: int) -> None:
        log_end = self._store.end_offset
        content = read_slot(self.files, self._store, slot_ms, self._is_done)
        self.open[slot_ms] = log_end
        self.near.add_slot(content.rows)
        self._left = np.concatenate([self._left, content.left])
        self._parked_markers.update(content.parked_markers)
        for physical_offset, size in content.markers:
            self._delete_by_key(physical_offset, size, slot_ms)
        while self.next_slot_ms in self.open:
            self.next_slot_ms = self.files.wheel.next_live(self.next_slot_ms + self._settings.precision_ms)

    def _is_done(self, units: np.ndarray) -> np.ndarray:
        """For each unit, whether something took the place of its message and the unit does not say so."""
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        offsets = units["physical_offset"].astype(np.int64)
        done = self._replay.is_done(offsets, units["record_size"], slots_ms)
        if self.withdrawn:
            done |= contains(np.sort(np.fromiter(self.withdrawn, np.int64, len(self.withdrawn))), offsets)
        return done

    def close_slots(self, now_ms: int) -> None:
        """Leave slots behind that have passed and of which nothing is left."""
        next_due_ms = self.near.next_due_ms
        for slot_ms in sorted(self.open):
            end_ms = slot_ms + self._settings.precision_ms
            if end_ms > now_ms or (next_due_ms is not None and next_due_ms <= end_ms):
                break
            del self.open[slot_ms]
            self.read_ms = max(self.read_ms, end_ms)
            self._deleted.pop(slot_ms, None)
            self._recalls.forget_before(self.read_ms)
            if not self.open:  # who opens the files begins behind all that was handed over
                self.near.take_left()
                self._left = np.empty(0, np.int64)
        self.leave_empty_slots(now_ms)

    # --- going out -----------------------------------------------------------------------------

    def take(self, now_ms: int, max_count: int) -> list[WaitingRecord]:
        """The next messages that are due; see `NearTerm.take`.

        A marker that is parked comes last: it has to be on the wheel again before what it may name is handed over.
        """
        taken = self.near.take(now_ms, max_count)
        if self._parked_markers:
            for count, item in enumerate(taken, start=1):
                if item.physical_offset in self._parked_markers:
                    return taken[:count]
        return taken

    def not_deleted(self, taken: list[WaitingRecord]) -> list[WaitingRecord]:
        """Those of them that no delete marker of their slot names."""
        return [item for item in taken if not self._is_deleted(item)] if self._deleted else taken

    def _is_deleted(self, item: WaitingRecord) -> bool:
        if item.rolls:
            return False
        own_ms = item.due_ms if item.is_poison else slot_of(item.due_ms, self._settings.precision_ms)
        keys = self._deleted.get(max(own_ms, self.read_ms))  # late-comers are linked to the slot at read_ms
        if keys is None:
            return False
        try:
            record = self._store.read(item.physical_offset, item.size)
        except CorruptRecordError:
            return False  # the releaser reports it
        return find_property(record.properties_bytes, UNIQ_KEY) in keys

    def drop(self, taken: list[WaitingRecord]) -> None:
        """Forget messages that `take` gave: they are handed over."""
        self.near.drop(taken)
        if self._count is not None:
            self._count -= len(taken)
        if self._parked_markers:
            gone = self._parked_markers.intersection(item.physical_offset for item in taken)
            self._parked_markers -= gone
            self._count = None if self._count is None else self._count + len(gone)

    # --- one message ---------------------------------------------------------------------------

    def is_waiting(self, record: StoredRecord) -> bool:
        """Whether a record of the timer topic is on the wheel, and to be handed over: neither done nor recalled."""
        found = self.files.log.find(record.physical_offset)
        if found is None:
            return False
        unit = found[1]
        if unit.magic & (MAGIC_DONE | MAGIC_DELETE) or unit.slot_ms < self.read_ms:
            return False
        if self._recalls.names(self._final_slot(unit, record), record, self.read_ms):
            return False
        if unit.slot_ms in self.open:
            return self.near.contains(self._leaves_ms(unit, record), record.physical_offset)
        row = np.array([tuple(unit)], TIMER_UNIT_DTYPE)
        return not self._is_done(row)[0]

    def _leaves_ms(self, unit: TimerUnit, record: StoredRecord) -> int:
        """When a message leaves its slot."""
        if unit.magic & MAGIC_ROLL:
            return unit.slot_ms + self._settings.precision_ms
        deliver_ms = deliver_time(record, self._settings.precision_ms)
        return unit.slot_ms if deliver_ms is None else deliver_ms

    def _final_slot(self, unit: TimerUnit, record: StoredRecord) -> int:
        """The slot that a message leaves for its real topic."""
        if not unit.magic & MAGIC_ROLL:
            return unit.slot_ms
        return slot_of(deliver_time(record, self._settings.precision_ms) or 0, self._settings.precision_ms)

    def slot_of(self, record: StoredRecord) -> int:
        """The slot that a record's unit stands in."""
        found = self.files.log.find(record.physical_offset)
        if found is None:
            return slot_of(deliver_time(record, self._settings.precision_ms) or 0, self._settings.precision_ms)
        return found[1].slot_ms

    def withdraw(self, record: StoredRecord) -> None:
        """Never hand a message over that waits."""
        found = self.files.log.find(record.physical_offset)
        if found is None:
            return
        position, unit = found
        self.withdrawn[record.physical_offset] = position
        if unit.slot_ms in self.open:
            self.near.remove(self._leaves_ms(unit, record), record.physical_offset)
        if self._count is not None and not unit.magic & MAGIC_DELETE:
            self._count -= 1

    def withdraw_replaced(self, physical_offsets: np.ndarray) -> None:
        """At a start: the same for those that the commit log tells of, as far as they are on the wheel."""
        for physical_offset in physical_offsets.tolist() if self.files.log.end else []:
            found = self.files.log.find(physical_offset)
            if found is not None and not found[1].magic & MAGIC_DONE:
                self.withdrawn[physical_offset] = found[0]

    # --- many messages -------------------------------------------------------------------------

    def slots_to_show(self, from_ms: int, before_ms: int, most: int) -> np.ndarray:
        """The next live slots, with about *most* messages in all, but one slot at least; none at the end."""
        slots = next(self.files.wheel.live(max(from_ms, self.read_ms), before_ms), None)
        if slots is None:
            return np.empty(0)
        count = int(np.searchsorted(np.cumsum(np.maximum(slots["num"], 1)), most)) + 1
        return slots[:count]

    def read_slots(self, slots: np.ndarray) -> np.ndarray:
        """The units of slots, waiting or not. Needs the lock only if it raises without it: a unit was just changed."""
        return units_of_slots(self.files.log, slots, self._settings.precision_ms)

    def waiting_of(self, units: np.ndarray, *, with_markers: bool = False) -> np.ndarray:
        """Those of some units that wait, as `WAITING_DTYPE`.

        Args:
            with_markers: RocketMQ's delete markers count, too, and what they name, which still has to meet them.
        """
        units = units[units["magic"] & (MAGIC_DONE if with_markers else MAGIC_DONE | MAGIC_DELETE) == 0]
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        waits = (slots_ms >= self.read_ms) & ~self._is_done(units)
        is_open = np.isin(slots_ms, list(self.open)) & (units["magic"] & (MAGIC_DELETE | MAGIC_ROLL) != MAGIC_DELETE)
        if is_open.any():
            waits &= ~is_open | contains(self.near.physical_offsets(), units["physical_offset"])
        if not with_markers:
            recalled = self._recalls.named(self.read_ms)
            waits &= ~contains(recalled["physical_offset"], units["physical_offset"])
        return waiting_rows(units[waits], self._store, self._settings.precision_ms)

    def units_between(self, physical_begin: int, physical_end: int) -> Iterator[np.ndarray]:
        """The units of a part of the commit log, piece by piece."""
        log = self.files.log
        for _, units in log.pieces(log.position_after(physical_begin), log.end):
            chosen = units[units["physical_offset"] < physical_end]
            yield chosen
            if len(chosen) < len(units):
                return

    def count(self) -> int:
        """How many messages wait. The first call looks at every unit of the log, a twentieth of a microsecond each."""
        if self._count is None:
            self._count = sum([self._count_waiting(units) for _, units in self.files.log.pieces(0, self.files.log.end)])
        positions = self._recalls.named(self.read_ms)["position"]
        return self._count - self._count_waiting(self.files.log.gather(positions[positions >= self.files.log.begin]))

    def _count_waiting(self, units: np.ndarray) -> int:
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        units = units[(slots_ms >= self.read_ms) & (units["magic"] & (MAGIC_DONE | MAGIC_DELETE) == 0)]
        if not len(units):
            return 0
        waits = ~self._is_done(units)
        slots_ms = units["write_time_ms"].astype(np.int64) + units["delay_ms"]
        is_open = np.isin(slots_ms, list(self.open))
        if is_open.any():
            waits &= ~is_open | contains(self.near.physical_offsets(), units["physical_offset"])
        return int(waits.sum())

    # --- files ---------------------------------------------------------------------------------

    def delete_before(self, physical_begin: int) -> int:
        """Delete the timer log's files in which nothing waits and whose records lie before *physical_begin*."""
        log, kept = self.files.log, self.files.log.begin
        for end in log.file_ends():
            last = log.read(log.last_position(end))
            if last is None or last.physical_offset >= physical_begin:
                break
            if any(len(self.waiting_of(units, with_markers=True)) for _, units in log.pieces(kept, end)):
                break
            kept = end
        return log.delete_before(kept)

    # --- marks ---------------------------------------------------------------------------------

    def marks(self) -> np.ndarray:
        """Where the units stand, ascending, of what was withdrawn, and of what was handed over from open slots.

        Their messages are gone, and the commit log says so. RocketMQ does not read it there: it empties a slot that is
        open when it takes over, all of it but the units that say themselves that they are done.
        """
        self._left = np.unique(np.concatenate([self._left, self.near.take_left()]))
        if not self.withdrawn:
            return self._left
        return np.union1d(self._left, np.fromiter(self.withdrawn.values(), np.int64, len(self.withdrawn)))

    def mark(self, marks: np.ndarray, from_ms: int) -> None:
        """Write that some of these units are done; those of slots before *from_ms* need not say so."""
        self.files.log.mark_done(marks, from_ms)

    def forget_marks(self, marks: np.ndarray) -> None:
        """All of these are written."""
        self._left = self._left[~contains(marks, self._left)]
        done = set(marks.tolist()) if self.withdrawn else set()
        self.withdrawn = {offset: position for offset, position in self.withdrawn.items() if position not in done}
