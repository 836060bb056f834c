"""Recovery at the start: find the end of the commit log, and bring all derived state up to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from logging import ERROR
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.errors import CorruptRecordError, Picklable
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.record.codec import BadRecordError, StoredRecord, UnverifiedError, parse_record
from mqtemplate.record.columns import RecordBatch
from mqtemplate.record.layout import SMALLEST_RECORD, SysFlag
from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.commit_log import CommitLog, LogReader, LogScan
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import DONE_SIZE_MARK, PRE_BLANK_SIZE_MARK, CqUnit
from mqtemplate.store.flush import is_lost_write
from mqtemplate.store.key_reader import tags_codes
from mqtemplate.topics import SCHEDULE_TOPIC

_log = get_logger("mqtemplate.store")

_MAX_SIZE = PRE_BLANK_SIZE_MARK - 1
_NOWHERE = (1 << 63) - 1
_Rows = NDArray[np.int64]
_Index = Callable[[RecordBatch], None]

TagsCodeOf = Callable[[str, bytes, int], int]
"""Computes the tags code of a record from its topic, its encoded properties and its store timestamp.

In the schedule topic it may be anything; in all other topics it is the one of the tags.
"""


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
        damage: The damaged ranges since `start`, for the units of the records in them.
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
        self.damage: list[DamagedRange] = []
        self._read_from = 0
        self.rebuilt_from = _NOWHERE

    def start(self, physical_offset: int) -> None:
        """Prepare for reading the log from this offset."""
        self._read_from = physical_offset
        self.damage.clear()

    # --- valid records -------------------------------------------------------------------------

    def dispatch(self, batch: RecordBatch) -> None:
        """Compare the units of these records with them, and add the missing ones.

        Raises:
            QueueGapError: A queue ends before the records that were read.
            UnverifiedError: They are not the next ones of their queues, and not verified.
        """
        tags = cache(lambda: tags_codes(batch))  # not needed where all units are correct
        for (topic, queue_id), rows in batch.rows_by_queue().items():
            queue = self._queue_of(topic, queue_id)
            self._skip_deleted(queue, int(batch.queue_offset[rows[0]]))
            codes_of = partial(self._due_times, batch) if topic == SCHEDULE_TOPIC else lambda new: tags()[new]
            if self._dispatch_sequence(queue, batch, rows, codes_of):
                continue
            if not batch.is_verified:
                raise UnverifiedError(f"records of queue {queue_id} of {topic} are not in the order of the queue")
            for row in rows.tolist():
                self._dispatch_one(queue, batch.record(row))

    def _due_times(self, batch: RecordBatch, rows: _Rows) -> NDArray[np.int64]:
        return np.array([self._tags_code(batch.record(row)) for row in rows.tolist()], np.int64)

    def _skip_deleted(self, queue: ConsumeQueue, queue_offset: int) -> None:
        """Begin an empty queue with this queue offset if retention deleted its records before, with their file."""
        if queue.min_offset == queue.max_offset < queue_offset and self._read_from <= self._log.start > 0:
            queue.clear(queue_offset)

    def _dispatch_sequence(
        self, queue: ConsumeQueue, batch: RecordBatch, rows: _Rows, codes_of: Callable[[_Rows], NDArray[np.int64]]
    ) -> bool:
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
            queue.append_all(physical_offsets[known:], sizes[known:], codes_of(rows[known:]))
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
        _log.warning("store.queue_unit_repaired", **record.position_fields(), **found)
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
            report_damage(self._log, damaged, reason, record.position_fields())
            return False
        units = self._units_of_damage(start, record.physical_offset)
        # More records are missing than the damaged ranges account for: mark the rest as done, so readers skip them.
        units = (units + [CqUnit(record.physical_offset, DONE_SIZE_MARK, 0)] * missing)[:missing]
        first = {"offset": queue.max_offset, "physical_offset": units[0].physical_offset}
        _log.warning("store.queue_gap_filled", **record.position_fields() | first, count=missing)
        queue.reserve(missing)
        for unit in units:
            queue.append(*unit)
        return True

    def _units_of_damage(self, start: int, end: int) -> list[CqUnit]:
        """Return units for as many records as the damaged ranges between two offsets can have contained."""
        units: list[CqUnit] = []
        for damaged in self.damage:
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

    def append_damaged(self, record: StoredRecord, damaged: DamagedRange) -> None:
        """Add the unit of a damaged record, if it is the next one of an existing queue."""
        queue = self.queues.get((record.topic, record.queue_id))
        if queue is not None and queue.max_offset == record.queue_offset:
            queue.reserve(1)
            queue.append(*damaged.unit)


class LogReplay:
    """Passes records that a recovery reads to the followers: all records of one append, or none.

    All records of an append but the last may have `SysFlag.CONTINUED`. If the last one is missing, the append was not
    acknowledged, and the recovery cuts its records off.

    Attributes:
        open_append: Physical offset of the first record of an append whose last record is not read yet; None for none.
    """

    def __init__(self, followers: Sequence[LogFollower]) -> None:
        self.followers = followers
        self.open_append: int | None = None
        self._held: list[StoredRecord] = []  # records of that append
        self._limited_log = LimitedLog(_log, lambda: int(time.monotonic() * 1_000))

    def starts(self) -> list[int]:
        """Return the physical offsets from which followers need the log."""
        return [start for follower in self.followers if (start := follower.replay_from()) is not None]

    def restart(self) -> None:
        """Forget the records that are held: the log is read again."""
        self.open_append, self._held = None, []

    def add(self, batch: RecordBatch, replay_from: int) -> None:
        """Replay the records of a batch from a physical offset on; hold those of an append that goes on."""
        lasts = np.flatnonzero(batch.sys_flag & SysFlag.CONTINUED == 0)
        closed = int(lasts[-1]) + 1 if len(lasts) else 0
        if closed:
            self.close_append()
        if closed < len(batch) and self.open_append is None:
            self.open_append = int(batch.physical_offset[closed])
        for row in batch.replacing_rows().tolist() if self.followers else ():
            if batch.physical_offset[row] < replay_from:
                continue
            if row < closed:
                self._replay(batch.record(row))
            else:
                self._held.append(batch.record(row))

    def close_append(self) -> None:
        """Replay the records that are held: no other one of their append follows."""
        held = self._held
        self.restart()
        for record in held:
            self._replay(record)

    def _replay(self, record: StoredRecord) -> None:
        """Pass a record to the followers. Contents that none of them can read must not prevent each later start."""
        for follower in self.followers:
            try:
                follower.replay(record)
            except (ValueError, TypeError, LookupError, ArithmeticError) as exc:
                position = record.position_fields()
                self._limited_log.log(ERROR, "store.record_not_replayed", **position, exc_info=exc)


class Recovery:
    """Reads the log from the last checkpoint on. The records of that file before the checkpoint are verified as well.

    Its decision about an offset where no valid record starts:

    ========================================================  ==================================================
    only zeros from there on                                  the end of the log
    no whole record follows, and no queue has a unit for it   a torn tail, never acknowledged: cut off and logged
    the power failed, the offset is past the checkpoint, and  the start of the unflushed bytes: cut off with all
    sectors of the record are missing                         that follows, and logged
    anything else                                             damage: reported with file and offset, and skipped;
                                                              no byte is changed
    ========================================================  ==================================================

    - Bytes that are cut off are set to zero. Otherwise old records could become valid again after later ones.
    - A damaged record keeps its queue offset. Its readers get an error; all other messages are delivered.
    - In a snapshot of a folder in use, the log grows meanwhile. It ends where the owner was, which is no damage.

    Args:
        rebuild: Adds the missing units to the consume queues.
        followers: Replay the records from the checkpoint on that replace a delayed one; see `LogFollower`.
        index: Called with all records that are read.
    """

    def __init__(
        self, log: CommitLog, rebuild: QueueRebuild, followers: Sequence[LogFollower], index: _Index = lambda _: None
    ) -> None:
        self._log = log
        self._index = index
        self._scan = LogScan(log)
        self._rebuild = rebuild
        self._replay = LogReplay(followers)
        self._checkpoint = 0
        self._was_clean = self._lost_power = self._was_cut = self._is_growing = False
        self._last_ms = 0  # store timestamp, of the last record that was read
        self._read_again_at = -1
        self._reported: set[int] = set()

    def run(
        self,
        checkpoint_offset: int,
        *,
        was_clean: bool,
        lost_power: bool = False,
        is_growing: bool = False,
        is_verified: bool = False,
    ) -> None:
        """Recover.

        Args:
            checkpoint_offset: All records before it are on the disk, in the consume queues and in the followers' files.
            was_clean: The last owner closed the store, so only zeros follow the end of the log.
            lost_power: The machine lost its power: any sector of the unflushed bytes may be missing.
            is_growing: The owner of the files may append while they are read.
            is_verified: The log was written from verified bytes, and there are no queues: only where records contradict
                each other their checksums are compared.
        """
        self._scan.verify = not is_verified
        self._checkpoint = checkpoint_offset
        self._was_clean, self._lost_power, self._is_growing = was_clean, lost_power, is_growing
        queues = list(self._rebuild.queues.values())
        # Without any queue the folder consumequeue was deleted or lost, and the checkpoint does not help.
        starts = [checkpoint_offset, *self._ends_of_cut_queues()] if queues else [0]
        if not was_clean:
            for queue in queues:
                if lost_power:
                    queue.truncate_at_hole(checkpoint_offset)
                queue.mark_unflushed(checkpoint_offset)
        replay_from = max(min([*starts, *self._replay.starts()]), self._log.start)
        is_cut = self._read(replay_from)
        if self._replay.followers and self._rebuild.rebuilt_from < replay_from:
            # The followers had marked units as done. Rebuilt units lack these marks, so replay the records as well.
            replay_from = self._rebuild.rebuilt_from
            is_cut = self._read(replay_from)
        end = self._scan.end
        if self._replay.open_append is not None:
            end, is_cut = self._replay.open_append, True
            self._log_cut(end, "the last record of an append is missing")
        if is_cut or not was_clean:
            for queue in list(self._rebuild.queues.values()):
                queue.truncate(queue.end_before(end))
            self._log.truncate(end)
        else:
            self._log.open_at(end)
        for queue in queues:
            queue.mark_rebuilt()
        if not was_clean:
            _log.info("store.recovered", end_offset=end, replayed_from=replay_from)

    def _ends_of_cut_queues(self) -> Iterator[int]:
        """Yield the physical offsets from which damaged queues have to be rebuilt."""
        if self._lost_power:
            return  # all queues are cut: units before the checkpoint are valid, and later ones are rebuilt anyway
        for (topic, queue_id), queue in self._rebuild.queues.items():
            if queue.was_cut:
                is_empty = queue.min_offset == queue.max_offset
                start = 0 if is_empty else queue.unit(queue.max_offset - 1).physical_offset
                _log.warning(
                    "store.queue_rebuilt", topic=topic, queue=queue_id, offset=queue.max_offset, read_from=start
                )
                yield start

    # --- reading -------------------------------------------------------------------------------

    def _read(self, replay_from: int) -> bool:
        """Read the log to its end. Return True if bytes have to be cut off there."""
        start = self._log.file_start_of(replay_from)
        while True:
            try:
                return self._read_once(replay_from, start)
            except QueueGapError as exc:
                _log.warning("store.queue_rebuilt", reason=str(exc), read_from=exc.physical_offset)
                start = self._log.file_start_of(exc.physical_offset)
            except UnverifiedError as exc:
                _log.warning("store.queue_rebuilt", reason=str(exc), read_from=start)
                self._scan.verify = True
                for queue in list(self._rebuild.queues.values()):
                    queue.clear()

    def _read_once(self, replay_from: int, start: int) -> bool:
        self._rebuild.start(start)
        self._last_ms = 0
        self._replay.restart()
        while True:
            reason = ""
            try:
                for batch in self._scan.batches(start):
                    self._process(batch, replay_from)
            except BadRecordError as exc:
                reason = str(exc)
            following = self._judge(self._scan.end, reason)
            if following is None:
                return bool(reason) or self._was_cut
            if following > self._scan.end:
                self._replay.close_append()  # a part of it is damaged; the rest of it is kept
            start = following

    def _process(self, batch: RecordBatch, replay_from: int) -> None:
        self._log.clock_steps.note_all(self._last_ms, batch.physical_offset, batch.store_timestamp)
        self._log.last_store_timestamp = self._last_ms = int(batch.store_timestamp[-1])
        self._rebuild.dispatch(batch)
        self._replay.add(batch, replay_from)
        self._index(batch)

    # --- deciding ------------------------------------------------------------------------------

    def _judge(self, offset: int, reason: str) -> int | None:
        """Return the offset where the log continues after an offset without a valid record; None if it ends there.

        Args:
            offset: The physical offset.
            reason: Why no record starts there; empty if the bytes are zero.
        """
        self._was_cut = False
        # After a power failure the queues may be ahead of the log: a unit proves nothing past the checkpoint.
        position = None if self._lost_power and offset >= self._checkpoint else self._rebuild.position_of(offset)
        if not reason and self._was_clean and position is None and offset >= self._checkpoint:
            return None
        # Older records are leftovers: RocketMQ does not clear the bytes after a tail that it cut off.
        whole = next(self._log.records_after(offset, self._last_ms), None)
        next_whole = None if whole is None else whole.physical_offset
        if self._is_growing and offset != self._read_again_at and self._log.is_whole(offset):
            # Stored since it was read. Else the units and records after it would make it look damaged.
            self._read_again_at = offset
            return offset
        if self._is_unflushed(offset, next_whole) or self._is_unacknowledged_end(offset, reason, next_whole):
            self._log_cut(offset, reason)
            return None
        # The damage ends at the next whole record, or at the end that the unit of a queue has, or at the checkpoint.
        ends = [] if next_whole is None else [next_whole]
        if position is not None:
            ends += self._end_by_queue(position)
        if not ends and offset < self._checkpoint:
            ends += self._end_by_checkpoint(offset)
        if not ends:
            if reason:
                self._log_cut(offset, reason)
            return None
        damaged = DamagedRange(offset, min(ends))
        self._skip(damaged, position, reason or "there are only zeros")
        return damaged.end

    def _is_unflushed(self, offset: int, next_whole: int | None) -> bool:
        """Return True if the power failed before the bytes there reached the disk."""
        if not self._lost_power or offset < self._checkpoint:
            return False
        found = self._log.files.find(offset)
        if next_whole is None or found is None:
            return True
        file, file_start = found
        return is_lost_write(file, offset - file_start, min(next_whole - file_start, file.size))

    def _is_unacknowledged_end(self, offset: int, reason: str, next_whole: int | None) -> bool:
        """Return True if the rest is zero and no acknowledged record can be in it.

        A consume queue may still refer to it: RocketMQ flushes queues and log independently, and after RocketMQ a lost
        power is not known.
        """
        return not reason and next_whole is None and not self._was_clean and offset >= self._checkpoint

    def _end_by_queue(self, position: QueuePosition) -> list[int]:
        """Return the end of a damaged record according to its unit, if that is plausible."""
        unit = position.unit
        found = self._log.files.find(unit.physical_offset)
        if found is None:
            return []
        file, file_start = found
        end = unit.physical_offset + unit.size
        return [end] if unit.size > DONE_SIZE_MARK and end <= file_start + file.size else []

    def _end_by_checkpoint(self, offset: int) -> list[int]:
        """Return the checkpoint: all records before it were flushed. Report them as lost if their file is missing."""
        if self._log.files.find(self._checkpoint - 1) is not None:
            return [self._checkpoint]
        self._was_cut = True
        _log.error(
            "store.records_lost",
            file=str(self._log.path_of(offset)),
            physical_offset=offset,
            end_offset=self._checkpoint,
            reason="the files end before the offset up to which everything was flushed",
        )
        return []

    def _log_cut(self, offset: int, reason: str) -> None:
        """Log what is cut off: a torn record, or the unflushed bytes that a power failure left."""
        self._was_cut = True
        if self._is_growing:
            _log.debug("store.snapshot_end", physical_offset=offset)
            return
        path = self._log.path_of(offset)
        dropped = sum(1 for _ in self._log.records_after(offset, self._last_ms))
        if dropped:
            _log.warning(
                "store.unflushed_tail_cut", file=path.name, physical_offset=offset, whole_records_dropped=dropped
            )
        elif reason:
            _log.warning("store.torn_tail_cut", file=path.name, physical_offset=offset, reason=reason)

    # --- damage --------------------------------------------------------------------------------

    def _skip(self, damaged: DamagedRange, position: QueuePosition | None, reason: str) -> None:
        """Report a damaged range, and keep the queue offset of its record."""
        self._rebuild.damage.append(damaged)
        fields: dict[str, object] = {}
        if position is not None:
            fields = {"topic": position.topic, "queue": position.queue_id, "offset": position.queue_offset}
        elif (record := self._parse_unverified(damaged)) is not None:
            fields = record.position_fields()
            self._rebuild.append_damaged(record, damaged)
        if damaged.start not in self._reported:  # the log may be read a second time
            self._reported.add(damaged.start)
            report_damage(self._log, damaged, reason, fields)

    def _parse_unverified(self, damaged: DamagedRange) -> StoredRecord | None:
        """Return the damaged record, if its lengths match the damaged range: then its queue offset is plausible."""
        try:
            record = parse_record(self._log.files.read(damaged.start, damaged.size), verify=False)
        except BadRecordError:
            return None
        return record if (record.physical_offset, record.total_size) == (damaged.start, damaged.size) else None
