"""Delay service for levels: releases each message of the schedule topic at its millisecond, in order of due time.

`ClockCorrection` releases messages, timers too, whose due times a clock set that was ahead.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mqtemplate.delay.delay_store import FLUSH_TIMEOUT_MS, MAX_RELEASE_COUNT, DelayStore
from mqtemplate.delay.level_queue import DueUnits, LevelQueue
from mqtemplate.delay.pending_rows import NEVER_MS, NO_ROWS, DueRecord, LatenessCauses, PendingEntry, PendingPiece
from mqtemplate.delay.replay import LevelReplay
from mqtemplate.delay.settings import slot_of
from mqtemplate.errors import CorruptRecordError, StoreFormatError, StoreFullError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import TIMER_DELAY_MS, TIMER_DELAY_SEC, find_property
from mqtemplate.services import ClockWatch
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import DataVersion, format_errors, load_json, write_table
from mqtemplate.topics import SCHEDULE_TOPIC

_log = get_logger("mqtemplate.delay")

DELAY_OFFSET_FILE = "config/delayOffset.json"
_MAX_LEVEL_DIGITS = 9
_PIECE_COUNT = 16_384  # units in one piece of `pending`


def level_of_queue(queue_id: int) -> int:
    """Return the level whose messages are in this queue of the schedule topic."""
    return queue_id + 1


class ScheduleMessageService(DelayStore):
    """Releases the messages of the schedule topic to their real topics when they are due.

    The consume queue of a level stores the due time of each message as its tags code. `LevelQueue` finds the first due
    message of a level, also after changes of the level table or of the clock.

    - A message is released at its due time or later, never before. Earlier due times are released earlier.
    - ``positions[level]`` is the queue offset of the first pending message of the level. A unit after it that is done
      is marked as done on disk by the next checkpoint.
    - The commit log shows what was released (`copies`). Marks and ``config/delayOffset.json`` only shorten the replay,
      and let RocketMQ continue where this service stopped.
    - A message keeps the due time it was sent with. Levels that the table no longer has are released as well.

    Args:
        precision_ms: Length of a timer slot: RocketMQ looks for a delete marker in such a slot.
    """

    name = "delay.schedule"
    source_topic = SCHEDULE_TOPIC

    def __init__(self, store: MessageStore, precision_ms: int = 1_000, causes: LatenessCauses | None = None) -> None:
        super().__init__(store, causes)
        self._precision_ms = precision_ms
        self._queues: dict[int, LevelQueue] = {}
        self._replay = LevelReplay(store)
        self._loaded: dict[int, int] = {}  # contents of the progress file: level -> position
        self._replay_offset = 0
        self._version = DataVersion()
        self._persisted: dict[int, int] | None = None  # positions in the progress file; None if it is not current
        self._may_have_new_level = True
        self._poison = store.metrics.counter("delay.poison")
        store.metrics.gauge("delay.waiting.level", self.count_pending)
        store.metrics.add_collector(self._pending_by_level)

    @property
    def positions(self) -> dict[int, int]:
        """Level -> queue offset of the first pending message; a level that was never used is missing."""
        return {level: queue.position for level, queue in self._queues.items()}

    # --- recovery ------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Load the progress. Return 0, the whole log, if it is missing or outdated, or a level lost its queue."""
        table, is_current = self._read_progress()
        self._version = DataVersion.of(table)
        self._loaded = {int(level): int(offset) for level, offset in table.get("offsetTable", {}).items()}
        self._persisted = self._loaded if is_current else None
        has_queues = self._loaded.keys() <= set(map(level_of_queue, self._store.queue_ids(SCHEDULE_TOPIC)))
        return None if is_current and has_queues else 0

    def _read_progress(self) -> tuple[dict[str, Any], bool]:
        """Return the newest readable table, and True if it is the last one that was written.

        An older table is correct, but incomplete: the log shows the rest.
        """
        for name in (DELAY_OFFSET_FILE, f"{DELAY_OFFSET_FILE}.bak"):
            data = self._store.store_files.read_bytes(name)
            try:
                if data:
                    return _parse_progress(data), name == DELAY_OFFSET_FILE
            except (ValueError, StoreFormatError) as exc:
                _log.warning("progress.ignored", file=name, reason=str(exc))
        return {}, False

    def replay(self, record: StoredRecord) -> None:
        """Note which delayed message *record* replaced, if any; see `LogFollower`."""
        self._replay.replay(record)

    def _recover(self) -> None:
        for queue_id in self._store.queue_ids(SCHEDULE_TOPIC):
            level = level_of_queue(queue_id)
            queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_id)
            position = min(max(self._loaded.get(level, 0), queue.min_offset), queue.max_offset)
            self._queues[level] = LevelQueue(queue, self._replay.mark_released(queue, position))
        self.catch_up()
        if len(self._replay):
            _log.debug("delay.recovered", service=self.name, positions=self.positions)
        self._replay = LevelReplay(self._store)
        self._replay_offset = self._store.end_offset

    def _on_new_messages(self) -> None:
        self._may_have_new_level = True
        super()._on_new_messages()

    # --- release -------------------------------------------------------------------------------

    def _release_due(self, now_ms: int) -> int | None:
        if self._may_have_new_level:
            self._may_have_new_level = False
            self._find_levels()
        due_units = []
        for level, queue in self._queues.items():
            self._catch_up_queue(level, queue)
            due_units += [(queue, units) for units in queue.due(now_ms, MAX_RELEASE_COUNT)]
        if due_units:
            self._release(due_units, now_ms)
        next_due_ms = min([queue.due_ms for queue in self._queues.values()], default=NEVER_MS)
        return None if next_due_ms == NEVER_MS else next_due_ms

    def _release(self, due_units: Sequence[tuple[LevelQueue, DueUnits]], now_ms: int) -> None:
        rows, counts = self._first_of([units for _, units in due_units])
        rows = rows[rows["size"] > 0]  # a size of 0 stands for a unit that is not pending
        columns = (rows[name].tolist() for name in ("due_ms", "physical_offset", "size"))
        self._releaser.release(list(map(DueRecord, *columns)), now_ms, rows["due_ms"])
        due_ms = rows["due_ms"]
        self._causes.observe(due_ms, due_ms, now_ms)
        for (queue, units), count in zip(due_units, counts, strict=True):
            if count:
                queue.advance(units, count)

    def _first_of(self, due: Sequence[DueUnits]) -> tuple[np.ndarray, list[int]]:
        """Select the units that are due first, as many as fit into one append; the one stored first of equal ones.

        Returns:
            Their rows, and how many of each of *due* were selected.
        """
        rows = np.concatenate([units.rows for units in due])
        order = np.lexsort((rows["physical_offset"], rows["due_ms"]))[:MAX_RELEASE_COUNT]
        order = order[: self._releaser.count_fitting(rows["size"][order].tolist())]
        ends = np.cumsum([len(units.rows) for units in due])
        counts = np.bincount(np.searchsorted(ends, order, "right"), minlength=len(due))
        return rows[order], counts.tolist()

    # --- pending messages ----------------------------------------------------------------------

    def _enqueue_lag(self) -> int:
        with self.lock:
            return sum([queue.unread_count for queue in self._queues.values()])

    def _next_due_ms(self) -> int:
        return min([queue.due_ms for queue in self._queues.values()], default=NEVER_MS)

    def _pending_by_level(self) -> list[MetricSample]:
        with self.lock:
            counts = {level: queue.pending_count for level, queue in self._queues.items()}
        return [
            MetricSample("delay.pending_levels", MetricKind.GAUGE, count, {"level": str(level)})
            for level, count in counts.items()
        ]

    def catch_up(self) -> None:
        self._find_levels()
        for level, queue in self._queues.items():
            self._catch_up_queue(level, queue)

    def _find_levels(self) -> None:
        for queue_id in self._store.queue_ids(SCHEDULE_TOPIC):
            level = level_of_queue(queue_id)
            if level not in self._queues:
                queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_id)
                self._queues[level] = LevelQueue(queue, 0)

    def _catch_up_queue(self, level: int, queue: LevelQueue) -> None:
        lost_count = queue.catch_up()
        if lost_count:
            self._poison.add(lost_count)
            reason = "their files were deleted before they were due"
            _log.error("message.lost", level=level, count=lost_count, next_offset=queue.position, reason=reason)

    def find(self, record: StoredRecord) -> PendingEntry | None:
        queue = self._queues.get(level_of_queue(record.queue_id))
        due_ms = None if queue is None else queue.find(record.queue_offset, record.physical_offset)
        return None if due_ms is None else PendingEntry(due_ms, slot_of(due_ms, self._precision_ms))

    def _remove(self, record: StoredRecord) -> None:
        self._queues[level_of_queue(record.queue_id)].remove(record.queue_offset)
        self._releaser.end = max(self._releaser.end, self._store.end_offset)

    def mark_cancelled(self, record: StoredRecord) -> None:
        """See `DelayStore`. RocketMQ cannot recall messages with a level. It only skips units that are marked."""
        self._queues[level_of_queue(record.queue_id)].mark_cancelled(record.queue_offset)

    def _count(self) -> int:
        return sum(queue.pending_count for queue in self._queues.values())

    def pending(self, after_ms: int, before_ms: int) -> Iterator[PendingPiece]:
        with self.lock:
            self.catch_up()
            spans = [(*span, level) for level, queue in self._queues.items() for span in queue.spans(after_ms)]
        # The heap's first span has the lowest floor of all units that are left.
        heapq.heapify(spans)
        while spans and spans[0][0] < before_ms:
            floor_ms, start, end, level = heapq.heappop(spans)
            stop = min(start + _PIECE_COUNT, end)
            with self.lock:
                queue = self._queues[level]
                rows = queue.rows(start, stop)
                if stop < end:
                    heapq.heappush(spans, (max(queue.due_ms_at(stop), floor_ms), stop, end, level))
            rows = rows[(rows["due_ms"] >= after_ms) & (rows["due_ms"] < before_ms)]
            if len(rows):
                yield PendingPiece(floor_ms, rows)

    def pending_between(self, physical_start: int, physical_end: int) -> np.ndarray:
        with self.lock:
            self.catch_up()
            pieces = [queue.rows_between(physical_start, physical_end) for queue in self._queues.values()]
        return np.concatenate([NO_ROWS, *pieces])

    # --- progress ------------------------------------------------------------------------------

    def persist(self) -> int | None:
        """Mark units that are done, and write ``delayOffset.json`` if it changed; see `LogFollower`."""
        if not self._is_started:
            return self._replay_offset
        with self.lock:
            positions, end, release_end = self.positions, self._store.end_offset, self._releaser.end
            marks = [(queue, queue.marks()) for queue in self._queues.values()]
        # A copy that a power failure can still take must not count as released.
        if not self._store.group_commit.wait(release_end, FLUSH_TIMEOUT_MS):
            return self._replay_offset
        for queue, done in marks:
            queue.mark(done)
        with self.lock:
            for queue, done in marks:
                queue.forget(done)
        if positions != self._persisted:
            self._write(positions)
        self._replay_offset = end
        return end

    def _write(self, positions: dict[int, int]) -> None:
        table: dict[str, Any] = {
            "dataVersion": self._version.next(self._store.clock.now_ms()),
            "offsetTable": {str(level): offset for level, offset in sorted(positions.items())},
        }
        write_table(self._store.store_files, DELAY_OFFSET_FILE, table)
        self._persisted = positions


