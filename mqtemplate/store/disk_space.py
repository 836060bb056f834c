"""The disk of a store: how much is used and free, when it will be full, and whether it refuses messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.metrics import MetricKind, Metrics, MetricSample
from mqtemplate.results import DiskSpace
from mqtemplate.store.checkpoint import FileSizes
from mqtemplate.store.files.store_files import DiskUsage, StoreFiles
from mqtemplate.store.settings import StoreSettings

_log = get_logger("mqtemplate.store")

_FREE_FILES = 16
"""While the disk has space for this number of commit log files, the limits do not count.

A nearly full disk of a terabyte has space for months.
"""
_WARNING_FREE_FILES = 4 * _FREE_FILES
"""The same for the warning before files are deleted although their messages are unread."""
_SAMPLE_MS = 10_000
_WINDOW_MS = 300_000
"""Time over which the rate is measured: the log grows in steps of its allocations."""
_SHORTEST_MS = 60_000
_LOW_AGAIN = 0.01
"""Part of the disk by which the free space must be above the warning before it is logged again."""
_REPEAT_MS = 60_000


class WatchedStore(Protocol):
    """The store whose disk is watched."""

    clock: Clock
    settings: StoreSettings
    sizes: FileSizes
    metrics: Metrics
    store_files: StoreFiles

    def allocated_bytes(self) -> int:
        """Return the disk space of the log and the consume queues."""


class DiskWatch:
    """The space of the disk, its rate of change, and the failures of the last writes.

    The figures are those of the file system, with all that other programs store there. The limits of the retention
    count only while few commit log files fit into the free space; see `ratio`.

    Attributes:
        read: Returns the space now; None without a disk. On a virtual clock the disk is ignored: a test has the same
            result on every machine.
        failure: Why the disk has refused the last message; None if it did not.
        is_low: True while less than ``disk-free-warning-ratio`` is free.
    """

    def __init__(self, store: WatchedStore) -> None:
        self._store = store
        self._clock = clock = store.clock
        self.read: Callable[[], DiskUsage | None] = lambda: None if clock.is_virtual else store.store_files.disk_usage()
        settings = store.settings
        forcible, full = settings.disk_space_clean_forcibly_ratio, settings.disk_space_warning_level_ratio
        self._limit = (forcible if settings.clean_file_forcibly_enable else full) / 100
        self._low = settings.disk_free_warning_ratio / 100
        self._samples: deque[tuple[int, int]] = deque()  # steady time, free bytes
        self._limited_log = LimitedLog(_log, clock.steady_ms, burst=1, period_ms=_REPEAT_MS)
        self.failure: str | None = None
        self._free_at_failure = 0
        self.is_low = False
        store.metrics.add_collector(self._samples_of_now)

    # --- figures -------------------------------------------------------------------------------

    def space(self) -> DiskSpace | None:
        """Return the figures of now; None without a disk."""
        usage = self.read()
        if usage is None:
            return None
        limit_free = self._limit_free(usage)
        full_in_ms, is_roomy = self._full_in_ms(usage, limit_free), usage.free >= self._roomy_bytes()
        return DiskSpace(usage.used, usage.free, self._store.allocated_bytes(), limit_free, full_in_ms, is_roomy)

    def _roomy_bytes(self, files: int = _FREE_FILES) -> int:
        return files * self._store.sizes.commit_log

    def _limit_free(self, usage: DiskUsage) -> int:
        """Return the free space below which messages are deleted or refused: both conditions of `ratio` hold."""
        return int(min((1 - self._limit) * (usage.used + usage.free), self._roomy_bytes()))

    def _full_in_ms(self, usage: DiskUsage, limit_free: int) -> int | None:
        left = usage.free - limit_free
        if left <= 0:
            return 0
        now_ms = self._clock.steady_ms()
        since_ms, free_then = next(iter(self._samples), (now_ms, usage.free))
        taken = free_then - usage.free
        if taken <= 0 or now_ms - since_ms < _SHORTEST_MS:
            return None
        return left * (now_ms - since_ms) // taken

    def ratio(self, usage: DiskUsage | None, *, is_warning: bool = False) -> float:
        """Return the used part of the disk for the limits of the retention.

        It is 0 without a disk, and while 16 more commit log files fit into the free space; for the warning 64.
        """
        files = _WARNING_FREE_FILES if is_warning else _FREE_FILES
        return 0.0 if usage is None or usage.free >= self._roomy_bytes(files) else usage.used_ratio

    def _samples_of_now(self) -> Iterator[MetricSample]:
        """Yield the metrics; ``store.disk_full_in_ms`` only while the disk fills."""
        space = self.space()
        if space is None:
            return
        values: dict[str, float | None] = {
            "store.disk_used": space.used_ratio,
            "store.disk_free": space.free_bytes,
            "store.disk_limit_free": space.limit_free_bytes,
            "store.disk_full_in_ms": space.full_in_ms,
            "store.size": space.store_bytes,
        }
        for name, value in values.items():
            if value is not None:
                yield MetricSample(name, MetricKind.GAUGE, value, {})

    # --- checks --------------------------------------------------------------------------------

    def check(self) -> DiskUsage | None:
        """Read the disk for the rate, log the warning, and end a failure if there is more space than at that time."""
        usage = self.read()
        if usage is None:
            return None
        now_ms = self._clock.steady_ms()
        if not self._samples or now_ms - self._samples[-1][0] >= _SAMPLE_MS:
            self._samples.append((now_ms, usage.free))
            while self._samples[0][0] < now_ms - _WINDOW_MS:
                self._samples.popleft()
        if usage.free >= self._free_at_failure + self._roomy_bytes(1):
            self.works()
        self._update_warning(usage)
        return usage

    def _update_warning(self, usage: DiskUsage) -> None:
        free = 1 - usage.used_ratio
        if free >= self._low + (_LOW_AGAIN if self.is_low else 0):
            self.is_low = False
        elif not self.is_low and usage.free >= self._roomy_bytes(_WARNING_FREE_FILES):  # else the cleaning warns
            self.is_low = True
            full_in_ms = self._full_in_ms(usage, self._limit_free(usage))
            self._limited_log.warning(
                "store.disk_low",
                used=round(usage.used_ratio, 3),
                free_bytes=usage.free,
                full_in_s=None if full_in_ms is None else full_in_ms // 1_000,
                hint=f"less than {self._low:.0%} of the disk is free (disk-free-warning-ratio); free space, or use a "
                "larger disk, before messages are deleted or refused",
            )

    def refuse(self, reason: str) -> None:
        """Note that the disk had no space for a message."""
        if self.failure is None:
            usage = self.read()
            self._free_at_failure = 0 if usage is None else usage.free
            self._limited_log.log(logging.ERROR, "store.messages_refused", reason=reason)
        self.failure = reason

    def works(self) -> None:
        """Note that the disk had space for a message, or that there is space again."""
        if self.failure is not None:
            self.failure = None
            self._limited_log.log(logging.INFO, "store.messages_accepted")
