"""Facts about a store directory: sizes of its files, steps of the clock, and up to which offset its files agree."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.codec import StoredRecord
from mqtemplate.store.files import layout
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.settings import StoreSettings

NO_LIMIT_MS = 1 << 63


class ClockStep(NamedTuple):
    """A place in the commit log where store timestamps fall.

    Attributes:
        physical_offset: The first record that was stored after the step starts here, or later.
        before_ms: Store timestamp of the record before.
        after_ms: Store timestamp of the first record after the step.
    """

    physical_offset: int
    before_ms: int
    after_ms: int


class ClockSteps:
    """The steps back of the clock in the part of the log that exists.

    RocketMQ does not note them: in the log of another broker only those are known that a recovery read. With more than
    `layout.MAX_CLOCK_STEPS` the smallest ones are forgotten. A search by time is inexact by their length then.
    """

    def __init__(self, steps: Iterable[ClockStep] = ()) -> None:
        self._steps = sorted(steps)

    def __iter__(self) -> Iterator[ClockStep]:
        return iter(list(self._steps))

    def note(self, physical_offset: int, before_ms: int, after_ms: int) -> None:
        """Note a step. Noting one again is harmless: a recovery reads records twice."""
        steps = [step for step in self._steps if step.physical_offset != physical_offset]
        steps.append(ClockStep(physical_offset, before_ms, after_ms))
        if len(steps) > layout.MAX_CLOCK_STEPS:
            steps.remove(min(steps, key=lambda step: step.before_ms - step.after_ms))
        self._steps = sorted(steps)  # a new list: threads may iterate over the other one

    def note_all(self, before_ms: int, physical_offsets: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Note the steps between records with these store timestamps, of which the first follows *before_ms*."""
        earlier = np.append(before_ms, times[:-1])
        for row in np.flatnonzero(times < earlier).tolist():
            self.note(int(physical_offsets[row]), int(earlier[row]), int(times[row]))

    def forget_outside(self, physical_start: int, physical_end: int) -> None:
        """Forget the steps in parts of the log that were deleted."""
        self._steps = [step for step in self._steps if physical_start <= step.physical_offset < physical_end]

    def are_between(self, physical_start: int, physical_end: int) -> bool:
        """Return True if the clock was set back between the records at these offsets."""
        return any(physical_start < step.physical_offset <= physical_end for step in self._steps)

    def latest_ms(self, physical_offset: int, now_ms: int) -> int:
        """Return a time at which the record at this offset was stored already, by the clock of *now_ms*.

        That is the first later one that is not in the future.
        """
        later = [step.after_ms for step in self._steps if step.physical_offset > physical_offset]
        return next((after_ms for after_ms in later if after_ms <= now_ms), now_ms)

    def spans(self, offsets: range, first_from: Callable[[int], int]) -> Iterator[range]:
        """Yield the parts of *offsets*, queue offsets, in which store timestamps ascend.

        Args:
            first_from: Returns the first queue offset whose record starts at a physical offset or later.
        """
        starts = {min(max(first_from(step.physical_offset), offsets.start), offsets.stop) for step in self}
        for start, stop in pairwise(sorted({offsets.start, *starts, offsets.stop})):
            yield range(start, stop)

    def search(
        self,
        offsets: range,
        timestamp: int,
        now_ms: int,
        time_at: Callable[[int], int],
        first_from: Callable[[int], int],
    ) -> int:
        """Return the first queue offset stored at *timestamp* or later; the end of *offsets* if not found.

        A record of the future was stored while the clock was ahead, some time between the records around it. It counts
        as one of *timestamp* only if the record before it is older and the one after it is not: then no message is
        skipped.
        If *timestamp* is in the future itself, the store timestamps are compared as they are.

        Args:
            offsets: The queue offsets to search.
            time_at: Returns the store timestamp of a queue offset.
            first_from: See `spans`.
        """
        limit_ms = now_ms if timestamp <= now_ms else NO_LIMIT_MS
        future: int | None = None  # the first of the records of the future right before the current span
        for span in self.spans(offsets, first_from):
            start, stop = span.start, span.stop
            found = start + bisect_left(span, timestamp, key=time_at)
            past_end = start + bisect_left(span, True, key=lambda at: time_at(at) > limit_ms)
            if found < past_end:
                return found if found > start or future is None else future
            if past_end > start:  # these are older, and so is what was stored before them
                future = None
            if past_end < stop and future is None:
                future = past_end
        return offsets.stop if future is None else future


NEW_COMMIT_LOG_SIZE = 64 << 20
NEW_CONSUME_QUEUE_SIZE = 600_000
NEW_TIMER_LOG_SIZE = 4 << 20


class FileSizes(NamedTuple):
    """Bytes of each file of the commit log and of the consume queues."""

    commit_log: int
    consume_queue: int