def _parse_progress(data: bytes) -> dict[str, Any]:
    """Parse ``delayOffset.json``.

    Raises:
        ValueError: It is not a table of queue offsets by level.
        StoreFormatError: Its version is not valid.
    """
    table = load_json(data.decode())
    offsets = table.get("offsetTable", {}) if isinstance(table, dict) else None
    if not isinstance(offsets, dict) or not all(
        level.isdecimal() and len(level) <= _MAX_LEVEL_DIGITS and isinstance(offset, int) and offset >= 0
        for level, offset in offsets.items()
    ):
        raise ValueError("it is not a table of level -> queue offset")
    with format_errors(DELAY_OFFSET_FILE):
        DataVersion.of(table)
    return dict(table)


_RETRY_MS = 1_000  # when the disk was full
_PIECE = 256
"""Messages that one step examines or releases: some milliseconds in which none is released on time."""
_RELATIVE_MS = 10_000
"""A timer counts from its store time if it is due its delay after it; the append may have waited for this long."""

ReleaseNow = Callable[[Sequence[StoredRecord]], object]


class ClockCorrection:
    """Service that releases messages whose due time a clock set that was ahead.

    Such a message has a level, or a timer that counts from the send, and a store time that is in the future now. When
    it was stored is unknown, but that was before the next record that has a time of the past, and before now. So its
    delay counts from there: it is never early, and late by less than its delay. A deliver time that the producer gave
    is kept. RocketMQ releases such a level at once. Source: ``ScheduleMessageService.correctDeliverTimestamp``.

    - The messages are searched when the service starts, and when the clock was set. Nothing is read before.
    - The times are in memory only. After a restart they are computed again from the commit log.

    Args:
        delay_stores: The two delay services.
        release_now: Releases the records that are still pending.
    """

    name = "delay.clock"

    def __init__(self, store: MessageStore, delay_stores: Iterable[DelayStore], release_now: ReleaseNow) -> None:
        self._store = store
        self._delay_stores = list(delay_stores)
        self._release_now = release_now
        self._watch = ClockWatch(store.clock)
        self._stalled_log = LimitedLog(_log, store.clock.steady_ms, burst=1)  # a full disk refuses each step
        self._is_started = False
        self._unread: deque[tuple[DelayStore, ConsumeQueue, range]] = deque()
        self._due: list[tuple[int, int]] = []  # heap: corrected due time, physical offset

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the thread that releases delayed messages steps this service with them."""

    def step(self) -> int | None:
        now_ms = self._store.clock.now_ms()
        if self._watch.moved_ms() or not self._is_started:
            self._is_started = True
            self._search(now_ms)
        self._read_piece(now_ms)
        try:
            self._release_due(now_ms)
        except StoreFullError as exc:
            self._stalled_log.warning("release.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        if self._unread:
            return now_ms
        return self._due[0][0] if self._due else None

    def _search(self, now_ms: int) -> None:
        """Find the parts of the queues whose records are in the future."""
        self._due.clear()
        self._unread.clear()
        steps = self._store.clock_steps
        if max([self._store.last_store_timestamp, *(step.before_ms for step in steps)]) <= now_ms:
            return
        for delay_store in self._delay_stores:
            for queue_id in self._store.queue_ids(delay_store.source_topic):
                queue = self._store.consume_queue(delay_store.source_topic, queue_id)
                offsets = range(queue.min_offset, queue.max_offset)
                for span in steps.spans(offsets, partial(queue.first_at, "physical_offset")):
                    start = span.start + bisect_right(span, now_ms, key=partial(self._time_at, queue))
                    if start < span.stop:
                        self._unread.append((delay_store, queue, range(start, span.stop)))
        if self._unread:
            count = sum(len(part) for _, _, part in self._unread)
            _log.warning("delay.clock_was_ahead", messages=count, reason="their store times are in the future")

    def _time_at(self, queue: ConsumeQueue, queue_offset: int) -> int:
        record = self._record_at(queue, queue_offset)
        return 0 if record is None else record.store_timestamp

    def _record_at(self, queue: ConsumeQueue, queue_offset: int) -> StoredRecord | None:
        """Return a record; None for one that is unreadable, or whose unit is marked as done."""
        for physical_offset, _, _ in queue.unit_tuples(queue_offset, 1):
            try:
                return self._store.read_at(physical_offset)
            except CorruptRecordError:  # its release reports it
                return None
        return None

    def _read_piece(self, now_ms: int) -> None:
        if not self._unread:
            return
        delay_store, queue, part = self._unread.popleft()
        if len(part) > _PIECE:
            self._unread.appendleft((delay_store, queue, part[_PIECE:]))
        records = [self._record_at(queue, queue_offset) for queue_offset in part[:_PIECE]]
        with delay_store.lock:
            delay_store.catch_up()
            for record in records:
                entry = None if record is None else delay_store.find(record)
                if record is None or entry is None:
                    continue
                delay_ms = _delay_ms(record, entry.due_ms)
                stored_ms = self._store.clock_steps.latest_ms(record.physical_offset, now_ms)
                if delay_ms is not None and stored_ms + delay_ms < entry.due_ms:
                    heapq.heappush(self._due, (stored_ms + delay_ms, record.physical_offset))

    def _release_due(self, now_ms: int) -> None:
        if not self._due or self._due[0][0] > now_ms:
            return
        due = [each for each in heapq.nsmallest(_PIECE, self._due) if each[0] <= now_ms]
        records = [self._store.read_at(physical_offset) for _, physical_offset in due]
        self._release_now([record for record in records if record is not None])
        for _ in due:  # after the release: it may fail
            heapq.heappop(self._due)


def _delay_ms(record: StoredRecord, due_ms: int) -> int | None:
    """Return the delay of a message; None if it is a timer for a time that the producer gave."""
    if record.topic == SCHEDULE_TOPIC:
        return max(due_ms - record.store_timestamp, 0)
    for name, unit_ms in ((TIMER_DELAY_SEC, 1_000), (TIMER_DELAY_MS, 1)):
        delay = parse_number(find_property(record.properties_bytes, name) or "")
        if delay is not None and abs(record.store_timestamp + delay * unit_ms - due_ms) <= _RELATIVE_MS:
            return delay * unit_ms
    return None
