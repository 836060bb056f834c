"""Consume queues after a start: compared with the log, and brought up to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.batch import RecordBatch
from mqtemplate.record.codec import SMALLEST_RECORD, Labelled, StoredRecord, SysFlag
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.layout import DONE_SIZE_MARK, PRE_BLANK_SIZE_MARK, CqUnit

_log = structlog.stdlib.get_logger("mqtemplate.store")

_LARGEST_SIZE = PRE_BLANK_SIZE_MARK - 1
_NOWHERE = (1 << 63) - 1


class QueueGapError(Exception):
    """A consume queue lacks units of records before those that were read.

    Attributes:
        physical_offset: The log has to be read from here.
    """

    def __init__(self, message: str, physical_offset: int) -> None:
        super().__init__(message)
        self.physical_offset = physical_offset


class DamagedRange(NamedTuple):
    """Bytes of the log in which no good record begins."""

    begin: int
    end: int


class QueuePlace(NamedTuple):
    """A place in a queue, and what it points at."""

    topic: str
    queue_id: int
    queue_offset: int
    unit: CqUnit


class QueueRebuild:
    """Gives consume queues the units of records that are read again.

    - A unit that is there and right stays. One that points elsewhere is written anew.
    - A record takes the queue offset that stands in it. Where the queue ends before that, what is missing must have
      been in damaged bytes: the places get units that point there, so that who reads them is told, and those behind
      keep their offsets.
    - If the queue lacks more than that, `QueueGapError` asks to read the log from where the queue ends. Only that
      queue is made anew: the others find their units there.

    Args:
        queues: All there are now.
        queue_of: Gives a queue, made if missing.

    Attributes:
        made_from: Physical offset of the first record that was given a unit, because it had none or a wrong one.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: Mapping[tuple[str, int], ConsumeQueue],
        queue_of: Callable[[str, int], ConsumeQueue],
        tags_code_of: Callable[[Labelled], int],
    ) -> None:
        self._log = log
        self.queues = queues
        self._queue_of = queue_of
        self._tags_code_of = tags_code_of
        self._damage: list[DamagedRange] = []
        self._read_from = 0
        self.made_from = _NOWHERE

    def begin(self, physical_offset: int) -> None:
        """The log is read from here on now."""
        self._read_from = physical_offset
        self._damage.clear()

    # --- whole records -------------------------------------------------------------------------

    def dispatch(self, batch: RecordBatch) -> None:
        """See to the units of these records.

        Raises:
            QueueGapError: One of the queues ends before the records that are read.
        """
        for (topic, queue_id), rows in _by_queue(batch).items():
            queue = self._queue_of(topic, queue_id)
            if not self._dispatch_run(queue, batch, rows):
                for row in rows.tolist():
                    self._dispatch_one(queue, batch.record(row))

    def _dispatch_run(self, queue: ConsumeQueue, batch: RecordBatch, rows: NDArray[np.int64]) -> bool:
        """The usual case: one run of queue offsets, whose first part is in the queue, and the rest goes behind it."""
        offsets = batch.queue_offset[rows]
        first = int(offsets[0])
        is_run = bool((offsets == np.arange(first, first + len(rows))).all())
        if not is_run or not queue.min_offset <= first <= queue.max_offset:
            return False
        physical_offsets, sizes = batch.physical_offset[rows], batch.size[rows]
        known = min(queue.max_offset - first, len(rows))
        if known and not queue.holds(first, physical_offsets[:known], sizes[:known]):
            return False
        if known < len(rows):
            tags_codes = [self._tags_code_of(label) for label in batch.labels(rows[known:])]
            queue.append_all(physical_offsets[known:], sizes[known:], tags_codes)
            self.made_from = min(self.made_from, int(physical_offsets[known]))
        return True

    def _dispatch_one(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        """The general case."""
        at = record.queue_offset
        if at < queue.max_offset:
            if at >= queue.min_offset:
                self._compare(queue, record)
            return
        if at > queue.max_offset and not self._close_gap(queue, record):
            return
        self._append(queue, record)

    def _append(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        queue.reserve(1)
        queue.append(record.physical_offset, record.total_size, self._tags_code_of(record))
        self.made_from = min(self.made_from, record.physical_offset)

    def _compare(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        """There is a unit at the record's place."""
        at = record.queue_offset
        unit = queue.unit(at)
        if unit.physical_offset == record.physical_offset and unit.size in (record.total_size, DONE_SIZE_MARK):
            return
        if self._is_right(unit, record):
            if unit.physical_offset < record.physical_offset:  # the topic was deleted and made anew
                queue.cut(at)
                self._append(queue, record)
            return
        _log.warning(
            "store.queue_unit_mended",
            topic=record.topic,
            queue=record.queue_id,
            offset=at,
            physical_offset=record.physical_offset,
            found_physical_offset=unit.physical_offset,
            found_size=unit.size,
        )
        queue.rewrite(at, record.physical_offset, record.total_size, self._tags_code_of(record))
        self.made_from = min(self.made_from, record.physical_offset)

    def _is_right(self, unit: CqUnit, record: StoredRecord) -> bool:
        """Whether a unit points at a good record that has the same place in the same queue."""
        try:
            other = self._log.read(unit.physical_offset, unit.size)
        except CorruptRecordError:
            return False
        return _place_of(other) == _place_of(record)

    # --- what is missing -----------------------------------------------------------------------

    def _close_gap(self, queue: ConsumeQueue, record: StoredRecord) -> bool:
        """Bring a queue's end to the place of *record*, which lies behind it; False if the record cannot be there.

        Raises:
            QueueGapError: The missing records may lie before those that are read.
        """
        is_empty = queue.min_offset == queue.max_offset
        last = -1 if is_empty else queue.unit(queue.max_offset - 1).physical_offset
        begin = max(last, self._log.begin)
        if begin < self._read_from:
            raise QueueGapError(
                f"queue {record.queue_id} of {record.topic} ends at {queue.max_offset}, "
                f"the log goes on with {record.queue_offset}",
                begin,
            )
        missing = record.queue_offset - queue.max_offset
        if last < self._log.begin > 0:  # they were deleted with their file
            queue.clear()
            queue.begin_at(record.queue_offset)
            return True
        if missing * SMALLEST_RECORD > record.physical_offset - begin:
            self._log_odd_place(record, queue)
            return False
        units = list(self._units_in_damage(begin, record.physical_offset))
        units = (units + [CqUnit(record.physical_offset, DONE_SIZE_MARK, 0)] * missing)[:missing]
        _log.warning(
            "store.queue_gap_filled",
            topic=record.topic,
            queue=record.queue_id,
            offset=queue.max_offset,
            count=missing,
            physical_offset=units[0].physical_offset,
        )
        for unit in units:
            queue.reserve(1)
            queue.append(*unit)
        return True

    def _units_in_damage(self, begin: int, end: int) -> list[CqUnit]:
        """Units for as many records as the damaged bytes between two places may have held."""
        units: list[CqUnit] = []
        for damaged in self._damage:
            if begin <= damaged.begin < end:
                length = damaged.end - damaged.begin
                units += [CqUnit(damaged.begin, min(length, _LARGEST_SIZE), 0)] * max(1, length // SMALLEST_RECORD)
        return units

    def _log_odd_place(self, record: StoredRecord, queue: ConsumeQueue) -> None:
        _log.error(
            "store.damaged_record",
            file=str(self._log.path_of(record.physical_offset)),
            physical_offset=record.physical_offset,
            size=record.total_size,
            topic=record.topic,
            queue=record.queue_id,
            reason=f"it cannot have queue offset {record.queue_offset}: the queue ends at {queue.max_offset}",
        )

    # --- damaged records -----------------------------------------------------------------------

    def place_of(self, physical_offset: int) -> QueuePlace | None:
        """The unit that points at a record there, if a queue has one."""
        for (topic, queue_id), queue in self.queues.items():
            at = queue.end_before(physical_offset)
            if at < queue.max_offset and (unit := queue.unit(at)).physical_offset == physical_offset:
                return QueuePlace(topic, queue_id, at, unit)
        return None

    def note_damage(self, damaged: DamagedRange) -> None:
        self._damage.append(damaged)

    def append_damaged(self, record: StoredRecord, damaged: DamagedRange) -> None:
        """Give a damaged record its unit, if it comes next in a queue that is there."""
        queue = self.queues.get((record.topic, record.queue_id))
        if queue is not None and queue.max_offset == record.queue_offset:
            queue.reserve(1)
            queue.append(damaged.begin, min(damaged.end - damaged.begin, _LARGEST_SIZE), 0)


def _place_of(record: StoredRecord) -> tuple[str, int, int]:
    return record.topic, record.queue_id, record.queue_offset


def _by_queue(batch: RecordBatch) -> dict[tuple[str, int], NDArray[np.int64]]:
    """The rows of each queue, in order. Prepared and rolled back transactions are in none."""
    kind = batch.sys_flag & SysFlag.TRANSACTION_MASK
    rows = np.flatnonzero((kind != SysFlag.TRANSACTION_PREPARED) & (kind != SysFlag.TRANSACTION_ROLLBACK))
    if not len(rows):
        return {}
    numbers: dict[str, int] = {}
    topic_of = np.array([numbers.setdefault(topic, len(numbers)) for topic in batch.topics], np.int64)[rows]
    key = topic_of << 32 | batch.queue_id[rows] & 0xFFFF_FFFF
    order = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    groups = {}
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = rows[order[begin:end]]
        groups[batch.topics[int(mine[0])], int(batch.queue_id[mine[0]])] = mine
    return groups