def file_sizes(
    settings: StoreSettings, store_files: StoreFiles | None = None, noted: FileSizes | None = None
) -> FileSizes:
    """Return the sizes that *settings* set. Others are taken from the files; in a new directory: the defaults.

    The result may contradict the files: then opening them fails, with the reason.

    Args:
        noted: The sizes that mqtemplate has noted in the directory. A single file that is shorter was cut.
    """
    commit_log, consume_queue = settings.mapped_file_size_commit_log, settings.mapped_file_size_consume_queue
    if commit_log is None and store_files is not None:
        commit_log = _not_cut(size_in_folder(store_files, "commitlog"), noted and noted.commit_log)
    if consume_queue is None and store_files is not None:
        consume_queue = _not_cut(_queue_file_size(store_files), noted and noted.consume_queue)
    # A consume queue has whole units.
    consume_queue = -(-(consume_queue or NEW_CONSUME_QUEUE_SIZE) // layout.CQ_UNIT_SIZE) * layout.CQ_UNIT_SIZE
    return FileSizes(commit_log or NEW_COMMIT_LOG_SIZE, consume_queue)


def size_in_folder(store_files: StoreFiles, folder: str) -> int | None:
    """Return the size of the mapped files in a folder; None without a file that has content.

    A file is named by the offset of its first byte, so the names of two adjacent files show the size as well.
    """
    lengths = store_files.file_sizes(folder)
    starts = sorted(int(name) for name in lengths if name.isdecimal())
    sizes = Counter(length for name, length in lengths.items() if length and name.isdecimal())
    if not sizes:
        return None
    distances = [later - earlier for earlier, later in pairwise(starts)]
    for size, _ in sizes.most_common():
        if all(distance % size == 0 for distance in distances):  # a multiple if a file is missing
            return size
    return min(distances)


def _queue_file_size(store_files: StoreFiles) -> int | None:
    """Return the size of most consume queue files."""
    found: Counter[int] = Counter()
    for topic in store_files.list_folders("consumequeue"):
        for queue_id in store_files.list_folders(f"consumequeue/{topic}"):
            size = size_in_folder(store_files, f"consumequeue/{topic}/{queue_id}")
            if size is not None and size % layout.CQ_UNIT_SIZE == 0:
                found[size] += 1
    return found.most_common(1)[0][0] if found else None


def _not_cut(found: int | None, noted: int | None) -> int | None:
    return max(found, noted) if found and noted else found or noted


class LogFollower(Protocol):
    """A component whose state is derived from the commit log: a delay service, or the table of sequenced sends."""

    def replay_from(self) -> int | None:
        """Return the physical offset from which it needs the log at the load.

        None means that the offset of the checkpoint is early enough.
        """

    def replay(self, record: StoredRecord) -> None:
        """Process one record at the load, in log order.

        A record may be replayed twice. The owner starts the follower later. Only records are replayed that may replace
        a delayed one: those with a ``prepared_transaction_offset``, and those that RocketMQ wrote (without check) with
        ``DELAY`` or ``TIMER_OUT_MS``; and records of sequenced sends.
        """

    def persist(self) -> int | None:
        """Write the progress to files.

        Returns:
            Physical offset from which the log must be replayed after a crash at this moment; None if that is
            unnecessary.
        """


class StoreCheckpoint:
    """The ``checkpoint`` file: one page, overwritten in place, as RocketMQ does.

    RocketMQ's fields describe RocketMQ's files. They cannot contain the progress of the delay services here, so
    mqtemplate has fields of its own in a part of the page that RocketMQ leaves unchanged.

    Attributes:
        fields: RocketMQ's fields.
        replay_start: All records before this physical offset are in flushed consume queues and in the followers' files;
            0 if the fields of mqtemplate are missing or damaged.
        sizes: The sizes of the files when mqtemplate wrote the page last; None if it did not. The next `write` notes
            them.
        clock_steps: Where the clock was set back, as far as mqtemplate noted it.
    """

    def __init__(self, store_files: StoreFiles) -> None:
        self._file = store_files.open_mapped("checkpoint", layout.CHECKPOINT_SIZE)
        self.fields = layout.unpack_checkpoint(self._file.view)
        self.replay_start = layout.unpack_replay_start(self._file.view)
        sizes = layout.unpack_sizes(self._file.view)
        self.sizes = None if sizes is None else FileSizes(*sizes)
        self.clock_steps = ClockSteps(map(ClockStep._make, layout.unpack_clock_steps(self._file.view)))

    def write(self, logics_physical_offset: int, last_store_timestamp: int, index_msg_timestamp: int) -> None:
        """Note that records before *logics_physical_offset* need no replay."""
        self.fields = self.fields._replace(
            physic_msg_timestamp=last_store_timestamp,
            logics_msg_timestamp=last_store_timestamp,
            index_msg_timestamp=index_msg_timestamp,
            logics_physical_offset=logics_physical_offset,
        )
        layout.pack_checkpoint_into(self._file.view, self.fields)
        if self.sizes is not None:
            layout.pack_sizes_into(self._file.view, *self.sizes)
        layout.pack_clock_steps_into(self._file.view, list(self.clock_steps))
        self.replay_start = logics_physical_offset
        self._file.flush()

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()
