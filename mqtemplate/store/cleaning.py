"""Retention: when files of the commit log are deleted, and when a full disk refuses new messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from mqtemplate.clock import Clock
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import CorruptRecordError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.metrics import Metrics
from mqtemplate.record.codec import StoredRecord
from mqtemplate.services import ClockWatch, wall_time
from mqtemplate.store.commit_log import LogFile
from mqtemplate.store.disk_space import DiskWatch
from mqtemplate.store.files.layout import file_name
from mqtemplate.store.settings import StoreSettings, parse_delete_when
from mqtemplate.topics import DLQ_TOPIC_PREFIX, is_broker_topic

_log = get_logger("mqtemplate.store")

_HOUR_MS = 3_600_000
_MAX_FILES = 10  # in one run; RocketMQ's deleteFileBatchMax
_INTERVAL_MS = 10_000  # between checks of the disk, and between runs; RocketMQ's cleanResourceInterval
_RETRY_MS = 600_000  # for a file that could not be deleted, while the disk has space
_AFTER_CLOCK_SET_MS = 3_600_000
"""No file is deleted for its age so soon after the clock was set forward: by then a mistake is noticed."""
_WARNING_BELOW = 0.10
"""Part of the disk between the warning and the limit from which unread messages are deleted."""
_NAMED_TOPICS = 20
"""Most topics, and most unread spans, that the event about deleted messages names."""


class CleanedStore(Protocol):
    """The store as its cleaning uses it."""

    clock: Clock
    settings: StoreSettings
    metrics: Metrics
    disk: DiskWatch
    messages_before: Callable[[int], dict[str, int]]

    def oldest_file(self) -> LogFile | None:
        """Return the first file of the log; None if it is the only one, which is never deleted."""

    def checkpoint_after(self, physical_offset: int) -> bool:
        """Take a checkpoint. Return True if a restart from now on reads no record before *physical_offset*."""

    def read_at(self, physical_offset: int) -> StoredRecord | None:
        """Return the record at this offset; None if no record starts there."""

    def delete_before(self, physical_offset: int) -> None:
        """Delete the files of the log before this offset, and the consume queue units that point there."""


class KeptMessages(Protocol):
    """The delayed messages of a store that are not delivered yet. The cleaning must not lose them."""

    def copy_forward(self, physical_start: int, physical_end: int) -> bool:
        """Append the pending messages of this part of the log again, so that the part can be deleted.

        Returns:
            False if one of them still needs it.
        """

    def pending_bytes(self, physical_start: int, physical_end: int) -> int:
        """Return the size of the pending messages in this part of the log."""


class UnreadSpan(NamedTuple):
    """Messages of one topic that a group has not consumed, or dead letters that are not old.

    Attributes:
        group: The group that has not consumed them, or whose dead letters they are.
        message_count: Number of these messages in the part of the log that was searched.
        physical_offset: Physical offset of the first one.
    """

    group: str
    topic: str
    message_count: int
    physical_offset: int

    def __str__(self) -> str:
        if self.topic.startswith(DLQ_TOPIC_PREFIX):
            return f"group {self.group!r} has dead letters that are not old (dead-letter-reserved-time)"
        return f"group {self.group!r} has not consumed messages of topic {self.topic!r}"


class UnreadMessages(Protocol):
    """The messages that the cleaning keeps unless the disk is full."""

    def before(self, physical_end: int) -> Sequence[UnreadSpan]:
        """Return the unread messages and the dead letters in the log before this offset, by group and topic."""


def is_delete_hour(time_ms: int, hours: frozenset[int]) -> bool:
    """Return True if files may be deleted at *time_ms*, in local time."""
    return _local(time_ms).hour in hours


def next_delete_hour(time_ms: int, hours: frozenset[int]) -> int:
    """Return the first millisecond from *time_ms* on at which files may be deleted."""
    while not is_delete_hour(time_ms, hours):
        local = _local(time_ms)
        time_ms += _HOUR_MS - (local.minute * 60_000 + local.second * 1_000 + time_ms % 1_000)
    return time_ms


def _local(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms // 1_000, UTC).astimezone()


class _KeptFile(NamedTuple):
    """A file that could not be deleted, and the conditions at that time."""

    start: int
    is_tight: bool
    since_ms: int
    retry_ms: int
    reason: str


class CleaningService:
    """Service that deletes files of the commit log, oldest first, but never the last one. RocketMQ:
    ``CleanCommitLogService``.

    ==========================================  =====================================================================
    used part of the disk                       deleted
    ==========================================  =====================================================================
    any                                         files older than ``file-reserved-time``, in the hours of ``delete-when``
    above ``disk-max-used-space-ratio``         the same at any hour
    ten percent below the next limit            the same, and a warning that unread messages will be deleted
    above ``disk-space-clean-forcibly-ratio``   the oldest, whatever its age (``clean-file-forcibly-enable``), also if
                                                it has unread messages: an error event names what was deleted
    above ``disk-space-warning-level-ratio``    the same, and new messages are refused
    ==========================================  =====================================================================

    - The age of a file is the age of its newest record by store timestamps. For an hour after the clock was set forward
      no file is deleted for its age.
    - A file stays while it has a pending message, while a restart would read it, or while it is not completely on the
      disk. Pending messages are copied forward first. While the disk is tight that is done only if it needs less than
      half of the file's size.
    - With ``keep-unread-messages`` a file stays while it has messages that a known group has not consumed, or dead
      letters that are not old. The search for them takes place only when it could be deleted.
    - Between two times at which a file can expire, only the disk is checked.

    One thread steps it.

    Attributes:
        disk: The space of the disk.
        refusal: Reason why new messages are refused above the limit; None while they are accepted.
        is_near_limit: True while the disk is near the limit from which unread messages are deleted.
        holds: Functions (physical offset) that return why the log before that offset must stay; None if it may go. They
            count unless the disk is full.
        on_cleaned: Hooks that are called after each deletion with the new start of the log.
    """

    name = "store.cleaning"

    def __init__(self, store: CleanedStore) -> None:
        self._store = store
        self.disk = store.disk
        self._clock = store.clock
        settings = store.settings
        self._reserved_ms = settings.file_reserved_time * _HOUR_MS
        self._hours = parse_delete_when(settings.delete_when)
        self._is_forcible = settings.clean_file_forcibly_enable
        self._max_used = settings.disk_max_used_space_ratio / 100
        self._tight = settings.disk_space_clean_forcibly_ratio / 100
        self._full = settings.disk_space_warning_level_ratio / 100
        self._limit = self._tight if self._is_forcible else self._full
        self._has_disk = False
        self.refusal: str | None = None
        self.is_near_limit = False
        self._pending: KeptMessages | None = None
        self._unread: UnreadMessages | None = None
        self.holds: list[Callable[[int], str | None]] = []
        self.on_cleaned: list[Callable[[int], object]] = []
        self._deleted = store.metrics.counter("store.files_deleted")
        self._lost = store.metrics.counter("store.forcibly_deleted")  # 0 from the start: alerts see its first increase
        store.metrics.gauge("store.refusing", lambda: int(self.why_refused is not None))
        store.metrics.gauge("store.disk_near_limit", lambda: int(self.is_near_limit))
        self._files_in_run = 0
        self._kept: _KeptFile | None = None
        self._checked_ms = 0
        self._next_ms = 0
        self._watch = ClockWatch(self._clock)
        self._trusted_ms = 0  # steady: from then on ages count

    @property
    def why_refused(self) -> str | None:
        """Why messages are refused for want of disk space, by the limit or by a write that failed, and what helps."""
        return self.refusal or self.disk.failure

    def load(self, pending: KeptMessages | None) -> None:
        """Take the pending messages of the store. Without them (None) no file is deleted."""
        self._pending = pending

    def keep(self, unread: UnreadMessages) -> None:
        """Keep unread messages unless the disk is full. Without this call a file is deleted by its age."""
        self._unread = unread

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the time at which the next file can expire is known in advance."""

    def step(self) -> int | None:
        """Delete one file, if its time has come. Return the time of the next step."""
        now_ms = self._clock.now_ms()
        if not self._checked_ms <= now_ms < self._next_ms:
            self._checked_ms = now_ms
            self._next_ms = self.clean()
        return self._next_ms

    def clean(self) -> int:
        """Check the disk and delete one file now, if that is allowed. Return the time of the next step."""
        now_ms = self._clock.now_ms()
        if self._watch.moved_ms() > 0:
            self._trusted_ms = self._clock.steady_ms() + _AFTER_CLOCK_SET_MS
        usage = self.disk.check()
        self._has_disk = usage is not None
        used = self.disk.ratio(usage)
        self._update_refusal(used)
        file = self._store.oldest_file()
        self._update_warning(file, self.disk.ratio(usage, is_warning=True))
        reason = None if file is None else self._reason_to_delete(file, now_ms, used)
        if file is None or reason is None:
            self._files_in_run = 0
            return self._check_again(self._next_expiry(file, now_ms, used), now_ms)
        kept = self._kept
        is_same = kept is not None and (kept.start, kept.is_tight) == (file.start, used > self._tight)
        if is_same and kept is not None and kept.since_ms <= now_ms < kept.retry_ms:
            return self._check_again(kept.retry_ms, now_ms)
        why_not = self._delete(file, reason, now_ms, used)
        if why_not is not None:
            return self._check_again(self._keep(file, why_not, now_ms, used), now_ms)
        self._files_in_run += 1
        return now_ms if self._files_in_run % _MAX_FILES else now_ms + _INTERVAL_MS

    # --- when ----------------------------------------------------------------------------------

    def _reason_to_delete(self, file: LogFile, now_ms: int, used: float) -> str | None:
        """Return why *file* is to be deleted now; None if it is not."""
        is_hour = used > self._max_used or is_delete_hour(now_ms, self._hours)
        is_trusted = self._clock.steady_ms() >= self._trusted_ms
        if is_hour and is_trusted and file.newest_ms is not None and now_ms - file.newest_ms >= self._reserved_ms:
            return "age"
        return "disk" if self._is_forcible and used > self._tight else None

    def _next_expiry(self, file: LogFile | None, now_ms: int, used: float) -> int:
        """Return when a file can expire, if none has. A file without successor has records up to now."""
        # A time in the future is wrong. The file expires once a record is stored by the right clock, see `oldest_file`.
        newest_ms = now_ms if file is None or file.newest_ms is None else min(file.newest_ms, now_ms)
        trusted_ms = wall_time(self._clock, self._trusted_ms) or now_ms
        expiry_ms = max(newest_ms + self._reserved_ms, now_ms, trusted_ms)
        return expiry_ms if used > self._max_used else next_delete_hour(expiry_ms, self._hours)

    def _check_again(self, next_ms: int, now_ms: int) -> int:
        return min(next_ms, now_ms + _INTERVAL_MS) if self._has_disk else next_ms

    def _update_refusal(self, used: float) -> None:
        if used <= self._full:
            if self.refusal is not None:
                self.refusal = None
                _log.info("store.messages_accepted", used=round(used, 3))
            return
        if self.refusal is None:
            _log.error("store.messages_refused", used=round(used, 3), warning_level=self._full)
        self.refusal = (
            f"the disk is {used:.0%} full, and above {self._full:.0%} (disk-space-warning-level-ratio) no message is "
            "taken; free space there, or raise the ratio, then send again: what was acknowledged is safe"
        )

    # --- deleting ------------------------------------------------------------------------------

    def _update_warning(self, file: LogFile | None, soon: float) -> None:
        """Log a warning when the disk comes near the limit from which unread messages are deleted."""
        is_near = soon > self._limit - _WARNING_BELOW
        if is_near == self.is_near_limit:
            return
        self.is_near_limit = is_near
        if not is_near:
            _log.info("store.disk_has_space", used=round(soon, 3))
            return
        unread = [] if file is None else [str(span) for span in self._unread_before(file.end)]
        then = (
            "the oldest files are deleted, also those with unread messages and dead letters"
            if self._is_forcible
            else "new messages are refused"
        )
        _log.warning(
            "store.disk_nearly_full",
            used=round(soon, 3),
            limit=self._limit,
            first_file="; ".join(unread) or "no unread messages",
            hint=f"above the limit {then}; free disk space, let these groups consume, or forget groups that are gone "
            "with: mqtemplate offsets forget GROUP",
        )

    def _unread_before(self, physical_end: int) -> Sequence[UnreadSpan]:
        return () if self._unread is None else self._unread.before(physical_end)

    def _keep(self, file: LogFile, why_not: str, now_ms: int, used: float) -> int:
        """Note that *file* cannot be deleted. Return the time of the next attempt."""
        is_tight = used > self._tight
        retry_ms = now_ms + (_INTERVAL_MS if is_tight else _RETRY_MS)
        before, self._kept = self._kept, _KeptFile(file.start, is_tight, now_ms, retry_ms, why_not)
        if before is None or (before.start, before.reason) != (file.start, why_not):
            _log.warning("store.file_kept", file=file_name(file.start), reason=why_not)
        return retry_ms

    def _delete(self, file: LogFile, reason: str, now_ms: int, used: float) -> str | None:
        """Delete the oldest file. Return the reason if that is not possible."""
        start, end, newest_ms = file
        if self._pending is None:
            return "it is unknown if it has pending messages"
        if used > self._tight and (pending := self._pending.pending_bytes(start, end)) * 2 >= end - start:
            return f"{pending} of its {end - start} bytes are pending messages, and the disk has no space for copies"
        unread = self._unread_before(end)
        is_forced = self._is_forcible and used > self._tight
        for hold in self.holds:
            if (why := hold(end)) is not None and not is_forced:
                return why
        if unread and not is_forced:
            return (
                f"{'; '.join(map(str, unread))}; it stays until they are consumed or old, or the disk is full; forget "
                "a group that is gone with: mqtemplate offsets forget GROUP"
            )
        try:
            if not self._pending.copy_forward(start, end):
                return "it has pending messages that could not be copied forward"
            # The copies must be on the disk, and their sources withdrawn durably, before the sources are deleted.
            if not self._store.checkpoint_after(end):
                return "a restart would still read it"
        except StoreError as exc:
            return f"its pending messages could not be copied forward: {exc}"
        is_early = reason == "disk" or bool(unread)
        counts = self._store.messages_before(end) if is_early else {}
        first_ms = self._stored_ms(start) if is_early else None
        self._store.delete_before(end)
        self._deleted.add()
        age_h = None if newest_ms is None else round((now_ms - newest_ms) / _HOUR_MS, 1)
        _log.info("store.file_deleted", file=file_name(start), reason=reason, age_h=age_h, used=round(used, 3))
        lost = {topic: count for topic, count in counts.items() if not is_broker_topic(topic)}
        if lost:
            self._report_loss(file, first_ms, lost, unread, used)
        for hook in self.on_cleaned:
            hook(end)
        return None

    def _stored_ms(self, physical_offset: int) -> int | None:
        try:
            record = self._store.read_at(physical_offset)
        except CorruptRecordError:
            return None
        return None if record is None else record.store_timestamp

    def _report_loss(
        self, file: LogFile, first_ms: int | None, lost: dict[str, int], unread: Sequence[UnreadSpan], used: float
    ) -> None:
        """Log and count the messages that were deleted before their time."""
        self._lost.add(sum(lost.values()))
        for span in unread:
            self._store.metrics.counter("store.unread_deleted", group=span.group, topic=span.topic).add(
                span.message_count
            )
        largest = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
        losers = [f"{span.message_count} of {span.topic} by {span.group}" for span in unread]
        unread_text = _listed(losers) or "none by a known group"
        _log.error(
            "store.messages_deleted",
            messages=sum(lost.values()),
            topics=_listed([f"{topic}: {count}" for topic, count in largest]),
            unread="not known: keep-unread-messages is false" if self._unread is None else unread_text,
            first=time_text(first_ms),
            last=time_text(file.newest_ms),
            file=file_name(file.start),
            used=round(used, 3),
            limit=self._tight,
            hint="the disk is full, so messages are deleted before file-reserved-time; free space, or let the groups "
            "consume, before more are deleted; to refuse new messages instead, set clean-file-forcibly-enable to false",
        )


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMED_TOPICS
    return ", ".join(texts[:_NAMED_TOPICS]) + (f", and {more} more" if more > 0 else "")
