"""The checkpoint: up to which offset the files of a store agree, and the interface for state derived from the log."""

from __future__ import annotations

from typing import Protocol

from mqtemplate.record.codec import StoredRecord
from mqtemplate.store.clock_steps import ClockStep, ClockSteps
from mqtemplate.store.file_sizes import FileSizes
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.layout import (
    CHECKPOINT_SIZE,
    pack_checkpoint_into,
    pack_clock_steps_into,
    pack_sizes_into,
    unpack_checkpoint,
    unpack_clock_steps,
    unpack_replay_start,
    unpack_sizes,
)


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
        self._file = store_files.open_mapped("checkpoint", CHECKPOINT_SIZE)
        self.fields = unpack_checkpoint(self._file.view)
        self.replay_start = unpack_replay_start(self._file.view)
        sizes = unpack_sizes(self._file.view)
        self.sizes = None if sizes is None else FileSizes(*sizes)
        self.clock_steps = ClockSteps(map(ClockStep._make, unpack_clock_steps(self._file.view)))

    def write(self, logics_physical_offset: int, last_store_timestamp: int, index_msg_timestamp: int) -> None:
        """Note that records before *logics_physical_offset* need no replay."""
        self.fields = self.fields._replace(
            physic_msg_timestamp=last_store_timestamp,
            logics_msg_timestamp=last_store_timestamp,
            index_msg_timestamp=index_msg_timestamp,
            logics_physical_offset=logics_physical_offset,
        )
        pack_checkpoint_into(self._file.view, self.fields)
        if self.sizes is not None:
            pack_sizes_into(self._file.view, *self.sizes)
        pack_clock_steps_into(self._file.view, list(self.clock_steps))
        self.replay_start = logics_physical_offset
        self._file.flush()

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()
