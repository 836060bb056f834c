"""Delay service for timers: any delay, on the timing wheel, each message released at its millisecond.

It also counts the pending timers by topic: the file ``config/timermetrics``, for RocketMQ's tools.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import compress
from types import MappingProxyType
from typing import Any

import numpy as np

from mqtemplate.delay.delay_store import FLUSH_TIMEOUT_MS, MAX_RELEASE_COUNT, DelayStore, count_copies
from mqtemplate.delay.pending_rows import NEVER_MS, NO_ROWS, DueRecord, LatenessCauses, PendingEntry, PendingPiece
from mqtemplate.delay.replay import TimerReplay
from mqtemplate.delay.settings import TimerSettings, TopicShape
from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.files import (
    NO_MASTER,
    TIMER_CHECKPOINT_FILE,
    TimerCheckpoint,
    TimerFiles,
    Writer,
    log_file_size,
)
from mqtemplate.delay.timers.intake import TimerTopicReader
from mqtemplate.delay.timers.pending_timers import PendingTimers
from mqtemplate.delay.timers.shaping import Shaper
from mqtemplate.delay.timers.timer_log import Magic, TimerLogDamageError
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.event_log import get_logger
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import REAL_TOPIC, find_property
from mqtemplate.record.record_arrays import AlikeCopies
from mqtemplate.services import ClockWatch
from mqtemplate.store.files.layout import PRE_BLANK_SIZE_MARK
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import DataVersion, read_table
from mqtemplate.topics import TIMER_TOPIC, UNDELIVERABLE_TOPIC

_log = get_logger("mqtemplate.delay")

TIMER_METRICS_FILE = "config/timermetrics"
_INTERVAL_MS = 30_000  # a write takes several flushes, and only operators read the file
_MOST_TOPICS = 10_000
_REST_MS, _FEW = 2, 128  # see `TimerMessageStore._rests`


class TimerMetrics:
    """Counts timers by topic: up when one is put on the wheel, down when it leaves the wheel.

    The numbers are for information only. After a kill they may lack the changes of the last half minute. The exact
    total is the metric ``delay.waiting.timer``. Source: RocketMQ ``store: TimerMetrics``.
    """

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._version = DataVersion()
        self._counts: dict[str, dict[str, int]] = {}  # as in the file: topic -> "count" and "timeStamp"
        self._is_changed = False
        self._written_ms = -1

    def load(self, *, is_current: bool) -> None:
        """Continue with the numbers in the file; with none if it cannot be read, or belongs to another wheel."""
        try:
            table = read_table(self._store_files, TIMER_METRICS_FILE)
            self._version = DataVersion.of(table)
            for topic, pair in (table.get("timingCount") or {}).items() if is_current else ():
                self._counts[topic] = {name: int(pair[name]) for name in ("count", "timeStamp")}
        except (StoreError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as exc:
            _log.warning("timer_metrics.ignored", reason=str(exc))

    def add(self, counts: Mapping[str, int], now_ms: int, sign: int = 1) -> None:
        """Add *counts*, which map a topic to a number of timers; with a *sign* of -1 subtract them."""
        for topic, count in counts.items():
            before = self._counts[topic]["count"] if topic in self._counts else 0
            self._counts[topic] = {"count": before + sign * count, "timeStamp": now_ms}
            self._is_changed = True

    def counts(self) -> list[tuple[str, int]]:
        """Return each topic with its number of timers."""
        return [(topic, max(pair["count"], 0)) for topic, pair in self._counts.items()]

    def write(self, now_ms: int) -> None:
        """Write the file if numbers changed and the last write is long enough ago."""
        if not self._is_changed or 0 <= now_ms - self._written_ms < _INTERVAL_MS or len(self._counts) > _MOST_TOPICS:
            return
        self._is_changed, self._written_ms = False, now_ms
        counts = {topic: pair | {"count": max(pair["count"], 0)} for topic, pair in dict(self._counts).items()}
        table: dict[str, Any] = {"dataVersion": self._version.next(now_ms), "timingCount": counts}
        self._store_files.write_bytes(TIMER_METRICS_FILE, json.dumps(table, separators=(",", ":")).encode())


_ENQUEUE_COUNT = 256  # messages put on the wheel in one step: about 2 ms in which none is released (measured)
_CATCH_UP_COUNT = 4_096  # the same while none may be released yet
_READ_AHEAD_MS = 100  # a slot is read this long before it starts
_MARKED_AT_ONCE = 1_024  # units marked under one lock: less than a millisecond in which no message is released


class TimerMessageStore(DelayStore):
    """Releases the messages of the timer topic to their real topics when they are due.

    ::

        timer topic ──enqueue──> wheel + timer log ──a slot opens──> near term ──due──> real topic
           ^                                                             │
           └───────────────── parked far messages (roll) <───────────────┘

    A slot covers ``slot_ms < deliver time <= slot_ms + precision``. It is read shortly before it starts, and closed
    when its last millisecond has passed and all its messages are released.

    - A message is released at its due time or later, never before, whatever the clock does.
    - `TimerBacklog` has the messages on the wheel. Messages of the timer topic before the cursor are on it.
    - The commit log shows what was released (`copies`). Wheel and log are derived from it: `TimerFiles` brings them to
      one state at a start, and if that fails, they are rebuilt from the topic.

    Args:
        shapes: Topic -> the shape of its releases.
    """

    name = "delay.timer"
    source_topic = TIMER_TOPIC

    def __init__(
        self,
        store: MessageStore,
        settings: TimerSettings | None = None,
        causes: LatenessCauses | None = None,
        shapes: Mapping[str, TopicShape] = MappingProxyType({}),
    ) -> None:
        super().__init__(store, causes)
        self._shaper = Shaper(shapes, self._causes)
        self._clock_watch = ClockWatch(store.clock)
        self._settings = settings or TimerSettings()
        self.window_ms = self._settings.window_ms
        self._reader = TimerTopicReader(store, self._settings.precision_ms)
        self._replay = TimerReplay(store)
        self._metrics = TimerMetrics(store.store_files)
        self._cursor = 0  # queue offset in the timer topic: earlier messages are on the wheel, or need not be
        self._enqueued_ms = -_REST_MS  # steady time at which messages were put on the wheel last
        self._catch_up_to = 0  # the end of the topic at the start: no slot opens before the cursor is there
        self._is_rebuilt = False  # the files were rebuilt at this start
        self._replay_offset: int | None = 0  # start of the part of the log that a recovery has to replay
        self._saving = threading.Lock()  # held by the thread that writes the files
        # These three exist together, from the first timer of the store directory on.
        self._files: TimerFiles | None = None
        self._backlog: TimerBacklog | None = None
        self._pending: PendingTimers | None = None
        store.metrics.gauge("delay.waiting.timer", self.count_pending)
        store.metrics.gauge("delay.held", lambda: self._shaper.count)
        store.metrics.add_collector(self._pending_by_topic)

    @property
    def log_file_size(self) -> int:
        """Bytes of each file of the timer log."""
        return log_file_size(self._store.store_files, self._settings)

    # --- recovery ------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Open the files. Return 0, the whole log, if there are timers but the files cannot be used."""
        store_files = self._store.store_files
        # Without files, or with unwritten ones: the last process was killed too early, or they were deleted.
        is_new = not TimerFiles.exist(store_files)
        if store_files.exists(TIMER_CHECKPOINT_FILE):  # wheel and log are useless without a checkpoint
            self._files = TimerFiles(store_files, self._settings)
            if self._files.recover():
                return None
            is_new = self._files.is_unwritten
            self._files.close()
        elif not self._store.queue_ids(TIMER_TOPIC):
            return None
        self._files = TimerFiles.create_empty(store_files, self._settings)
        self._is_rebuilt = True
        if is_new:
            _log.info("timers.rebuilt", reason="there are timers, and their files are not written yet")
        else:
            _log.warning("timers.rebuilt", reason="their files are incomplete, damaged, or contradict each other")
        return 0

    def replay(self, record: StoredRecord) -> None:
        """Note which delayed message *record* replaced, if any; see `LogFollower`."""
        self._replay.replay(record)

    def _recover(self) -> None:
        cursor = 0 if self._files is None else self._start_files(self._files)
        queue, first = self._store.consume_queue(TIMER_TOPIC, 0), self._replay.first_offset
        self._cursor, self._catch_up_to = min(max(cursor, queue.min_offset), queue.max_offset), queue.max_offset
        self._replay_offset = 0 if self._is_rebuilt else self._store.end_offset if first is None else first
        released, to_enqueue = len(self._replay), self._catch_up_to - self._cursor
        if released or to_enqueue:
            _log.debug("delay.recovered", service=self.name, already_released=released, to_enqueue=to_enqueue)

    def _start_files(self, files: TimerFiles) -> int:
        """Create the backlog. Return the queue offset of the first message that is not on the wheel."""
        is_current = not self._is_rebuilt and files.writer is not Writer.UNKNOWN
        self._metrics.load(is_current=is_current)
        if not is_current:
            cursor, read_ms = 0, self._settings.slot_at(self._store.clock.now_ms())
        else:
            files.cut_after(self._store.end_offset)
            cursor, read_ms = self._cursor_after(files), files.checkpoint.last_read_time_ms
        self._create_backlog(files, read_ms).remove_replaced(self._replay.changed.values())
        return cursor

    def _cursor_after(self, files: TimerFiles) -> int:
        cursor = files.checkpoint.last_timer_queue_offset
        last = files.log.read(files.log.last_position())
        # RocketMQ notes the queue offset before it flushes the log. So the log may have units after that offset.
        if files.writer is Writer.ROCKETMQ and last is not None:
            queue = self._store.consume_queue(TIMER_TOPIC, 0)
            cursor = max(cursor, queue.first_at("physical_offset", last.physical_offset + 1))
        return cursor

    def _create_backlog(self, files: TimerFiles, read_ms: int) -> TimerBacklog:
        self._backlog = TimerBacklog(
            files, self._reader, self._replay.is_replaced, read_ms, self._shaper, lambda: self._store.end_offset
        )
        self._pending = PendingTimers(self._backlog, self._reader, self.lock, self.catch_up)
        return self._backlog

    # --- release -------------------------------------------------------------------------------

    def _release_due(self, now_ms: int) -> int | None:
        try:
            return self._work(now_ms)
        except TimerLogDamageError as exc:
            raise self._condemn(exc) from exc

    def _work(self, now_ms: int) -> int | None:
        """Put new messages on the wheel and release due ones, a bounded number. Return the time of the next call."""
        if moved_ms := self._clock_watch.moved_ms():
            self._shaper.clock_moved(moved_ms)
        if self._rests():
            return now_ms + _REST_MS
        is_blocked = not self._enqueue(now_ms)
        backlog = self._backlog
        if backlog is None:
            return None
        # Before the topic is caught up, a message with an earlier due time may still be missing.
        if is_blocked or self._cursor >= self._catch_up_to:
            backlog.open_slots(now_ms, _READ_AHEAD_MS, MAX_RELEASE_COUNT)
            self._release(backlog, now_ms)
            backlog.close_slots(now_ms)
        has_more = self._cursor < self._store.consume_queue(TIMER_TOPIC, 0).max_offset
        return now_ms if has_more else self._next_call(backlog, now_ms)

    def _rests(self) -> bool:
        """Return True if few messages have arrived since others were put on the wheel a moment ago.

        To put one on the wheel costs nearly as much as to put a hundred, and each send would wake the thread for it. A
        timer that is due meanwhile is released 2 ms late.
        """
        if self._backlog is None or self._store.clock.is_virtual:
            return False
        unread = self._store.consume_queue(TIMER_TOPIC, 0).max_offset - self._cursor
        return 0 < unread < _FEW and self._store.clock.steady_ms() - self._enqueued_ms < _REST_MS

    def _condemn(self, exc: TimerLogDamageError) -> StoreError:
        """Stop using damaged files. Return the error to raise."""
        assert self._files is not None
        self._files.condemn()
        return StoreError(
            f"{exc}; timers are not released until the broker is started again: then wheel and timer log are rebuilt "
            "from the commit log, and nothing is lost"
        )

    def _next_call(self, backlog: TimerBacklog, now_ms: int) -> int | None:
        next_open_ms = backlog.next_open_ms(now_ms, _READ_AHEAD_MS)
        next_ms = min(backlog.near.next_due_ms, backlog.held_release_ms, next_open_ms)
        if backlog.open:
            # A complete slot is closed although nothing is due, so that the progress is written.
            end_ms = min(backlog.open) + self._settings.precision_ms
            if backlog.held_due_ms > end_ms:  # else a release of held messages completes the slot
                next_ms = min(next_ms, max(end_ms, now_ms + 1))
        return None if next_ms >= NEVER_MS - _READ_AHEAD_MS else next_ms

    def _enqueue(self, now_ms: int) -> bool:
        """Put new messages of the timer topic on the wheel. Return False if overdue ones must leave it first."""
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        if self._cursor >= queue.max_offset:
            return True
        backlog = self._backlog or self._create_files(now_ms)
        backlog.close_empty_slots(now_ms)
        if backlog.is_full(now_ms):
            return False
        cursor = max(self._cursor, queue.min_offset)
        units = queue.units(cursor, _CATCH_UP_COUNT if cursor < self._catch_up_to else _ENQUEUE_COUNT)
        offsets, sizes = units["physical_offset"].astype(np.int64), units["size"]
        fresh = ~(self._replay.sources.contains(offsets) | (sizes == PRE_BLANK_SIZE_MARK))
        arrivals, topics = self._reader.read(offsets[fresh].tolist(), sizes[fresh].tolist())
        counted = arrivals["magic"] == Magic.DEFAULT
        if len(self._replay):
            slots_ms = self._reader.arrival_slots(arrivals)
            is_new = ~self._replay.is_replaced(arrivals["physical_offset"], arrivals["size"], slots_ms)
            arrivals, counted = arrivals[is_new], counted & is_new
        backlog.take_in(arrivals, now_ms)
        self._cursor = cursor + len(units)
        self._enqueued_ms = self._store.clock.steady_ms()
        counts = Counter(compress(topics, counted.tolist()))
        self._metrics.add({topic.decode("utf-8", "replace"): counts[topic] for topic in counts if topic}, now_ms)
        return True

    def _create_files(self, now_ms: int) -> TimerBacklog:
        """Create the files for the first timer of the store directory.

        Raises:
            StoreFullError: There is no space for them.
        """
        self._files = files = TimerFiles(self._store.store_files, self._settings)
        backlog = self._create_backlog(files, self._settings.slot_at(now_ms))
        files.save(self._checkpoint(backlog), [])
        return backlog

    def _release(self, backlog: TimerBacklog, now_ms: int) -> None:
        """Release one batch of due messages, the earliest first."""
        taken = backlog.drop_removed(backlog.take(now_ms, MAX_RELEASE_COUNT))
        if not taken:
            return
        taken = taken[: self._releaser.count_fitting([item.size for item in taken])]
        due_ms = np.array([item.due_ms for item in taken if not item.rolls], np.int64)
        eligible = backlog.eligible_ms
        eligible_ms = [eligible.get(item.physical_offset, item.due_ms) for item in taken] if eligible else []
        copies = self._releaser.release(backlog.not_deleted(taken), now_ms, due_ms)
        self._causes.observe(due_ms, _without_rolled(taken, eligible_ms, due_ms), now_ms)
        backlog.drop(taken)
        topics: Counter[str] = Counter()
        for each in copies:
            topics[_real_topic(each)] += count_copies([each])
        self._metrics.add(topics, self._store.clock.now_ms(), -1)

    # --- pending messages ----------------------------------------------------------------------

    def _enqueue_lag(self) -> int:
        return max(0, self._store.consume_queue(TIMER_TOPIC, 0).max_offset - self._cursor) if self._is_started else 0

    def _next_due_ms(self) -> int:
        if self._backlog is None:
            return NEVER_MS
        return min(self._backlog.near.next_due_ms, self._backlog.held_due_ms, self._backlog.next_slot_ms)

    def _pending_by_topic(self) -> list[MetricSample]:
        with self.lock:
            counts = self._metrics.counts()
        return [
            MetricSample("delay.pending_timers", MetricKind.GAUGE, count, {"topic": topic}) for topic, count in counts
        ]

    def catch_up(self) -> None:
        self.start()
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        end = queue.max_offset
        while self._cursor < end:
            now_ms = self._store.clock.now_ms()
            if not self._enqueue(now_ms):
                self._work(now_ms)  # overdue messages have to leave the wheel first
                self._wake()
                end = queue.max_offset  # some of them may have been rolled

    def find(self, record: StoredRecord) -> PendingEntry | None:
        try:
            return None if self._pending is None else self._pending.find(record)
        except TimerLogDamageError as exc:
            raise self._condemn(exc) from exc

    def find_now(self, record: StoredRecord) -> PendingEntry | None:
        # A cancel or a move changes what is on the wheel. So only at a start the unread part may have such a change.
        is_on_wheel = self._is_started and record.queue_offset < self._cursor and self._cursor >= self._catch_up_to
        return self.find(record) if is_on_wheel else super().find_now(record)

    def _remove(self, record: StoredRecord) -> None:
        assert self._backlog is not None, "the message is pending"
        self._backlog.remove(record)
        self._metrics.add(Counter([_real_topic(record)]), self._store.clock.now_ms(), -1)
        self._releaser.end = max(self._releaser.end, self._store.end_offset)

    def may_wait(self, slot_ms: int) -> bool:
        is_caught_up = self._is_started and self._cursor >= self._catch_up_to
        return is_caught_up and self._backlog is not None and self._backlog.may_wait(slot_ms)

    def remove_waiting(self, physical_offset: int, topic: str) -> None:
        assert self._backlog is not None, "the message is pending"
        self._backlog.remove_waiting(physical_offset)
        self._metrics.add({topic: 1}, self._store.clock.now_ms(), -1)
        self._releaser.end = max(self._releaser.end, self._store.end_offset)

    def mark_cancelled(self, record: StoredRecord) -> None:
        """See `DelayStore`. Nothing to do: RocketMQ finds the delete marker in the slot."""

    def _count(self) -> int:
        return 0 if self._pending is None else self._pending.count()

    def pending(self, after_ms: int, before_ms: int) -> Iterator[PendingPiece]:
        with self.lock:
            self.catch_up()
        if self._pending is not None:
            yield from self._pending.pieces(after_ms, before_ms)

    def pending_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        """See `DelayStore`. RocketMQ's delete markers are included."""
        with self.lock:
            self.catch_up()
            return NO_ROWS if self._pending is None else self._pending.rows_between(physical_start, physical_end)

    # --- checkpoint ----------------------------------------------------------------------------

    def persist(self) -> int | None:
        """Write wheel, log and ``timercheck`` if they changed; see `LogFollower`."""
        if not self._is_started or (self._is_rebuilt and self._cursor < self._catch_up_to):
            return self._replay_offset  # files with a part of the topic are useless
        with self._saving:
            with self.lock:
                # Not earlier: another thread may release the first timer of the store directory just now.
                backlog = self._backlog or self._backlog_of_first_timer()
                if backlog is not None and backlog.files.is_condemned:
                    return 0
                try:
                    unread = None if backlog is None else backlog.place_removed(self._read_end())
                except TimerLogDamageError as exc:
                    self._stalled_log.warning("timers.damaged", reason=str(self._condemn(exc)))
                    return 0
                replay_offset, release_end = self._replay_start(), self._releaser.end
                if unread is not None:  # the next start reads it from the topic, and must find out that it was removed
                    replay_offset = min(replay_offset, unread)
                # The changes first: the checkpoint has a checksum that covers them.
                changes = [] if backlog is None else backlog.files.wheel.changes()
                state = None if backlog is None else (backlog, backlog.unmarked(), self._checkpoint(backlog))
            is_saved = False
            try:
                # A copy that a power failure can still take must not count as released.
                if not self._store.group_commit.wait(release_end, FLUSH_TIMEOUT_MS):
                    return self._replay_offset
                if state is not None:
                    self._save(*state, changes)
                is_saved = True
            finally:
                if backlog is not None and not is_saved:  # the next checkpoint has to write them
                    backlog.files.wheel.touch(changes)
            self._replay_offset = replay_offset
            return replay_offset

    def _read_end(self) -> int:
        """Return the physical offset of the first message of the timer topic that is not on the wheel."""
        queue = self._store.consume_queue(TIMER_TOPIC, 0)
        cursor = max(self._cursor, queue.min_offset)
        return self._store.end_offset if cursor >= queue.max_offset else queue.unit(cursor).physical_offset

    def _backlog_of_first_timer(self) -> TimerBacklog | None:
        """Create the files if the first timer is stored, and the service did not run since; None without a timer.

        Without files the next start would replay the whole log: it cannot know that nothing was released.
        """
        if self._store.consume_queue(TIMER_TOPIC, 0).max_offset == self._cursor:
            return None
        try:
            return self._create_files(self._store.clock.now_ms())
        except StoreFullError as exc:
            self._stalled_log.warning("timers.not_created", reason=str(exc))
            return None

    def _replay_start(self) -> int:
        """Return from where a recovery must replay the log if the files are written now."""
        # Releases from an open slot are after the end that the log had when the slot opened.
        open_slots = {} if self._backlog is None else self._backlog.open
        start = min(open_slots.values(), default=self._store.end_offset)
        first = self._replay.first_offset
        if first is None:
            return start
        read_ms = 0 if self._backlog is None else self._backlog.read_ms
        if self._cursor >= self._catch_up_to and (self._is_rebuilt or read_ms > self._replay.last_timestamp):
            self._replay.forget()  # all slots of its sources are closed
            return start
        return min(start, first)

    def _checkpoint(self, backlog: TimerBacklog) -> TimerCheckpoint:
        """Return the checkpoint that describes the files after `TimerWheel.changes` are written."""
        files = backlog.files
        return TimerCheckpoint(
            last_read_time_ms=backlog.read_ms,
            last_timer_log_flush_pos=files.log.end,
            last_timer_queue_offset=self._cursor,
            master_timer_queue_offset=NO_MASTER,
            timestamp=self._store.clock.now_ms(),
            counter=files.checkpoint.counter + 1,
            precision_ms=self._settings.precision_ms,
            wheel_checksum=files.wheel.checksum,
        )

    def _save(
        self, backlog: TimerBacklog, unmarked: np.ndarray, checkpoint: TimerCheckpoint, changes: list[tuple[int, bytes]]
    ) -> None:
        files = backlog.files
        if not len(unmarked) and not changes and files.has_state(checkpoint):
            return
        for start in range(0, len(unmarked), _MARKED_AT_ONCE):
            with self.lock:
                files.log.mark_done(unmarked[start : start + _MARKED_AT_ONCE], checkpoint.last_read_time_ms)
        with self.lock:
            backlog.forget_marked(unmarked)
        files.save(checkpoint, changes)
        self._metrics.write(self._store.clock.now_ms())
        with self.lock:
            files.wheel.forget_before(backlog.read_ms)

    # --- files ---------------------------------------------------------------------------------

    def delete_before(self, physical_start: int) -> int:
        """Delete timer log files without pending messages, now that the commit log starts at *physical_start*.

        Returns:
            The number of deleted files. The last file stays.
        """
        with self.lock:
            return 0 if self._pending is None else self._pending.delete_before(physical_start)

    def close(self) -> None:
        """Close the files. Call `persist` first."""
        if self._files is not None:
            self._files.close()


def _real_topic(record: RecordDraft | AlikeCopies | StoredRecord) -> str:
    """Return the real topic of a delayed message, or of its copy."""
    if isinstance(record, AlikeCopies) or record.topic not in (TIMER_TOPIC, UNDELIVERABLE_TOPIC):
        return record.topic
    properties = record.properties if isinstance(record, RecordDraft) else record.properties_bytes
    return find_property(properties, REAL_TOPIC) or ""


def _without_rolled(taken: list[DueRecord], eligible_ms: list[int], due_ms: np.ndarray) -> np.ndarray:
    """Return the release times of the messages that are released; *due_ms* itself if no topic has a shape."""
    if not eligible_ms:
        return due_ms
    return np.array([ms for item, ms in zip(taken, eligible_ms, strict=True) if not item.rolls], np.int64)
