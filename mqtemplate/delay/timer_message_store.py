"""Timers: any delay, on the timing wheel, each message at its millisecond."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import numpy as np
import structlog

from mqtemplate.delay.divert import TimerLimits
from mqtemplate.delay.near_term import NearTerm
from mqtemplate.delay.release import DEAD_LETTER_TOPIC, MAX_RELEASE_COUNT, Releaser, WaitingRecord, released_source
from mqtemplate.delay.slot_reader import contains, read_slot
from mqtemplate.delay.timer_checkpoint import TimerCheckpoint
from mqtemplate.delay.timer_files import (
    DEFAULT_LOG_FILE_SIZE,
    DEFAULT_ROLL_WINDOW_SLOTS,
    TIMER_CHECKPOINT_FILE,
    TimerFiles,
    TimerSettings,
)
from mqtemplate.delay.timer_intake import Arrival, delete_keys, read_arrival, roll_slot
from mqtemplate.delay.timer_log import MAGIC_DELETE, MAGIC_ROLL, TIMER_UNIT_SIZE, TimerUnit
from mqtemplate.delay.timer_wheel import DEFAULT_SLOTS_TOTAL
from mqtemplate.errors import CorruptRecordError, StoreError, StoreFullError
from mqtemplate.message import SCHEDULE_TOPIC, TIMER_TOPIC
from mqtemplate.record import StoredRecord, find_property
from mqtemplate.store import MessageStore
from mqtemplate.store.layout import PRE_BLANK_SIZE_MARK

__all__ = ["TimerMessageStore"]

_log = structlog.stdlib.get_logger("mqtemplate.delay")

_ENQUEUE_COUNT = 256  # messages put on the wheel in one step; about 3 ms, during which nothing is handed over
_READ_AHEAD_MS = 100  # a slot is read this long before it begins
_RETRY_MS = 1_000  # when the disk was full


class TimerMessageStore:
    """Moves the messages of the timer topic to their real topics when they are due.

    ::

        timer topic ──enqueue──> wheel + timer log ──a slot opens──> near term ──due──> real topic
           ^                                                             │
           └───────────────── parked far messages (roll) <───────────────┘

    A slot covers ``slot_ms < deliver time <= slot_ms + precision``. It is read when it opens, and closed when its
    last millisecond has passed and all of it is handed over.

    - A message is handed over at its due time or later, never before, whatever the clock does.
    - Slots before ``_read_ms`` are closed. A message that comes for one of them is linked to the slot at
      ``_read_ms``, where a restart finds it; its own due time still decides.
    - ``_cursor`` units of the timer topic's queue are on the wheel, or need not be.
    - What was handed over is read off the commit log (`release`). Wheel and log are derived; `TimerFiles` brings
      them to one state at a start, and they are made anew from the topic if that fails.

    One thread steps it; `persist` may come from another.

    Args:
        limits: Its precision is the length of a slot. A folder keeps that for life.
        roll_window_slots: A message due later than so many slots is parked in a nearer one, and set on again there.
        timer_log_file_size: Bytes of each timer log file.
        slots_total: Slots in the window; the wheel has twice as many. Upstream has the default.
    """

    name = "delay.timer"

    def __init__(
        self,
        store: MessageStore,
        limits: TimerLimits | None = None,
        *,
        roll_window_slots: int = DEFAULT_ROLL_WINDOW_SLOTS,
        timer_log_file_size: int = DEFAULT_LOG_FILE_SIZE,
        slots_total: int = DEFAULT_SLOTS_TOTAL,
    ) -> None:
        self._store = store
        self._settings = TimerSettings(
            precision_ms=(limits or TimerLimits()).precision_ms,
            slots_total=slots_total,
            roll_window_slots=roll_window_slots,
            log_file_size=timer_log_file_size,
        )
        self._releaser = Releaser(store, TIMER_TOPIC)
        self._files: TimerFiles | None = None
        self._lock = threading.Lock()  # `persist` sees a state between two changes
        self._near = NearTerm()
        self._open: dict[int, int] = {}  # open slot -> end of the commit log when it opened: releases lie behind
        self._next_slot_ms: int | None = None  # the first live slot that is not open yet
        self._must_open_ms: int | None = None  # a slot that late-comers were linked to
        self._read_ms = 0
        self._cursor = 0
        self._catch_up_to = 0  # units to put on the wheel before the first slot opens
        self._is_rebuilt = False
        self._deleted: dict[str, int] = {}  # key of a cancelled message -> its slot
        self._seen_sources = array("q")
        self._released = np.empty(0, np.int64)  # sorted sources of the copies seen by `replay`
        self._replayed: tuple[int, int] | None = None  # offset of the first such copy, time of the last
        self._release_end = 0
        self._replay_offset: int | None = 0
        self._wake: Callable[[], None] = lambda: None
        self._is_started = False

    @property
    def poison_count(self) -> int:
        """Messages that could not be handed over since the start."""
        return self._releaser.poison_count

    # --- recovery ------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Open the files. All of the log, if they cannot be used while there are timers."""
        home = self._store.home
        if TimerFiles.exist(home):
            self._files = TimerFiles(home, self._settings)
            checkpoint = self._files.checkpoint
            self._read_ms, self._cursor = checkpoint.last_read_time_ms, checkpoint.last_timer_queue_offset
            if any(checkpoint) and self._files.repair(checkpoint.last_timer_log_flush_pos):
                return None
        if not self._store.queue_ids(TIMER_TOPIC):
            return None
        self._remake_files("its files are missing or do not agree")
        return 0

    def _remake_files(self, reason: str) -> None:
        if self._files is not None:
            self._files.close()
        self._files = TimerFiles.remake(self._store.home, self._settings)
        self._cursor, self._is_rebuilt = 0, True
        _log.warning("delay.timers_rebuilt", reason=reason)

    def replay(self, record: StoredRecord) -> None:
        """Note which waiting message *record* was copied from, if it was."""
        source = released_source(record)
        if source is None or record.topic == SCHEDULE_TOPIC:
            return
        if record.topic == DEAD_LETTER_TOPIC or b"TIMER_OUT_MS\x01" in record.properties_bytes:
            self._seen_sources.append(source)
            first = record.physical_offset if self._replayed is None else self._replayed[0]
            self._replayed = min(first, record.physical_offset), record.store_timestamp

    def start(self) -> None:
        """Take up where the last owner stopped, and listen for new messages. Once; again is harmless.

        Call it right after the store was loaded, before anything is put.
        """
        if self._is_started:
            return
        self._is_started = True
        self._released = np.unique(np.frombuffer(self._seen_sources, np.int64))
        self._seen_sources = array("q")
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        now_slot_ms = self._slot_at(self._store.clock.now_ms())
        self._release_end = self._store.end_offset
        if self._files is None or self._is_rebuilt:
            self._read_ms = now_slot_ms
        else:
            end = self._files.cut_behind(self._store.end_offset)
            if end != self._files.log.end and not self._files.repair(end):
                self._files.close()
                self._store.home.delete(TIMER_CHECKPOINT_FILE)
                raise StoreError(
                    "the timer log tells of records that the commit log lost, and cannot be cut back; the wheel is "
                    "rebuilt from the commit log when the folder is opened again"
                )
            self._next_slot_ms = self._files.wheel.oldest_live(self._read_ms)
            if self._files.wheel.get(self._read_ms) is not None:
                self._must_open_ms = self._read_ms
        self._cursor = min(max(self._cursor, queue.min_offset), queue.max_offset)
        self._catch_up_to = queue.max_offset
        if self._replayed is not None:
            # each was handed over from a slot of its time or before, or from the one that late-comers went to
            self._replayed = self._replayed[0], max(self._replayed[1], self._read_ms)
        self._replay_offset = self._replayed[0] if self._replayed else self._store.end_offset
        if self._is_rebuilt:
            self._replayed = None  # of what was handed over nothing will be on the wheel
            self._replay_offset = 0
        if len(self._released) or self._catch_up_to > self._cursor:
            _log.info(
                "delay.recovered",
                service=self.name,
                already_released=len(self._released),
                to_enqueue=self._catch_up_to - self._cursor,
            )
        self._store.watch(TIMER_TOPIC, self._ring)

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _ring(self) -> None:
        self._wake()

    # --- work ----------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Put new messages on the wheel and hand over what is due, a bounded number of each; gives when to go on."""
        self.start()
        now_ms = self._store.clock.now_ms()
        try:
            is_blocked = not self._enqueue(now_ms)
            if self._files is None:
                return None
            if self._cursor >= self._catch_up_to or is_blocked:
                self._open_slots(now_ms)
                self._release(now_ms)
                self._close_slots(now_ms)
        except StoreFullError as exc:
            _log.warning("delay.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        has_more = self._cursor < self._store.consume_queue(TIMER_TOPIC, 0).max_offset
        return now_ms if has_more else self._next_call(now_ms)

    def _next_call(self, now_ms: int) -> int | None:
        times = []
        if (due_ms := self._near.next_due_ms) is not None:
            times.append(due_ms)
        if self._next_slot_ms is not None:
            times.append(self._next_slot_ms - _READ_AHEAD_MS)
        if self._open:
            # so that progress is written down, though nothing is due
            times.append(max(min(self._open) + self._settings.precision_ms, now_ms + 1))
        return min(times, default=None)

    def _slot_at(self, time_ms: int) -> int:
        return time_ms // self._settings.precision_ms * self._settings.precision_ms

    # --- enqueue -------------------------------------------------------------------------------

    def _enqueue(self, now_ms: int) -> bool:
        """Put new messages of the timer topic on the wheel; False if old ones have to leave it first."""
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        if self._cursor >= queue.max_offset:
            return True
        self._leave_empty_slots(now_ms)
        if self._wheel_is_full(now_ms):
            return False
        self._cursor = max(self._cursor, queue.min_offset)
        units = queue.units(self._cursor, _ENQUEUE_COUNT)
        is_done = contains(self._released, units["physical_offset"]) | (units["size"] == PRE_BLANK_SIZE_MARK)
        with self._lock:
            files = self._files or self._make_files(now_ms)
            for physical_offset, size, skip in zip(
                units["physical_offset"].tolist(), units["size"].tolist(), is_done.tolist(), strict=True
            ):
                if not skip:
                    arrival = read_arrival(self._store, physical_offset, size, self._settings.precision_ms)
                    if arrival is not None:
                        self._link(files, arrival, now_ms)
                self._cursor += 1
        return True

    def _wheel_is_full(self, now_ms: int) -> bool:
        """Whether a slot that waits since long stands where the far end of the window would be written."""
        return self._first_slot(now_ms) <= now_ms + self._settings.window_ms - self._settings.turn_ms

    def _first_slot(self, now_ms: int) -> int:
        """The first slot that has messages; that of now if it is later or there is none."""
        return min([*self._open, self._slot_at(now_ms), *([] if self._next_slot_ms is None else [self._next_slot_ms])])

    def _leave_empty_slots(self, now_ms: int) -> None:
        """Count the slots before the first that has messages as closed, up to now."""
        self._read_ms = max(self._read_ms, self._first_slot(now_ms))

    def _make_files(self, now_ms: int) -> TimerFiles:
        """The first timer of this folder."""
        self._files = TimerFiles(self._store.home, self._settings)
        self._files.save(self._checkpoint_now(), 0)
        return self._files

    def _link(self, files: TimerFiles, arrival: Arrival, now_ms: int) -> None:
        """Write a unit, and make it the newest of its slot."""
        write_ms = self._slot_at(now_ms)
        slot_ms, magic = arrival.slot_ms, arrival.magic
        parked_ms = roll_slot(
            slot_ms, arrival.physical_offset, write_ms, self._settings.precision_ms, self._settings.roll_window_slots
        )
        if parked_ms is not None:
            slot_ms, magic = parked_ms, magic | MAGIC_ROLL
        if slot_ms < self._read_ms:
            slot_ms = self._read_ms
            if slot_ms not in self._open:
                self._must_open_ms = slot_ms  # though it may begin later, if the clock was set back
        write_ms = min(write_ms, slot_ms)  # the difference has but four bytes
        position = files.log.next_position()
        previous = files.wheel.last_pos(slot_ms)
        unit = TimerUnit(
            TIMER_UNIT_SIZE, previous, magic, write_ms, slot_ms - write_ms,
            arrival.physical_offset, arrival.size, arrival.topic_hash, arrival.deliver_ms,
        )  # fmt: skip
        files.log.append(unit)
        files.wheel.link(slot_ms, position, -1 if magic & MAGIC_DELETE else 1)
        if slot_ms in self._open:
            self._add_late(arrival, slot_ms, write_ms, rolls=bool(magic & MAGIC_ROLL))
        elif self._next_slot_ms is None or slot_ms < self._next_slot_ms:
            self._next_slot_ms = slot_ms

    def _add_late(self, arrival: Arrival, slot_ms: int, write_ms: int, *, rolls: bool) -> None:
        """A message for a slot that was read already."""
        if arrival.magic & MAGIC_DELETE and not rolls:
            self._cancel(arrival.physical_offset, arrival.size, slot_ms)
            return
        due_ms = slot_ms + self._settings.precision_ms if rolls else arrival.deliver_ms
        is_poison = arrival.deliver_ms == 0
        self._near.add(WaitingRecord(due_ms, arrival.physical_offset, arrival.size, write_ms, rolls, is_poison))

    def _cancel(self, physical_offset: int, size: int, slot_ms: int) -> None:
        for key in delete_keys(self._store, physical_offset, size):
            self._deleted[key] = slot_ms

    # --- slots ---------------------------------------------------------------------------------

    def _open_slots(self, now_ms: int) -> None:
        """Read the slots that begin, and of those that should be past as many as one step can hand over."""
        if self._must_open_ms is not None and self._must_open_ms not in self._open:
            with self._lock:
                self._open_slot(self._must_open_ms)
        self._must_open_ms = None
        newest_ms = self._slot_at(now_ms + _READ_AHEAD_MS)
        while (slot_ms := self._next_slot_ms) is not None and slot_ms <= newest_ms:
            is_past = slot_ms + self._settings.precision_ms < now_ms
            if is_past and self._near.due_count(now_ms, MAX_RELEASE_COUNT) >= MAX_RELEASE_COUNT:
                return
            with self._lock:
                self._open_slot(slot_ms)

    def _open_slot(self, slot_ms: int) -> None:
        files = self._files
        assert files is not None, "a slot is live only in a wheel"
        self._open[slot_ms] = self._store.end_offset
        content = read_slot(files, self._store, slot_ms, self._released)
        self._near.add_slot(content.rows)
        for physical_offset, size in content.markers:
            self._cancel(physical_offset, size, slot_ms)
        while self._next_slot_ms in self._open:
            self._next_slot_ms = files.wheel.next_live(self._next_slot_ms + self._settings.precision_ms)

    def _close_slots(self, now_ms: int) -> None:
        """Leave slots behind that have passed and of which nothing is left."""
        next_due_ms = self._near.next_due_ms
        with self._lock:
            for slot_ms in sorted(self._open):
                end_ms = slot_ms + self._settings.precision_ms
                if end_ms > now_ms or (next_due_ms is not None and next_due_ms <= end_ms):
                    break
                del self._open[slot_ms]
                self._read_ms = max(self._read_ms, end_ms)
                self._deleted = {key: slot for key, slot in self._deleted.items() if slot != slot_ms}
            self._leave_empty_slots(now_ms)

    # --- release -------------------------------------------------------------------------------

    def _release(self, now_ms: int) -> None:
        """Hand over one batch of what is due, the earliest first."""
        taken = self._near.take(now_ms, MAX_RELEASE_COUNT)
        if not taken:
            return
        taken = taken[: self._releaser.fitting([item.size for item in taken])]
        kept = [item for item in taken if not self._is_deleted(item)] if self._deleted else taken
        drafts = self._releaser.drafts(kept, now_ms)
        with self._lock:  # `persist` sees a copy and its source gone together, or neither
            if drafts:
                self._release_end = self._releaser.append(drafts)
            self._near.drop(taken)
        if drafts:
            self._store.settle(self._release_end, {draft.topic for draft in drafts})
            _log.debug("delay.released", service=self.name, count=len(drafts), lag_ms=now_ms - taken[0].due_ms)

    def _is_deleted(self, item: WaitingRecord) -> bool:
        """Whether a delete marker of its slot names this message."""
        try:
            key = find_property(self._store.read(item.physical_offset, item.size).properties_bytes, b"UNIQ_KEY")
        except CorruptRecordError:
            return False  # the releaser reports it
        return not item.rolls and key in self._deleted

    # --- progress ------------------------------------------------------------------------------

    def _checkpoint_now(self) -> TimerCheckpoint:
        old = None if self._files is None else self._files.checkpoint
        return TimerCheckpoint(
            last_read_time_ms=self._read_ms,
            last_timer_log_flush_pos=0 if self._files is None else self._files.log.end,
            last_timer_queue_offset=self._cursor,
            master_timer_queue_offset=self._cursor,
            timestamp=self._store.clock.now_ms(),
            counter=0 if old is None else old.counter + 1,
            precision_ms=self._settings.precision_ms,
        )

    def persist(self) -> int | None:
        """Write wheel, log and ``timercheck`` if there is something new; see `LogFollower`."""
        if not self._is_started:
            return self._replay_offset
        if self._is_rebuilt and self._cursor < self._catch_up_to:
            return 0  # half of the topic is not on the wheel: no state to go on from
        with self._lock:
            # A copy that a power failure could still take away must not count as handed over.
            if self._release_end > self._store.group_commit.flushed:
                return self._replay_offset
            checkpoint = self._checkpoint_now()
            replay_offset = min(self._open.values(), default=self._store.end_offset)
            if self._replayed is not None:
                first_offset, last_time_ms = self._replayed
                if self._cursor >= self._catch_up_to and self._read_ms > last_time_ms:
                    self._replayed = None  # every slot that they came from is closed
                else:
                    replay_offset = min(replay_offset, first_offset)
        files = self._files
        if files is not None and not _tells_the_same(checkpoint, files.checkpoint):
            files.save(checkpoint, checkpoint.last_timer_log_flush_pos)
        self._replay_offset = replay_offset
        return replay_offset

    def close(self) -> None:
        """Let go of the files; `persist` came before."""
        if self._files is not None:
            self._files.close()


def _tells_the_same(one: TimerCheckpoint, other: TimerCheckpoint) -> bool:
    return one._replace(timestamp=0, counter=0) == other._replace(timestamp=0, counter=0)
