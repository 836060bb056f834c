"""Consume queues after a start: compare them with the commit log, and add what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.errors import CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.columns import RecordBatch
from mqtemplate.record.layout import SMALLEST_RECORD, SysFlag
from mqtemplate.store.layout import DONE_SIZE_MARK, PRE_BLANK_SIZE_MARK, CqUnit
from mqtemplate.store.log_reader import LogReader
from mqtemplate.store.queues.consume_queue import ConsumeQueue
from mqtemplate.user_code import Picklable

_log = get_logger("mqtemplate.store")

_MAX_SIZE = PRE_BLANK_SIZE_MARK - 1
_NOWHERE = (1 << 63) - 1

TagsCodeOf = Callable[[str, bytes, int], int]
"""Computes the tags code of a record from its topic, its encoded properties and its store timestamp."""


class QueueGapError(Picklable):
    """A consume queue lacks units of records before those that were read.

    Attributes:
        physical_offset: The log has to be read from this offset.
    """

    def __init__(self, message: str, physical_offset: int) -> None:
        super().__init__(message)
        self.physical_offset = physical_offset


class DamagedRange(NamedTuple):
    """Bytes of the log in which no valid record starts."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start

    @property
    def unit(self) -> CqUnit:
        """Consume queue unit that points here, so that a reader of that queue offset gets an error."""
        return CqUnit(self.start, min(self.size, _MAX_SIZE), 0)


class QueuePosition(NamedTuple):
    """A queue offset and its unit."""

    topic: str
    queue_id: int
    queue_offset: int
    unit: CqUnit


def position_fields(record: StoredRecord) -> dict[str, object]:
    """Return the position of a record as fields of a log event."""
    return {
        "topic": record.topic,
        "queue": record.queue_id,
        "offset": record.queue_offset,
        "physical_offset": record.physical_offset,
    }


def report_damage(log: LogReader, damaged: DamagedRange, reason: str, position: dict[str, object]) -> None:
    """Log a damaged record with its file and its offsets, as far as these are known."""
    location = {"file": str(log.path_of(damaged.start)), "physical_offset": damaged.start, "size": damaged.size}
    _log.error("store.record_damaged", **position | location, reason=reason)


