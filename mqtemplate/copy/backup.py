"""Backup of a store directory in use, and the writer of new store directories, which a restore uses too."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.copy.catalogue import is_copied_table
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import StoreError
from mqtemplate.pending import PendingQuery
from mqtemplate.processes import OPEN_FLAGS, absolute_path
from mqtemplate.record.codec import BadRecordError
from mqtemplate.store.checkpoint import StoreCheckpoint, file_sizes
from mqtemplate.store.commit_log import LogReader, LogScan
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.disk import Disk, disk_errors
from mqtemplate.store.files.disk_files import DiskFileQueue
from mqtemplate.store.files.folder_store_files import FolderStoreFiles, SnapshotStoreFiles
from mqtemplate.store.files.layout import file_name
from mqtemplate.store.files.mapped_files import MappedFileQueue

_PIECE = 4 << 20
_PARTIAL_LOG = "commitlog.partial"

Progress = Callable[[int], None]
"""Function that is called with the number of bytes of the log that were handled since the last call."""


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """Contents of a new store directory.

    Attributes:
        start_offset: Physical offset of the first byte of its commit log.
        end_offset: Physical offset after the last record.
        message_count: Messages in the topics of applications.
        pending_count: Messages that wait for their deliver time.
        overdue_count: Those of them that are due by now. The next start releases them.
        actions: What was rebuilt, one sentence each.
    """

    start_offset: int
    end_offset: int
    message_count: int
    pending_count: int
    overdue_count: int
    actions: tuple[str, ...]


class NewStore:
    """A store directory that is written from the bytes of a commit log and from tables.

    Its commit log has its name only when all bytes are on the disk. Before that no broker takes the directory for a
    store, so a process that is killed leaves nothing that could be mistaken for one.

    Args:
        path: The directory: missing or empty.
        file_size: Size of the files of the commit log.

    Raises:
        StoreError: The directory is not empty.
    """

    def __init__(self, path: Path, file_size: int) -> None:
        self.path = absolute_path(path)
        self._file_size = file_size
        with disk_errors("read", self.path):
            if os.path.lexists(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
                raise StoreError(
                    f"{path} is not empty; give a folder that does not exist yet, or an empty one: nothing is "
                    "overwritten"
                )
        with disk_errors("create", self.path):
            (self.path / _PARTIAL_LOG).mkdir(mode=0o700, parents=True)
            (self.path / "config").mkdir(mode=0o700)
        self._flusher = ThreadPoolExecutor(1, "mqtemplate-restore-flush")
        self._flushes: list[Future[None]] = []

    def write_log(self, physical_offset: int, data: bytes | memoryview) -> None:
        """Write the next bytes of the commit log. The disk writes each complete file meanwhile."""
        folder, end = self.path / _PARTIAL_LOG, physical_offset + len(data)
        write_log(folder, self._file_size, physical_offset, data)
        for start in range(physical_offset - physical_offset % self._file_size, end, self._file_size):
            if start + self._file_size <= end:
                self._flushes.append(self._flusher.submit(sync_file, folder / file_name(start)))

    def first_record_after(self, time_ms: int, certain: int) -> int | None:
        """Return the physical offset of the first record after *certain* that was stored after a time; None without.

        Args:
            certain: All records before this physical offset were stored until then.
        """
        files = DiskFileQueue(self.path / _PARTIAL_LOG, self._file_size, Disk())
        try:
            scan = LogScan(LogReader(files))
            with contextlib.suppress(BadRecordError):  # the log ends within a record, or is damaged there
                for batch in scan.batches(max(certain - certain % self._file_size, files.start)):
                    later = batch.physical_offset[
                        (batch.store_timestamp > time_ms) & (batch.physical_offset >= certain)
                    ]
                    if len(later):
                        return int(later[0])
            return None
        finally:
            files.close()

    def _complete_flushes(self) -> None:
        """Return when the disk has written the files that were given to it, or raise what it reported."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            flush.result()

    def cut(self, end: int) -> None:
        """Remove the bytes of the log from *end* on."""
        with disk_errors("write to", self.path):
            self._complete_flushes()
        for path in sorted((self.path / _PARTIAL_LOG).iterdir()):
            start = int(path.name)
            with disk_errors("write to", path):
                if start >= end:
                    path.unlink()
                elif end < start + self._file_size:
                    os.truncate(path, end - start)
                    os.truncate(path, self._file_size)

    def finish(self, settings: EmbeddedSettings, clock: Clock | None = None) -> StoreSummary:
        """Make the directory a store: rebuild consume queues, index and timers. Nothing is released or deleted."""
        with disk_errors("write to", self.path):
            self._complete_flushes()
            self._flusher.shutdown()
            for path in sorted((self.path / _PARTIAL_LOG).iterdir()):
                sync_file(path)
            (self.path / _PARTIAL_LOG).rename(self.path / "commitlog")
            for folder in (self.path / "commitlog", self.path / "config", self.path, self.path.parent):
                Disk().sync_folder(folder)
        settings = dataclasses.replace(settings, topics=(), mapped_file_size_commit_log=None)
        now_ms = (clock or SystemClock()).now_ms()
        files = _NewStoreFiles(self.path)
        with EmbeddedBroker(self.path, settings, VirtualClock(now_ms), store_files=files) as broker:
            return summary_of(broker, create_missing_topics(broker))


