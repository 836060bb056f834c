"""The engine: stores messages, maintains the consume queues, and decides when a message is readable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from time import perf_counter_ns
from typing import Any, overload

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError, StoreFencedError, StoreFullError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import tags_code
from mqtemplate.metrics import Metrics
from mqtemplate.processes import OwnerProcess, Unusable, call_after_fork, descriptor_limit
from mqtemplate.record.appends import NewRecords, PutBatch, PutResult, QueueRows
from mqtemplate.record.codec import DraftPair, RecordDraft, StoredRecord
from mqtemplate.record.properties import TAGS, find_property
from mqtemplate.services import AfterChangeService, Service, ServiceThread
from mqtemplate.store.checkpoint import ClockSteps, LogFollower, StoreCheckpoint, file_sizes
from mqtemplate.store.cleaning import CleaningService, KeptMessages
from mqtemplate.store.commit_log import CommitLog, LogFile
from mqtemplate.store.consume_queue import ConsumeQueue, QueueTable, encode_units_of, units_of_rows
from mqtemplate.store.disk_space import DiskWatch
from mqtemplate.store.files.store_files import StoreFiles, refuse_unsupported_formats
from mqtemplate.store.flush import FlushService, GroupCommit, WhenFlushed
from mqtemplate.store.index_file import RecentKeys
from mqtemplate.store.index_service import IndexService
from mqtemplate.store.recovery import QueueRebuild, Recovery, TagsCodeOf
from mqtemplate.store.settings import FlushDiskType, StoreSettings

_FLUSH_TIMEOUT_MS = 60_000

_log = get_logger("mqtemplate.store")


def _tags_code_of(topic: str, properties: bytes, store_timestamp: int) -> int:
    return tags_code(find_property(properties, TAGS))


class MessageStore:
    """Commit log, consume queues and index of one store. RocketMQ: ``DefaultMessageStore``.

    - A record and its consume queue unit are written under one lock, the record first.
    - ``confirm_offset`` is the end of the readable records: those that are flushed (``SYNC_FLUSH``), or written.
    - All files but the log are derived from it, and rebuilt from it after a crash.
    - It works in the process that loads it. In a process that was forked later each use raises `ForkedError`; `close`
      and `release` do nothing there.

    Args:
        tags_code_of: Computes the tags code of a record that the recovery reads. The delay services store a deliver
            time there.

    Attributes:
        sizes: Sizes of the files. `load` takes them from the directory, unless the settings set them.
        index: Finds records by their keys.
        flush_service: Flushes the log. Producers wait for it, so it needs a thread of its own.
        disk: The space of the disk.
        messages_before: Returns the number of messages of each topic in the log before a physical offset.
        cleaning: Deletes old files.
        is_sync: True with ``SYNC_FLUSH``.
        last_run_ms: Store time of the newest record of the process before (epoch ms); None in a new store.
        fence: Returns why nothing may be stored now, such as another process that may own the history; None if it may.
            None if it always may.
    """

    def __init__(
        self, store_files: StoreFiles, settings: StoreSettings, clock: Clock, tags_code_of: TagsCodeOf = _tags_code_of
    ) -> None:
        self.store_files = store_files
        self.clock = clock
        self.settings = settings
        self.sizes = file_sizes(settings)
        self.metrics = Metrics()
        self._appended = self.metrics.counter("store.appended")
        self._append_ns = self.metrics.histogram("store.append_ns")
        self._flush_ns = self.metrics.histogram("store.flush_ns")
        self._tags_code_of = tags_code_of
        self._lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()  # held while the consume queues are flushed, or their files deleted
        max_mapped = max(min(settings.max_mapped_queues, descriptor_limit() // 8), 1)
        self._queue_table = QueueTable(store_files, max_mapped, self._lock)
        self._queues = self._queue_table.queues
        self._watchers: dict[str, list[Callable[[], None]]] = {}
        self._followers: Sequence[LogFollower] = ()
        self.is_sync = self._is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._open_files: list[CommitLog | StoreCheckpoint] = []
        self._is_open = False
        self._owner: OwnerProcess | None = None
        self._is_dirty = False
        self.last_run_ms: int | None = None
        self.fence: Callable[[], str | None] | None = None
        self._thread: ServiceThread | None = None
        self.group_commit = GroupCommit(self._flush_log)
        self._checkpoint_service = AfterChangeService(
            "store.checkpoint", self.take_checkpoint, clock, settings.checkpoint_interval_ms
        )
        self.flush_service = FlushService(self.group_commit, lambda: self.end_offset, clock, settings)
        self.index = IndexService(store_files, settings, clock)
        self.disk = DiskWatch(self)
        self.messages_before: Callable[[int], dict[str, int]] = self._queue_table.counts_before
        self.cleaning = CleaningService(self)
        self.metrics.gauge("store.flush_failed", lambda: int(self.group_commit.error is not None))

    # --- opening and closing -------------------------------------------------------------------

    def load(self, followers: Sequence[LogFollower] = (), pending: KeptMessages | None = None) -> None:
        """Lock the store, open its files and recover.

        Args:
            followers: Components whose state is derived from the log.
            pending: The delayed messages, which the cleaning must keep. Without it no file is deleted.

        Raises:
            StoreLockedError: Another process owns it.
            StoreFormatError: The files have other sizes than the settings, or the queues have an unsupported format.
        """
        start_ns = time.monotonic_ns()
        self.cleaning.load(pending)
        self.store_files.lock()
        self._owner = OwnerProcess("this store")
        call_after_fork(self)
        try:
            self._open(followers)
        except BaseException:
            self.release()
            raise
        took_ns = time.monotonic_ns() - start_ns
        self.metrics.gauge("store.recovery_ns", lambda: took_ns)

    def _open(self, followers: Sequence[LogFollower]) -> None:
        refuse_unsupported_formats(self.store_files)
        was_clean = not self.store_files.was_left_open()
        self._checkpoint = StoreCheckpoint(self.store_files)
        self._open_files.append(self._checkpoint)
        self.last_run_ms = self._checkpoint.fields.physic_msg_timestamp or None
        self.sizes = file_sizes(self.settings, self.store_files, self._checkpoint.sizes)
        setting = self.settings.mapped_file_size_commit_log and "mapped-file-size-commit-log"
        files = self.store_files.mapped_queue("commitlog", self.sizes.commit_log, setting=setting or "")
        self._commit_log = CommitLog(
            files,
            self.clock,
            self.settings.listen_host,
            fills_ahead=self._is_sync,
            is_flushing=lambda: self._is_sync and self.group_commit.has_leader,
            clock_steps=self._checkpoint.clock_steps,
        )
        self._commit_log.last_store_timestamp = self._checkpoint.fields.physic_msg_timestamp
        self._open_files.append(self._commit_log)
        recent_keys = RecentKeys(self._lock, self.index.hurry)
        self._writer = RecordWriter(self._commit_log, self._queue_table, recent_keys)
        self._followers = followers
        self._is_open = True
        setting = self.settings.mapped_file_size_consume_queue and "mapped-file-size-consume-queue"
        self._queue_table.load(self.sizes.consume_queue, setting or "")
        self._checkpoint.sizes = self.sizes
        self.index.open(self._commit_log, recent_keys, was_clean=was_clean)
        rebuild = QueueRebuild(self._commit_log, self._queues, self._queue_table.open, self._tags_code_of)
        Recovery(self._commit_log, rebuild, followers, self.index.add).run(
            self._checkpoint.replay_start,
            was_clean=was_clean,
            lost_power=not was_clean and self.store_files.lost_power(),
            is_growing=self.store_files.is_written_by_others(),
            is_verified=self.store_files.is_log_verified(),
        )
        if was_clean:
            self.group_commit.flushed = self.end_offset
        else:
            # consumers read flushed records only, and possibly no producer will call flush
            self.group_commit.wait(self.end_offset, _FLUSH_TIMEOUT_MS)
        self._delete_units_before_log()
        self.index.load(self.written_end, self._checkpoint.fields.index_msg_timestamp, was_clean=was_clean)
        self.store_files.mark_open()

    def start(self) -> None:
        """Start the thread that creates files ahead of the writer. The owner steps the other services."""
        if not self.clock.is_virtual:
            self._thread = ServiceThread("mqtemplate-allocate", [self._commit_log], self.clock, self.report)
            self._thread.start()

    def services(self) -> list[Service]:
        """Return the services that the owner has to step, beside the `flush_service`."""
        return [self._checkpoint_service, self.index]

    def report(self, service: Service, error: Exception, repeated: int) -> None:
        """Log an error of a service; its thread continues. An error of the files has no stack: the text says it all."""
        cause = {"reason": str(error)} if isinstance(error, StoreError | OSError) else {"exc_info": error}
        _log.error("service.failed", service=service.name, repeated=repeated, **cause)

    def close(self) -> None:
        """Flush everything, write all progress, and unlock the store."""
        if not self._is_open or (self._owner is not None and not self._owner.is_current):
            return
        if self._thread is not None:
            self._thread.stop()
        self._is_open = False
        try:
            self._complete_index()
            self.take_checkpoint()
            self.store_files.mark_closed()
        finally:
            self.release()

    def _complete_index(self) -> None:
        """Index the log to its end: RocketMQ would not index the rest of a cleanly closed store."""
        try:
            self.index.catch_up()
            self.index.flush()
        except (OSError, StoreError) as exc:
            _log.warning("store.index_incomplete", reason=str(exc))  # the next start continues

    def release(self) -> None:
        """Close all files without writing progress, and unlock the store. The next `load` recovers."""
        if self._owner is not None and not self._owner.is_current:
            return
        self._close_files()
        self.store_files.unlock()

    def _close_files(self) -> None:
        self._is_open = False
        self.index.close()
        for queue in self._queues.values():
            queue.files.close()
        self._queues.clear()
        for file in self._open_files:
            file.close()
        self._open_files.clear()

    def after_fork(self) -> None:
        """Refuse all work: this process was forked from the one that owns the store. See `UsedByOneProcess`."""
        if self._owner is not None and self._is_open:
            unusable: Any = Unusable(self._owner)
            self._lock = self._checkpoint_lock = self._commit_log = self.group_commit = unusable
            self._queue_table = unusable

    # --- writing -------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """Physical offset of the first byte of the log that still exists."""
        return self._commit_log.start

    @property
    def end_offset(self) -> int:
        """Physical offset of the next record."""
        return self._commit_log.end

    def written_end(self) -> int:
        """Return `end_offset`, also while the log starts its next file in another thread."""
        with self._lock:
            return self._commit_log.end

    @property
    def last_store_timestamp(self) -> int:
        """Store timestamp of the last record (epoch ms)."""
        return self._commit_log.last_store_timestamp

    @property
    def clock_steps(self) -> ClockSteps:
        """The steps back of the clock between records of the log."""
        return self._commit_log.clock_steps

    @property
    def confirm_offset(self) -> int:
        """Physical offset up to which records are readable."""
        return self.group_commit.flushed if self._is_sync else self._commit_log.end

    @overload
    def put(self, records: RecordDraft, *, though_full: bool = False) -> PutResult: ...
    @overload
    def put(self, records: DraftPair, *, though_full: bool = False) -> tuple[PutResult, PutResult]: ...
    @overload
    def put(self, records: NewRecords, *, though_full: bool = False) -> PutBatch: ...
    def put(
        self, records: RecordDraft | DraftPair | NewRecords, though_full: bool = False
    ) -> PutResult | tuple[PutResult, PutResult] | PutBatch:
        """Append one record, or several adjacent ones: all of them or none. Together they must fit into one file.

        They are as durable as the flush mode requires once `confirm` returns.

        Args:
            though_full: Append above the warning level as well, for copies that allow a file to be deleted.

        Raises:
            MessageError: The records or their properties are too large.
            StoreFullError: There is no space for another file, or the disk is above the warning level. Nothing was
                written.
            StoreFencedError: The store takes nothing now, see *fence*. Nothing was written.
        """
        self._check_fence()
        if self.cleaning.refusal is not None and not though_full:
            raise StoreFullError(self.cleaning.refusal)
        try:
            with self._lock:
                self._check_fence()  # again: after a fence was set, `written_end` is the end of the log
                started = perf_counter_ns()
                puts = self._writer.append(records)
                self._append_ns.observe(perf_counter_ns() - started)
                self._appended.value += 1 if type(puts) is PutResult else len(puts)
        except StoreFencedError:  # the disk has space
            raise
        except StoreFullError as exc:
            self._note_full(exc)
            raise
        if not self._is_dirty:
            self.disk.works()
            self._mark_dirty()
        return puts

    def _check_fence(self) -> None:
        if self.fence is not None and (reason := self.fence()) is not None:
            raise StoreFencedError(reason)

    def start_flush(self, put: PutResult) -> None:
        """Let the disk begin to write a record whose producer calls `confirm` soon, in the same thread.

        With ``SYNC_FLUSH``, and only for the first record since the last flush: one flush writes all others.
        """
        if self._is_sync and self.group_commit.flushed == put.physical_offset and not self.group_commit.has_leader:
            self._commit_log.start_flush(put)

    def prepare(self, topic: str, queue_id: int) -> None:
        """Create the file for the next unit of a queue now, so that the next `put` is fast.

        Raises:
            StoreFullError: There is no space for it.
        """
        try:
            if (topic, queue_id) not in self._queues:
                self._queue_table.create(topic, queue_id)
            with self._lock:
                self._queue_table.open(topic, queue_id).reserve(1)
        except StoreFullError as exc:
            self._note_full(exc)
            raise

    def _note_full(self, error: StoreFullError) -> None:
        self.disk.refuse(str(error))
        self._is_dirty = False  # so that the next record that is stored ends the failure

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Return True if a queue exists; its file is created by `prepare` or by its first message."""
        return (topic, queue_id) in self._queues

    def _mark_dirty(self) -> None:
        self._is_dirty = True
        self._checkpoint_service.changed()
        self.flush_service.changed()
        self.index.changed()

    # --- confirming: durable as the flush mode requires, then readable -------------------------

    def confirm(self, physical_end: int, topics: Collection[str], timeout_ms: int = 5_000) -> bool:
        """Wait until all records before *physical_end* are as durable as the flush mode requires, then `notify`.

        Returns:
            False if the flush took longer than *timeout_ms*. The records are stored nevertheless.

        Raises:
            StoreError: The flush failed.
        """
        is_durable = False
        try:
            is_durable = not self._is_sync or self.group_commit.wait(physical_end, timeout_ms)
        finally:
            if not is_durable:
                self._notify_when_flushed(physical_end, topics)
        self.notify(topics)
        return is_durable

    def _notify_when_flushed(
        self, physical_end: int, topics: Collection[str], done: WhenFlushed = lambda error: None
    ) -> None:
        """Call `notify` once a flush succeeds, and *done* after the next flush, which may fail."""

        def finish(error: StoreError | None) -> None:
            if error is None:
                self.notify(topics)
            else:  # the records are stored, though no producer waits for them any more
                self._notify_when_flushed(physical_end, topics)
            done(error)

        self.group_commit.call_when_flushed(physical_end, finish)

    def confirm_async(self, physical_end: int, topics: Collection[str], done: WhenFlushed = lambda error: None) -> None:
        """Do the same as `confirm` without waiting. The first flush that succeeds calls `notify`.

        Args:
            done: Called with None or with the error of the flush, possibly in another thread.
        """
        if not self._is_sync:
            self.notify(topics)
            done(None)
            return
        self._notify_when_flushed(physical_end, topics, done)
        if self.clock.is_virtual:
            self.group_commit.wait(physical_end, 0)  # there is no flush thread
        else:
            self.flush_service.request()

    def watch(self, topic: str, callback: Callable[[], None]) -> None:
        """Call *callback* each time messages of *topic* become readable. It must be fast: it sets an event."""
        with self._lock:
            self._watchers[topic] = [*self._watchers.get(topic, []), callback]

    def unwatch(self, topic: str, callback: Callable[[], None]) -> None:
        """End a `watch`."""
        with self._lock:
            self._watchers[topic] = [other for other in self._watchers.get(topic, []) if other != callback]

    def notify(self, topics: Iterable[str]) -> None:
        """Call the callbacks of *topics*: they have new messages."""
        for topic in topics:
            for callback in self._watchers.get(topic, ()):
                callback()

    # --- reading -------------------------------------------------------------------------------

    def read(self, physical_offset: int, size: int) -> StoredRecord:
        """Return a record of known size, verified.

        Raises:
            CorruptRecordError: It is damaged; the error names file and offset.
            DeletedRecordError: Its file was deleted.
        """
        return self._commit_log.read(physical_offset, size)

    def read_at(self, physical_offset: int) -> StoredRecord | None:
        """Return the record that starts at this offset, verified; None if no record starts there, or it was deleted.

        Raises:
            CorruptRecordError: It is damaged; the error names file and offset.
        """
        return self._commit_log.read_at(physical_offset)

    def read_bytes(self, physical_offset: int, size: int) -> bytes:
        """Return bytes of the log, unverified; fewer at a file's end, none if the log has no such file."""
        return self._commit_log.files.read(physical_offset, size)

    def consume_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue; create it, without a file yet, if missing."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            with self._lock:
                queue = self._queue_table.open(topic, queue_id)
        return queue

    def queue_ids(self, topic: str) -> list[int]:
        """Return the ids of the consume queues of *topic*."""
        return sorted(queue_id for name, queue_id in list(self._queues) if name == topic)

    def queue_ids_by_topic(self) -> dict[str, list[int]]:
        """Return the ids of the consume queues of each topic."""
        found: dict[str, list[int]] = {}
        for topic, queue_id in list(self._queues):
            found.setdefault(topic, []).append(queue_id)
        return found

    def topic_ends(self) -> dict[str, int]:
        """Return, for each topic, the sum of its queues' ends. It grows by one with each message."""
        ends: dict[str, int] = {}
        for (topic, _), queue in list(self._queues.items()):
            ends[topic] = ends.get(topic, 0) + queue.max_offset
        return ends

    # --- durability and retention --------------------------------------------------------------

    def _flush_log(self) -> int:
        end = self._commit_log.end
        started = perf_counter_ns()
        self._commit_log.files.flush(self.group_commit.flushed, end)
        self._flush_ns.observe(perf_counter_ns() - started)
        return end

    def flush(self) -> None:
        """Return when all records written so far are on the disk.

        Raises:
            StoreError: The disk failed, or took longer than a minute.
        """
        if not self.group_commit.wait(self.end_offset, _FLUSH_TIMEOUT_MS):
            raise StoreError("flushing the commit log took longer than a minute, and is tried again")

    def take_checkpoint(self) -> None:
        """Make log, queues and the followers' progress durable, and write up to which offset they agree."""
        with self._checkpoint_lock:
            try:
                self._take_checkpoint()
            except BaseException:
                self._mark_dirty()  # so that the service tries again
                raise

    def _take_checkpoint(self) -> None:
        with self._lock:
            self._is_dirty = False
            end = self._commit_log.end
            queues = list(self._queues.values())
        if not self.group_commit.wait(end, _FLUSH_TIMEOUT_MS):
            raise StoreError("no checkpoint: flushing the commit log took longer than a minute, and is tried again")
        for queue in queues:
            queue.flush()
        starts = [start for follower in self._followers if (start := follower.persist()) is not None]
        self._checkpoint.write(min([end, *starts]), self._commit_log.last_store_timestamp, self.index.flushed_timestamp)

    def allocated_bytes(self) -> int:
        """Return the disk space of the log and the consume queues."""
        log = sum(file.allocated for file in self._commit_log.files.files) if self._is_open else 0
        return log + self._queue_table.allocated_bytes()

    def oldest_file(self) -> LogFile | None:
        """Return the first file of the log; None if it is the only one."""
        return self._commit_log.oldest_file()

    def expired_files(self) -> list[LogFile]:
        """Return the files that are older than ``file-reserved-time``, oldest first."""
        newest_ms = self.clock.now_ms() - self.settings.file_reserved_time * 3_600_000
        files = self._commit_log.complete_files()
        return list(takewhile(lambda file: file.newest_ms is not None and file.newest_ms <= newest_ms, files))

    def checkpoint_after(self, physical_offset: int) -> bool:
        """Take a checkpoint. Return True if a restart from now on reads no record before *physical_offset*."""
        end = self.written_end()
        self.take_checkpoint()
        return self.group_commit.flushed >= end and self._checkpoint.replay_start >= physical_offset

    def delete_before(self, physical_offset: int) -> None:
        """Delete the files of the log before this offset, but never the last one, and the units that point there.

        The log's files go first. A process that is killed in between leaves units that point before the log's start.
        They are never read, and the next `load` removes them. In the other order there would be records without a unit.
        """
        with self._lock:
            files = self._commit_log.detach_before(physical_offset)
        try:
            self._commit_log.files.remove(files)  # without the lock: the file system needs time to free the blocks
        finally:  # if the disk refuses, the files are not read any more nevertheless
            self._delete_units_before_log()
            self.index.delete_before(self._commit_log.start)

    def _delete_units_before_log(self) -> None:
        start = self._commit_log.start
        with self._checkpoint_lock:
            for queue in list(self._queues.values()):
                with self._lock:
                    queue.delete_before(start)


