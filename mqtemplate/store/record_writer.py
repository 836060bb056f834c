"""The consume queues of a store, and the writer that appends records together with their units."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from mqtemplate.errors import StoreError
from mqtemplate.numbers import parse_number
from mqtemplate.record.appends import NewRecords, PutBatch, PutResult, QueueRows
from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.consume_queue import ConsumeQueue, MappedQueues, encode_units
from mqtemplate.store.files.layout import CQ_UNIT_DTYPE, CQ_UNIT_SIZE, pack_cq_unit
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.key_reader import RecentKeys
from mqtemplate.topics import is_file_name


class QueueTable:
    """The consume queues of a store. The caller holds the lock of the store, except for `create`.

    Args:
        max_mapped: Largest number of queues with mapped files.
        lock: The lock of the store.

    Attributes:
        queues: All queues that exist.
    """

    def __init__(self, store_files: StoreFiles, max_mapped: int, lock: threading.Lock) -> None:
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._store_files = store_files
        self._mapped = MappedQueues(max_mapped)
        self._lock = lock
        self._creation_ended = threading.Condition(lock)
        self._in_creation: set[tuple[str, int]] = set()  # queues whose file is created now
        self._file_size = 0
        self._setting = ""

    def load(self, file_size: int, setting: str) -> None:
        """Open all queues in the folder.

        Args:
            setting: Configuration key of the size, for the error message; empty if the size is that of the files.

        Raises:
            StoreFormatError: The files have another size.
        """
        self._file_size, self._setting = file_size, setting
        for topic in self._store_files.list_folders("consumequeue"):
            for queue_id in self._store_files.list_folders(f"consumequeue/{topic}"):
                if (number := parse_number(queue_id)) is not None and 0 <= number < 1 << 31:
                    self.open(topic, number)

    def open(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue. If it is missing, add it without a file; if its file is created now, wait for that."""
        key = topic, queue_id
        found = self.queues.get(key)
        if found is not None:
            return found
        while key in self._in_creation:
            self._creation_ended.wait()
        if key not in self.queues:
            self.queues[key] = self._new(topic, queue_id)
        return self.queues[key]

    def create(self, topic: str, queue_id: int) -> None:
        """Add a queue with its file, unless it exists. The lock is free while a busy disk takes its time for the file.

        Raises:
            StoreFullError: There is no space for the file.
        """
        key = topic, queue_id
        with self._lock:
            if key in self.queues or key in self._in_creation:
                return
            self._in_creation.add(key)
        created = None
        try:
            queue = self._new(topic, queue_id)
            queue.create_first_file()
            created = queue
        finally:
            with self._lock:
                self._in_creation.remove(key)
                self._creation_ended.notify_all()
                if created is not None:
                    self.queues[key] = created
                    self._mapped.note(created)

    def _new(self, topic: str, queue_id: int) -> ConsumeQueue:
        if not is_file_name(topic):
            raise StoreError(f"topic {topic[:40]!r} has no queues: it cannot be the name of a folder; use another name")
        files = self._store_files.mapped_queue(
            f"consumequeue/{topic}/{queue_id}", self._file_size, setting=self._setting, rebuildable=True
        )
        return ConsumeQueue(files, self._mapped)


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
    def append(self, records: NewRecords) -> PutBatch: ...
    def append(self, records: RecordDraft | NewRecords) -> PutResult | PutBatch:
        """Append all records or, if that fails, none. Errors as `CommitLog.append`."""
        if not isinstance(records, RecordDraft):
            return self._append_many(records)
        # The same for one record: most sends store one, and it takes half the time.
        key = (records.topic, records.queue_id)
        queue = self._queues.get(key) or self._queue_table.open(*key)
        queue.reserve(1)
        put = self._commit_log.append(records, queue.max_offset)
        offset, size, _, timestamp = put
        queue.append(offset, size, records.tags_code_at(timestamp))
        self._recent_keys.add_one(records, put)
        return put

    def _append_many(self, records: NewRecords) -> PutBatch:
        parts = records.queues()
        queues = [self._queue_table.open(topic, queue_id) for topic, queue_id, _ in parts]
        puts = self._commit_log.append(records, _reserve(queues, parts))
        units = _encode_units(records, puts)
        for queue, (_, _, rows) in zip(queues, parts, strict=True):
            queue.append_units(_units_of(units, rows))
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


def _encode_units(records: NewRecords, puts: PutBatch) -> bytes:
    """Return the unit of each record, in the order of the log."""
    codes, offsets = records.tags_codes(puts.store_timestamp), puts.physical_offsets
    if isinstance(codes, list):
        return b"".join(map(pack_cq_unit, offsets, puts.sizes, codes))
    if isinstance(offsets, range):  # records of one size
        return encode_units(np.arange(offsets.start, offsets.stop, offsets.step), offsets.step, codes)
    return encode_units(np.array(offsets), np.array(puts.sizes), codes)


def _units_of(units: bytes, rows: Sequence[int] | NDArray[np.intp]) -> bytes:
    if isinstance(rows, range):
        return units[CQ_UNIT_SIZE * rows.start : CQ_UNIT_SIZE * rows.stop]
    if isinstance(rows, list):
        return b"".join([units[CQ_UNIT_SIZE * row : CQ_UNIT_SIZE * row + CQ_UNIT_SIZE] for row in rows])
    return np.frombuffer(units, CQ_UNIT_DTYPE)[rows].tobytes()