class _NewStoreFiles(FolderStoreFiles):
    """Files of a store directory whose log was written just now, from bytes with a checksum or from whole records."""

    def is_log_verified(self) -> bool:
        return True


def write_log(folder: Path, file_size: int, physical_offset: int, data: bytes | memoryview) -> None:
    """Write bytes of a commit log to its files, which are created if missing.

    Raises:
        StoreError: The disk failed.
    """
    view = memoryview(data)
    while view:
        start = physical_offset - physical_offset % file_size
        part = view[: start + file_size - physical_offset]
        path = folder / file_name(start)
        with disk_errors("write to", path, len(part)):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
            try:
                if os.fstat(fd).st_size != file_size:
                    os.ftruncate(fd, file_size)
                written = 0
                while written < len(part):
                    written += os.pwrite(fd, part[written:], physical_offset - start + written)
            finally:
                os.close(fd)
        physical_offset += len(part)
        view = view[len(part) :]


def write_table(path: Path, data: bytes) -> None:
    """Write a small file, durably.

    Raises:
        StoreError: The disk failed.
    """
    with disk_errors("write to", path, len(data)):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(0o600)
        path.write_bytes(data)
        sync_file(path)


def summary_of(broker: EmbeddedBroker, actions: Sequence[str] = ()) -> StoreSummary:
    """Return the contents of a started broker."""
    pending = broker.delayed.count_pending
    return StoreSummary(
        broker.store.start_offset,
        broker.store.end_offset,
        sum(queue.max_offset - queue.min_offset for queue in _queues(broker, broker.topic_names())),
        pending(PendingQuery()).total,
        pending(PendingQuery(before_ms=broker.clock.now_ms())).total,
        tuple(actions),
    )


def create_missing_topics(broker: EmbeddedBroker) -> list[str]:
    """Create the topics of a started broker that have messages and are not in its table, with as many queues.

    Returns:
        A sentence for each.
    """
    actions = []
    for topic in broker.store.store_files.list_folders("consumequeue"):
        queue_ids = broker.store.store_files.list_folders(f"consumequeue/{topic}")
        count = max((int(each) + 1 for each in queue_ids if each.isdecimal()), default=0)
        if broker.topics.queue_count(topic) < count:
            broker.topics.create(topic, count)
            actions.append(f"created topic {topic} with {count} queues, which was not in the table of topics")
    return actions


def _queues(broker: EmbeddedBroker, topics: Iterable[str]) -> Iterator[ConsumeQueue]:
    for topic in topics:
        for queue_id in broker.store.queue_ids(topic):
            yield broker.store.consume_queue(topic, queue_id)


def sync_file(path: Path) -> None:
    """Write a file to the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def backup_store(
    path: Path,
    target: Path,
    settings: EmbeddedSettings | None = None,
    on_progress: Progress = lambda count: None,
    clock: Clock | None = None,
) -> StoreSummary:
    """Write a consistent backup of a store directory, which this or another process may have open and write to.

    The backup has each message that was acknowledged before the call, and the state of some moment during the call. It
    is a store directory itself. The tables are read first, so they are never ahead of the commit log; of the log whole,
    verified records are copied; everything else is rebuilt from it.

    Args:
        target: Folder of the backup: missing or empty.

    Raises:
        StoreError: *path* is no store, or *target* is not empty or in *path*.
    """
    settings = settings or EmbeddedSettings()
    files = SnapshotStoreFiles(path)
    if files.root.resolve() in (target.resolve(), *target.resolve().parents):
        raise StoreError(f"{target} is in {path}; give a folder for the backup that is not in the store directory")
    config = files.file_sizes("config")
    tables = {name: files.read_bytes(name) for name in (f"config/{each}" for each in config)}
    checkpoint = StoreCheckpoint(files)
    sizes = file_sizes(settings, files, checkpoint.sizes)
    checkpoint.close()
    log = files.mapped_queue("commitlog", sizes.commit_log)
    try:
        new = NewStore(target, sizes.commit_log)
        for name, data in tables.items():
            if data is not None and is_copied_table(name):
                write_table(new.path / name, data)
        for physical_offset, data in _log_pieces(log):
            new.write_log(physical_offset, data)
            on_progress(len(data))
    finally:
        log.close()
    return new.finish(settings, clock)


def _log_pieces(files: MappedFileQueue) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of the log up to its last whole record.

    Bytes are read after the record that ends them was verified: the owner has written them completely by then.
    """
    at = files.start
    for end in _record_ends(files):
        while at < end:
            data = files.read(at, min(_PIECE, end - at))
            yield at, data
            at += len(data)


def _record_ends(files: MappedFileQueue) -> Iterator[int]:
    """Yield ends of whole records, in order. Damage is copied as it is: `doctor` shows it, and reading goes on."""
    log = LogReader(files)
    scan, at, last_ms = LogScan(log), log.start, 0
    while True:
        try:
            for batch in scan.batches(at):
                last_ms = int(batch.store_timestamp[-1])
                yield scan.end + batch.byte_count
        except BadRecordError:
            pass  # either damage, which valid records follow, or the record that the owner is writing
        following = next(log.records_after(scan.end, last_ms), None)
        if following is None:
            return
        at = following.physical_offset
