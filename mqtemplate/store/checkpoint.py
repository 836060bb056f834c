"""How far the files agree with each other, and who else derives its state from the log."""

from __future__ import annotations

from typing import Protocol

from mqtemplate.record.codec import StoredRecord
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.layout import (
    CHECKPOINT_SIZE,
    pack_checkpoint_into,
    unpack_checkpoint,
    unpack_own_checkpoint,
)


class LogFollower(Protocol):
    """Something whose state is derived from the commit log."""

    def replay_from(self) -> int | None:
        """At load: the physical offset it must see the log from; None if the checkpoint's is early enough."""

    def replay(self, record: StoredRecord) -> None:
        """At load: take one record in, in log order; the same one may come twice. All come before the owner starts
        the follower.

        Shown are the records that took a waiting one's place: those with a ``prepared_transaction_offset``, and those
        with ``DELAY`` or ``TIMER_OUT_MS`` that have no check of ours, so that another broker wrote them.
        """

    def persist(self) -> int | None:
        """Write progress to files. Gives the physical offset from which the log must be replayed after a crash
        that happens now; None if it need not be."""


class StoreCheckpoint:
    """The ``checkpoint`` file: one page, written in place, as upstream does.

    Upstream's fields tell how far its own files agree. It knows nothing of the delay services' progress here, so ours
    is kept beside them, where upstream leaves the page as it is.

    Attributes:
        replay_start: Everything before this physical offset is in flushed consume queues and in the followers' files;
            0 if no checkpoint of ours is there, or it is damaged.
        written_by_us: Nobody else has changed the page since we wrote it.
    """

    def __init__(self, store_files: StoreFiles) -> None:
        self._file = store_files.open_mapped("checkpoint", CHECKPOINT_SIZE)
        self.fields = unpack_checkpoint(self._file.view)
        own = unpack_own_checkpoint(self._file.view)
        self.replay_start = 0 if own is None else own.replay_start
        self.written_by_us = own is not None and own.is_last

    def write(self, logics_physical_offset: int, last_store_timestamp: int) -> None:
        """Note that everything before *logics_physical_offset* need not be replayed."""
        self.fields = self.fields._replace(
            physic_msg_timestamp=last_store_timestamp,
            logics_msg_timestamp=last_store_timestamp,
            logics_physical_offset=logics_physical_offset,
        )
        pack_checkpoint_into(self._file.view, self.fields)
        self.replay_start, self.written_by_us = logics_physical_offset, True
        self._file.flush()

    def close(self) -> None:
        self._file.close()
