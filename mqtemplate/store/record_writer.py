"""Records and their consume queue units, appended together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.appends import NewRecords, PutBatch, PutResult, QueueRows
from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.index.recent_keys import RecentKeys
from mqtemplate.store.layout import CQ_UNIT_DTYPE, CQ_UNIT_SIZE, pack_cq_unit
from mqtemplate.store.queues.consume_queue import ConsumeQueue, encode_units
from mqtemplate.store.queues.queue_table import QueueTable


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
