"""Administration of an embedded broker in this process, and of a store directory."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import CorruptRecordError, UnsupportedError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.broker_admin import BrokerAdmin, unknown
from mqtemplate.operations.values import GroupInfo, GroupSubscription, Member, QueueProgress, QueueSpan, TopicKind
from mqtemplate.processes import absolute_path
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector
from mqtemplate.store.files.folder_store_files import SnapshotStoreFiles, check_store
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import read_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_system_group

_GROUPS_FILE = "config/subscriptionGroup.json"


class StoreAdmin(BrokerAdmin):
    """Topics, groups and offsets of an embedded broker: one that is open, or one on a store directory.

    It knows the groups of this process, groups with offsets, and groups that a server has stored; and the members of
    this process.
    """

    is_embedded = True

    @property
    @abstractmethod
    def broker(self) -> EmbeddedBroker: ...

    def open_for_changes(self) -> EmbeddedBroker:
        return self.broker

    # --- topics --------------------------------------------------------------------------------

    def topic_kinds(self) -> dict[str, TopicKind]:
        table = self.broker.topics
        configs = {name: table.config(name) or {} for name in sorted(table.names())}
        return {name: TopicKind.of(name, int(config.get("perm", 0))) for name, config in configs.items()}

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        reader = self.broker.engine.queues
        return [
            QueueSpan(queue, low, high, self._stored_ms(queue, high - 1) if high > low else None)
            for queue in self._queues(topic)
            for low, high in [(reader.min_offset(queue), reader.max_offset(queue))]
        ]

    def _queues(self, topic: str) -> list[MessageQueue]:
        config = self.broker.topics.config(topic)
        if config is None:
            raise unknown("topic", topic, self.topic_names())
        count = max(int(config.get("readQueueNums", 0)), int(config.get("writeQueueNums", 0)))
        return [MessageQueue(topic, self.broker.name, queue_id) for queue_id in range(count)]

    def _stored_ms(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it was deleted or is corrupt."""
        try:
            messages, _ = self.broker.engine.queues.read(queue, queue_offset, 1, None)
        except CorruptRecordError:
            return None
        return messages[0].store_timestamp if messages else None

    def groups_of(self, topic: str) -> list[str]:
        members = self.broker.engine.groups.local.members
        subscribed = {
            name for name in self.group_names() if any(topic in spec.subscriptions for _, spec in members(name))
        }
        committed = {name for name in self.broker.engine.offsets.groups_of(topic) if not is_system_group(name)}
        return sorted(subscribed | committed)

    # --- groups --------------------------------------------------------------------------------

    def group_names(self) -> list[str]:
        engine = self.broker.engine
        names = engine.offsets.groups() | set(engine.groups.local.names()) | self._named_by_topics()
        names |= set(_stored_groups(self.broker.store.store_files))
        return sorted(name for name in names if not is_system_group(name))

    def _named_by_topics(self) -> set[str]:
        prefixes = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)
        topics = self.broker.topics.names()
        return {topic.removeprefix(prefix) for topic in topics for prefix in prefixes if topic.startswith(prefix)}

    def group(self, name: str) -> GroupInfo:
        names = self.group_names()
        if name not in names:
            raise unknown("group", name, names)
        specs = self.broker.engine.groups.local.members(name)
        subscriptions = {topic: selector for _, spec in specs for topic, selector in spec.subscriptions.items()}
        return GroupInfo(
            name,
            members=tuple(Member(client_id, "this process", "PYTHON") for client_id, _ in specs),
            subscriptions=tuple(_subscription(topic, subscriptions[topic]) for topic in sorted(subscriptions)),
            progress=tuple(self._progress(name, {*subscriptions, RETRY_TOPIC_PREFIX + name})),
            message_model=specs[0][1].message_model.value if specs else None,
            consume_from_where=specs[0][1].consume_from_where.value if specs else None,
        )

    def _progress(self, group: str, subscribed: set[str]) -> list[QueueProgress]:
        offsets, reader = self.broker.engine.offsets, self.broker.engine.queues
        topics = sorted(offsets.topics_of(group) | subscribed)
        found = []
        for queue in (queue for topic in topics if self.broker.topics.config(topic) for queue in self._queues(topic)):
            committed = offsets.offset(group, queue.topic, queue.queue_id)
            consumed_ms = self._stored_ms(queue, committed - 1) if committed else None
            high, low = reader.max_offset(queue), reader.min_offset(queue)
            found.append(QueueProgress(queue, committed, high, low, consumed_ms))
        return found

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        broker = self.open_for_changes()
        if broker.engine.groups.local.has_members(group):
            raise UnsupportedError(
                f"group {group!r} has listeners in this process, with read positions of their own; call seek of their "
                "containers (MQApplication.containers), or stop the application first"
            )
        if broker.engine.groups.has_remote_members(group):
            raise UnsupportedError(
                f"group {group!r} has members that are clients of this broker's server; connect to the server, which "
                "notifies them"
            )
        for queue, queue_offset in offsets.items():
            broker.commit_offset(group, queue, queue_offset)


def _stored_groups(store_files: StoreFiles) -> list[str]:
    """Return the groups that a server has stored."""
    return list(read_table(store_files, _GROUPS_FILE).get("subscriptionGroupTable", {}))


def _subscription(topic: str, selector: Selector) -> GroupSubscription:
    kind = "SQL92" if isinstance(selector, Sql92Selector) else "TAG"
    return GroupSubscription(topic, selector.expression, kind)


class EmbeddedAdmin(StoreAdmin):
    """Topics, groups and offsets of a started embedded broker. It leaves the broker open."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    @property
    def broker(self) -> EmbeddedBroker:
        return self._broker

    @property
    def store_path(self) -> Path | None:
        return self._broker.path

    def close(self) -> None:
        return


class FolderAdmin(StoreAdmin):
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
