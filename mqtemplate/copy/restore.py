"""The restore of a store directory to a moment; the contents of a copy, and the check of its objects."""

from __future__ import annotations

import json
import secrets
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.converters.readable import time_text
from mqtemplate.copy.backup import NewStore, Progress, StoreSummary, write_table
from mqtemplate.copy.catalogue import (
    ALIVE_MS,
    HISTORY_TABLE,
    Catalogue,
    Epoch,
    Moment,
    Piece,
    Segment,
    SegmentName,
    SnapshotName,
    zstd,
)
from mqtemplate.copy.objects import open_objects
from mqtemplate.delay.copies import released_source
from mqtemplate.delay.delay_store import is_marker
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import CopyError, StoreLockedError
from mqtemplate.record.codec import BadRecordError, StoredRecord
from mqtemplate.record.columns import RecordBatch
from mqtemplate.store.commit_log import LogReader, LogScan
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.mapped_files import MappedFileQueue
from mqtemplate.store.tables import load_json
from mqtemplate.topics import TIMER_TOPIC

_TOPICS_TABLE = "config/topics.json"
_READERS = 4  # an object store answers several requests at once
_AHEAD_BYTES = 64 << 20
_MOST_AHEAD = 32


# --- what a copy has ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopySummary:
    """Contents of a copy.

    Attributes:
        history: Id of the history.
        first_ms: First moment that can be restored (epoch ms); None before the first snapshot is complete.
        last_ms: Last one.
        epochs: The starts of copying processes, oldest first.
        is_alive: The process of the last one has not ended, and was seen within the last minute.
        log_bytes: Bytes of the commit log, uncompressed.
        stored_bytes: Bytes of all objects.
    """

    url: str
    history: str
    first_ms: int | None
    last_ms: int | None
    epochs: tuple[Epoch, ...]
    snapshots: tuple[SnapshotName, ...]
    segment_count: int
    is_alive: bool
    log_bytes: int
    stored_bytes: int


def list_copy(url: str, options: Mapping[str, str] | None = None, clock: Clock | None = None) -> CopySummary:
    """Return what a copy has. Only names are read, no segment.

    Raises:
        CopyError: There is no copy, or its place does not answer.
        ConfigurationError: The URL is wrong, or a package is missing.
    """
    catalogue = Catalogue.read(open_objects(url, options))
    last = catalogue.epochs[-1] if catalogue.epochs else None
    return CopySummary(
        url=url,
        history=catalogue.history,
        first_ms=min((each.time_ms for each in catalogue.snapshots), default=None),
        last_ms=catalogue.alive(last).copied_ms if last is not None else None,
        epochs=tuple(catalogue.epochs),
        snapshots=tuple(catalogue.snapshots),
        segment_count=len(catalogue.segments),
        is_alive=last is not None and _is_alive(catalogue, last, (clock or SystemClock()).now_ms()),
        log_bytes=sum(each.end - each.start for each in catalogue.segments),
        stored_bytes=sum(catalogue.sizes.values()),
    )


def _is_alive(catalogue: Catalogue, epoch: Epoch, now_ms: int) -> bool:
    alive = catalogue.alive(epoch)
    return not alive.is_closed and now_ms - alive.seen_ms < ALIVE_MS


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """Result of the check of a copy.

    Attributes:
        object_count: Number of segments and snapshots that were read.
        problems: A sentence for each damaged or missing object.
    """

    object_count: int
    problems: tuple[str, ...]


def verify_copy(
    url: str, options: Mapping[str, str] | None = None, on_progress: Progress = lambda n: None
) -> CopyCheck:
    """Read each object of a copy, verify its checksums, and check that no bytes of the log are missing.

    Args:
        on_progress: Called with the number of objects that were read since the last call.

    Raises:
        CopyError: There is no copy, or its place does not answer.
    """
    zstd()
    catalogue = Catalogue.read(open_objects(url, options))
    problems = []
    names: list[SegmentName | SnapshotName] = [*catalogue.snapshots, *catalogue.segments]
    for name in names:
        try:
            catalogue.merged_segment(name) if isinstance(name, SegmentName) else catalogue.segment(name)
        except CopyError as exc:
            problems.append(str(exc))
        on_progress(1)
    for snapshot in catalogue.snapshots:
        epoch = next((each for each in catalogue.epochs if each.number == snapshot.epoch), None)
        if epoch is None:
            problems.append(f"{url}: epochs/{snapshot.epoch:08d}.json is missing, and {snapshot.object} needs it")
        elif (missing := _missing(catalogue.pieces(epoch), snapshot.log_start, snapshot.end)) is not None:
            problems.append(f"{url}: {missing}, and moments from {time_text(snapshot.time_ms)} on need them")
    return CopyCheck(len(names), tuple(problems))


