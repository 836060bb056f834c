"""Offline check of a store directory: sizes, damage, pending messages, groups, and what a start would do."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mqtemplate.broker import RetentionHold, TopicKind
from mqtemplate.clock import SystemClock
from mqtemplate.durations import format_ms
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.operations.access import BrokerAccess, snapshot_broker
from mqtemplate.pending import PendingQuery
from mqtemplate.record.codec import BadRecordError
from mqtemplate.server.broker_server import BrokerServer
from mqtemplate.store.checkpoint import StoreCheckpoint, file_sizes
from mqtemplate.store.commit_log import LogReader, LogScan
from mqtemplate.store.files.disk import disk_errors
from mqtemplate.store.files.folder_store_files import FolderStoreFiles, SnapshotStoreFiles, check_store
from mqtemplate.store.files.mapped_files import MappedFileQueue


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of the commit log in which no valid record starts.

    Attributes:
        file: Name of the file.
        file_offset: First damaged byte, counted from the start of the file.
        size: Number of bytes up to the next valid record, or to the end of the file.
        is_tail: No valid record follows: a start cuts these bytes off, if no consume queue has a unit for them.
    """

    file: str
    file_offset: int
    physical_offset: int
    size: int
    reason: str
    is_tail: bool


@dataclass(slots=True)
class LogCheck:
    """Result of the check.

    Attributes:
        end_offset: Physical offset after the last valid record.
        newest_ms: Physical offset of each file's first byte -> store time (epoch ms) of its newest record.
    """

    start_offset: int = 0
    end_offset: int = 0
    record_count: int = 0
    oldest_ms: int | None = None
    damages: list[Damage] = field(default_factory=list)
    newest_ms: dict[int, int] = field(default_factory=dict)


def check_log(files: MappedFileQueue, on_progress: Callable[[int], None] = lambda count: None) -> LogCheck:
    """Read all records of the commit log, and verify them.

    Args:
        on_progress: Called with the number of bytes that were read since the last call.
    """
    log = LogReader(files)
    scan, found = LogScan(log), LogCheck(start_offset=log.start, end_offset=log.start)
    at, last_ms = log.start, 0
    while True:
        try:
            for batch in scan.batches(at):
                found.record_count += len(batch)
                newest = int(batch.store_timestamp.max())
                oldest = int(batch.store_timestamp.min())
                found.oldest_ms = oldest if found.oldest_ms is None else min(found.oldest_ms, oldest)
                start = scan.end - scan.end % files.file_size
                found.newest_ms[start] = max(found.newest_ms.get(start, 0), newest)
                last_ms = int(batch.store_timestamp[-1])
                on_progress(batch.byte_count)
                found.end_offset = scan.end + batch.byte_count
            reason = ""
        except BadRecordError as exc:
            reason = str(exc)
        at = scan.end
        # RocketMQ does not clear the bytes after a tail that it cut off, so older records may follow.
        # The last record is compared, not the newest one: that may have been stored while the clock was ahead.
        record = next(log.records_after(at, last_ms), None)
        following = None if record is None else record.physical_offset
        if following is None and not reason:
            return found
        found.damages.append(_damage(files, at, following, reason or "only zeros, and valid records follow"))
        if following is None:
            return found
        at = following


def _damage(files: MappedFileQueue, at: int, following: int | None, reason: str) -> Damage:
    start = at - at % files.file_size
    end = start + files.file_size if following is None else following
    path = files.path_of(start)
    return Damage(
        file=f"commitlog/{start:020d}" if path is None else f"commitlog/{path.name}",
        file_offset=at - start,
        physical_offset=at,
        size=end - at,
        reason=reason,
        is_tail=following is None,
    )


_log = get_logger("mqtemplate.admin")

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
_HORIZONS = {
    "overdue": (None, 0),
    "next minute": (0, _MINUTE),
    "next hour": (_MINUTE, _HOUR),
    "next day": (_HOUR, _DAY),
    "next week": (_DAY, 7 * _DAY),
    "later": (7 * _DAY, None),
}


