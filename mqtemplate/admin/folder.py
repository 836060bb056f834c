"""Administration of a store directory: read while another process has it open, changed while no process has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.embedded import EmbeddedAdmin
from mqtemplate.admin.values import GroupInfo, QueueSpan, TopicKind
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.message import MessageQueue
from mqtemplate.processes import absolute_path
from mqtemplate.store.files.folder_store_files import SnapshotStoreFiles, check_store


class FolderAdmin(BrokerAdmin):
    """Topics, groups and offsets of a store directory.

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

    # --- topics and groups ---------------------------------------------------------------------

    @property
    def _admin(self) -> EmbeddedAdmin:
        return EmbeddedAdmin(self.broker)

    def topic_kinds(self) -> dict[str, TopicKind]:
        return self._admin.topic_kinds()

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        return self._admin.queue_spans(topic)

    def groups_of(self, topic: str) -> list[str]:
        return self._admin.groups_of(topic)

    def group_names(self) -> list[str]:
        return self._admin.group_names()

    def group(self, name: str) -> GroupInfo:
        return self._admin.group(name)

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        self.open_for_changes()
        self._admin.set_offsets(group, offsets)


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
