"""How far the files agree with each other, and who else derives its state from the log."""

from __future__ import annotations

from typing import Protocol

from mqtemplate.record import StoredRecord
from mqtemplate.store.home import Home
from mqtemplate.store.layout import CHECKPOINT_SIZE, pack_checkpoint_into, unpack_checkpoint

__all__ = ["LogFollower", "StoreCheckpoint"]


class LogFollower(Protocol):
    """Something whose state is derived from the commit log."""

    def replay_from(self) -> int | None:
        """At load: the physical offset it must see the log from; None if the checkpoint's is early enough."""

    def replay(self, record: StoredRecord) -> None:
        """At load: take one record in, in log order; the same one may come twice. All come before the owner starts
        the follower."""

    def persist(self) -> int | None:
        """Write progress to files. Gives the physical offset from which the log must be replayed after a crash
        that happens now; None if it need not be."""


class StoreCheckpoint:
    """The ``checkpoint`` file: one page, written in place, as upstream does."""

    def __init__(self, home: Home) -> None:
        self._file = home.open_mapped("checkpoint", CHECKPOINT_SIZE)
        self.fields = unpack_checkpoint(self._file.view)

    def write(self, logics_physical_offset: int, last_store_timestamp: int) -> None:
        """Note that everything before *logics_physical_offset* need not be replayed."""
        self.fields = self.fields._replace(
            physic_msg_timestamp=last_store_timestamp,
            logics_msg_timestamp=last_store_timestamp,
            logics_physical_offset=logics_physical_offset,
        )
        pack_checkpoint_into(self._file.view, self.fields)
        self._file.flush()

    def close(self) -> None:
        self._file.close()
