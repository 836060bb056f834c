"""Check of the commit log: each record is read and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mqtemplate.record.codec import BadRecordError
from mqtemplate.store.files.mapped_files import MappedFileQueue
from mqtemplate.store.log_reader import LogReader, LogScan


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
