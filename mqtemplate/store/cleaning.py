"""Retention: which files of the commit log may go, and when; and no new messages while the disk is too full."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError
from mqtemplate.metrics import Metrics
from mqtemplate.store.commit_log import LogFile
from mqtemplate.store.layout import file_name
from mqtemplate.store.settings import StoreSettings, parse_delete_when

_log = structlog.stdlib.get_logger("mqtemplate.store")

_HOUR_MS = 3_600_000
_MOST_FILES = 10  # in a row; upstream's number
_LOOK_MS = 10_000  # between two looks at the disk, and two runs of deleting; upstream's interval
_KEPT_MS = 600_000  # before a file that had to stay is tried again, while the disk is not tight


class CleanedStore(Protocol):
    """What the cleaning needs of its store.

    Attributes:
        refusal: Why no new message is taken; None while they are. The cleaning says so.
    """

    clock: Clock
    settings: StoreSettings
    metrics: Metrics
    refusal: str | None

    def oldest_file(self) -> LogFile | None:
        """The first file of the log; None if it is the only one, which stays."""

    def checkpoint_after(self, physical_offset: int) -> bool:
        """Take a checkpoint; whether a restart, from then on, reads nothing before *physical_offset*."""

    def delete_before(self, physical_offset: int) -> None:
        """Delete the log's files before there, and what of the consume queues points at them."""


class DeleteHours:
    """The hours of the day that files are deleted in, local time.

    Args:
        text: As ``delete-when`` has them: ``04``, or ``04;16``.

    Raises:
        ConfigurationError: It names no hours.
    """

    def __init__(self, text: str) -> None:
        self._hours = parse_delete_when(text)

    def contain(self, time_ms: int) -> bool:
        return _local(time_ms).hour in self._hours

    def next(self, time_ms: int) -> int:
        """The first millisecond at *time_ms* or later that is in one of them."""
        while not self.contain(time_ms):
            local = _local(time_ms)
            time_ms += _HOUR_MS - (local.minute * 60_000 + local.second * 1_000 + time_ms % 1_000)
        return time_ms


