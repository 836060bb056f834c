"""Recovery at the start: find the end of the commit log, and bring all derived state up to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from logging import ERROR

import numpy as np
from numpy.typing import NDArray

from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record
from mqtemplate.record.columns import RecordBatch
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import DELAY, TIMER_OUT_MS, may_have_property
from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.log_reader import LogScan
from mqtemplate.store.recovery import (
    DamagedRange,
    QueueGapError,
    QueuePosition,
    QueueRebuild,
    position_fields,
    report_damage,
)

_log = get_logger("mqtemplate.store")

_SECTOR = 512
"""The smallest unit that a disk writes completely or not at all."""


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

    Args:
        rebuild: Adds the missing units to the consume queues.
        followers: Replay the records from the checkpoint on that replace a delayed one; see `LogFollower`.
    """

    def __init__(self, log: CommitLog, rebuild: QueueRebuild, followers: Sequence[LogFollower]) -> None:
        self._log = log
        self._scan = LogScan(log)
        self._rebuild = rebuild
        self._limited_log = LimitedLog(_log, lambda: int(time.monotonic() * 1_000))
        self._followers = followers
        self._checkpoint = 0
        self._was_clean = self._lost_power = self._was_cut = False
        self._last_ms = 0  # store timestamp, of the last record that was read
        self._reported: set[int] = set()

    def run(self, checkpoint_offset: int, *, was_clean: bool, lost_power: bool = False) -> None:
        """Recover.

        Args:
            checkpoint_offset: All records before it are on the disk, in the consume queues and in the followers' files.
            was_clean: The last owner closed the store, so only zeros follow the end of the log.
            lost_power: The machine lost its power: any sector of the unflushed bytes may be missing.
        """
        self._checkpoint = checkpoint_offset
        self._was_clean, self._lost_power = was_clean, lost_power
        queues = list(self._rebuild.queues.values())
        # Without any queue the folder consumequeue was deleted or lost, and the checkpoint does not help.
        starts = [checkpoint_offset, *self._ends_of_cut_queues()] if queues else [0]
        if not was_clean:
            for queue in queues:
                if lost_power:
                    queue.truncate_at_hole(checkpoint_offset)
                queue.mark_unflushed(checkpoint_offset)
        follower_starts = [start for follower in self._followers if (start := follower.replay_from()) is not None]
        replay_from = max(min([*starts, *follower_starts]), self._log.start)
        is_cut = self._read(replay_from)
        if self._followers and self._rebuild.rebuilt_from < replay_from:
            # The followers had marked units as done. Rebuilt units lack these marks, so replay the records as well.
            replay_from = self._rebuild.rebuilt_from
            is_cut = self._read(replay_from)
        end = self._scan.end
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

    def _read_once(self, replay_from: int, start: int) -> bool:
        self._rebuild.start(start)
        self._last_ms = 0
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
            start = following

    def _process(self, batch: RecordBatch, replay_from: int) -> None:
        self._note_clock_steps(batch)
        self._log.last_store_timestamp = self._last_ms
        self._rebuild.dispatch(batch)
        if self._followers:
            for row in _replayed_rows(batch).tolist():
                if batch.physical_offset[row] >= replay_from:
                    self._replay(batch.record(row))

    def _replay(self, record: StoredRecord) -> None:
        """Pass a record to the followers. Contents that none of them can read must not prevent each later start."""
        for follower in self._followers:
            try:
                follower.replay(record)
            except (ValueError, TypeError, LookupError, ArithmeticError) as exc:
                self._limited_log.log(
                    ERROR,
                    "store.record_not_replayed",
                    topic=record.topic,
                    physical_offset=record.physical_offset,
                    exc_info=exc,
                )

    def _note_clock_steps(self, batch: RecordBatch) -> None:
        times = np.append(self._last_ms, batch.store_timestamp)
        for row in np.flatnonzero(times[1:] < times[:-1]).tolist():
            step_ms = int(times[row]), int(times[row + 1])
            self._log.clock_steps.note(int(batch.physical_offset[row]), *step_ms)
        self._last_ms = int(times[-1])

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
        found = self._log.find(offset)
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
        found = self._log.find(unit.physical_offset)
        if found is None:
            return []
        file, file_start = found
        end = unit.physical_offset + unit.size
        return [end] if unit.size > DONE_SIZE_MARK and end <= file_start + file.size else []

    def _end_by_checkpoint(self, offset: int) -> list[int]:
        """Return the checkpoint: all records before it were flushed. Report them as lost if their file is missing."""
        if self._log.find(self._checkpoint - 1) is not None:
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
        self._rebuild.add_damage(damaged)
        fields: dict[str, object] = {}
        if position is not None:
            fields = {"topic": position.topic, "queue": position.queue_id, "offset": position.queue_offset}
        elif (record := self._parse_unverified(damaged)) is not None:
            fields = position_fields(record)
            self._rebuild.append_damaged(record, damaged)
        if damaged.start not in self._reported:  # the log may be read a second time
            self._reported.add(damaged.start)
            report_damage(self._log, damaged, reason, fields)

    def _parse_unverified(self, damaged: DamagedRange) -> StoredRecord | None:
        """Return the damaged record, if its lengths match the damaged range: then its queue offset is plausible."""
        try:
            record = parse_record(self._log.read_bytes(damaged.start, damaged.size), verify=False)
        except BadRecordError:
            return None
        return record if (record.physical_offset, record.total_size) == (damaged.start, damaged.size) else None


def is_lost_write(file: MappedFile, at: int, end: int) -> bool:
    """Return True if the record at byte *at* is invalid because a part of it never reached the disk.

    A disk writes whole sectors. A sector that was not written has its old bytes: those of earlier records, then zeros
    up to its end. So at least one sector has only zeros from *at* or its start up to its end.

    Args:
        end: Start of the next whole record, or end of the file.
    """
    first_end = at - at % _SECTOR + _SECTOR
    head = file.view[at : min(first_end, end)]
    # The first bytes of the size are zero in most valid records, so four zeros or fewer prove nothing.
    if not any(head) and (len(head) > 4 or _is_valid_with_size(file.view[at:end], len(head))):
        return True
    return any(
        not any(file.view[sector : sector + _SECTOR])
        for sector in range(first_end, min(end, file.size) - _SECTOR + 1, _SECTOR)
    )


def _is_valid_with_size(data: bytes, lost: int) -> bool:
    """Return True if the record is valid once the first *lost* bytes of its size are restored."""
    try:
        parse_record(len(data).to_bytes(4, "big")[:lost] + data[lost:])
    except BadRecordError:
        return False
    return True


def _replayed_rows(batch: RecordBatch) -> NDArray[np.int64]:
    """Return the rows that replace a delayed record, or may do so because RocketMQ wrote them; and sequenced ones.

    A copy made by mqtemplate has a ``prepared_transaction_offset``. RocketMQ's copies have no such link.
    """
    replaces = (batch.prepared_transaction_offset != 0) | (batch.sys_flag & SysFlag.SEQUENCED != 0)
    for row in np.flatnonzero(~batch.has_check & ~replaces).tolist():
        properties = batch.properties(row)
        replaces[row] = may_have_property(properties, DELAY) or may_have_property(properties, TIMER_OUT_MS)
    return np.flatnonzero(replaces)