def _missing(pieces: Sequence[Piece], start: int, end: int) -> str | None:
    """Return which bytes between two physical offsets no segment has; None if all are there."""
    for piece in pieces:
        if piece.end > start and piece.name.start <= start:
            start = piece.end
    return None if start >= end else f"the bytes of the commit log from physical offset {start} on are missing"


# --- restore ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Result of a restore.

    Attributes:
        moment_ms: The moment (epoch ms): everything stored until then is in the directory.
        store: Contents of the directory. Its overdue messages are released by the next start; the original may have
            released some of them after the last moment of the copy.
        released_later: Messages that are pending in the directory, and that the copy shows as released after the
            moment: they are released again.
        cancelled_later: Messages that are pending in the directory, and that were cancelled after the moment: they are
            released.
        is_fork: The directory has a history of its own.
    """

    moment_ms: int
    store: StoreSummary
    released_later: int
    cancelled_later: int
    is_fork: bool


def restore_store(
    url: str,
    path: Path,
    until_ms: int | None = None,
    *,
    fork: bool = False,
    options: Mapping[str, str] | None = None,
    settings: EmbeddedSettings | None = None,
    on_progress: Progress = lambda count: None,
    clock: Clock | None = None,
) -> RestoreReport:
    """Write a store directory with the state of a moment.

    The log is cut at the first record that was stored after the moment, and everything else is rebuilt from it. So what
    was cancelled by then stays cancelled, and what was released by then is not released again.

    Args:
        path: The directory: missing or empty.
        until_ms: The moment (epoch ms); None for the last one of the copy.
        fork: The original goes on: give the directory a history of its own.
        on_progress: Called with the number of bytes of the log that were written since the last call.

    Raises:
        CopyError: The copy has no such moment, an object is damaged, or the original is alive and *fork* is False.
        StoreError: The directory is not empty.
        ConfigurationError: The URL is wrong, or a package is missing.
    """
    zstd()
    clock = clock or SystemClock()
    catalogue = Catalogue.read(open_objects(url, options))
    if not fork:
        _check_original(catalogue, clock.now_ms())
    plan = _plan(catalogue, until_ms)
    new = NewStore(path, plan.epoch.file_size)
    restoring = _Restoring(catalogue, plan, new, on_progress)
    with closing(restoring.pieces):
        restoring.write()
        restoring.count_later()
    for name, data in restoring.tables.items():
        if data is not None:
            write_table(new.path / name, data)
    if fork:
        write_table(new.path / HISTORY_TABLE, json.dumps({"history": secrets.token_hex(16)}).encode())
    store = new.finish(settings or EmbeddedSettings(), clock)
    later = restoring.later
    return RestoreReport(plan.moment_ms, store, later.released, later.cancelled, fork)


def _check_original(catalogue: Catalogue, now_ms: int) -> None:
    """Check that no broker has the history.

    Raises:
        CopyError: The last process that copied is alive.
        StoreLockedError: It was on this host, and its directory is in use.
    """
    if not catalogue.epochs:
        return
    last = catalogue.epochs[-1]
    hint = f"{_TWO_OWNERS} Stop that one first, or give the new directory a history of its own: --fork"
    if last.host == socket.gethostname():
        check_local_owner(last, hint)
        return
    if _is_alive(catalogue, last, now_ms):
        raise CopyError(
            f"the original is alive: process {last.pid} on {last.host} copied {last.folder} at "
            f"{time_text(catalogue.alive(last).seen_ms)}; {hint}. A process that was killed counts as alive for "
            f"{ALIVE_MS // 1_000} s"
        )


_TWO_OWNERS = "two brokers with one history would release the same messages twice."


def check_local_owner(epoch: Epoch, hint: str = f"{_TWO_OWNERS} Stop that one first.") -> None:
    """Check that the process of an epoch has ended, if it was on this host.

    Raises:
        StoreLockedError: Its directory is in use.
    """
    if epoch.host != socket.gethostname():
        return
    owner = FolderStoreFiles(Path(epoch.folder)).locked_by()
    if owner is not None:
        raise StoreLockedError(f"the original {epoch.folder} is in use by process {owner}; {hint}")


class _Plan(NamedTuple):
    """Which objects lead to a moment.

    Attributes:
        epoch: Epoch whose history has the moment.
        until_ms: The moment; None for the last one.
        moment_ms: The same as a time.
    """

    epoch: Epoch
    snapshot: SnapshotName
    pieces: Sequence[Piece]
    until_ms: int | None
    moment_ms: int


def _plan(catalogue: Catalogue, until_ms: int | None) -> _Plan:
    epoch = catalogue.epoch_at(until_ms)
    pieces = catalogue.pieces(epoch)
    # A later process may have copied records of that time, which its predecessor had not. If it continued from an
    # earlier offset, the directory had been restored, and the moment belongs to the history before.
    for later in catalogue.epochs:
        if later.number > epoch.number and later.start >= max([epoch.start, *(each.end for each in pieces)]):
            epoch, pieces = later, catalogue.pieces(later)
    last_ms = catalogue.alive(epoch).copied_ms
    snapshot = catalogue.snapshot_at(epoch, until_ms)
    if snapshot is None:
        first_ms = min((each.time_ms for each in catalogue.snapshots), default=None)
        first = "and it has none yet" if first_ms is None else f"and its first one is {time_text(first_ms)}"
        raise CopyError(
            f"{catalogue.objects.url} has no such moment: the copy begins with a snapshot of the tables, {first}"
        )
    if until_ms is not None and until_ms > last_ms:
        raise CopyError(
            f"{catalogue.objects.url} has no such moment: the copy ends at {time_text(last_ms)}; leave --until out to "
            "restore that one"
        )
    return _Plan(epoch, snapshot, pieces, until_ms, last_ms if until_ms is None else until_ms)


@dataclass(slots=True)
class _Later:
    """Numbers of messages that were pending at the moment, by what the copy shows of the time after it."""

    released: int = 0
    cancelled: int = 0


class _Restoring:
    """One restore while it runs.

    Attributes:
        pieces: What is left of the log, which is read ahead until it is closed.
        tables: Name -> content at the moment.
        later: What was counted after the moment.
    """

    def __init__(self, catalogue: Catalogue, plan: _Plan, new: NewStore, on_progress: Progress) -> None:
        self._catalogue = catalogue
        self._plan = plan
        self._new = new
        self._on_progress = on_progress
        self._at = plan.snapshot.log_start
        needed = (each for each in plan.pieces if each.end > self._at or each.name.last_ms > plan.snapshot.time_ms)
        self.pieces = _read_ahead(needed, catalogue.merged_piece)
        self._cut: int | None = None
        self._last: SegmentName | None = None
        self._after_cut = b""
        self.tables: dict[str, bytes | None] = {}
        self.later = _Later()

    def write(self) -> None:
        """Write the log up to the moment, and collect the tables."""
        plan = self._plan
        for moment in self._catalogue.segment(plan.snapshot).moments:
            self.tables |= moment.tables
        for piece, read in self.pieces:
            if piece.end <= self._at and piece.name.last_ms <= plan.snapshot.time_ms:
                continue
            if plan.until_ms is not None and self._at >= piece.end and piece.name.first_ms > plan.until_ms:
                continue  # only tables, of later moments
            self._write_piece(piece, read)
            if self._cut is not None:
                break
        if self._at < plan.snapshot.end:
            raise self._missing()

    def _write_piece(self, piece: Piece, read: _ReadPiece) -> None:
        if self._last is not None and self._last.has(piece.name):
            return  # it was merged while this restore runs, and is written
        piece, segment = read()
        self._last = piece.name
        until_ms = self._plan.until_ms
        earlier = [each for each in segment.moments if until_ms is None or each.time_ms <= until_ms]
        for moment in earlier:
            if moment.time_ms > self._plan.snapshot.time_ms and moment.end <= piece.end:
                self.tables |= moment.tables
        if piece.end <= self._at:
            return
        if piece.name.start > self._at:
            raise self._missing()
        data = memoryview(segment.log)[self._at - piece.name.start : piece.end - piece.name.start]
        self._new.write_log(self._at, data)
        self._on_progress(len(data))
        start, self._at = self._at, self._at + len(data)
        if until_ms is not None and piece.name.last_ms > until_ms:
            certain = max([start, *(each.end for each in earlier)])
            self._cut = self._new.first_record_after(until_ms, certain)
            if self._cut is None and self._last.is_complete:
                self._cut = self._at
            if self._cut is not None:
                self._after_cut = bytes(data[max(self._cut - start, 0) :])
                self._new.cut(self._cut)
                self._add_later_topics(segment.moments)

    def _missing(self) -> CopyError:
        return self._catalogue.missing(self._at, "restore to an earlier moment")

    def _add_later_topics(self, moments: Sequence[Moment]) -> None:
        """Add topics whose first message is in the log, and whose table was copied a moment later."""
        later = next((each.tables.get(_TOPICS_TABLE) for each in moments if _TOPICS_TABLE in each.tables), None)
        earlier = self.tables.get(_TOPICS_TABLE)
        if later is None or earlier is None:
            return
        table, newer = load_json(earlier.decode()), load_json(later.decode())
        table["topicConfigTable"] = newer.get("topicConfigTable", {}) | table.get("topicConfigTable", {})
        self.tables[_TOPICS_TABLE] = json.dumps(table).encode()

    def count_later(self) -> None:
        """Count what became of the pending messages after the moment, as far as the copy shows it."""
        if self._cut is None:
            return
        records = _LaterRecords(self._plan.epoch.file_size, self._cut)
        replaced: set[int] = set()
        for batch in self._later_batches(records):
            for row in np.flatnonzero(batch.prepared_transaction_offset).tolist():
                self._count(batch.record(row), replaced)

    def _later_batches(self, records: _LaterRecords) -> Iterator[RecordBatch]:
        yield from records.feed(self._after_cut)
        for piece, read in self.pieces:
            if piece.end > self._at and piece.name.start <= self._at:
                merged, segment = read()
                yield from records.feed(segment.log[self._at - merged.name.start : merged.end - merged.name.start])
                self._at = merged.end

    def _count(self, record: StoredRecord, replaced: set[int]) -> None:
        """Count a record that replaces one from before the moment, directly or over timers that were stored again."""
        assert self._cut is not None, "there is a moment"
        source = released_source(record)
        if source is None or not (source < self._cut or source in replaced):
            return
        if is_marker(record):
            self.later.cancelled += record.body == b"0"
        elif record.topic == TIMER_TOPIC:
            replaced.add(record.physical_offset)
        else:
            self.later.released += 1


_ReadPiece = Callable[[], tuple[Piece, Segment]]


def _read_ahead(
    pieces: Iterable[Piece], read: Callable[[Piece], tuple[Piece, Segment]]
) -> Generator[tuple[Piece, _ReadPiece]]:
    """Yield pieces, each with the function that returns what was read of it.

    Other threads read, decompress and verify the next ones meanwhile: those of about `_AHEAD_BYTES` of the log.
    """
    waiting: deque[tuple[Piece, Future[tuple[Piece, Segment]]]] = deque()
    ahead = 0
    pool = ThreadPoolExecutor(_READERS, "mqtemplate-restore")
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(read, piece)))
            ahead += piece.end - piece.name.start
            while ahead > _AHEAD_BYTES or len(waiting) > _MOST_AHEAD:
                first, future = waiting.popleft()
                yield first, future.result
                ahead -= first.end - first.name.start
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result
    finally:
        pool.shutdown(cancel_futures=True)


class _LaterRecords:
    """Reads the records of a log that arrives in parts.

    Args:
        start: Physical offset of the first record.
    """

    def __init__(self, file_size: int, start: int) -> None:
        self._file_size = file_size
        self._fed = self._at = start
        self._files = MappedFileQueue(file_size)

    def feed(self, data: bytes) -> Iterator[RecordBatch]:
        """Take the following bytes, and yield the records that are whole now."""
        view = memoryview(data)
        while view:
            start = self._fed - self._fed % self._file_size
            if self._files.find(self._fed) is None:
                self._files = MappedFileQueue(self._file_size)
                self._files.append_file(start)
                self._at = max(self._at, start)
            part = view[: start + self._file_size - self._fed]
            self._files.files[0].view[self._fed - start : self._fed - start + len(part)] = part
            self._fed += len(part)
            view = view[len(part) :]
            scan = LogScan(LogReader(self._files))
            try:
                yield from scan.batches(self._at)
            except BadRecordError:  # the rest of the record arrives with the next part; damage ends with the file
                self._at = scan.end
            else:
                self._at = scan.end
