"""The embedded broker: it stores messages in this process, in a store directory or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mqtemplate.broker import (
    Broker,
    BrokerAdmin,
    ConsumerGroups,
    DelayedMessages,
    GroupInfo,
    GroupSubscription,
    Member,
    MessageReader,
    MessageSends,
    QueueProgress,
    QueueSpan,
    Requests,
    RetentionHold,
    StoreHealth,
    TopicKind,
    Transactions,
    unknown_name,
)
from mqtemplate.clock import Clock
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import CorruptRecordError, UnsupportedError
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import read_table
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_application_topic, is_system_group

_GROUPS_FILE = "config/subscriptionGroup.json"


class EmbeddedBroker(Broker):
    """A broker in this process.

    - With a store directory, acknowledged messages survive the process. One process owns the directory.
    - In memory the same code uses anonymous memory, for tests and for messages that may be lost.
    - On a virtual clock it starts no thread: a harness steps ``services()``.
    - It is started once. To start again, create another broker.
    - It works in the process that starts it. In a process that was forked later, each use raises `ForkedError`, and
      `close` does nothing.

    Args:
        path: The store directory, created if missing; None for memory. A relative path is resolved here, once.
        store_files: Store files to use instead of a directory, for tests with a simulated disk.

    Attributes:
        engine: Does the work. A server uses it too.
        store: Commit log and consume queues of the engine.
        topics: The table of topics of the engine.
    """

    is_embedded = True

    def __init__(
        self,
        path: Path | str | None = None,
        settings: EmbeddedSettings | None = None,
        clock: Clock | None = None,
        *,
        store_files: StoreFiles | None = None,
    ) -> None:
        self.engine = engine = Engine(path, settings, clock, store_files=store_files)
        self.settings, self.clock, self.name, self.path = engine.settings, engine.clock, engine.name, engine.path
        self.capabilities = engine.capabilities
        self.store, self.topics = engine.store, engine.topics
        self._check_open = engine.lifecycle.check

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self.engine.levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self.engine.drafts.retry_delays_ms

    @property
    def metrics(self) -> Metrics:
        """Metrics of this broker; docs/metrics.md has their names."""
        return self.store.metrics

    def start(self) -> None:
        """Open the files and recover; see `Engine.start` for the errors."""
        self.engine.start()

    def services(self) -> Sequence[Service]:
        return self.engine.services()

    def close(self) -> None:
        self.engine.close()

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._check_open()
        return self.engine.routes.queues(topic)

    def topic_names(self) -> Sequence[str]:
        return [topic for topic in self.topics.names() if is_application_topic(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        self.engine.routes.unknown.expect(topics)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        self._check_open()
        self.engine.routes.create(topic, queue_count)

    # --- operators -----------------------------------------------------------------------------

    def admin(self) -> BrokerAdmin:
        return EmbeddedAdmin(self.engine)

    def store_health(self) -> StoreHealth:
        flush = self.store.group_commit
        refusal = self.store.cleaning.why_refused
        error = refusal if flush.error is None else str(flush.error)
        return StoreHealth(error, self.store.end_offset - flush.flushed, self.store.disk.space(), refusal)

    def retention_holds(self) -> Sequence[RetentionHold]:
        return tuple(self.engine.retention.holds())

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> MessageSends:
        return self.engine.sends

    @property
    def requests(self) -> Requests:
        return self.engine.requests

    @property
    def transactions(self) -> Transactions:
        return self.engine.transactions

    @property
    def reader(self) -> MessageReader:
        return self.engine.reader

    @property
    def groups(self) -> ConsumerGroups:
        return self.engine.groups

    @property
    def delayed(self) -> DelayedMessages:
        return self.engine.delayed

    def change_delay_levels(self, text: str) -> None:
        """Use another level table; see `Engine.change_delay_levels`."""
        self.engine.change_delay_levels(text)


class EmbeddedAdmin(BrokerAdmin):
    """Topics, groups and offsets of a started engine.

    It knows the groups of this process, groups with offsets, and groups that a server has stored; and the members of
    this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- topics --------------------------------------------------------------------------------

    def topic_kinds(self) -> dict[str, TopicKind]:
        table = self._engine.topics
        configs = {name: table.config(name) or {} for name in sorted(table.names())}
        return {name: TopicKind.of(name, int(config.get("perm", 0))) for name, config in configs.items()}

    def delay_levels_ms(self) -> Sequence[int]:
        return self._engine.levels.delays_ms

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        reader = self._engine.queues
        return [
            QueueSpan(queue, low, high, self._stored_ms(queue, high - 1) if high > low else None)
            for queue in self._queues(topic)
            for low, high in [(reader.min_offset(queue), reader.max_offset(queue))]
        ]

    def _queues(self, topic: str) -> list[MessageQueue]:
        config = self._engine.topics.config(topic)
        if config is None:
            raise unknown_name("topic", topic, self.topic_names())
        count = max(int(config.get("readQueueNums", 0)), int(config.get("writeQueueNums", 0)))
        return [MessageQueue(topic, self._engine.name, queue_id) for queue_id in range(count)]

    def _stored_ms(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it was deleted or is corrupt."""
        try:
            messages, _ = self._engine.queues.read(queue, queue_offset, 1, None)
        except CorruptRecordError:
            return None
        return messages[0].store_timestamp if messages else None

    def delete_topic(self, topic: str) -> None:
        engine = self._engine
        if not engine.topics.delete(topic):
            raise unknown_name("topic", topic, self.topic_names())
        engine.routes.refresh(topic)
        engine.groups.forget_topic(topic)

    def groups_of(self, topic: str) -> list[str]:
        members = self._engine.groups.local.members
        subscribed = {
            name for name in self.group_names() if any(topic in spec.subscriptions for _, spec in members(name))
        }
        committed = {name for name in self._engine.offsets.groups_of(topic) if not is_system_group(name)}
        return sorted(subscribed | committed)

    # --- groups --------------------------------------------------------------------------------

    def group_names(self) -> list[str]:
        engine = self._engine
        names = engine.offsets.groups() | set(engine.groups.local.names()) | self._named_by_topics()
        names |= set(_stored_groups(self._engine.store.store_files))
        return sorted(name for name in names if not is_system_group(name))

    def _named_by_topics(self) -> set[str]:
        prefixes = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)
        topics = self._engine.topics.names()
        return {topic.removeprefix(prefix) for topic in topics for prefix in prefixes if topic.startswith(prefix)}

    def group(self, name: str) -> GroupInfo:
        names = self.group_names()
        if name not in names:
            raise unknown_name("group", name, names)
        return self._group(name)

    def groups(self) -> list[GroupInfo]:
        # Not `group` of each: it looks for the name in all tables.
        return [self._group(name) for name in self.group_names()]

    def _group(self, name: str) -> GroupInfo:
        specs = self._engine.groups.local.members(name)
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
        offsets, reader = self._engine.offsets, self._engine.queues
        topics = sorted(offsets.topics_of(group) | subscribed)
        found = []
        for queue in (queue for topic in topics if self._engine.topics.config(topic) for queue in self._queues(topic)):
            committed = offsets.offset(group, queue.topic, queue.queue_id)
            consumed_ms = self._stored_ms(queue, committed - 1) if committed else None
            high, low = reader.max_offset(queue), reader.min_offset(queue)
            found.append(QueueProgress(queue, committed, high, low, consumed_ms))
        return found

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        if self._engine.groups.local.has_members(group):
            raise UnsupportedError(
                f"group {group!r} has listeners in this process, with read positions of their own; call seek of their "
                "containers (MQApplication.containers), or stop the application first"
            )
        if self._engine.groups.has_remote_members(group):
            raise UnsupportedError(
                f"group {group!r} has members that are clients of this broker's server; connect to the server, which "
                "notifies them"
            )
        for queue, queue_offset in offsets.items():
            self._engine.groups.reset_offset(group, queue, queue_offset)

    def forget_group(self, group: str) -> None:
        groups = self._engine.groups
        if groups.local.has_members(group) or groups.has_remote_members(group):
            raise _has_members(group)
        groups.forget(group)


def _has_members(group: str) -> UnsupportedError:
    return UnsupportedError(
        f"group {group!r} has members now, so it is not gone; stop them first, or move its offsets instead with: "
        f"mqtemplate offsets reset {group} TOPIC --to latest"
    )


def _stored_groups(store_files: StoreFiles) -> list[str]:
    """Return the groups that a server has stored."""
    return list(read_table(store_files, _GROUPS_FILE).get("subscriptionGroupTable", {}))


def _subscription(topic: str, selector: Selector) -> GroupSubscription:
    kind = "SQL92" if isinstance(selector, Sql92Selector) else "TAG"
    return GroupSubscription(topic, selector.expression, kind)
