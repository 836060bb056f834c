"""Progress of the timers, and which part of it is on disk."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.releaser import Releaser
from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.replay import TimerReplay
from mqtemplate.delay.timers.timer_checkpoint import NO_MASTER, TimerCheckpoint
from mqtemplate.delay.timers.timer_metrics import TimerMetrics
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.message_store import MessageStore

_FLUSH_TIMEOUT_MS = 60_000
_MARKED_AT_ONCE = 1_024  # units marked under one lock: less than a millisecond in which no message is released


class _State(NamedTuple):
    """What `persist` writes, all of one moment.

    Attributes:
        unmarked: Positions of units to mark as done.
        changes: Pages of the wheel.
    """

    backlog: TimerBacklog
    unmarked: np.ndarray
    changes: list[tuple[int, bytes]]
    checkpoint: TimerCheckpoint


class TimerProgress:
    """Writes wheel, log and ``timercheck``, and knows from where a recovery must replay the commit log.

    Args:
        replay: What the commit log showed at the start; forgotten once the files show it, too.
        metrics: Written together with the files.
        lock: Guards everything that changes.

    Attributes:
        cursor: Queue offset in the timer topic: the messages before it are on the wheel, or need not be.
        is_rebuilt: The files were rebuilt at this start.
        replay_offset: Physical offset from which a recovery must replay the log, according to the files on disk.
    """

    def __init__(
        self,
        store: MessageStore,
        releaser: Releaser,
        replay: TimerReplay,
        metrics: TimerMetrics,
        lock: threading.RLock,
    ) -> None:
        self._store = store
        self._releaser = releaser
        self._replay = replay
        self._metrics = metrics
        self._lock = lock
        self._saving = threading.Lock()  # held by the thread that writes the files
        self._catch_up_to = 0
        self.cursor = 0
        self.is_rebuilt = False
        self.replay_offset: int | None = 0

    @property
    def to_catch_up(self) -> int:
        """Number of messages in the topic at the start that are not on the wheel yet. No slot opens before them."""
        return max(self._catch_up_to - self.cursor, 0)

    def mark_rebuilt(self) -> None:
        """Note that the files were rebuilt: the whole log must be replayed until they are complete."""
        self.is_rebuilt = True

    def start(self, cursor: int, queue: ConsumeQueue) -> None:
        """Start at *cursor*, corrected to the bounds of the timer topic's queue."""
        self.cursor = min(max(cursor, queue.min_offset), queue.max_offset)
        self._catch_up_to = queue.max_offset
        first = self._replay.first_offset
        self.replay_offset = 0 if self.is_rebuilt else self._store.end_offset if first is None else first

    def advance_to(self, cursor: int) -> None:
        """Note that the messages before *cursor* are on the wheel."""
        self.cursor = cursor

    def checkpoint(self, backlog: TimerBacklog) -> TimerCheckpoint:
        """Return the checkpoint that describes the files after `TimerWheel.changes` are written."""
        files = backlog.files
        return TimerCheckpoint(
            last_read_time_ms=backlog.read_ms,
            last_timer_log_flush_pos=files.log.end,
            last_timer_queue_offset=self.cursor,
            master_timer_queue_offset=NO_MASTER,
            timestamp=self._store.clock.now_ms(),
            counter=files.checkpoint.counter + 1,
            precision_ms=files.settings.precision_ms,
            wheel_checksum=files.wheel.checksum,
        )

    def persist(self, backlog: TimerBacklog | None) -> int | None:
        """Write what changed; see `LogFollower`. Without timers there is no backlog."""
        if backlog is not None and backlog.files.is_condemned:
            return 0
        if self.is_rebuilt and self.to_catch_up:
            return self.replay_offset  # files with half of the topic are useless
        with self._saving:
            with self._lock:
                replay_offset, release_end = self._replay_start(backlog), self._releaser.end
                state = None if backlog is None else self._state(backlog)
            # A copy that a power failure can still take must not count as released.
            is_safe = self._store.group_commit.wait(release_end, _FLUSH_TIMEOUT_MS)
            if state is not None and is_safe:
                self._save(state)
            elif state is not None:
                state.backlog.files.wheel.touch(state.changes)
            if is_safe:
                self.replay_offset = replay_offset
            return self.replay_offset

    def _replay_start(self, backlog: TimerBacklog | None) -> int:
        """Return from where a recovery must replay the log if the files are written now."""
        # Releases from an open slot are after the end that the log had when the slot opened.
        open_slots = {} if backlog is None else backlog.open
        start = min(open_slots.values(), default=self._store.end_offset)
        first = self._replay.first_offset
        if first is None:
            return start
        read_ms = 0 if backlog is None else backlog.read_ms
        if not self.to_catch_up and (self.is_rebuilt or read_ms > self._replay.last_timestamp):
            self._replay.forget()  # all slots of its sources are closed
            return start
        return min(start, first)

    def _state(self, backlog: TimerBacklog) -> _State:
        changes = backlog.files.wheel.changes()  # before the checksum of the checkpoint, which covers them
        return _State(backlog, backlog.unmarked(), changes, self.checkpoint(backlog))

    def _save(self, state: _State) -> None:
        backlog, unmarked, changes, checkpoint = state
        files = backlog.files
        if not len(unmarked) and not changes and _is_same_state(checkpoint, files.checkpoint):
            return
        for start in range(0, len(unmarked), _MARKED_AT_ONCE):
            with self._lock:
                files.log.mark_done(unmarked[start : start + _MARKED_AT_ONCE], checkpoint.last_read_time_ms)
        with self._lock:
            backlog.forget_marked(unmarked)
        files.save(checkpoint, changes)
        self._metrics.write(self._store.clock.now_ms())
        with self._lock:
            files.wheel.forget_before(backlog.read_ms)


def _is_same_state(one: TimerCheckpoint, other: TimerCheckpoint) -> bool:
    return one._replace(timestamp=0, counter=0) == other._replace(timestamp=0, counter=0)
