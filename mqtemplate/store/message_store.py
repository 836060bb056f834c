"""The engine: appends records, keeps the queues that point at them, and says when a message is safe to see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np
import structlog
from numpy.typing import NDArray

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError, StoreFullError
from mqtemplate.java_hash import tags_code
from mqtemplate.metrics import Metrics
from mqtemplate.record.codec import Labelled, RecordDraft, StoredRecord, find_property
from mqtemplate.record.run import RecordRun
from mqtemplate.services import AfterChangeService, Service, ServiceThread
from mqtemplate.store.checkpoint import LogFollower, StoreCheckpoint
from mqtemplate.store.cleaning import CleaningService
from mqtemplate.store.commit_log import CommitLog, LogFile, PutResult
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.foreign_forms import refuse_foreign_forms
from mqtemplate.store.files.sized_files import open_files
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.flush import GroupCommit, WhenFlushed
from mqtemplate.store.flush_service import AllocateService, FlushService
from mqtemplate.store.index.index_service import IndexService
from mqtemplate.store.layout import CQ_UNIT_SIZE
from mqtemplate.store.log_walk import read_record
from mqtemplate.store.queue_rebuild import QueueRebuild
from mqtemplate.store.recovery import Recovery
from mqtemplate.store.settings import FlushDiskType, StoreSettings

_ROOMY_FILES = 16
"""While there is room for so many commit log files, the disk counts as empty, whatever part of it is used."""

_log = structlog.stdlib.get_logger("mqtemplate.store")


def _tags_code_of(record: Labelled) -> int:
    return tags_code(find_property(record.properties_bytes, b"TAGS"))


class MessageStore:
    """Commit log, consume queues and what keeps them safe, in one store_files.

    - A record and its consume queue unit are written under one lock, the record first.
    - ``confirm_offset`` is how far readers may look: what is flushed (``SYNC_FLUSH``), or what is written.
    - Everything but the log is derived from it, and rebuilt from it after a crash.

    Args:
        tags_code_of: The tags code of a record that is read again by the recovery; the delay services
            keep a deliver time there.

    Attributes:
        index: Finds records by their keys.
        cleaning: Deletes old files; whoever keeps messages that wait tells it what it must not lose.
        refusal: Why no new message is taken now; None while they are.
    """

    def __init__(
        self,
        store_files: StoreFiles,
        settings: StoreSettings,
        clock: Clock,
        tags_code_of: Callable[[Labelled], int] = _tags_code_of,
    ) -> None:
        self.store_files = store_files
        self.clock = clock
        self.settings = settings
        self.metrics = Metrics()
        self._appended = self.metrics.counter("store.appended")
        self._append_ns = self.metrics.histogram("store.append_ns")
        self._flush_ns = self.metrics.histogram("store.flush_ns")
        self._tags_code_of = tags_code_of
        self._lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()  # held by whoever flushes the queues, or deletes their files
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._watchers: dict[str, list[Callable[[], None]]] = {}
        self._followers: Sequence[LogFollower] = ()
        self._flushes_first = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._open_files: list[CommitLog | StoreCheckpoint] = []
        self._is_open = False
        self._is_dirty = False
        self._thread: ServiceThread | None = None
        self.group_commit = GroupCommit(self._flush_log)
        self._checkpoint_service = AfterChangeService(
            "store.checkpoint", self.take_checkpoint, clock, settings.checkpoint_interval_ms
        )
        self._flush_service = FlushService(self.group_commit, lambda: self.end_offset, clock, settings)
        self.index = IndexService(store_files, settings, clock)
        self.refusal: str | None = None
        # on a virtual clock a test gives the same result on every machine, however full its disk is
        # and a nearly full disk of a terabyte has room for months
        roomy_bytes = _ROOMY_FILES * settings.mapped_file_size_commit_log
        disk_used = partial(store_files.disk_used_ratio, roomy_bytes)
        self.cleaning = CleaningService(self, None if clock.is_virtual else disk_used)

    # --- life ----------------------------------------------------------------------------------

    def load(self, followers: Sequence[LogFollower] = ()) -> None:
        """Own the store_files, open its files and recover.

        Raises:
            StoreLockedError: Another process has it.
            StoreFormatError: Its files have other sizes than the settings, or its queues are of a kind that cannot
                be read.
        """
        self.store_files.lock()
        try:
            self._open(followers)
        except BaseException:
            self.release()
            raise

    def _open(self, followers: Sequence[LogFollower]) -> None:
        refuse_foreign_forms(self.store_files)
        was_clean = not self.store_files.was_left_open()
        settings = self.settings
        files = open_files(
            self.store_files, "commitlog", settings.mapped_file_size_commit_log, "mapped-file-size-commit-log"
        )
        self._commit_log = CommitLog(files, self.clock, settings.listen_host, maps_single=self._flushes_first)
        self._open_files.append(self._commit_log)
        self._checkpoint = StoreCheckpoint(self.store_files)
        self._open_files.append(self._checkpoint)
        self._followers = followers
        self._is_open = True
        self._load_queues()
        dispatch = QueueRebuild(self._commit_log, self._queues, self._queue, self._tags_code_of)
        Recovery(self._commit_log, dispatch, followers).run(
            self._checkpoint.replay_start,
            was_clean=was_clean,
            may_have_holes=not was_clean and self.store_files.lost_power(),
        )
        if was_clean:
            self.group_commit.flushed = self.end_offset
        else:
            self.group_commit.wait(self.end_offset, 60_000)  # readers see what is safe, and nobody else may flush
        self._correct_min_offsets()
        indexed_to = self._checkpoint.fields.index_msg_timestamp
        self.index.load(self._commit_log, self._written_end, indexed_to, was_clean=was_clean)
        self.store_files.mark_open()
        self._allocate_service = AllocateService(self._commit_log)

    def _load_queues(self) -> None:
        for topic in self.store_files.list_folders("consumequeue"):
            for queue_id in self.store_files.list_folders(f"consumequeue/{topic}"):
                if queue_id.isdecimal():
                    self._open_queue(topic, int(queue_id))

    def start(self) -> None:
        """Start the thread that makes files ahead of the writer. The other services are stepped by the owner."""
        if not self.clock.is_virtual:
            self._thread = ServiceThread("mqtemplate-allocate", [self._allocate_service], self.clock, self.report)
            self._thread.start()

    def services(self) -> list[Service]:
        return [self._flush_service, self._checkpoint_service, self.index]

    def report(self, service: Service, error: Exception) -> None:
        """What a service thread does with an error: tell it, and go on."""
        _log.error("service.failed", service=service.name, exc_info=error)

    def close(self) -> None:
        """Flush everything, write all progress, and give the store_files free."""
        if not self._is_open:
            return
        if self._thread is not None:
            self._thread.stop()
        self._is_open = False
        try:
            self._end_index()
            self.take_checkpoint()
            self.store_files.mark_closed()
        finally:
            self.release()

    def _end_index(self) -> None:
        """A cleanly closed folder is indexed to its end, since RocketMQ would not do the rest."""
        try:
            self.index.catch_up()
            self.index.flush()
        except (OSError, StoreError) as exc:
            _log.warning("store.index_behind", reason=str(exc))  # the next start goes on where it stands

    def release(self) -> None:
        """Let go of store_files and files as they are, without a word of progress; the next `load` recovers."""
        self._close_files()
        self.store_files.unlock()

    def _close_files(self) -> None:
        self._is_open = False
        self.index.close()
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        for file in self._open_files:
            file.close()
        self._open_files.clear()

    # --- writing -------------------------------------------------------------------------------

    @property
    def begin_offset(self) -> int:
        """Physical offset that the log begins at; what lay before it was deleted."""
        return self._commit_log.begin

    @property
    def end_offset(self) -> int:
        """Physical offset of the next record."""
        return self._commit_log.end

    def _written_end(self) -> int:
        """`end_offset` for another thread: never that of a moment in which the log goes on to its next file."""
        with self._lock:
            return self._commit_log.end

    @property
    def confirm_offset(self) -> int:
        """Records that end here or before may be read."""
        return self.group_commit.flushed if self._flushes_first else self._commit_log.end

    def put(self, draft: RecordDraft) -> PutResult:
        """Append one record and its queue unit. It is not promised to be safe before `settle` returned.

        Raises:
            MessageError: It is too large, or its properties are.
            StoreFullError: There is no room for another file, or the disk is above the warning level; nothing was
                written.
        """
        if self.refusal is not None:
            raise StoreFullError(self.refusal)
        key = (draft.topic, draft.queue_id)
        with self._lock:
            started = perf_counter_ns()
            queue = self._queues.get(key) or self._open_queue(*key)
            queue.reserve(1)
            result = self._commit_log.append(draft, queue.max_offset)
            delay_ms = draft.delay_ms
            tags_code = draft.tags_code if delay_ms < 0 else result.store_timestamp + delay_ms
            queue.append(result.physical_offset, result.size, tags_code)
            self._append_ns.observe(perf_counter_ns() - started)
            self._appended.value += 1
        if not self._is_dirty:
            self._mark_dirty()
        return result

    def put_all(self, drafts: Sequence[RecordDraft], *, though_full: bool = False) -> list[PutResult]:
        """`put` for several, one behind the other: all of them or none. Together they must fit into one file.

        Args:
            though_full: Above the warning level, too: for what makes room.
        """
        if self.refusal is not None and not though_full:
            raise StoreFullError(self.refusal)
        with self._lock:
            started = perf_counter_ns()
            queues = [self._queue(draft.topic, draft.queue_id) for draft in drafts]
            results = self._commit_log.append_all(drafts, _reserve(queues))
            for draft, queue, result in zip(drafts, queues, results, strict=True):
                physical_offset, size, _, timestamp = result
                delay_ms = draft.delay_ms
                queue.append(physical_offset, size, draft.tags_code if delay_ms < 0 else timestamp + delay_ms)
            self._append_ns.observe(perf_counter_ns() - started)
            self._appended.add(len(results))
        if not self._is_dirty:
            self._mark_dirty()
        return results

    def put_runs(self, runs: Sequence[RecordDraft | RecordRun]) -> int:
        """`put_all` for records of which many come as runs; gives the physical offset behind them."""
        if self.refusal is not None:
            raise StoreFullError(self.refusal)
        with self._lock:
            started = perf_counter_ns()
            offsets = self._reserve_runs(runs)
            results = self._commit_log.append_runs(runs, offsets)
            for run, result in zip(runs, results, strict=True):
                self._append_units(run, result)
            self._append_ns.observe(perf_counter_ns() - started)
            self._appended.add(sum(map(len, offsets)))
            end = self._commit_log.end
        if not self._is_dirty:
            self._mark_dirty()
        return end

    def _reserve_runs(self, runs: Sequence[RecordDraft | RecordRun]) -> list[NDArray[np.int64]]:
        """The queue offsets of all records in each of *runs*; there is room for all of them then."""
        ends: dict[ConsumeQueue, int] = {}
        offsets = []
        for run in runs:
            places = np.empty(1 if isinstance(run, RecordDraft) else len(run), np.int64)
            for queue_id, rows in _queues_of(run):
                queue = self._queue(run.topic, queue_id)
                begin = ends.get(queue, queue.max_offset)
                ends[queue] = begin + len(rows)
                places[rows] = np.arange(begin, begin + len(rows))
            offsets.append(places)
        for queue, end in ends.items():
            queue.reserve(end - queue.max_offset)
        return offsets

    def _append_units(self, run: RecordDraft | RecordRun, first: PutResult) -> None:
        physical_offset, size, _, timestamp = first
        if isinstance(run, RecordDraft):
            tags_code = run.tags_code if run.delay_ms < 0 else timestamp + run.delay_ms
            self._queue(run.topic, run.queue_id).append(physical_offset, size, tags_code)
            return
        for queue_id, rows in run.queues():
            sizes = np.full(len(rows), size)
            self._queue(run.topic, queue_id).append_all(physical_offset + size * rows, sizes, run.tags_codes[rows])

    def prepare(self, topic: str, queue_id: int) -> None:
        """Have the file for the queue's next unit now: whoever knows that a message is to come may not be in a hurry.

        Raises:
            StoreFullError: There is no room for it.
        """
        with self._lock:
            self._queue(topic, queue_id).reserve(1)

    def _mark_dirty(self) -> None:
        self._is_dirty = True
        self._checkpoint_service.changed()
        self._flush_service.changed()
        self.index.changed()

    def confirm(self, physical_end: int, topics: Iterable[str], timeout_ms: int = 5_000) -> bool:
        """Keep the promise of the flush mode for everything before *physical_end*, then wake the readers of *topics*.

        Returns:
            False if flushing took longer than *timeout_ms*; the records are there all the same.
        """
        is_safe = False
        try:
            is_safe = not self._flushes_first or self.group_commit.wait(physical_end, timeout_ms)
        finally:
            if not is_safe:
                self._ring_once_safe(physical_end, topics)
        self.notify(topics)
        return is_safe

    def _ring_once_safe(self, physical_end: int, topics: Iterable[str]) -> None:
        """Wake the readers when a later flush succeeds: the records are there, though nobody waits for them now."""

        def finish(error: StoreError | None) -> None:
            if error is None:
                self.notify(topics)
            else:
                self.group_commit.when(physical_end, finish)

        self.group_commit.when(physical_end, finish)

    def confirm_async(self, physical_end: int, topics: Sequence[str], done: WhenFlushed = lambda error: None) -> None:
        """The same without waiting; *done* is called, maybe in another thread, when the promise is kept or broken."""

        def finish(error: StoreError | None) -> None:
            self.notify(topics)
            done(error)

        if not self._flushes_first:
            finish(None)
            return
        self.group_commit.when(physical_end, finish)
        self._flush_soon(physical_end)

    def confirm_in_background(self, physical_end: int, topics: Collection[str]) -> None:
        """The same without waiting, for who appends more at once; the first flush that succeeds wakes the readers."""
        if not self._flushes_first:
            self.notify(topics)
            return
        self._ring_once_safe(physical_end, topics)
        self._flush_soon(physical_end)

    def _flush_soon(self, physical_end: int) -> None:
        if self.clock.is_virtual:
            self.group_commit.wait(physical_end, 0)  # no thread would
        else:
            self._flush_service.request()

    # --- reading -------------------------------------------------------------------------------

    def watch(self, topic: str, callback: Callable[[], None]) -> None:
        """Call *callback* whenever messages of *topic* became readable. It must be quick: it sets a wake_event."""
        with self._lock:
            self._watchers[topic] = [*self._watchers.get(topic, []), callback]

    def unwatch(self, topic: str, callback: Callable[[], None]) -> None:
        with self._lock:
            self._watchers[topic] = [other for other in self._watchers.get(topic, []) if other != callback]

    def notify(self, topics: Iterable[str]) -> None:
        """Wake the readers of *topics*."""
        for topic in topics:
            for callback in self._watchers.get(topic, ()):
                callback()

    def read(self, physical_offset: int, size: int) -> StoredRecord:
        """One record, checked.

        Raises:
            CorruptRecordError: It is damaged; the error names file and offset.
        """
        return self._commit_log.read(physical_offset, size)

    def read_at(self, physical_offset: int) -> StoredRecord | None:
        """The record that begins at *physical_offset*, checked; None where none does, or none any more.

        Raises:
            CorruptRecordError: It is damaged; the error names file and offset.
        """
        return read_record(self._commit_log, physical_offset)

    def read_bytes(self, physical_offset: int, size: int) -> bytes:
        """What the log holds there, unchecked; fewer bytes at a file's end, none where the log has nothing."""
        found = self._commit_log.find(physical_offset)
        if found is None:
            return b""
        file, start = found
        return file.view[physical_offset - start : physical_offset - start + size]

    def consume_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue; made, without a file yet, if missing."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            with self._lock:
                queue = self._queue(topic, queue_id)
        return queue

    def queue_ids(self, topic: str) -> list[int]:
        """Ids of the queues that *topic* has messages in."""
        return sorted(queue_id for name, queue_id in list(self._queues) if name == topic)

    def topic_ends(self) -> dict[str, int]:
        """Topic -> the sum of its queues' ends, which grows by one with each message, at one sweep."""
        ends: dict[str, int] = {}
        for (topic, _), queue in list(self._queues.items()):
            ends[topic] = ends.get(topic, 0) + queue.max_offset
        return ends

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        return self._queues.get((topic, queue_id)) or self._open_queue(topic, queue_id)

    def _open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        size = -(-self.settings.mapped_file_size_consume_queue // CQ_UNIT_SIZE) * CQ_UNIT_SIZE
        folder = f"consumequeue/{topic}/{queue_id}"
        queue = ConsumeQueue(
            open_files(self.store_files, folder, size, "mapped-file-size-consume-queue", lasting=False)
        )
        self._queues[topic, queue_id] = queue
        return queue

    # --- keeping -------------------------------------------------------------------------------

    def _flush_log(self) -> int:
        end = self._commit_log.end
        started = perf_counter_ns()
        self._commit_log.flush(self.group_commit.flushed, end)
        self._flush_ns.observe(perf_counter_ns() - started)
        return end

    def flush(self) -> None:
        """Return when all that was written by now is on the disk.

        Raises:
            StoreError: The disk refused, or took longer than a minute.
        """
        if not self.group_commit.wait(self.end_offset, 60_000):
            raise StoreError("flushing the commit log took longer than a minute; it is tried again")

    def take_checkpoint(self) -> None:
        """Make log, queues and the followers' progress durable, and note how far they agree."""
        with self._checkpoint_lock:
            try:
                self._take_checkpoint()
            except BaseException:
                self._mark_dirty()  # again, then
                raise

    def _take_checkpoint(self) -> None:
        with self._lock:
            self._is_dirty = False
            end = self._commit_log.end
            queues = list(self._queues.values())
        if not self.group_commit.wait(end, 60_000):
            raise StoreError("no checkpoint: flushing the commit log took longer than a minute; it is tried again")
        for queue in queues:
            queue.flush()
        starts = [start for follower in self._followers if (start := follower.persist()) is not None]
        self._checkpoint.fields = self._checkpoint.fields._replace(index_msg_timestamp=self.index.flushed_timestamp)
        self._checkpoint.write(min([end, *starts]), self._commit_log.last_store_timestamp)

    def oldest_file(self) -> LogFile | None:
        """The first file of the log; None if it is the only one."""
        return self._commit_log.oldest_file()

    def checkpoint_after(self, physical_offset: int) -> bool:
        """Take a checkpoint; whether a restart, from then on, reads nothing before *physical_offset*."""
        end = self._written_end()
        self.take_checkpoint()
        return self.group_commit.flushed >= end and self._checkpoint.replay_start >= physical_offset

    def delete_before(self, physical_offset: int) -> None:
        """Delete the log's files before *physical_offset*, never the last one, and what of the queues points at them.

        The log goes first. A process that dies in between leaves units that point before the log's begin, which
        nobody reads, and which the next `load` removes. The other way round there would be records that no queue has.
        """
        with self._lock:
            gone = self._commit_log.take_before(physical_offset)
        try:
            self._commit_log.remove(gone)  # without the lock: giving blocks back takes its time
        finally:  # if the disk refuses, nobody reads the file any more all the same
            self._correct_min_offsets()
            self.index.delete_before(self._commit_log.begin)

    def _correct_min_offsets(self) -> None:
        begin = self._commit_log.begin
        with self._checkpoint_lock:
            for queue in list(self._queues.values()):
                with self._lock:
                    queue.delete_before(begin)


def _queues_of(run: RecordDraft | RecordRun) -> Iterable[tuple[int, NDArray[np.intp]]]:
    """Each queue, and which rows go there."""
    return [(run.queue_id, np.zeros(1, np.intp))] if isinstance(run, RecordDraft) else run.queues()


def _reserve(queues: Sequence[ConsumeQueue]) -> list[int]:
    """The queue offsets of messages that go to *queues* in this order; there is room for all of them then."""
    first = queues[0]
    if all(queue is first for queue in queues):  # a sender's batch
        first.reserve(len(queues))
        return list(range(first.max_offset, first.max_offset + len(queues)))
    ends = {queue: queue.max_offset for queue in queues}
    offsets = []
    for queue in queues:
        offsets.append(ends[queue])
        ends[queue] += 1
    for queue, end in ends.items():
        queue.reserve(end - queue.max_offset)
    return offsets
