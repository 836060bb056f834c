"""The services beside the writer: flush what nobody waits for, and make files before they are needed."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.clock import Clock
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.flush import GroupCommit
from mqtemplate.store.settings import FlushDiskType, StoreSettings


class FlushService:
    """Flushes the log: every half second (``ASYNC_FLUSH``), or at once for a message whose sender does not wait."""

    name = "store.flush"

    def __init__(self, commit: GroupCommit, end: Callable[[], int], clock: Clock, settings: StoreSettings) -> None:
        self._commit = commit
        self._end = end
        self._clock = clock
        self._is_periodic = settings.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        self._interval_ms = settings.flush_interval_commit_log_ms
        self._due_ms: int | None = None
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def changed(self) -> None:
        """Something was written for the first time since the last flush."""
        if self._is_periodic and self._due_ms is None:
            self._due_ms = self._clock.now_ms() + self._interval_ms
            self._wake()

    def request(self) -> None:
        """Flush as soon as may be."""
        self._due_ms = self._clock.now_ms()
        self._wake()

    def step(self) -> int | None:
        now = self._clock.now_ms()
        if self._due_ms is not None and self._due_ms <= now:
            self._due_ms = None
            end = self._end()
            if self._commit.flushed < end:
                try:
                    self._commit.wait(end, 60_000)
                except BaseException:
                    self._due_ms = now + self._interval_ms  # the disk refused: again
                    raise
                if self._is_periodic:
                    self._due_ms = now + self._interval_ms
        return self._due_ms


class AllocateService:
    """Makes the log's next file before it is needed."""

    name = "store.allocate"

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._log.on_low_water(wake)

    def step(self) -> int | None:
        self._log.prepare()
        return None