def _local(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms // 1_000, UTC).astimezone()


class _Kept(NamedTuple):
    """A file that had to stay, and under which circumstances."""

    begin: int
    is_tight: bool
    since_ms: int
    until_ms: int
    reason: str


class CleaningService:
    """Deletes files of the commit log, from the oldest on and one after the other, but never the last one.

    ==========================================  =====================================================================
    used of the disk                            what goes
    ==========================================  =====================================================================
    any                                         files older than ``file-reserved-time``, in the hours of ``delete-when``
    above ``disk-max-used-space-ratio``         the same at any hour
    above ``disk-space-clean-forcibly-ratio``   the oldest, whatever its age (``clean-file-forcibly-enable``)
    above ``disk-space-warning-level-ratio``    the same, and no new message is taken
    ==========================================  =====================================================================

    - A file is as old as its newest record, by the store's timestamps.
    - No file goes that a message waits in, that a restart would read, or that is not on the disk whole. What waits is
      copied forward first; while the disk is tight only if that takes less than half of what the file gives.
    - Between two times at which something can expire nothing is done, but for a look at the disk.

    One thread steps it.

    Args:
        disk_used_ratio: How full the disk is, 0 to 1; None if that does not matter.

    Attributes:
        make_free: Called with begin and end of a part of the log: see that nothing in it is needed any more, by copying
            forward what waits there; False if it still is. While nobody says so (None), every file stays.
        waiting_bytes: How many bytes of such a part belong to messages that wait.
    """

    name = "store.cleaning"

    def __init__(self, store: CleanedStore, disk_used_ratio: Callable[[], float] | None = None) -> None:
        self._store = store
        self._clock = store.clock
        settings = store.settings
        self._reserved_ms = settings.file_reserved_time * _HOUR_MS
        self._hours = DeleteHours(settings.delete_when)
        self._is_forcible = settings.clean_file_forcibly_enable
        self._max_used = settings.disk_max_used_space_ratio / 100
        self._tight = settings.disk_space_clean_forcibly_ratio / 100
        self._full = settings.disk_space_warning_level_ratio / 100
        self.disk_used_ratio = disk_used_ratio
        self.make_free: Callable[[int, int], bool] | None = None
        self.waiting_bytes: Callable[[int, int], int] = lambda begin, end: 0
        self._hooks: list[Callable[[int], object]] = []
        self._deleted = store.metrics.counter("store.files_deleted")
        self._in_a_row = 0
        self._kept: _Kept | None = None
        self._looked_ms = 0
        self._next_ms = 0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nobody wakes it: it knows beforehand when the next file can expire."""

    def on_cleaned(self, hook: Callable[[int], object]) -> None:
        """Call *hook* after each deletion with the physical offset that the log begins at then."""
        self._hooks.append(hook)

    def step(self) -> int | None:
        """Delete one file, if it is time; gives when there can be something to do again."""
        now_ms = self._clock.now_ms()
        if not self._looked_ms <= now_ms < self._next_ms:
            self._looked_ms = now_ms
            self._next_ms = self.look()
        return self._next_ms

    def look(self) -> int:
        """`step`, whether or not the time has come for it."""
        now_ms = self._clock.now_ms()
        used = 0.0 if self.disk_used_ratio is None else self.disk_used_ratio()
        self._refuse_or_not(used)
        file = self._store.oldest_file()
        reason = None if file is None else self._reason(file, now_ms, used)
        if file is None or reason is None:
            self._in_a_row = 0
            return self._look_again(self._next_expiry(file, now_ms, used), now_ms)
        if self._must_wait(file, now_ms, used):
            assert self._kept is not None
            return self._look_again(self._kept.until_ms, now_ms)
        why_not = self._delete(file, reason, now_ms, used)
        if why_not is not None:
            return self._look_again(self._keep(file, why_not, now_ms, used), now_ms)
        self._in_a_row += 1
        return now_ms if self._in_a_row % _MOST_FILES else now_ms + _LOOK_MS

    # --- when ----------------------------------------------------------------------------------

    def _reason(self, file: LogFile, now_ms: int, used: float) -> str | None:
        """Why *file* should go now; None if it should not."""
        is_hour = used > self._max_used or self._hours.contain(now_ms)
        if is_hour and file.newest_ms is not None and now_ms - file.newest_ms >= self._reserved_ms:
            return "age"
        return "disk" if self._is_forcible and used > self._tight else None

    def _next_expiry(self, file: LogFile | None, now_ms: int, used: float) -> int:
        """When a file can go by its age, if none can now. One that is not there yet, or has no second, is not older
        than now."""
        newest_ms = now_ms if file is None or file.newest_ms is None else file.newest_ms
        expiry_ms = max(newest_ms + self._reserved_ms, now_ms)
        return expiry_ms if used > self._max_used else self._hours.next(expiry_ms)

    def _look_again(self, next_ms: int, now_ms: int) -> int:
        return next_ms if self.disk_used_ratio is None else min(next_ms, now_ms + _LOOK_MS)

    # --- the disk ------------------------------------------------------------------------------

    def _refuse_or_not(self, used: float) -> None:
        if used <= self._full:
            if self._store.refusal is not None:
                self._store.refusal = None
                _log.info("store.takes_messages_again", used=round(used, 3))
            return
        if self._store.refusal is None:
            _log.error("store.refuses_messages", used=round(used, 3), warning_level=self._full)
        self._store.refusal = (
            f"the disk is {used:.0%} full, and above {self._full:.0%} (disk-space-warning-level-ratio) no message is "
            "taken; free space there, or raise the ratio, then send again: what was acknowledged is safe"
        )

    # --- deleting ------------------------------------------------------------------------------

    def _must_wait(self, file: LogFile, now_ms: int, used: float) -> bool:
        """Whether *file* was tried a short while ago, when things were as they are."""
        kept = self._kept
        is_same = kept is not None and (kept.begin, kept.is_tight) == (file.begin, used > self._tight)
        return is_same and kept is not None and kept.since_ms <= now_ms < kept.until_ms

    def _keep(self, file: LogFile, why_not: str, now_ms: int, used: float) -> int:
        """Note that *file* had to stay; gives when it is tried again."""
        is_tight = used > self._tight
        until_ms = now_ms + (_LOOK_MS if is_tight else _KEPT_MS)
        before, self._kept = self._kept, _Kept(file.begin, is_tight, now_ms, until_ms, why_not)
        if before is None or (before.begin, before.reason) != (file.begin, why_not):
            _log.warning("store.file_kept", file=file_name(file.begin), reason=why_not)
        return until_ms

    def _delete(self, file: LogFile, reason: str, now_ms: int, used: float) -> str | None:
        """Delete the oldest file; or tell why it has to stay."""
        size = file.end - file.begin
        if self.make_free is None:
            return "nobody tells whether messages wait in it"
        if used > self._tight and (waiting := self.waiting_bytes(file.begin, file.end)) * 2 >= size:
            return f"{waiting} of its {size} bytes wait to be delivered, and the disk has no room to copy them forward"
        try:
            if not self.make_free(file.begin, file.end):
                return "messages wait in it, and could not be copied forward"
            # What was copied forward must be on the disk, and withdrawn for good, before the only other copy goes.
            if not self._store.checkpoint_after(file.end):
                return "a restart would still read it"
        except StoreError as exc:
            return f"what waits in it could not be copied forward: {exc}"
        self._store.delete_before(file.end)
        self._deleted.add()
        age_h = None if file.newest_ms is None else round((now_ms - file.newest_ms) / _HOUR_MS, 1)
        _log.info("store.file_deleted", file=file_name(file.begin), reason=reason, age_h=age_h, used=round(used, 3))
        for hook in self._hooks:
            hook(file.end)
        return None
