"""The timers on the wheel, and, for the open slots, in the near term."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS, DueRecord, contains
from mqtemplate.delay.settings import TimerSettings, slot_of
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.intake import NO_TIME_MS, TimerKey, TimerTopicReader
from mqtemplate.delay.timers.shaping import NEAR_DTYPE, NearTerm, Shaper
from mqtemplate.delay.timers.timer_log import TIMER_UNIT_SIZE, Magic, TimerUnit, create_units, have_priority, slots_of
from mqtemplate.record.codec import StoredRecord

if TYPE_CHECKING:
    from mqtemplate.delay.timers.fairness import FairTimers

_EMPTY = np.empty(0, np.int64)
_READ_FOR_ONE = 512 * TIMER_UNIT_SIZE  # bytes of the timer log whose reading takes as long as the search for one unit

IsReplaced = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class TimerBacklog:
    """Puts messages on the wheel, opens slots that start, and closes slots that are complete.

    - Slots before ``read_ms`` are closed: all their messages are released. A message that arrives for a closed slot is
      linked to the slot at ``read_ms``, where a restart finds it. Its own due time still decides.
    - An open slot is in the near term as a whole. Its units stay in the timer log.
    - ``removed`` messages are never released. The next checkpoint marks their units, once the records that replaced
      them are on disk.
    - Not thread-safe: the `TimerMessageStore` holds its lock.

    Args:
        is_replaced: Returns for physical offsets, sizes and slots whether the commit log shows a record that replaced
            the message.
        read_ms: The first slot that is not closed.
        shaper: Holds the timers of topics with a shape.
        log_end: Returns the end of the commit log.

    Attributes:
        open: Open slot -> end of the commit log when it opened. Releases from the slot are after it.
        keys_of: See `TimerSource`.
        next_slot_ms: The first live slot that is not open; `NEVER_MS` without one.
        balance: Number of messages taken in since construction, minus those that left. Delete markers do not count.
    """

    def __init__(
        self,
        files: TimerFiles,
        reader: TimerTopicReader,
        is_replaced: IsReplaced,
        read_ms: int,
        shaper: Shaper,
        log_end: Callable[[], int],
    ) -> None:
        self._shaper = shaper
        self.held = shaper.held
        self.keys_of = reader.keys_of
        self._settings = files.settings
        self._reader = reader
        self._is_replaced = is_replaced
        self._log_end = log_end
        self.files = files
        self.near = NearTerm()
        self.eligible_ms: dict[int, int] = {}  # physical offset -> release time of held messages that `take` returned
        self.read_ms = read_ms
        self.open: dict[int, int] = {}
        self.next_slot_ms = files.wheel.next_live(read_ms)
        # The slot at `read_ms` may hold late messages of closed slots, so it has to open whatever its own time is.
        self._must_open_ms = read_ms if files.wheel.get(read_ms) is not None else None
        self.balance = 0
        self._removed: dict[int, int] = {}  # physical offset -> position of the unit
        self._unplaced: set[int] = set()  # physical offsets of removed messages whose units are not looked up
        self._dropped = _EMPTY  # positions of released units of open slots that are not marked as done
        self._deleted: dict[int, set[TimerKey]] = {}  # open slot -> messages that RocketMQ's markers name there
        self._parked_markers: set[int] = set()  # physical offsets of parked markers in the near term

    @property
    def fair(self) -> FairTimers | None:
        """Timers of open slots whose order is not that of their due times; None without such a topic or priority."""
        return self._shaper.fair

    # --- taking in -----------------------------------------------------------------------------

    def is_full(self, now_ms: int) -> bool:
        """Return True if an overdue slot occupies the place on the ring that the end of the window needs."""
        return self._first_slot(now_ms) <= now_ms + self._settings.window_ms - self._settings.lap_ms

    def _first_slot(self, now_ms: int) -> int:
        """Return the first slot with messages, or the slot of *now_ms* if that is earlier."""
        return min([*self.open, self._settings.slot_at(now_ms), self.next_slot_ms])

    def close_empty_slots(self, now_ms: int) -> None:
        """Count past slots without messages as closed."""
        self.read_ms = max(self.read_ms, self._first_slot(now_ms))

    def take_in(self, arrivals: np.ndarray, now_ms: int) -> None:
        """Put messages on the wheel, and into the near term if their slots are open.

        Args:
            arrivals: Array of `ARRIVAL_DTYPE`.

        Raises:
            StoreFullError: There is no room for the units. Nothing was changed.
        """
        if self._unplaced:
            offsets = arrivals["physical_offset"].tolist()
            is_removed = np.fromiter(map(self._unplaced.__contains__, offsets), np.bool_, len(offsets))
            self._put(arrivals[~is_removed], now_ms)  # the others were removed before they are on the wheel
            self._unplaced.difference_update(offsets)
            self.balance += int(is_removed.sum())  # `remove_waiting` has counted them
        else:
            self._put(arrivals, now_ms)

    def _put(self, arrivals: np.ndarray, now_ms: int) -> None:
        write_ms = self._settings.slot_at(now_ms)
        slots_ms, magic = self._slots(arrivals, write_ms)
        # Our own delete markers are for RocketMQ. In a closed slot it does not look for them.
        kept = ~((magic & Magic.DONE != 0) & (slots_ms < self.read_ms))
        arrivals, slots_ms, magic = arrivals[kept], slots_ms[kept], magic[kept]
        if not len(arrivals):
            return
        is_late = slots_ms < self.read_ms
        slots_ms[is_late] = self.read_ms
        units = create_units(arrivals, slots_ms, magic, write_ms, self._settings.precision_ms)
        positions = self.files.log.next_positions(len(units))
        links = self.files.wheel.plan(slots_ms, positions, np.where(magic & Magic.DELETE, -1, 1))
        units["previous_pos"] = links.previous
        # The log first: recovery can cut units that no slot refers to, but not follow a slot to missing units.
        self.files.log.append(units, positions)
        self.files.wheel.put(links.slots)
        if is_late.any() and self.read_ms not in self.open:
            self._must_open_ms = self.read_ms  # its time may be in the future, if the clock was set back
        self.balance += int((magic & Magic.DELETE == 0).sum())
        # A few messages arrive at once, and few slots are open: a dict is faster than `np.isin` (measured).
        is_open = np.fromiter(map(self.open.__contains__, slots_ms.tolist()), np.bool_, len(slots_ms))
        enters = is_open & (magic & Magic.DONE == 0)
        if enters.any():
            rows = self._near_rows(positions[enters], units[enters], np.zeros(enters.sum(), np.bool_))
            self.near.add_late(self._shaper.keep_unshaped(*rows, now_ms))
        if not is_open.all():
            self.next_slot_ms = min(self.next_slot_ms, int(slots_ms[~is_open].min()))

    def _slots(self, arrivals: np.ndarray, write_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of new messages and the bits of their units. Messages beyond the window are parked."""
        slots_ms, magic = self._reader.arrival_slots(arrivals), arrivals["magic"].copy()
        is_far = slots_ms - write_ms >= self._settings.window_ms
        if is_far.any():
            slots_ms[is_far] = parking_slots(arrivals["physical_offset"][is_far], write_ms, self._settings)
            magic[is_far] |= Magic.ROLL
            # RocketMQ finds our delete marker only in the slot that it names. Parked, it is useless: no slot has time
            # -1.
            slots_ms[is_far & (magic & Magic.DONE != 0)] = -1
        return slots_ms, magic

    # --- slots ---------------------------------------------------------------------------------

    def open_slots(self, now_ms: int, ahead_ms: int, max_count: int) -> None:
        """Read the slots that start within *ahead_ms* into the near term. Of overdue slots only some are read.

        Args:
            max_count: After an outage, stop at this many due messages: memory holds no more than one batch and a slot.
        """
        if self._must_open_ms is not None and self._must_open_ms not in self.open:
            self._open_slot(self._must_open_ms, now_ms)
        self._must_open_ms = None
        newest_ms = self._settings.slot_at(now_ms + ahead_ms)
        while self.next_slot_ms <= newest_ms:
            is_overdue = self.next_slot_ms + self._settings.precision_ms < now_ms
            if is_overdue and (self.near.due_count(now_ms, max_count) >= max_count or self._shaper.is_full()):
                return
            self._open_slot(self.next_slot_ms, now_ms)

    def next_open_ms(self, now_ms: int, ahead_ms: int) -> int:
        """Return when `open_slots` has to be called; `NEVER_MS` while only a release of held messages makes room."""
        is_overdue = self.next_slot_ms + self._settings.precision_ms < now_ms
        return NEVER_MS if is_overdue and self._shaper.is_full() else self.next_slot_ms - ahead_ms

    def _open_slot(self, slot_ms: int, now_ms: int) -> None:
        log_end = self._log_end()  # before reading: what is released while reading counts as after the opening
        slot = self.files.wheel.get(slot_ms)
        pieces = []
        if slot is not None:
            for positions, units in self.files.log.units_of_slot(slot.first_pos, slot.last_pos, slot.num, slot_ms):
                chosen = units["magic"] & Magic.DONE == 0
                positions, units = positions[chosen], units[chosen]
                pieces.append(self._near_rows(positions, units, self.is_done(units)))
        self.open[slot_ms] = log_end
        if pieces:
            rows, hashes, priorities = (np.concatenate(column) for column in zip(*pieces, strict=True))
            self.near.add_slot(self._shaper.keep_unshaped(rows, hashes, priorities, now_ms))
        while self.next_slot_ms in self.open:
            self.next_slot_ms = self.files.wheel.next_live(self.next_slot_ms + self._settings.precision_ms)

    def _near_rows(
        self, positions: np.ndarray, units: np.ndarray, done: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the messages among units of open slots, as `NEAR_DTYPE`; the hashes of their topics; `have_priority`.

        Note the markers and the done units.
        """
        # A parked marker does not belong to this slot. It is rolled like a message.
        is_marker = (units["magic"] & (Magic.DELETE | Magic.ROLL)) == Magic.DELETE
        markers = units[is_marker & ~done]
        fields = markers["physical_offset"].tolist(), markers["record_size"].tolist(), slots_of(markers).tolist()
        for physical_offset, size, slot_ms in zip(*fields, strict=True):
            self._deleted.setdefault(slot_ms, set()).update(self._reader.delete_keys(physical_offset, size))
        self._dropped = np.concatenate([self._dropped, positions[done & ~is_marker]])
        is_row = ~(is_marker | done)
        positions, units = positions[is_row], units[is_row]
        self._parked_markers.update(units["physical_offset"][units["magic"] & Magic.DELETE != 0].tolist())
        rows = np.zeros(len(units), NEAR_DTYPE)
        rows["physical_offset"] = units["physical_offset"]
        rows["size"] = units["record_size"]
        prioritized = have_priority(units, self._settings.precision_ms)
        rows["enqueue_ms"] = units["write_time_ms"] + prioritized
        rows["rolls"] = (units["magic"] & Magic.ROLL) != 0
        slots_ms, times = slots_of(units), self._reader.due_times(units)
        rows["is_poison"] = times == NO_TIME_MS
        times = np.where(rows["is_poison"], slots_ms, times)
        # A parked message is rolled at the end of its slot.
        rows["due_ms"] = np.where(rows["rolls"], slots_ms + self._settings.precision_ms, times)
        rows["position"] = positions
        return rows, units["topic_hash"], prioritized

    def is_done(self, units: np.ndarray) -> np.ndarray:
        """Return for each unit whether its message was replaced although the unit is not marked as done."""
        offsets = units["physical_offset"].astype(np.int64)
        done = self._is_replaced(offsets, units["record_size"], slots_of(units))
        # Each cancel reads one unit: a sorted array of all removed messages would cost more with each of them.
        for removed in (self._removed, self._unplaced):
            if removed:
                done |= np.fromiter(map(removed.__contains__, offsets.tolist()), np.bool_, len(offsets))
        return done

    @property
    def held_due_ms(self) -> int:
        """A time before which no timer is due that a shape holds; `NEVER_MS` without one."""
        return min(self.held.first_due_ms, NEVER_MS if self.fair is None else self.fair.first_due_ms)

    @property
    def held_release_ms(self) -> int:
        """Time at which the next timer may be released that a shape holds; `NEVER_MS` without one."""
        return min(self.held.next_release_ms, NEVER_MS if self.fair is None else self.fair.next_release_ms)

    def close_slots(self, now_ms: int) -> None:
        """Close the slots that are past and have no messages left."""
        next_due_ms = min(self.near.next_due_ms, self.held_due_ms)
        for slot_ms in sorted(self.open):
            end_ms = slot_ms + self._settings.precision_ms
            if end_ms > now_ms or next_due_ms <= end_ms:
                break
            del self.open[slot_ms]
            self.read_ms = max(self.read_ms, end_ms)
            self._deleted.pop(slot_ms, None)
            if not self.open:  # the next reader of the files starts after these slots, so their units need no marks
                self.near.take_dropped()
                self.held.take_dropped()
                if self.fair is not None:
                    self.fair.take_dropped()
                self._dropped = _EMPTY
        self.close_empty_slots(now_ms)

    # --- taking out ----------------------------------------------------------------------------

    def take(self, now_ms: int, max_count: int) -> list[DueRecord]:
        """Return the next due messages; see `NearTerm.take`."""
        taken = self.near.take(now_ms, max_count)
        if len(self.held):
            taken = self._with_held(taken, now_ms, max_count)
        if self.fair:
            taken = self._with_fair(self.fair, taken, now_ms, max_count)
        if self._parked_markers:
            # A parked marker ends the batch: it must be on the wheel again before the message it names is released.
            for count, item in enumerate(taken, start=1):
                if item.physical_offset in self._parked_markers:
                    return taken[:count]
        return taken

    def _with_held(self, taken: list[DueRecord], now_ms: int, max_count: int) -> list[DueRecord]:
        """Return *taken* with the held messages that may be released, in the order of both."""
        held = self.held.take(now_ms, max_count)
        self.eligible_ms = {item.physical_offset: release_ms for _, item, release_ms in held}
        ordered = [(order_ms, item) for order_ms, item, _ in held] + [(item.due_ms, item) for item in taken]
        return [item for _, item in sorted(ordered)][:max_count]

    def _with_fair(self, timers: FairTimers, taken: list[DueRecord], now_ms: int, max_count: int) -> list[DueRecord]:
        """Return *taken* with the timers of fair topics that may be released, which keep their own order."""
        fair = timers.take(now_ms, max_count, self)
        self.eligible_ms |= {item.physical_offset: release_ms for _, item, release_ms in fair}
        others = [(item.due_ms, item, item.due_ms) for item in taken]
        return [item for _, item, _ in heapq.merge(fair, others, key=itemgetter(0))][:max_count]

    def due_records(self, positions: np.ndarray) -> list[DueRecord]:
        """See `TimerSource`."""
        units = self.files.log.gather(positions)
        written_ms = units["write_time_ms"] + have_priority(units, self._settings.precision_ms)
        columns = (self._reader.due_times(units), units["physical_offset"], units["record_size"], written_ms)
        return [DueRecord(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    def not_deleted(self, taken: list[DueRecord]) -> list[DueRecord]:
        """Return the messages of *taken* that no delete marker of their slot names."""
        return [item for item in taken if not self._is_deleted(item)] if self._deleted else taken

    def _is_deleted(self, item: DueRecord) -> bool:
        if item.rolls:
            return False
        own_ms = item.due_ms if item.is_poison else slot_of(item.due_ms, self._settings.precision_ms)
        ids = self._deleted.get(max(own_ms, self.read_ms))  # a late message is linked to the slot at `read_ms`
        return ids is not None and self._reader.unique_key(item.physical_offset, item.size) in ids

    def drop(self, taken: list[DueRecord]) -> None:
        """Forget messages that `take` returned: they are released."""
        rest = self.fair.drop(taken) if self.fair else taken
        self.near.drop(self.held.drop(rest) if len(self.held) else rest)
        self.eligible_ms.clear()
        self.balance -= len(taken)
        if taken and taken[-1].physical_offset in self._parked_markers:  # `take` ends a batch with it
            self._parked_markers.remove(taken[-1].physical_offset)
            self.balance += 1

    # --- single messages -----------------------------------------------------------------------

    def due_in_slot_ms(self, unit: TimerUnit, record: StoredRecord) -> int:
        """Return the time at which a message leaves its slot: its ``due_ms`` in the near term."""
        if unit.magic & Magic.ROLL:
            return unit.slot_ms + self._settings.precision_ms
        deliver_ms = self._reader.deliver_time(record)
        return unit.slot_ms if deliver_ms is None else deliver_ms

    def is_near(self, unit: TimerUnit, record: StoredRecord) -> bool:
        """Return True if a message of an open slot is not released, cancelled or moved."""
        due_ms = self.due_in_slot_ms(unit, record)
        if self.near.contains(due_ms, record.physical_offset) or self.held.contains(record.physical_offset):
            return True
        found = self.files.log.find(record.physical_offset) if self.fair else None
        return self.fair is not None and found is not None and self.fair.contains(found[0])

    def near_offsets(self) -> np.ndarray:
        """Return the physical offsets of the pending messages of open slots, ascending."""
        pieces = [self.near.physical_offsets(), self.held.physical_offsets()]
        if self.fair:
            pieces.append(self.files.log.gather(np.sort(self.fair.positions()))["physical_offset"].astype(np.int64))
        return np.sort(np.concatenate(pieces))

    def remove(self, record: StoredRecord) -> None:
        """Never release a message, if it is on the wheel."""
        found = self.files.log.find(record.physical_offset)
        if found is None:
            return
        position, unit = found
        self._removed[record.physical_offset] = position
        if unit.slot_ms in self.open:
            due_ms = self.due_in_slot_ms(unit, record)
            is_held = self.fair is not None and self.fair.remove(position, due_ms)
            if not is_held and not self.held.remove(record.physical_offset):
                self.near.remove(due_ms, record.physical_offset)
        if not unit.magic & Magic.DELETE:
            self.balance -= 1

    def may_wait(self, slot_ms: int) -> bool:
        """Return True if no message of this slot can be in the near term: `remove_waiting` may remove it."""
        return slot_ms > self.read_ms and slot_ms not in self.open

    def remove_waiting(self, physical_offset: int) -> None:
        """Never release a message that is on the wheel, or will be put there, and is not parked; see `may_wait`."""
        self._unplaced.add(physical_offset)
        self.balance -= 1

    def drop_removed(self, taken: list[DueRecord]) -> list[DueRecord]:
        """Return the messages of *taken* that were not removed, and forget the others.

        There are others only if the clock was set back after a message was sent: then its slot is not the usual one.
        """
        unplaced, placed = self._unplaced, self._removed
        if not unplaced and not placed:
            return taken
        kept = [each for each in taken if each.physical_offset not in unplaced and each.physical_offset not in placed]
        if len(kept) < len(taken):
            self.drop([each for each in taken if each not in kept])
            self.balance += len(taken) - len(kept)  # the removal has counted them
        return kept

    def place_removed(self, read_end: int) -> int | None:
        """Look up the units of the messages that `remove_waiting` removed, for their marks.

        Args:
            read_end: Physical offset after the records of the timer topic that were put on the wheel.

        Returns:
            The physical offset of the first removed message that is not on the wheel yet; None without one.

        Raises:
            TimerLogDamageError: A unit is damaged.
        """
        offsets = np.sort(np.fromiter(self._unplaced, np.int64, len(self._unplaced)))
        read, unread = np.split(offsets, [int(np.searchsorted(offsets, read_end))])
        if len(read):
            self._place(read)
            self._unplaced.difference_update(read.tolist())
        return int(unread[0]) if len(unread) else None

    def _place(self, offsets: np.ndarray) -> None:
        """Note the positions of units, given by physical offset, ascending."""
        log = self.files.log
        start, end = log.position_after(int(offsets[0])), log.position_after(int(offsets[-1]) + 1)
        if len(offsets) > 1 and end - start > _READ_FOR_ONE * len(offsets):
            for half in np.array_split(offsets, 2):
                self._place(half)
            return
        for position, units in log.pieces(start, end):
            found = units["physical_offset"].astype(np.int64)
            for index in np.flatnonzero(contains(offsets, found)).tolist():
                self._removed[int(found[index])] = position + index * TIMER_UNIT_SIZE

    def remove_replaced(self, physical_offsets: np.ndarray) -> None:
        """At a start: remove the cancelled and rescheduled messages that the commit log shows."""
        for physical_offset in physical_offsets.tolist() if self.files.log.end else []:
            found = self.files.log.find(physical_offset)
            if found is not None and not found[1].magic & Magic.DONE:
                self._removed[physical_offset] = found[0]

    # --- marks ---------------------------------------------------------------------------------

    def unmarked(self) -> np.ndarray:
        """Return the positions, ascending, of units that are done but not marked: removed, or released from open slots.

        The commit log shows that their messages are gone, but RocketMQ does not read it there. When it opens the files,
        it releases all of an open slot except units that are marked as done.
        """
        dropped = [self._dropped, self.near.take_dropped(), self.held.take_dropped()]
        if self.fair is not None:
            dropped.append(self.fair.take_dropped())
        self._dropped = np.unique(np.concatenate(dropped))
        if not self._removed:
            return self._dropped
        return np.union1d(self._dropped, np.fromiter(self._removed.values(), np.int64, len(self._removed)))

    def forget_marked(self, positions: np.ndarray) -> None:
        """Stop storing these units in memory. They are marked."""
        self._dropped = self._dropped[~contains(positions, self._dropped)]
        done = set(positions.tolist()) if self._removed else set()
        self._removed = {offset: position for offset, position in self._removed.items() if position not in done}


def parking_slots(physical_offsets: np.ndarray, write_ms: int, settings: TimerSettings) -> np.ndarray:
    """Return the slots in which messages beyond the window are parked, at *write_ms*."""
    window_slots, half = settings.roll_window_slots, settings.roll_window_slots // 2
    # Fibonacci hashing spreads the offsets over the second half of the window. So many messages with one far due time
    # are not rolled in one slot. RocketMQ parks in two slots only (issue 8203).
    mixed = physical_offsets.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) >> np.uint64(32)
    spread = (mixed % np.uint64(window_slots - half)).astype(np.int64)
    return write_ms + (half + spread) * settings.precision_ms
