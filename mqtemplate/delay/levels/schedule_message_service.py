"""Delay levels: what waits in each level's queue is released in order of due time, each message at its millisecond."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import structlog

from mqtemplate.delay.delay_store import WAITING_DTYPE, WaitingPiece
from mqtemplate.delay.divert import slot_of
from mqtemplate.delay.levels.level_queue import NEVER_MS, DueUnits, LevelQueue
from mqtemplate.delay.levels.level_replay import LevelReplay
from mqtemplate.delay.levels.table import DelayLevels, tags_code_of
from mqtemplate.delay.release import (
    DEAD_LETTER_TOPIC,
    MAX_RELEASE_COUNT,
    Releaser,
    WaitingRecord,
    count_copies,
    observe_all,
)
from mqtemplate.errors import StoreFullError
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.run import RecordRun
from mqtemplate.store import MessageStore
from mqtemplate.store.files.json_files import DataVersion, load_json, write_table
from mqtemplate.topics import SCHEDULE_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.delay")

DELAY_OFFSET_FILE = "config/delayOffset.json"
_RETRY_MS = 1_000  # when the disk was full
_FLUSH_TIMEOUT_MS = 60_000
_PIECE_COUNT = 16_384  # messages of `waiting` at a time


def queue_of_level(level: int) -> int:
    return level - 1


def level_of_queue(queue_id: int) -> int:
    return queue_id + 1


class ScheduleMessageService:
    """Moves the messages of the schedule topic to their real topics when they are due.

    The consume queue of a level keeps, as tags code, when each of its messages is due. `LevelQueue` finds the first
    due of a level, whatever became of the table or the clock since it was sent.

    - A message is handed over at its due time or later, never before, and due earlier is handed over earlier.
    - ``positions[level]`` is the queue offset of the first message of the level that is not done. What is done behind
      it is marked so in its unit, at the next checkpoint.
    - What was handed over is read off the commit log (`release`); marks and ``config/delayOffset.json`` only shorten
      that, and let RocketMQ go on where this service stopped.
    - A message keeps the time it was promised, and levels that the table no longer has are served to their end.

    One thread steps it; everything else may come from others. See `DelayStore` for the half that steering works with.

    Args:
        levels: The level table of now.
        precision_ms: Of the timers: RocketMQ looks for a delete marker in one of their slots.
    """

    name = "delay.schedule"
    source_topic = SCHEDULE_TOPIC

    def __init__(self, store: MessageStore, levels: DelayLevels, precision_ms: int = 1_000) -> None:
        self._store = store
        self._levels = levels
        self._precision_ms = precision_ms
        self._releaser = Releaser(store, SCHEDULE_TOPIC)
        self.lock = threading.RLock()
        self._queues: dict[int, LevelQueue] = {}
        self._replay = LevelReplay(store)
        self._loaded: dict[int, int] = {}  # what the file told: level -> position
        self._release_end = 0  # physical offset behind the newest record that took a waiting one's place
        self._replay_offset = 0
        self._version = DataVersion()
        self._persisted: dict[int, int] | None = None  # what stands in the file
        self._has_news = True
        self._lost_count = 0
        self._wake: Callable[[], None] = lambda: None
        self._is_started = False
        self._released = store.metrics.counter("delay.released")
        self._poison = store.metrics.counter("delay.poison")
        self._lag_ms = store.metrics.histogram("delay.lag_ms")
        store.metrics.gauge("delay.waiting.level", self.count_waiting)

    @property
    def levels(self) -> DelayLevels:
        return self._levels

    def change_levels(self, levels: DelayLevels) -> None:
        """Use another table for what is sent from now on. What waits keeps the time it was promised."""
        self._levels = levels

    @property
    def positions(self) -> dict[int, int]:
        """Level -> queue offset of the first message that is not done; a level never used is not in it."""
        return {level: queue.position for level, queue in self._queues.items()}

    @property
    def poison_count(self) -> int:
        """Messages that could not be handed over since the start."""
        return self._releaser.poison_count + self._lost_count

    # --- life ----------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """All of the log, if nobody wrote down what was handed over, or a level lost its queue."""
        table, is_current = self._read_progress()
        version = table.get("dataVersion") or {}
        self._version = DataVersion(
            version.get("counter", 0), version.get("stateVersion", 0), version.get("timestamp", 0)
        )
        self._loaded = {int(level): int(offset) for level, offset in table.get("offsetTable", {}).items()}
        self._persisted = self._loaded if is_current else None
        has_queues = self._loaded.keys() <= set(map(level_of_queue, self._store.queue_ids(SCHEDULE_TOPIC)))
        return None if is_current and has_queues else 0

    def _read_progress(self) -> tuple[dict[str, Any], bool]:
        """The newest table that can be read, and whether it is the last that was written.

        An older one is true as far as it goes; the rest stands in the log.
        """
        for name in (DELAY_OFFSET_FILE, f"{DELAY_OFFSET_FILE}.bak"):
            data = self._store.store_files.read_bytes(name)
            try:
                if data:
                    return _parse_progress(data), name == DELAY_OFFSET_FILE
            except ValueError as exc:
                _log.warning("delay.progress_unreadable", file=name, reason=str(exc))
        return {}, False

    def replay(self, record: StoredRecord) -> None:
        """Note which waiting message *record* took the place of, if it did."""
        self._replay.replay(record)

    def start(self) -> None:
        """Correct the positions by the log and the queues, and listen for new messages. Once; again is harmless."""
        if self._is_started:
            return
        self._is_started = True
        for queue_id in self._store.queue_ids(SCHEDULE_TOPIC):
            level = level_of_queue(queue_id)
            queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_id)
            position = min(max(self._loaded.get(level, 0), queue.min_offset), queue.max_offset)
            self._queues[level] = LevelQueue(queue, self._replay.confirm(queue, position))
        self.catch_up()
        if len(self._replay):
            _log.info("delay.recovered", service=self.name, positions=self.positions)
        self._replay = LevelReplay(self._store)
        self._release_end = self._replay_offset = self._store.end_offset
        self._store.watch(SCHEDULE_TOPIC, self._ring)

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _ring(self) -> None:
        self._has_news = True
        self._wake()

    # --- work ----------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Hand over what is due, a bounded number of messages; gives when the next is."""
        self.start()
        now_ms = self._store.clock.now_ms()
        try:
            with self.lock:  # a message is handed over, or steered: whoever comes second finds it gone
                topics = self._hand_over(now_ms)
                next_due_ms = min([queue.due_ms for queue in self._queues.values()], default=NEVER_MS)
        except StoreFullError as exc:
            _log.warning("delay.stalled", service=self.name, reason=str(exc))
            return now_ms + _RETRY_MS
        if topics:
            self._releaser.confirm(self._release_end, topics, has_more=next_due_ms <= now_ms)
        return None if next_due_ms == NEVER_MS else next_due_ms

    def _hand_over(self, now_ms: int) -> set[str]:
        """Append the copies of what is due; gives their topics."""
        if self._has_news:
            self._has_news = False
            self._find_levels()
        ripe = []
        for level, queue in self._queues.items():
            self._take_in(level, queue)
            ripe += [(queue, units) for units in queue.due(now_ms, MAX_RELEASE_COUNT)]
        if not ripe:
            return set()
        due_ms, physical_offsets, sizes, counts = self._first_of([units for _, units in ripe])
        rows = zip(due_ms.tolist(), physical_offsets.tolist(), sizes.tolist(), strict=True)
        drafts = self._releaser.drafts([WaitingRecord(*row) for row in rows if row[2]], now_ms)
        if drafts:
            self._release_end = self._releaser.append(drafts)
        for (queue, units), count in zip(ripe, counts, strict=True):
            if count:
                queue.pass_over(units, count)
        self._count(drafts, due_ms[sizes > 0])
        return {draft.topic for draft in drafts}

    def _first_of(self, ripe: Sequence[DueUnits]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """What is due first, as much as goes into one append: due times, places, sizes; and how many of each of *ripe*.

        Of messages due at once the one stored first is first.
        """
        due_ms, physical_offsets, sizes = (
            np.concatenate(columns) for columns in zip(*(u[1:] for u in ripe), strict=True)
        )
        order = np.lexsort((physical_offsets, due_ms))[:MAX_RELEASE_COUNT]
        order = order[: self._releaser.fitting(sizes[order].tolist())]
        ends = np.cumsum([len(units.sizes) for units in ripe])
        counts = np.bincount(np.searchsorted(ends, order, "right"), minlength=len(ripe))
        return due_ms[order], physical_offsets[order], sizes[order], counts.tolist()

    def _count(self, copies: Sequence[RecordDraft | RecordRun], due_ms: np.ndarray) -> None:
        count = count_copies(copies)
        self._released.add(count - sum([each.topic == DEAD_LETTER_TOPIC for each in copies]))
        if len(due_ms):
            lags_ms = self._store.clock.now_ms() - due_ms
            observe_all(self._lag_ms, lags_ms)
            _log.debug("delay.released", service=self.name, count=count, lag_ms=int(lags_ms[0]))

    # --- what waits ----------------------------------------------------------------------------

    def catch_up(self) -> None:
        """See `DelayStore`."""
        self._find_levels()
        for level, queue in self._queues.items():
            self._take_in(level, queue)

    def _find_levels(self) -> None:
        for queue_id in self._store.queue_ids(SCHEDULE_TOPIC):
            level = level_of_queue(queue_id)
            if level not in self._queues:
                queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_id)
                self._queues[level] = LevelQueue(queue, 0)

    def _take_in(self, level: int, queue: LevelQueue) -> None:
        lost_count = queue.catch_up()
        if lost_count:
            self._lost_count += lost_count
            self._poison.add(lost_count)
            _log.error(
                "delay.lost",
                level=level,
                count=lost_count,
                next_offset=queue.position,
                reason="their files were deleted before they were due",
            )

    def is_waiting(self, record: StoredRecord) -> bool:
        """See `DelayStore`."""
        queue = self._queues.get(level_of_queue(record.queue_id))
        return queue is not None and queue.is_waiting(record.queue_offset, record.physical_offset)

    def due_ms(self, record: StoredRecord) -> int:
        """See `DelayStore`. The queue knows best: the record alone may tell of another table."""
        queue = self._store.consume_queue(SCHEDULE_TOPIC, record.queue_id)
        units = queue.unit_tuples(record.queue_offset, 1)
        is_its_own = bool(units) and units[0][0] == record.physical_offset
        return (
            units[0][2]
            if is_its_own
            else tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, self._levels)
        )

    def slot_of(self, record: StoredRecord) -> int:
        """See `DelayStore`."""
        return slot_of(self.due_ms(record), self._precision_ms)

    def withdraw(self, record: StoredRecord) -> None:
        """See `DelayStore`."""
        self._queues[level_of_queue(record.queue_id)].withdraw(record.queue_offset)
        self._release_end = max(self._release_end, self._store.end_offset)

    def mark_cancelled(self, record: StoredRecord) -> None:
        """See `DelayStore`. RocketMQ knows no recall of a level; it only passes over a unit that is marked."""
        self._queues[level_of_queue(record.queue_id)].mark_cancelled(record.queue_offset)

    def count_waiting(self) -> int:
        """How many messages wait."""
        with self.lock:
            if self._is_started:
                self.catch_up()
            return sum(queue.waiting_count for queue in self._queues.values())

    def waiting(self, after_ms: int, before_ms: int) -> Iterator[WaitingPiece]:
        """See `DelayStore`."""
        with self.lock:
            self.catch_up()
            spans = [(*span, level) for level, queue in self._queues.items() for span in queue.spans(after_ms)]
        heapq.heapify(spans)
        while spans and spans[0][0] < before_ms:
            floor_ms, begin, end, level = heapq.heappop(spans)
            stop = min(begin + _PIECE_COUNT, end)
            with self.lock:
                queue = self._queues[level]
                rows = queue.rows(begin, stop)
                if stop < end:
                    heapq.heappush(spans, (max(queue.due_ms_at(stop), floor_ms), stop, end, level))
            rows = rows[(rows["due_ms"] >= after_ms) & (rows["due_ms"] < before_ms)]
            if len(rows):
                yield WaitingPiece(floor_ms, rows)

    def waiting_between(self, physical_begin: int, physical_end: int) -> np.ndarray:
        """See `DelayStore`."""
        with self.lock:
            self.catch_up()
            pieces = [queue.rows_between(physical_begin, physical_end) for queue in self._queues.values()]
        return np.concatenate([np.empty(0, WAITING_DTYPE), *pieces])

    # --- progress ------------------------------------------------------------------------------

    def persist(self) -> int | None:
        """Mark what is done out of turn and write ``delayOffset.json``, if anything is new; see `LogFollower`."""
        if not self._is_started:
            return self._replay_offset
        with self.lock:
            positions, end, release_end = self.positions, self._store.end_offset, self._release_end
            marks = [(queue, queue.marks()) for queue in self._queues.values()]
        # A copy that a power failure could still take away must not count as handed over.
        if not self._store.group_commit.wait(release_end, _FLUSH_TIMEOUT_MS):
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
    """The table in ``delayOffset.json``.

    Raises:
        ValueError: It is none.
    """
    table = load_json(data.decode())
    offsets = table.get("offsetTable", {}) if isinstance(table, dict) else None
    if not isinstance(offsets, dict) or not all(
        level.isdecimal() and isinstance(offset, int) and offset >= 0 for level, offset in offsets.items()
    ):
        raise ValueError("it is no table of level -> queue offset")
    return dict(table)
