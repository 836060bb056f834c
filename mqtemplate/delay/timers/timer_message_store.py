"""Timers: any delay, on the timing wheel, each message at its millisecond."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import structlog

from mqtemplate.delay.delay_store import WAITING_DTYPE, WaitingPiece
from mqtemplate.delay.divert import TimerLimits
from mqtemplate.delay.release import (
    DEAD_LETTER_TOPIC,
    MAX_RELEASE_COUNT,
    Releaser,
    WaitingRecord,
    count_copies,
    observe_all,
)
from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.files import (
    DEFAULT_LOG_FILE_SIZE,
    DEFAULT_ROLL_WINDOW_SLOTS,
    TIMER_CHECKPOINT_FILE,
    TimerFiles,
    TimerSettings,
)
from mqtemplate.delay.timers.intake import deliver_time, read_arrivals, topic_names
from mqtemplate.delay.timers.progress import TimerProgress
from mqtemplate.delay.timers.replay import TimerReplay
from mqtemplate.delay.timers.timer_checkpoint import Writer
from mqtemplate.delay.timers.timer_log import TimerLogDamageError
from mqtemplate.delay.timers.timer_metrics import TimerMetrics
from mqtemplate.delay.timers.timer_unit import MAGIC_DEFAULT
from mqtemplate.delay.timers.timer_wheel import DEFAULT_SLOTS_TOTAL
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import REAL_TOPIC, find_property
from mqtemplate.record.run import RecordRun
from mqtemplate.store import MessageStore
from mqtemplate.store.layout import PRE_BLANK_SIZE_MARK
from mqtemplate.topics import TIMER_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.delay")

_ENQUEUE_COUNT = 256  # messages put on the wheel in one step; about 2 ms, during which nothing is handed over
_CATCH_UP_COUNT = 4_096  # the same while nothing may be handed over yet
_READ_AHEAD_MS = 100  # a slot is read this long before it begins
_RETRY_MS = 1_000  # when the disk was full
_SHOWN_COUNT = 16_384  # messages of `waiting` at a time


class TimerMessageStore:
    """Moves the messages of the timer topic to their real topics when they are due.

    ::

        timer topic ──enqueue──> wheel + timer log ──a slot opens──> near term ──due──> real topic
           ^                                                             │
           └───────────────── parked far messages (roll) <───────────────┘

    A slot covers ``slot_ms < deliver time <= slot_ms + precision``. It is read when it opens, and closed when its
    last millisecond has passed and all of it is handed over.

    - A message is handed over at its due time or later, never before, whatever the clock does.
    - `TimerBacklog` knows what is on the wheel, `TimerProgress` how far the timer topic is there.
    - What was handed over is read off the commit log (`release`). Wheel and log are derived; `TimerFiles` brings
      them to one state at a start, and they are made anew from the topic if that fails.

    One thread steps it; everything else may come from others. See `DelayStore` for the half that steering works with.

    Args:
        limits: Its precision is the length of a slot. A folder keeps that for life.
        roll_window_slots: A message due later than so many slots is parked in a nearer one, and set on again there.
        timer_log_file_size: Bytes of each timer log file.
        slots_total: Slots in the window; the wheel has twice as many. Upstream has the default.
    """

    name = "delay.timer"
    source_topic = TIMER_TOPIC

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
        self.lock = threading.RLock()
        self._files: TimerFiles | None = None
        self._backlog: TimerBacklog | None = None
        self._replay = TimerReplay(store)
        self._metrics = TimerMetrics(store.store_files)
        self._progress = TimerProgress(store, self._replay, self._metrics, self.lock)
        self._unsettled: set[str] = set()  # topics that something was handed over to and nobody was told yet
        self._wake: Callable[[], None] = lambda: None
        self._is_started = False
        self._released = store.metrics.counter("delay.released")
        self._rolled = store.metrics.counter("delay.rolled")
        self._lag_ms = store.metrics.histogram("delay.lag_ms")
        store.metrics.gauge("delay.waiting.timer", self.count_waiting)

    @property
    def poison_count(self) -> int:
        """Messages that could not be handed over since the start."""
        return self._releaser.poison_count

    # --- recovery ------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Open the files. All of the log, if they cannot be used while there are timers."""
        store_files = self._store.store_files
        if TimerFiles.exist(store_files):
            self._files = TimerFiles(store_files, self._settings)
            if self._files.recover():
                return None
        elif not self._store.queue_ids(TIMER_TOPIC):
            return None
        self._remake_files("its files are missing or do not agree")
        return 0

    def _remake_files(self, reason: str) -> None:
        if self._files is not None:
            self._files.close()
        self._files = TimerFiles.remake(self._store.store_files, self._settings)
        self._progress.is_rebuilt = True
        _log.warning("delay.timers_rebuilt", reason=reason)

    def replay(self, record: StoredRecord) -> None:
        """Note which waiting message *record* took the place of, if it did."""
        self._replay.replay(record)

    def start(self) -> None:
        """Take up where the last owner stopped, and listen for new messages. Once; again is harmless.

        Call it right after the store was loaded, before anything is put.
        """
        if self._is_started:
            return
        self._is_started = True
        self._replay.finish()
        self._progress.release_end = self._store.end_offset
        if self._files is not None:
            self._open_backlog(self._files)
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        progress, first = self._progress, self._replay.first_offset
        progress.cursor = min(max(progress.cursor, queue.min_offset), queue.max_offset)
        progress.catch_up_to = queue.max_offset
        progress.replay_offset = 0 if progress.is_rebuilt else self._store.end_offset if first is None else first
        if len(self._replay) or not progress.has_caught_up:
            _log.info(
                "delay.recovered",
                service=self.name,
                already_released=len(self._replay),
                to_enqueue=progress.catch_up_to - progress.cursor,
            )
        self._store.watch(TIMER_TOPIC, self._ring)

    def _open_backlog(self, files: TimerFiles) -> None:
        self._metrics.load()
        if self._progress.is_rebuilt or files.writer is Writer.NOBODY:
            self._metrics.begin_anew()
            self._progress.cursor, read_ms = 0, self._slot_at(self._store.clock.now_ms())
        else:
            self._cut_behind_log(files)
            self._progress.cursor, read_ms = self._cursor_after(files), files.checkpoint.last_read_time_ms
        self._backlog = TimerBacklog(self._store, files, self._replay, read_ms)
        self._backlog.withdraw_replaced(self._replay.steered)

    def _cut_behind_log(self, files: TimerFiles) -> None:
        """Forget timers whose records the commit log lost."""
        end = files.cut_after(self._store.end_offset)
        if end != files.log.end and not files.cut(end):
            files.close()
            self._store.store_files.delete(TIMER_CHECKPOINT_FILE)
            raise StoreError(
                "the timer log tells of records that the commit log lost, and cannot be cut back; the wheel is "
                "rebuilt from the commit log when the folder is opened again"
            )

    def _cursor_after(self, files: TimerFiles) -> int:
        """The first unit of the timer topic's queue that is not on the wheel.

        RocketMQ notes the queue offset before it flushes the log, so what stands in the log is ahead of it.
        """
        cursor = files.checkpoint.last_timer_queue_offset
        last = files.log.read(files.log.last_position())
        if files.writer is Writer.ROCKETMQ and last is not None:
            queue = self._store.consume_queue(TIMER_TOPIC, 0)
            cursor = max(cursor, queue.first_at("physical_offset", last.physical_offset + 1))
        return cursor

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
            with self.lock:  # a message is handed over, or steered: whoever comes second finds it gone
                next_ms = self._work(now_ms)
        except StoreFullError as exc:
            _log.warning("delay.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        except TimerLogDamageError as exc:
            raise self._condemned(exc) from exc
        topics, self._unsettled = self._unsettled, set()
        if topics:
            has_more = next_ms is not None and next_ms <= now_ms
            self._releaser.confirm(self._progress.release_end, topics, has_more=has_more)
        return next_ms

    def _work(self, now_ms: int) -> int | None:
        is_blocked = not self._enqueue(now_ms)
        backlog = self._backlog
        if backlog is None:
            return None
        if self._progress.has_caught_up or is_blocked:
            backlog.open_slots(now_ms, _READ_AHEAD_MS, MAX_RELEASE_COUNT)
            self._release(backlog, now_ms)
            backlog.close_slots(now_ms)
        has_more = self._progress.cursor < self._store.consume_queue(TIMER_TOPIC, 0).max_offset
        return now_ms if has_more else self._next_call(backlog, now_ms)

    def _condemned(self, exc: TimerLogDamageError) -> StoreError:
        """What is said of files that were found damaged; no word of progress is written to them any more."""
        assert self._files is not None
        self._progress.is_condemned = True
        self._files.condemn()
        return StoreError(
            f"{exc}; timers wait until the broker is started again: then wheel and timer log are made anew from the "
            "commit log, and nothing is lost"
        )

    def _next_call(self, backlog: TimerBacklog, now_ms: int) -> int | None:
        times = []
        if (due_ms := backlog.near.next_due_ms) is not None:
            times.append(due_ms)
        if backlog.next_slot_ms is not None:
            times.append(backlog.next_slot_ms - _READ_AHEAD_MS)
        if backlog.open:
            # so that progress is written down, though nothing is due
            times.append(max(min(backlog.open) + self._settings.precision_ms, now_ms + 1))
        return min(times, default=None)

    def _slot_at(self, time_ms: int) -> int:
        return time_ms // self._settings.precision_ms * self._settings.precision_ms

    def _enqueue(self, now_ms: int) -> bool:
        """Put new messages of the timer topic on the wheel; False if old ones have to leave it first."""
        queue, progress = self._store.consume_queue(TIMER_TOPIC, 0), self._progress
        if progress.cursor >= queue.max_offset:
            return True
        backlog = self._backlog or self._make_backlog(now_ms)
        backlog.leave_empty_slots(now_ms)
        if backlog.is_full(now_ms):
            return False
        progress.cursor = max(progress.cursor, queue.min_offset)
        units = queue.units(progress.cursor, _ENQUEUE_COUNT if progress.has_caught_up else _CATCH_UP_COUNT)
        offsets, sizes = units["physical_offset"].astype(np.int64), units["size"]
        fresh = ~(self._replay.is_linked(offsets) | (sizes == PRE_BLANK_SIZE_MARK))
        arrivals = read_arrivals(
            self._store, offsets[fresh].tolist(), sizes[fresh].tolist(), self._settings.precision_ms
        )
        if len(self._replay):
            columns = (arrivals[name] for name in ("physical_offset", "size", "slot_ms"))
            arrivals = arrivals[~self._replay.is_done(*columns)]
        backlog.take_in(arrivals, now_ms)
        progress.cursor += len(units)
        self._metrics.add(topic_names(arrivals["topic_hash"][arrivals["magic"] == MAGIC_DEFAULT]), now_ms)
        return True

    def _make_backlog(self, now_ms: int) -> TimerBacklog:
        """The first timer of this folder."""
        self._files = files = TimerFiles(self._store.store_files, self._settings)
        self._backlog = backlog = TimerBacklog(self._store, files, self._replay, self._slot_at(now_ms))
        files.save(self._progress.checkpoint_of(backlog), [])
        return backlog

    def _release(self, backlog: TimerBacklog, now_ms: int) -> None:
        """Hand over one batch of what is due, the earliest first."""
        taken = backlog.take(now_ms, MAX_RELEASE_COUNT)
        if not taken:
            return
        taken = taken[: self._releaser.fitting([item.size for item in taken])]
        drafts = self._releaser.drafts(backlog.not_deleted(taken), now_ms)
        if drafts:
            self._progress.release_end = self._releaser.append(drafts)
            self._unsettled.update({draft.topic for draft in drafts})
        backlog.drop(taken)
        self._count(drafts, taken)

    def _count(self, copies: Sequence[RecordDraft | RecordRun], taken: Sequence[WaitingRecord]) -> None:
        rolled_count = sum([each.topic == TIMER_TOPIC for each in copies])
        dead_count = sum([each.topic == DEAD_LETTER_TOPIC for each in copies])
        count = count_copies(copies)
        topics: Counter[str] = Counter()
        for each in copies:
            topics[_real_topic(each)] += count_copies([each])
        self._metrics.add(topics, self._store.clock.now_ms(), -1)
        self._rolled.add(rolled_count)
        self._released.add(count - rolled_count - dead_count)
        lags_ms = self._store.clock.now_ms() - np.array([item.due_ms for item in taken if not item.rolls], np.int64)
        if len(lags_ms):
            observe_all(self._lag_ms, lags_ms)
            _log.debug("delay.released", service=self.name, count=count, lag_ms=int(lags_ms[0]))

    # --- what waits ----------------------------------------------------------------------------

    def catch_up(self) -> None:
        """See `DelayStore`."""
        self.start()
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        end = queue.max_offset
        while self._progress.cursor < end:
            now_ms = self._store.clock.now_ms()
            if not self._enqueue(now_ms):
                self._work(now_ms)  # what is long overdue has to leave first
                self._wake()

    def is_waiting(self, record: StoredRecord) -> bool:
        """See `DelayStore`."""
        try:
            return self._backlog is not None and self._backlog.is_waiting(record)
        except TimerLogDamageError as exc:
            raise self._condemned(exc) from exc

    def due_ms(self, record: StoredRecord) -> int:
        """See `DelayStore`; 0 where nobody can tell."""
        return deliver_time(record, self._settings.precision_ms) or 0

    def slot_of(self, record: StoredRecord) -> int:
        """See `DelayStore`."""
        assert self._backlog is not None, "something waits"
        return self._backlog.slot_of(record)

    def withdraw(self, record: StoredRecord) -> None:
        """See `DelayStore`."""
        assert self._backlog is not None, "something waits"
        self._backlog.withdraw(record)
        self._metrics.add(Counter([_real_topic(record)]), self._store.clock.now_ms(), -1)
        self._progress.release_end = max(self._progress.release_end, self._store.end_offset)

    def mark_cancelled(self, record: StoredRecord) -> None:
        """See `DelayStore`. RocketMQ finds the marker in the slot."""

    def count_waiting(self) -> int:
        """How many messages wait. The first call looks at every unit of the timer log, see `TimerBacklog.count`."""
        with self.lock:
            if self._is_started:
                self.catch_up()
            return 0 if self._backlog is None else self._backlog.count()

    def waiting(self, after_ms: int, before_ms: int) -> Iterator[WaitingPiece]:
        """See `DelayStore`. Parked messages may be due long after their slot, so all slots before the end are read."""
        with self.lock:
            self.catch_up()
        from_ms = 0
        while (backlog := self._backlog) is not None:
            with self.lock:
                slots = backlog.slots_to_show(from_ms, before_ms, _SHOWN_COUNT)
            if not len(slots):
                return
            try:
                units = backlog.read_slots(slots)
            except TimerLogDamageError:  # it may have been marked at this moment
                with self.lock:
                    units = backlog.read_slots(slots)
            with self.lock:
                rows = backlog.waiting_of(units)
            rows = rows[(rows["due_ms"] >= after_ms) & (rows["due_ms"] < before_ms)]
            precision_ms = self._settings.precision_ms
            if len(rows):
                yield WaitingPiece(max(int(slots["time"][0]) * precision_ms, after_ms), rows)
            from_ms = (int(slots["time"][-1]) + 1) * precision_ms

    def waiting_between(self, physical_begin: int, physical_end: int) -> np.ndarray:
        """See `DelayStore`. A delete marker of RocketMQ's counts as waiting: its target still has to meet it."""
        with self.lock:
            self.catch_up()
            backlog = self._backlog
            if backlog is None:
                return np.empty(0, WAITING_DTYPE)
            pieces = [
                backlog.waiting_of(units, with_markers=True)
                for units in backlog.units_between(physical_begin, physical_end)
            ]
        return np.concatenate([np.empty(0, WAITING_DTYPE), *pieces])

    def delete_before(self, physical_begin: int) -> int:
        """Delete timer log files that tell of nothing but records before *physical_begin*, where the commit log now
        begins; gives how many went. One in which something waits stays, and the last one."""
        with self.lock:
            return 0 if self._backlog is None else self._backlog.delete_before(physical_begin)

    def persist(self) -> int | None:
        """Write wheel, log and ``timercheck`` if there is something new; see `LogFollower`."""
        return self._progress.persist(self._backlog) if self._is_started else self._progress.replay_offset

    def close(self) -> None:
        """Let go of the files; `persist` came before."""
        if self._files is not None:
            self._files.close()


def _real_topic(record: RecordDraft | RecordRun | StoredRecord) -> str:
    """Where a message goes in the end; of one in a real topic, that."""
    if isinstance(record, RecordRun) or record.topic not in (TIMER_TOPIC, DEAD_LETTER_TOPIC):
        return record.topic
    properties = record.properties if isinstance(record, RecordDraft) else record.properties_bytes
    return find_property(properties, REAL_TOPIC) or ""
