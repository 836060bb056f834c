"""After a start: find the log's end, and bring everything derived from the log up to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import structlog

from mqtemplate.record.batch import RecordBatch
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record
from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.files.holes import is_lost_write
from mqtemplate.store.queue_rebuild import DamagedRange, QueueGapError, QueuePlace, QueueRebuild

_log = structlog.stdlib.get_logger("mqtemplate.store")


class Recovery:
    """Reads the log from the last checkpoint on, and from the begin of that file to be sure of its records.

    What it does about a place where no good record begins:

    ========================================================  ==================================================
    nothing but zeros from there on                           the log ends there
    no whole record behind it, and no queue knows of it       a torn tail, never acknowledged: cut off and logged
    power failed, it lies behind the checkpoint, and its      the begin of what was not flushed: cut off with all
    sectors are missing                                       that lies behind it, and logged
    anything else                                             damage: reported with file and offset, and passed
                                                              over; nothing is touched
    ========================================================  ==================================================

    - What is cut off is made zero: records of a tail that was cut must not come alive behind later ones.
    - A damaged record keeps its place in its queue. Who reads it is told, and its neighbours are served.

    Args:
        dispatch: Sees to the consume queues.
        followers: Are shown the records from the checkpoint on that took a waiting one's place; see `LogFollower`.
    """

    def __init__(self, log: CommitLog, dispatch: QueueRebuild, followers: Sequence[LogFollower]) -> None:
        self._log = log
        self._dispatch = dispatch
        self._followers = followers
        self._checkpoint = 0
        self._was_clean = self._may_have_holes = self._was_cut = False
        self._newest_ms = 0  # store timestamp, of what was read since the last beginning
        self._reported: set[int] = set()

    def run(self, checkpoint_offset: int, *, was_clean: bool, may_have_holes: bool = False) -> None:
        """Recover.

        Args:
            checkpoint_offset: Everything before it is on the disk, in the consume queues, and in the followers' files.
            was_clean: The last owner closed the store; behind the log's end there are zeros, then.
            may_have_holes: The machine lost power: of what was not flushed any sector may be missing.
        """
        self._checkpoint = checkpoint_offset
        self._was_clean, self._may_have_holes = was_clean, may_have_holes
        queues = list(self._dispatch.queues.values())
        starts = [checkpoint_offset, *self._starts_of_cut_queues()] if queues else [0]
        if not was_clean:
            for queue in queues:
                if may_have_holes:
                    queue.cut_at_hole(checkpoint_offset)
                queue.flush_again(checkpoint_offset)
        follower_starts = [start for follower in self._followers if (start := follower.replay_from()) is not None]
        replay_from = max(min([*starts, *follower_starts]), self._log.begin)
        is_cut = self._read(replay_from, self._log.file_start_of(replay_from))
        if self._followers and self._dispatch.made_from < replay_from:
            # units that were made again do not tell what the followers had noted in them
            replay_from = self._dispatch.made_from
            is_cut = self._read(replay_from, self._log.file_start_of(replay_from))
        end = self._log.scan_end
        if is_cut or not was_clean:
            for queue in list(self._dispatch.queues.values()):
                queue.truncate_after(end)
            self._log.truncate(end)
        else:
            self._log.open_at(end)
        for queue in queues:
            queue.mended()
        if not was_clean:
            _log.info("store.recovered", end_offset=end, replayed_from=replay_from)

    def _starts_of_cut_queues(self) -> Iterator[int]:
        """Where the log has to be read from for queues that were found damaged."""
        if self._may_have_holes:
            return  # they end somewhere behind the checkpoint
        for (topic, queue_id), queue in self._dispatch.queues.items():
            if queue.was_cut:
                is_empty = queue.min_offset == queue.max_offset
                start = 0 if is_empty else queue.unit(queue.max_offset - 1).physical_offset
                _log.warning(
                    "store.queue_rebuilt", topic=topic, queue=queue_id, offset=queue.max_offset, read_from=start
                )
                yield start

    # --- reading -------------------------------------------------------------------------------

    def _read(self, replay_from: int, start: int) -> bool:
        """Read the log to its end; True if something was cut off there."""
        while True:
            try:
                return self._read_once(replay_from, start)
            except QueueGapError as exc:
                _log.warning("store.queue_rebuilt", reason=str(exc), read_from=exc.physical_offset)
                start = self._log.file_start_of(exc.physical_offset)

    def _read_once(self, replay_from: int, start: int) -> bool:
        self._dispatch.begin(start)
        self._newest_ms = 0
        while True:
            reason = ""
            try:
                for batch in self._log.scan(start):
                    self._take_in(batch, replay_from)
            except BadRecordError as exc:
                reason = str(exc)
            bad = self._log.scan_end
            behind = self._judge(bad, reason)
            if behind is None:
                return bool(reason) or self._was_cut
            start = behind

    def _take_in(self, batch: RecordBatch, replay_from: int) -> None:
        self._newest_ms = max(self._newest_ms, int(batch.store_timestamp.max()))
        self._log.last_store_timestamp = max(self._log.last_store_timestamp, self._newest_ms)
        self._dispatch.dispatch(batch)
        if self._followers:
            for row in _copies(batch).tolist():
                if batch.physical_offset[row] >= replay_from:
                    record = batch.record(row)
                    for follower in self._followers:
                        follower.replay(record)

    # --- judging -------------------------------------------------------------------------------

    def _judge(self, bad: int, reason: str) -> int | None:
        """Where the log goes on behind a place without a good record; None if it ends there.

        Args:
            reason: Why no record is there; empty if there are zeros.
        """
        self._was_cut = False
        place = None if self._may_have_holes and bad >= self._checkpoint else self._dispatch.place_of(bad)
        if not reason and self._was_clean and place is None and bad >= self._checkpoint:
            return None
        whole = next(self._log.records_after(bad, self._newest_ms), None)
        next_whole = None if whole is None else whole.physical_offset
        if self._is_unflushed(bad, next_whole) or self._is_end(bad, reason, next_whole):
            self._log_cut(bad, reason)
            return None
        ends = [] if next_whole is None else [next_whole]
        if place is not None:
            ends += self._end_by_queue(place)
        if not ends and bad < self._checkpoint:
            ends += self._end_by_checkpoint(bad)
        if not ends:
            if reason:
                self._log_cut(bad, reason)
            return None
        damaged = DamagedRange(bad, min(ends))
        self._pass_over(damaged, place, reason or "there are only zeros")
        return damaged.end

    def _is_unflushed(self, bad: int, next_whole: int | None) -> bool:
        """Whether the power failed before what lies there came to the disk."""
        if not self._may_have_holes or bad < self._checkpoint:
            return False
        found = self._log.find(bad)
        if next_whole is None or found is None:
            return True
        file, file_start = found
        return is_lost_write(file, bad - file_start, min(next_whole - file_start, file.size))

    def _is_end(self, bad: int, reason: str, next_whole: int | None) -> bool:
        """Whether there are only zeros, and nothing was promised: though a queue may know of records there. RocketMQ
        flushes queues and log on their own, and not every machine tells that its power failed."""
        return not reason and next_whole is None and not self._was_clean and bad >= self._checkpoint

    def _end_by_queue(self, place: QueuePlace) -> list[int]:
        """The end of a record as its queue knows it, if that can be."""
        found = self._log.find(place.unit.physical_offset)
        if found is None:
            return []
        file, file_start = found
        end = place.unit.physical_offset + place.unit.size
        return [end] if place.unit.size > 1 and end <= file_start + file.size else []

    def _end_by_checkpoint(self, bad: int) -> list[int]:
        if self._log.find(self._checkpoint - 1) is not None:
            return [self._checkpoint]
        self._was_cut = True
        _log.error(
            "store.records_lost",
            file=str(self._log.path_of(bad)),
            physical_offset=bad,
            end_offset=self._checkpoint,
            reason="the files end before the place up to which everything was flushed",
        )
        return []

    def _log_cut(self, bad: int, reason: str) -> None:
        """Say what is cut off: a torn record, or all that the power failure left of what was not flushed."""
        self._was_cut = True
        path = self._log.path_of(bad)
        dropped = sum(1 for _ in self._log.records_after(bad, self._newest_ms))
        if dropped:
            _log.warning("store.unflushed_tail_cut", file=path.name, physical_offset=bad, whole_records_dropped=dropped)
        elif reason:
            _log.warning("store.torn_tail_cut", file=path.name, physical_offset=bad, reason=reason)

    def _pass_over(self, damaged: DamagedRange, place: QueuePlace | None, reason: str) -> None:
        """Report damage, and let its queue keep the place."""
        self._dispatch.note_damage(damaged)
        where: dict[str, object] = {}
        if place is not None:
            where = {"topic": place.topic, "queue": place.queue_id, "offset": place.queue_offset}
        elif (record := self._read_unchecked(damaged)) is not None:
            where = {"topic": record.topic, "queue": record.queue_id, "offset": record.queue_offset}
            self._dispatch.append_damaged(record, damaged)
        if damaged.begin in self._reported:
            return  # the log is read a second time
        self._reported.add(damaged.begin)
        _log.error(
            "store.damaged_record",
            file=str(self._log.path_of(damaged.begin)),
            physical_offset=damaged.begin,
            size=damaged.end - damaged.begin,
            reason=reason,
            **where,
        )

    def _read_unchecked(self, damaged: DamagedRange) -> StoredRecord | None:
        """What a damaged record says it is, if its lengths are still those of the damaged bytes."""
        found = self._log.find(damaged.begin)
        if found is None:
            return None
        file, file_start = found
        try:
            data = file.view[damaged.begin - file_start : damaged.end - file_start]
            record = parse_record(data, verifies=False)
        except BadRecordError:
            return None
        is_all = record.total_size == damaged.end - damaged.begin
        return record if is_all and record.physical_offset == damaged.begin else None


def _copies(batch: RecordBatch) -> np.ndarray:
    """The rows that took a waiting record's place, or, written by another broker, may have."""
    is_copy = batch.prepared_transaction_offset != 0
    for row in np.flatnonzero(~batch.is_checked & ~is_copy).tolist():
        properties = batch.properties(row)
        is_copy[row] = b"DELAY\x01" in properties or b"TIMER_OUT_MS\x01" in properties
    return np.flatnonzero(is_copy)