class QueueRebuild:
    """Adds units to the consume queues while the recovery reads the log.

    - A correct unit stays. One that points to another record is overwritten.
    - A record gets the queue offset from its own header. If the queue ends before that offset, the missing records must
      have been in a damaged range. They get units that point there: their readers get an error, and later messages keep
      their offsets.
    - If the queue lacks even more, `QueueGapError` requests to read the log from the end of that queue. Only that queue
      is rebuilt, the other queues have their units already.

    Args:
        queues: All existing queues.
        queue_of: Returns a queue; creates it if missing.

    Attributes:
        rebuilt_from: Physical offset of the first record that got a unit, because its unit was missing or wrong.
    """

    def __init__(
        self,
        log: LogReader,
        queues: Mapping[tuple[str, int], ConsumeQueue],
        queue_of: Callable[[str, int], ConsumeQueue],
        tags_code_of: TagsCodeOf,
    ) -> None:
        self._log = log
        self.queues = queues
        self._queue_of = queue_of
        self._tags_code_of = tags_code_of
        self._damage: list[DamagedRange] = []
        self._read_from = 0
        self.rebuilt_from = _NOWHERE

    def start(self, physical_offset: int) -> None:
        """Prepare for reading the log from this offset."""
        self._read_from = physical_offset
        self._damage.clear()

    # --- valid records -------------------------------------------------------------------------

    def dispatch(self, batch: RecordBatch) -> None:
        """Compare the units of these records with them, and add the missing ones.

        Raises:
            QueueGapError: A queue ends before the records that were read.
        """
        for (topic, queue_id), rows in _rows_by_queue(batch).items():
            queue = self._queue_of(topic, queue_id)
            if not self._dispatch_sequence(queue, batch, rows):
                for row in rows.tolist():
                    self._dispatch_one(queue, batch.record(row))

    def _dispatch_sequence(self, queue: ConsumeQueue, batch: RecordBatch, rows: NDArray[np.int64]) -> bool:
        """Dispatch the usual case: consecutive queue offsets, the first of them known to the queue. False otherwise."""
        offsets = batch.queue_offset[rows]
        first = int(offsets[0])
        is_consecutive = bool((offsets == np.arange(first, first + len(rows))).all())
        if not is_consecutive or not queue.min_offset <= first <= queue.max_offset:
            return False
        physical_offsets, sizes = batch.physical_offset[rows], batch.size[rows]
        known = min(queue.max_offset - first, len(rows))
        if known and not queue.has_units_of(first, physical_offsets[:known], sizes[:known]):
            return False
        if known < len(rows):
            tags_codes = [self._tags_code_of(*label) for label in batch.labels(rows[known:])]
            queue.append_all(physical_offsets[known:], sizes[known:], tags_codes)
            self.rebuilt_from = min(self.rebuilt_from, int(physical_offsets[known]))
        return True

    def _dispatch_one(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        at = record.queue_offset
        if at < queue.max_offset:
            if at >= queue.min_offset:
                self._compare(queue, record)
        elif at == queue.max_offset or self._close_gap(queue, record):
            self._append(queue, record)

    def _append(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        queue.reserve(1)
        queue.append(record.physical_offset, record.total_size, self._tags_code(record))
        self.rebuilt_from = min(self.rebuilt_from, record.physical_offset)

    def _tags_code(self, record: StoredRecord) -> int:
        return self._tags_code_of(record.topic, record.properties_bytes, record.store_timestamp)

    def _compare(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        """Compare a record with the unit at its queue offset."""
        at = record.queue_offset
        unit = queue.unit(at)
        # a marked unit keeps its physical offset, see `DONE_SIZE_MARK`
        if unit.physical_offset == record.physical_offset and unit.size in (record.total_size, DONE_SIZE_MARK):
            return
        if self._points_at_position_of(unit, record):
            # Two valid records have the same queue offset: the topic was deleted and created again, and counts from 0.
            # The later record belongs to the new topic.
            if unit.physical_offset < record.physical_offset:
                queue.truncate(at)
                self._append(queue, record)
            return
        found = {"found_physical_offset": unit.physical_offset, "found_size": unit.size}
        _log.warning("store.queue_unit_repaired", **position_fields(record), **found)
        queue.overwrite(at, record.physical_offset, record.total_size, self._tags_code(record))
        self.rebuilt_from = min(self.rebuilt_from, record.physical_offset)

    def _points_at_position_of(self, unit: CqUnit, record: StoredRecord) -> bool:
        """Return True if a unit points at a valid record with the queue and the queue offset of *record*."""
        try:
            other = self._log.read(unit.physical_offset, unit.size)
        except CorruptRecordError:
            return False
        return (other.topic, other.queue_id, other.queue_offset) == (record.topic, record.queue_id, record.queue_offset)

    # --- missing units -------------------------------------------------------------------------

    def _close_gap(self, queue: ConsumeQueue, record: StoredRecord) -> bool:
        """Extend a queue to the queue offset of *record*, which is past its end. Return False if that is implausible.

        Raises:
            QueueGapError: The missing records may be before those that were read.
        """
        is_empty = queue.min_offset == queue.max_offset
        last = -1 if is_empty else queue.unit(queue.max_offset - 1).physical_offset
        start = max(last, self._log.start)
        if start < self._read_from:
            raise QueueGapError(
                f"queue {record.queue_id} of {record.topic} ends at {queue.max_offset}, "
                f"the log continues with {record.queue_offset}",
                start,
            )
        missing = record.queue_offset - queue.max_offset
        if last < self._log.start > 0:  # retention deleted the missing records with their file
            queue.clear(record.queue_offset)
            return True
        # The bytes between the last known record and this one cannot hold so many records: the queue offset is wrong.
        if missing * SMALLEST_RECORD > record.physical_offset - start:
            reason = f"it cannot have queue offset {record.queue_offset}: the queue ends at {queue.max_offset}"
            damaged = DamagedRange(record.physical_offset, record.physical_offset + record.total_size)
            report_damage(self._log, damaged, reason, position_fields(record))
            return False
        units = self._units_of_damage(start, record.physical_offset)
        # More records are missing than the damaged ranges account for: mark the rest as done, so readers skip them.
        units = (units + [CqUnit(record.physical_offset, DONE_SIZE_MARK, 0)] * missing)[:missing]
        first = {"offset": queue.max_offset, "physical_offset": units[0].physical_offset}
        _log.warning("store.queue_gap_filled", **position_fields(record) | first, count=missing)
        queue.reserve(missing)
        for unit in units:
            queue.append(*unit)
        return True

    def _units_of_damage(self, start: int, end: int) -> list[CqUnit]:
        """Return units for as many records as the damaged ranges between two offsets can have contained."""
        units: list[CqUnit] = []
        for damaged in self._damage:
            if start <= damaged.start < end:
                units += [damaged.unit] * max(1, damaged.size // SMALLEST_RECORD)
        return units

    # --- damaged records -----------------------------------------------------------------------

    def position_of(self, physical_offset: int) -> QueuePosition | None:
        """Return the queue offset whose unit points at this physical offset, if a queue has one."""
        for (topic, queue_id), queue in self.queues.items():
            at = queue.end_before(physical_offset)
            if at < queue.max_offset and (unit := queue.unit(at)).physical_offset == physical_offset:
                return QueuePosition(topic, queue_id, at, unit)
        return None

    def add_damage(self, damaged: DamagedRange) -> None:
        """Remember a damaged range for the units of the records in it."""
        self._damage.append(damaged)

    def append_damaged(self, record: StoredRecord, damaged: DamagedRange) -> None:
        """Add the unit of a damaged record, if it is the next one of an existing queue."""
        queue = self.queues.get((record.topic, record.queue_id))
        if queue is not None and queue.max_offset == record.queue_offset:
            queue.reserve(1)
            queue.append(*damaged.unit)


def _rows_by_queue(batch: RecordBatch) -> dict[tuple[str, int], NDArray[np.int64]]:
    """Return the rows of each queue, in order. Prepared and rolled back transactions have no unit in any queue."""
    kind = batch.sys_flag & SysFlag.TRANSACTION_MASK
    rows = np.flatnonzero((kind != SysFlag.TRANSACTION_PREPARED) & (kind != SysFlag.TRANSACTION_ROLLBACK))
    if not len(rows):
        return {}
    numbers: dict[str, int] = {}
    topic_of = np.array([numbers.setdefault(topic, len(numbers)) for topic in batch.topics], np.int64)[rows]
    key = topic_of << 32 | batch.queue_id[rows] & 0xFFFF_FFFF  # a queue id is an i4
    order = np.argsort(key, kind="stable")  # keeps the order within each queue
    bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    groups = {}
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        group = rows[order[start:end]]
        groups[batch.topics[int(group[0])], int(batch.queue_id[group[0]])] = group
    return groups
