"""How far the timers are, and what of that is on the disk."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.timers.backlog import TimerBacklog
from mqtemplate.delay.timers.replay import TimerReplay
from mqtemplate.delay.timers.timer_checkpoint import NO_MASTER, TimerCheckpoint
from mqtemplate.delay.timers.timer_metrics import TimerMetrics
from mqtemplate.store import MessageStore

_FLUSH_TIMEOUT_MS = 60_000
_MARKED_AT_ONCE = 1_024  # less than a millisecond, in which nothing is handed over


class _State(NamedTuple):
    """What is to be written, all of one moment.

    Attributes:
        marks: Positions of units that are done.
        changes: Pages of the wheel.
    """

    backlog: TimerBacklog
    marks: np.ndarray
    changes: list[tuple[int, bytes]]
    checkpoint: TimerCheckpoint


class TimerProgress:
    """Writes wheel, log and ``timercheck``, and says from where the commit log must be replayed after a crash.

    Args:
        replay: What the commit log told at the start; forgotten when the files tell it, too.
        metrics: Written along.
        lock: Guards everything that changes.

    Attributes:
        cursor: Units of the timer topic's queue that are on the wheel, or need not be.
        catch_up_to: So many have to be there before the first slot opens.
        is_rebuilt: The files were made anew at this start.
        is_condemned: They were found damaged, and no word of progress is written to them any more.
        release_end: Physical offset behind the newest record that took a waiting one's place.
        replay_offset: From where the log must be replayed, by what is written so far; None if it need not be.
    """

    def __init__(self, store: MessageStore, replay: TimerReplay, metrics: TimerMetrics, lock: threading.RLock) -> None:
        self._store = store
        self._replay = replay
        self._metrics = metrics
        self._lock = lock
        self._saving = threading.Lock()  # one writes the files
        self.cursor = 0
        self.catch_up_to = 0
        self.is_rebuilt = False
        self.is_condemned = False
        self.release_end = 0
        self.replay_offset: int | None = 0

    @property
    def has_caught_up(self) -> bool:
        """Whether everything is on the wheel that was in the topic at the start."""
        return self.cursor >= self.catch_up_to

    def checkpoint_of(self, backlog: TimerBacklog) -> TimerCheckpoint:
        """What the files tell once `TimerWheel.changes` are written."""
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
        """Write what is new; see `LogFollower`."""
        if self.is_condemned:
            return 0
        if self.is_rebuilt and not self.has_caught_up:
            return self.replay_offset  # half of the topic on the wheel is no state to go on from
        with self._saving:
            with self._lock:
                replay_offset, release_end = self._replay_start(backlog), self.release_end
                state = None if backlog is None else self._state_of(backlog)
            # A copy that a power failure could still take away must not count as handed over.
            is_safe = self._store.group_commit.wait(release_end, _FLUSH_TIMEOUT_MS)
            if state is not None and not is_safe:
                state.backlog.files.wheel.touch(state.changes)
            if not is_safe:
                return self.replay_offset
            if state is not None:
                self._save(state)
            self.replay_offset = replay_offset
            return replay_offset

    def _replay_start(self, backlog: TimerBacklog | None) -> int:
        """From where the log must be replayed after a crash, if the files are written now."""
        open_slots = {} if backlog is None else backlog.open
        start = min(open_slots.values(), default=self._store.end_offset)
        first = self._replay.first_offset
        if first is None:
            return start
        read_ms = 0 if backlog is None else backlog.read_ms
        if self.has_caught_up and (self.is_rebuilt or read_ms > self._replay.last_timestamp):
            self._replay.forget()  # every slot that they came from is closed
            return start
        return min(start, first)

    def _state_of(self, backlog: TimerBacklog) -> _State:
        changes = backlog.files.wheel.changes()
        return _State(backlog, backlog.marks(), changes, self.checkpoint_of(backlog))

    def _save(self, state: _State) -> None:
        backlog, marks, changes, checkpoint = state
        files = backlog.files
        if not len(marks) and not changes and _tells_the_same(checkpoint, files.checkpoint):
            return
        for begin in range(0, len(marks), _MARKED_AT_ONCE):
            with self._lock:
                backlog.mark(marks[begin : begin + _MARKED_AT_ONCE], checkpoint.last_read_time_ms)
        with self._lock:
            backlog.forget_marks(marks)
        files.save(checkpoint, changes)
        self._metrics.write(self._store.clock.now_ms())
        with self._lock:
            files.wheel.forget_before(backlog.read_ms)


def _tells_the_same(one: TimerCheckpoint, other: TimerCheckpoint) -> bool:
    return one._replace(timestamp=0, counter=0) == other._replace(timestamp=0, counter=0)
