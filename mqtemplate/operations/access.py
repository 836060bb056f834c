"""Brokers that operators work on: a broker that is open, or a store directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Self

from mqtemplate.broker import Broker, BrokerAdmin
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.processes import absolute_path
from mqtemplate.store.files.folder_store_files import SnapshotStoreFiles, check_store


class BrokerAccess:
    """A broker that is open, and stays open. The other parts of `mqtemplate.operations` take it.

    Args:
        broker: A started broker.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def broker(self) -> Broker:
        """The broker, for reading. After `open_for_changes` it takes changes too."""
        return self._broker

    @property
    def admin(self) -> BrokerAdmin:
        """Topics, groups and offsets of the broker."""
        return self.broker.admin()

    @property
    def store_path(self) -> Path | None:
        """The store directory; None if it is not on this machine."""
        return self.broker.path

    def open_for_changes(self) -> Broker:
        """Return the broker, for changes.

        Raises:
            StoreLockedError: The broker is a store directory that another process has open.
        """
        return self.broker

    def refresh(self) -> None:
        """See what was stored since. Only a store directory that another process has open needs it."""

    def close(self) -> None:
        """Close what this object has opened. A second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class StoreAccess(BrokerAccess):
    """A store directory.

    - Reads use a snapshot: nothing on the disk changes, nothing is delivered, and another process may have the
      directory open. `refresh` takes a new one.
    - The first change opens the directory as its owner. From then on messages that are due are delivered.

    Args:
        path: The store directory of a broker that was started at least once.
        create: The directory may be missing: the first change creates it.

    Raises:
        StoreError: The directory is missing, or is not a store.
    """

    def __init__(self, path: Path, settings: EmbeddedSettings | None = None, *, create: bool = False) -> None:
        if not (create and not path.exists()):
            check_store(path)
        self.path = absolute_path(path)
        self._settings = settings or EmbeddedSettings()
        self._snapshot: EmbeddedBroker | None = None
        self._owned: EmbeddedBroker | None = None

    @property
    def broker(self) -> EmbeddedBroker:
        if self._owned is not None:
            return self._owned
        if self._snapshot is None:
            self._snapshot = snapshot_broker(self.path, self._settings)
        return self._snapshot

    @property
    def store_path(self) -> Path:
        return self.path

    def open_for_changes(self) -> EmbeddedBroker:
        if self._owned is None:
            owned = EmbeddedBroker(self.path, self._settings)
            owned.start()
            self._owned = owned
            self._close_snapshot()
        return self._owned

    def refresh(self) -> None:
        self._close_snapshot()

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def close(self) -> None:
        self._close_snapshot()
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()


def snapshot_broker(path: Path, settings: EmbeddedSettings, clock: VirtualClock | None = None) -> EmbeddedBroker:
    """Return a started broker on a snapshot of a store directory. Its changes stay in memory.

    Args:
        clock: By default one that stands still at the current time, so the broker releases and deletes nothing.

    Raises:
        StoreError: The directory is missing, is not a store, or no broker could open it.
    """
    clock = clock or VirtualClock(SystemClock().now_ms())
    # Topics of the settings are created at the start; in the result they would look like topics of the directory.
    settings = dataclasses.replace(settings, topics=())
    broker = EmbeddedBroker(settings=settings, clock=clock, store_files=SnapshotStoreFiles(path))
    broker.start()
    return broker
