"""Records and their consume queue units, appended together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.run import RecordRun
from mqtemplate.record.sent_batch import SentBatch
from mqtemplate.store.commit_log import CommitLog, PutResult
from mqtemplate.store.index.recent_keys import RecentKeys
from mqtemplate.store.layout import pack_cq_unit
from mqtemplate.store.queues.consume_queue import ConsumeQueue, encode_units
from mqtemplate.store.queues.queue_table import QueueTable


class PutBatch(Sequence[PutResult]):
    """Positions of adjacent records. They are kept as columns, which saves an object for each record.

    Attributes:
        physical_offsets: Of each record, as are queue offsets and sizes.
        end: Physical offset after the last record, for `MessageStore.confirm`.
    """

    __slots__ = ("end", "physical_offsets", "queue_offsets", "sizes", "store_timestamp")

    def __init__(
        self, physical_offsets: Sequence[int], sizes: Sequence[int], queue_offsets: Sequence[int], store_timestamp: int
    ) -> None:
        self.physical_offsets = physical_offsets
        self.sizes = sizes
        self.queue_offsets = queue_offsets
        self.store_timestamp = store_timestamp
        self.end = physical_offsets[-1] + sizes[-1]

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> PutResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PutResult]: ...
    def __getitem__(self, index: int | slice) -> PutResult | Sequence[PutResult]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return PutResult(
            self.physical_offsets[index], self.sizes[index], self.queue_offsets[index], self.store_timestamp
        )


class RecordWriter:
    """Appends each record first, then its unit. Not thread-safe: the `MessageStore` calls it under its lock.

    Each method appends all records or, if that fails, none. Errors as `CommitLog.append`.
    """

    def __init__(self, commit_log: CommitLog, queue_table: QueueTable, recent_keys: RecentKeys) -> None:
        self._commit_log = commit_log
        self._recent_keys = recent_keys
        self._queue_table = queue_table
        self._queues = queue_table.queues

    def append(self, draft: RecordDraft) -> PutResult:
        """Append one record."""
        key = (draft.topic, draft.queue_id)
        queue = self._queues.get(key) or self._queue_table.open(*key)
        queue.reserve(1)
        result = self._commit_log.append(draft, queue.max_offset)
        offset, size, _, timestamp = result
        queue.append(offset, size, _tags_code(draft, timestamp))
        self._recent_keys.add(draft, offset, size, timestamp)
        return result

    def append_drafts(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        """Append records of any queues. Together they must fit into one file."""
        topic, queue_id = drafts[0].topic, drafts[0].queue_id
        for draft in drafts:  # a loop takes half the time of a generator
            if draft.queue_id != queue_id or draft.topic != topic:
                return self._append_to_queues(drafts)
        return self._append_to_one_queue(drafts, self._queue_table.open(topic, queue_id))

    def _append_to_one_queue(self, drafts: Sequence[RecordDraft], queue: ConsumeQueue) -> PutBatch:
        """Append the records of one queue, as batches of producers are, in few steps."""
        start, count = queue.max_offset, len(drafts)
        queue.reserve(count)
        queue_offsets = range(start, start + count)
        offsets, sizes, timestamp = self._commit_log.append_drafts(drafts, queue_offsets)
        codes = [_tags_code(draft, timestamp) for draft in drafts]
        queue.append_units(b"".join(map(pack_cq_unit, offsets, sizes, codes)))
        self._recent_keys.add_drafts(drafts, offsets, sizes, timestamp)
        return PutBatch(offsets, sizes, queue_offsets, timestamp)

    def _append_to_queues(self, drafts: Sequence[RecordDraft]) -> PutBatch:
        ends: dict[ConsumeQueue, int] = {}
        queues = [self._queue_table.open(draft.topic, draft.queue_id) for draft in drafts]
        queue_offsets = [_next_offset(queue, ends) for queue in queues]
        _reserve(ends)
        offsets, sizes, timestamp = self._commit_log.append_drafts(drafts, queue_offsets)
        for draft, queue, offset, size in zip(drafts, queues, offsets, sizes, strict=True):
            queue.append(offset, size, _tags_code(draft, timestamp))
        self._recent_keys.add_drafts(drafts, offsets, sizes, timestamp)
        return PutBatch(offsets, sizes, queue_offsets, timestamp)

    def append_batch(self, batch: SentBatch) -> PutBatch:
        """Append the records of batches. Together they must fit into one file."""
        ends: dict[ConsumeQueue, int] = {}
        queues = [self._queue_table.open(batch.first.topic, queue_id) for queue_id in batch.queue_ids]
        total, count = len(batch), batch.messages_per_batch
        starts = [_next_offset(queue, ends, count) for queue in queues]
        _reserve(ends)
        offset, size, timestamp = self._commit_log.append_batch(batch, starts)
        units = encode_units(offset + size * np.arange(total), size, _tags_code(batch.first, timestamp))
        length = len(units) // len(queues)
        for number, queue in enumerate(queues):
            queue.append_units(units[number * length : (number + 1) * length])
        self._recent_keys.add_similar(batch.first, batch.properties, total, offset, size, timestamp)
        queue_offsets = [queue_offset for start in starts for queue_offset in range(start, start + count)]
        return PutBatch(range(offset, offset + total * size, size), [size] * total, queue_offsets, timestamp)

    def append_runs(self, drafts: Sequence[RecordDraft | RecordRun]) -> list[PutResult]:
        """Append records and runs of similar records. Return the position of each, for a run that of its last record.

        Together they must fit into one file.
        """
        ends: dict[ConsumeQueue, int] = {}
        queue_offsets: list[Any] = [
            _next_offset(self._queue_table.open(draft.topic, draft.queue_id), ends)
            if isinstance(draft, RecordDraft)
            else self._offsets_of_run(draft, ends)
            for draft in drafts
        ]
        _reserve(ends)
        results = self._commit_log.append_runs(drafts, queue_offsets)
        for draft, (physical_offset, size, _, timestamp) in zip(drafts, results, strict=True):
            if isinstance(draft, RecordDraft):
                queue = self._queue_table.open(draft.topic, draft.queue_id)
                queue.append(physical_offset, size, _tags_code(draft, timestamp))
            else:
                self._append_units(draft, physical_offset - size * (len(draft) - 1), size)
        return results

    def _offsets_of_run(self, run: RecordRun, ends: dict[ConsumeQueue, int]) -> NDArray[np.int64]:
        offsets = np.empty(len(run), np.int64)
        for queue_id, rows in run.queues():
            start = _next_offset(self._queue_table.open(run.topic, queue_id), ends, len(rows))
            offsets[rows] = np.arange(start, start + len(rows))
        return offsets

    def _append_units(self, run: RecordRun, physical_offset: int, size: int) -> None:
        for queue_id, rows in run.queues():
            sizes = np.full(len(rows), size)
            self._queue_table.open(run.topic, queue_id).append_all(
                physical_offset + size * rows, sizes, run.tags_codes[rows]
            )


def _next_offset(queue: ConsumeQueue, ends: dict[ConsumeQueue, int], count: int = 1) -> int:
    end = ends.get(queue, queue.max_offset)
    ends[queue] = end + count
    return end


def _reserve(ends: dict[ConsumeQueue, int]) -> None:
    """Reserve space for the units of each queue before its new end."""
    for queue, end in ends.items():
        queue.reserve(end - queue.max_offset)


def _tags_code(draft: RecordDraft, store_timestamp: int) -> int:
    return draft.tags_code if draft.delay_ms < 0 else store_timestamp + draft.delay_ms
