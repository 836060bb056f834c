"""After a start: find the log's end, and bring everything derived from the log up to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import structlog

from mqtemplate.errors import CorruptRecordError
from mqtemplate.record import BadRecordError, StoredRecord
from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.consume_queue import ConsumeQueue

__all__ = ["QueueGapError", "Recovery"]

_log = structlog.stdlib.get_logger("mqtemplate.store")


class QueueGapError(Exception):
    """A consume queue lacks units before the checkpoint: it has to be rebuilt from the log's first record."""


class Recovery:
    """Reads the log from the last checkpoint on, and from the begin of that file to be sure of its records.

    - A torn tail (nothing whole behind it) was never acknowledged: it is cut off, zeroed, and logged.
    - Damage with whole records behind it is not a tail: it is reported with file and offset, and nothing is touched.
    - Consume queues take each record at the queue offset that stands in it. Where one has a gap, all are rebuilt.

    Args:
        queues: All consume queues there are now.
        dispatch: Writes the consume queue unit of a record, if it is not there; raises `QueueGapError`.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: Callable[[], Iterable[ConsumeQueue]],
        dispatch: Callable[[StoredRecord], None],
        followers: Sequence[LogFollower],
    ) -> None:
        self._log = log
        self._queues = queues
        self._dispatch = dispatch
        self._followers = followers

    def run(self, checkpoint_offset: int, *, was_clean: bool) -> None:
        """Recover.

        Args:
            checkpoint_offset: Everything before it is in the consume queues, and in the followers' files.
            was_clean: The last owner closed the store; behind the log's end there are zeros, then.

        Raises:
            CorruptRecordError: Damage in the middle of the log.
        """
        dispatch_from = max(checkpoint_offset, self._log.begin)
        follower_starts = [start for follower in self._followers if (start := follower.replay_from()) is not None]
        replay_from = max(min([dispatch_from, *follower_starts]), self._log.begin)
        try:
            is_torn = self._read(replay_from, dispatch_from)
        except QueueGapError as exc:
            _log.warning("store.queues_rebuilt", reason=str(exc))
            is_torn = self._read(replay_from, self._log.begin)
        if is_torn or not was_clean:
            for queue in self._queues():
                queue.truncate_behind(self._log.scan_end)
            self._log.truncate(self._log.scan_end)
        else:
            self._log.open_at(self._log.scan_end)
        if not was_clean:
            _log.info("store.recovered", end_offset=self._log.end, replayed_from=replay_from)

    def _read(self, replay_from: int, dispatch_from: int) -> bool:
        """One pass over the log; True if it ends in a torn record."""
        for queue in self._queues():
            queue.truncate_behind(dispatch_from)
        try:
            for record in self._log.scan_file_of(min(replay_from, dispatch_from)):
                self._log.last_store_timestamp = max(self._log.last_store_timestamp, record.store_timestamp)
                self._dispatch(record)
                if record.physical_offset >= replay_from:
                    for follower in self._followers:
                        follower.replay(record)
        except BadRecordError as exc:
            self._judge(self._log.scan_end, str(exc))
            return True
        return False

    def _judge(self, physical_offset: int, reason: str) -> None:
        """Log a torn tail; raise for damage that is none."""
        behind = self._log.find_record_behind(physical_offset)
        path = self._log.path_of(physical_offset)
        if behind is not None:
            raise CorruptRecordError(path, physical_offset, f"{reason}, and whole records follow at {behind}")
        _log.warning("store.torn_tail_cut", file=path.name, physical_offset=physical_offset, reason=reason)