class RecordWriter:
    """Appends each record first, then its unit. Not thread-safe: the `MessageStore` calls it under its lock."""

    def __init__(self, commit_log: CommitLog, queue_table: QueueTable, recent_keys: RecentKeys) -> None:
        self._commit_log = commit_log
        self._recent_keys = recent_keys
        self._queue_table = queue_table
        self._queues = queue_table.queues

    @overload
    def append(self, records: RecordDraft) -> PutResult: ...
    @overload
    def append(self, records: DraftPair) -> tuple[PutResult, PutResult]: ...
    @overload
    def append(self, records: NewRecords) -> PutBatch: ...
    def append(
        self, records: RecordDraft | DraftPair | NewRecords
    ) -> PutResult | tuple[PutResult, PutResult] | PutBatch:
        """Append all records or, if that fails, none. Errors as `CommitLog.append`."""
        if not isinstance(records, RecordDraft):
            return self._append_pair(records) if isinstance(records, DraftPair) else self._append_many(records)
        # The same for one record: most sends store one, and it takes half the time.
        key = (records.topic, records.queue_id)
        queue = self._queues.get(key) or self._queue_table.open(*key)
        queue.reserve(1)
        put = self._commit_log.append(records, queue.max_offset)
        offset, size, _, timestamp = put
        queue.append(offset, size, records.tags_code_at(timestamp))
        self._recent_keys.add_one(records, put)
        return put

    def _append_pair(self, records: DraftPair) -> tuple[PutResult, PutResult]:
        key = (records.first.topic, records.first.queue_id)
        queue = self._queues.get(key) or self._queue_table.open(*key)
        queue.reserve(2)
        puts = self._commit_log.append(records, queue.max_offset)
        for draft, put in zip(records, puts, strict=True):
            offset, size, _, timestamp = put
            queue.append(offset, size, draft.tags_code_at(timestamp))
            self._recent_keys.add_one(draft, put)
        return puts

    def _append_many(self, records: NewRecords) -> PutBatch:
        parts = records.queues()
        queues = [self._queue_table.open(topic, queue_id) for topic, queue_id, _ in parts]
        puts = self._commit_log.append(records, _reserve(queues, parts))
        units = encode_units_of(records, puts)
        for queue, (_, _, rows) in zip(queues, parts, strict=True):
            queue.append_units(units_of_rows(units, rows))
        self._recent_keys.add(records, puts)
        return puts


def _reserve(queues: Sequence[ConsumeQueue], parts: Sequence[QueueRows]) -> list[int]:
    """Reserve space for the units, and return the queue offset of the first record of each part."""
    starts, ends = list[int](), dict[ConsumeQueue, int]()
    for queue, part in zip(queues, parts, strict=True):
        start = ends.get(queue, queue.max_offset)
        starts.append(start)
        ends[queue] = start + len(part.rows)
    for queue, end in ends.items():
        queue.reserve(end - queue.max_offset)
    return starts
