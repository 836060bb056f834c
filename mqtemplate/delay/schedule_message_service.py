"""Delay levels: each level's queue is released in order, each message at its millisecond."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from mqtemplate.delay.levels import DelayLevels
from mqtemplate.delay.release import DEAD_LETTER_TOPIC, MAX_RELEASE_COUNT, Releaser, WaitingRecord, released_source
from mqtemplate.errors import StoreFullError
from mqtemplate.message import SCHEDULE_TOPIC, TIMER_TOPIC
from mqtemplate.record import StoredRecord, find_property
from mqtemplate.store import MessageStore
from mqtemplate.store.json_files import DataVersion, read_table, write_table
from mqtemplate.store.layout import PRE_BLANK_SIZE_MARK

__all__ = ["DELAY_OFFSET_FILE", "ScheduleMessageService", "level_of_queue", "queue_of_level"]

_log = structlog.stdlib.get_logger("mqtemplate.delay")

DELAY_OFFSET_FILE = "config/delayOffset.json"
_RETRY_MS = 1_000  # when the disk was full


def queue_of_level(level: int) -> int:
    return level - 1


def level_of_queue(queue_id: int) -> int:
    return queue_id + 1


class ScheduleMessageService:
    """Moves the messages of the schedule topic to their real topics when they are due.

    The consume queue of a level keeps, as tags code, when each of its messages is due. One delay for a whole
    queue means that the first is due first, so only the head of each queue is looked at.

    - A message is handed over at its due time or later, never before, whatever the clock or the table did.
    - ``positions[level]`` is the queue offset of the first message of the level that is not handed over.
    - What was handed over is read off the commit log (`release`); ``config/delayOffset.json`` only shortens that,
      and lets RocketMQ go on where this service stopped.
    - Levels that the table no longer has are served to their end.

    One thread steps it; `persist` and `replay` may come from others.
    """

    name = "delay.schedule"

    def __init__(self, store: MessageStore, levels: DelayLevels) -> None:
        self._store = store
        self._levels = levels
        self._releaser = Releaser(store, SCHEDULE_TOPIC)
        self._lock = threading.Lock()
        self._positions: dict[int, int] = {}
        self._released_sources: dict[int, int] = {}  # level -> the last source of a copy seen by `replay`
        self._release_end = 0  # physical offset behind the newest copy
        self._replay_offset = 0
        self._version = DataVersion()
        self._persisted: dict[int, int] = {}
        self._due_ms: dict[int, int] = {}  # level -> when its head is due, while that is known
        self._levels_in_use: list[int] = []
        self._has_news = True
        self._wake: Callable[[], None] = lambda: None
        self._is_started = False

    @property
    def levels(self) -> DelayLevels:
        return self._levels

    @property
    def positions(self) -> dict[int, int]:
        """Level -> queue offset of the next message; a level never used is not in it."""
        return dict(self._positions)

    @property
    def poison_count(self) -> int:
        """Messages that could not be handed over since the start."""
        return self._releaser.poison_count

    # --- life ----------------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """All of the log, if there are delayed messages whose progress nobody wrote down."""
        table = read_table(self._store.home, DELAY_OFFSET_FILE)
        version = table.get("dataVersion") or {}
        self._version = DataVersion(
            version.get("counter", 0), version.get("stateVersion", 0), version.get("timestamp", 0)
        )
        self._positions = {int(level): int(offset) for level, offset in table.get("offsetTable", {}).items()}
        self._persisted = dict(self._positions)
        return 0 if not table and self._store.queue_ids(SCHEDULE_TOPIC) else None

    def replay(self, record: StoredRecord) -> None:
        """Note which waiting message *record* was copied from, if it was."""
        source = released_source(record)
        if source is None or record.topic == TIMER_TOPIC or b"TIMER_OUT_MS\x01" in record.properties_bytes:
            return
        level = find_property(record.properties_bytes, b"DELAY") or ""
        if level.isascii() and level.isdecimal():
            self._released_sources[int(level)] = max(source, self._released_sources.get(int(level), -1))
        if record.topic == DEAD_LETTER_TOPIC:
            self._releaser.dead.add(source)

    def start(self) -> None:
        """Correct the positions by the log and the queues, and listen for new messages. Once; again is harmless."""
        if self._is_started:
            return
        self._is_started = True
        for queue_id in self._store.queue_ids(SCHEDULE_TOPIC):
            level = level_of_queue(queue_id)
            queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_id)
            position = self._positions.get(level, 0)
            source = self._released_sources.get(level)
            if source is not None:
                position = max(position, queue.first_at("physical_offset", source + 1))
            self._positions[level] = min(max(position, queue.min_offset), queue.max_offset)
        if self._released_sources:
            _log.info("delay.recovered", service=self.name, positions=self._positions)
        self._released_sources.clear()
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
        if self._has_news:
            self._has_news = False
            self._levels_in_use = [level_of_queue(queue_id) for queue_id in self._store.queue_ids(SCHEDULE_TOPIC)]
        heads = {level: head for level in self._levels_in_use if len(head := self._due_head(level, now_ms))}
        if heads:
            try:
                self._release(heads, now_ms)
            except StoreFullError as exc:
                _log.warning("delay.stalled", service=self.name, reason=str(exc))
                return now_ms + _RETRY_MS
        return min(self._due_ms.values(), default=None)

    def _due_head(self, level: int, now_ms: int) -> np.ndarray:
        """The units at the head of a level that are due; notes when the first is, or the first behind them."""
        known = self._due_ms.get(level)
        if known is not None and known > now_ms:
            return _NOTHING
        queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_of_level(level))
        position = max(self._positions.get(level, 0), queue.min_offset)
        self._positions[level] = position
        units = queue.units(position, MAX_RELEASE_COUNT)
        due = units["tags_code"] <= now_ms
        count = len(units) if due.all() else int(np.argmin(due))
        if len(units):
            self._due_ms[level] = int(units["tags_code"][0])
        else:
            self._due_ms.pop(level, None)
        return units[:count]

    def _release(self, heads: dict[int, np.ndarray], now_ms: int) -> None:
        """Hand over one batch: the earliest of all levels, each level in its order."""
        levels = np.concatenate([np.full(len(units), level) for level, units in heads.items()])
        units = np.concatenate(list(heads.values()))
        # within a level nobody overtakes, so a unit counts as due no earlier than those before it
        keys = np.concatenate([np.maximum.accumulate(units["tags_code"].astype(np.int64)) for units in heads.values()])
        order = np.argsort(keys, kind="stable")[:MAX_RELEASE_COUNT]
        units = units[order]
        count = self._releaser.fitting(units["size"].tolist())
        units, levels = units[:count], levels[order][:count]
        rows = zip(units["tags_code"].tolist(), units["physical_offset"].tolist(), units["size"].tolist(), strict=True)
        drafts = self._releaser.drafts([WaitingRecord(*row) for row in rows if row[2] != PRE_BLANK_SIZE_MARK], now_ms)
        with self._lock:  # `persist` sees a copy and the position behind its source together, or neither
            if drafts:
                self._release_end = self._releaser.append(drafts)
            self._advance(levels)
        if drafts:
            self._store.settle(self._release_end, {draft.topic for draft in drafts})
            _log.debug(
                "delay.released", service=self.name, count=len(drafts), lag_ms=now_ms - int(units["tags_code"][0])
            )

    def _advance(self, levels: np.ndarray) -> None:
        for level, count in zip(*(column.tolist() for column in np.unique(levels, return_counts=True)), strict=True):
            self._positions[level] += count
            self._look_again(level)

    def _look_again(self, level: int) -> None:
        """Note when the new head of a level is due."""
        queue = self._store.consume_queue(SCHEDULE_TOPIC, queue_of_level(level))
        if self._positions[level] < queue.max_offset:
            self._due_ms[level] = queue.unit(self._positions[level]).tags_code
        else:
            self._due_ms.pop(level, None)

    # --- progress ------------------------------------------------------------------------------

    def persist(self) -> int | None:
        """Write ``delayOffset.json`` if there is something new; see `LogFollower`."""
        if not self._is_started:
            return self._replay_offset
        with self._lock:
            # A copy that a power failure could still take away must not count as handed over.
            is_durable = self._release_end <= self._store.group_commit.flushed
            positions, end = dict(self._positions), self._store.end_offset
        if is_durable:
            if positions != self._persisted:
                self._write(positions)
            self._replay_offset = end
        return self._replay_offset

    def _write(self, positions: dict[int, int]) -> None:
        table: dict[str, Any] = {
            "dataVersion": self._version.next(self._store.clock.now_ms()),
            "offsetTable": {str(level): offset for level, offset in sorted(positions.items())},
        }
        write_table(self._store.home, DELAY_OFFSET_FILE, table)
        self._persisted = positions


_NOTHING = np.empty(0, dtype=[("tags_code", ">i8")])