@dataclass(frozen=True, slots=True)
class PartSize:
    """Files of one part of a store directory.

    Attributes:
        name: Name of the folder, or of the file.
        byte_count: Sum of the lengths.
        disk_bytes: Allocated disk space: files may be sparse.
    """

    name: str
    file_count: int
    byte_count: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class GroupBacklog:
    """Lag of one group."""

    name: str
    lag: int


class Verdict(Enum):
    """The result of a start on a store directory: the worst that it meets."""

    STARTS = "starts"
    """It finds nothing to repair."""
    REPAIRS = "repairs"
    """It repairs something, and logs a warning. No message is lost."""
    LOSES = "loses messages"
    """It logs an error: messages are damaged or missing. It starts, and delivers the others."""
    REFUSES = "refuses"
    """It raises an error."""


@dataclass(slots=True)
class FolderReport:
    """State of a store directory at one moment.

    Attributes:
        used_by: Process id of the owner; None if no process has the directory open.
        was_closed: The last owner closed it, or it is in use.
        log: Result of the check of the commit log; None if its files cannot be opened.
        message_counts: Topic -> number of messages, without system topics.
        holds: What keeps commit log files that are older than ``file-reserved-time``.
        pending: Horizon, such as ``next hour`` -> number of pending messages.
        start: What a start would do, one sentence each.
        warnings: Events that a start would log, from the level WARNING on.
        losses: Those of the level ERROR.
        problem: Reason why no broker, or no server, can open the directory; None if one can.
    """

    path: Path
    used_by: str | None = None
    was_closed: bool = True
    free_bytes: int = 0
    parts: list[PartSize] = field(default_factory=list)
    log: LogCheck | None = None
    message_counts: dict[str, int] = field(default_factory=dict)
    holds: list[RetentionHold] = field(default_factory=list)
    pending: dict[str, int] = field(default_factory=dict)
    groups: list[GroupBacklog] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Result of a start now, if no other process had the directory open."""
        if self.problem is not None:
            return Verdict.REFUSES
        damages = self.log.damages if self.log else ()
        if self.losses or any(not each.is_tail for each in damages):
            return Verdict.LOSES
        return Verdict.REPAIRS if self.warnings or damages else Verdict.STARTS

    @property
    def is_damaged(self) -> bool:
        """True if there is damage that a start does not repair, or if no broker can start."""
        return self.verdict in (Verdict.LOSES, Verdict.REFUSES)


def examine(
    path: Path, settings: EmbeddedSettings | None = None, on_progress: Callable[[int], None] = lambda count: None
) -> FolderReport:
    """Return the report about a store directory. Nothing in it changes, and another process may have it open.

    Args:
        settings: Settings with which a broker would open it.
        on_progress: Called with the number of bytes of the commit log that were read since the last call.

    Raises:
        StoreError: The directory is missing, or is not a store.
    """
    settings = settings or EmbeddedSettings()
    check_store(path)
    report = FolderReport(path, parts=part_sizes(path))
    with _warnings(report):
        try:
            with disk_errors("read", path):
                report.free_bytes = shutil.disk_usage(path).free
                report.used_by = FolderStoreFiles(path).locked_by()
                files = SnapshotStoreFiles(path)
                report.was_closed = report.used_by is not None or not files.was_left_open()
                checkpoint = _check_files(report, files, settings, on_progress)
                _start(report, settings, checkpoint)
        except MQTemplateError as exc:
            report.problem = str(exc)
        except Exception as exc:  # files can be damaged in more ways than their readers foresee
            _log.debug("doctor.failed", exc_info=exc)
            report.problem = f"{type(exc).__name__}: {exc}; the file that causes it is not known, so restore a backup"
    return report


def _check_files(
    report: FolderReport, files: SnapshotStoreFiles, settings: EmbeddedSettings, on_progress: Callable[[int], None]
) -> int:
    """Check the commit log. Return the physical offset from which a start would read it."""
    checkpoint = StoreCheckpoint(files)
    try:
        sizes = file_sizes(settings, files, checkpoint.sizes)
        queue = files.mapped_queue("commitlog", sizes.commit_log)
        try:
            report.log = check_log(queue, on_progress)
        finally:
            queue.close()
        if report.used_by is not None:  # a record that the owner is writing is not damage
            report.log.damages = [each for each in report.log.damages if not each.is_tail]
        return checkpoint.replay_start
    finally:
        checkpoint.close()


def _start(report: FolderReport, settings: EmbeddedSettings, checkpoint: int) -> None:
    """Start a broker and its server on a snapshot, and read what they know."""
    with snapshot_broker(report.path, settings) as broker:
        BrokerServer(broker).load()  # it has tables of its own; nothing listens
        access = BrokerAccess(broker)
        topics = [topic for topic in access.admin.topics() if topic.kind is not TopicKind.SYSTEM]
        report.message_counts = {topic.name: topic.message_count for topic in topics}
        report.groups = [GroupBacklog(group.name, group.lag) for group in access.admin.groups()]
        report.holds = list(broker.retention_holds())
        report.pending = pending_by_horizon(access)
    if report.used_by is None:
        report.start = list(_plan(report, settings, checkpoint))


def _plan(report: FolderReport, settings: EmbeddedSettings, checkpoint: int) -> Iterator[str]:
    """Yield what a start would do."""
    log = report.log
    if log is None:
        return
    if not report.was_closed:
        read_bytes = max(0, log.end_offset - max(checkpoint, log.start_offset))
        yield (
            f"recover: the last owner did not close the directory; read {read_bytes} bytes from physical offset "
            f"{checkpoint} on"
        )
    for damage in log.damages:
        if damage.is_tail:
            yield f"cut off an incomplete record at the end of {damage.file}, byte {damage.file_offset}"
        else:
            yield f"skip {damage.size} damaged bytes of {damage.file} from byte {damage.file_offset} on"
    if overdue := report.pending.get("overdue"):
        yield f"deliver {overdue} messages at once, which were due while no broker ran"
    oldest_ms = SystemClock().now_ms() - settings.file_reserved_time * _HOUR
    expired = [start for start, newest_ms in sorted(log.newest_ms.items())[:-1] if newest_ms <= oldest_ms]
    if held_bytes := max((hold.byte_count for hold in report.holds), default=0):
        expired = [start for start in expired if start + held_bytes <= expired[-1]]
    if expired:
        yield (
            f"delete {len(expired)} commit log files at {settings.delete_when} o'clock: their messages are older than "
            f"file-reserved-time ({format_ms(settings.file_reserved_time * _HOUR)}); pending ones are kept"
        )


def pending_by_horizon(access: BrokerAccess) -> dict[str, int]:
    """Return the number of pending messages by the time until they are due."""
    now_ms = access.broker.clock.now_ms()
    counts = {}
    for name, (after, before) in _HORIZONS.items():
        query = PendingQuery(
            after_ms=None if after is None else now_ms + after, before_ms=None if before is None else now_ms + before
        )
        counts[name] = access.broker.delayed.count_pending(query, _DAY).total
    return counts


def part_sizes(path: Path) -> list[PartSize]:
    """Return the sizes of the parts of a store directory, by name. Links are not followed, and count as no file."""
    parts = []
    for name in sorted(each.name for each in _entries(path)):
        found = list(_file_states(path / name))
        byte_count, blocks = sum(each.st_size for each in found), sum(each.st_blocks for each in found)
        parts.append(PartSize(name, len(found), byte_count, blocks * 512))
    return parts


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read, or is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _file_states(path: Path) -> Iterator[os.stat_result]:
    """Yield the states of the regular files at *path* and below. The owner may delete some meanwhile."""
    waiting = [path]  # not recursive: a hostile directory is nested more deeply than Python's stack
    while waiting:
        each = waiting.pop()
        with contextlib.suppress(OSError):
            found = each.lstat()
            if stat.S_ISREG(found.st_mode):
                yield found
            elif stat.S_ISDIR(found.st_mode):
                waiting += [each / entry.name for entry in _entries(each)]


class _WarningList(logging.Handler):
    """Adds events to a report."""

    def __init__(self, report: FolderReport) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.warnings.append(record.getMessage())
        if record.levelno >= logging.ERROR:
            self._report.losses.append(record.getMessage())


@contextlib.contextmanager
def _warnings(report: FolderReport) -> Iterator[None]:
    """Collect the warnings and errors that the library logs inside the ``with`` block."""
    logger, handler = logging.getLogger("mqtemplate"), _WarningList(report)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
