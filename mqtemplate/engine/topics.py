"""Topics of a broker: the queues of each, their creation by a first message, and the writer of tables."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from mqtemplate.clock import Clock
from mqtemplate.errors import DestinationError
from mqtemplate.event_log import EventLogger, get_logger
from mqtemplate.message import DELAY_PROPERTIES, MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.record.properties import PRIORITY_PROPERTY
from mqtemplate.services import AfterChangeService
from mqtemplate.store.tables import EntryTable
from mqtemplate.topics import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    TRANS_CHECK_MAX_TIME_TOPIC,
    check_send_topic,
    nearest_topic,
)

_OTHER_TYPES = {*DELAY_PROPERTIES, Property.SHARDING_KEY}


def queue_of_priority(properties: Mapping[str, str], count: int) -> int | None:
    """Return the queue of a message with a priority, among *count* queues.

    Returns:
        None if it has no priority, or has another type: delayed, ordered, or in a transaction.

    Source: RocketMQ ``SendMessageProcessor.sendMessage``, ``TopicMessageType.parseFromMessageProperty``.
    """
    priority = parse_number(properties.get(PRIORITY_PROPERTY))
    if priority is None or not 0 <= priority < 1 << 31 or count <= 0:
        return None
    is_half = properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
    return None if is_half or not _OTHER_TYPES.isdisjoint(properties) else min(priority, count - 1)


class UnknownTopics:
    """Check of a topic that does not exist, before it is created.

    A topic is known if a listener of the application reads it, or the configuration names it. The retry and dead letter
    topics of groups are known.

    Args:
        auto_create: False: an unknown topic is refused. True: its creation is logged.
    """

    def __init__(self, log: EventLogger, *, auto_create: bool, known: Iterable[str] = ()) -> None:
        self._log = log
        self._auto_create = auto_create
        self._known = frozenset(known)

    def expect(self, topics: Iterable[str]) -> None:
        """Note topics that the application reads."""
        self._known = self._known.union(topics)

    def check(self, topic: str, existing: Callable[[], Iterable[str]], reason: str) -> None:
        """Log that a topic is created by its first use, unless it is known.

        Args:
            existing: Returns the names of the topics that exist, for the most similar one.
            reason: Of the creation, for the log.

        Raises:
            DestinationError: Unknown topics must not be created.
        """
        if topic in self._known or topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
            return
        nearest = self.nearest(topic, existing)
        if not self._auto_create:
            meant = f"did you mean {nearest!r}? " if nearest else ""
            raise DestinationError(
                f"topic {topic!r} does not exist, no listener of the application reads it, and "
                f"mqtemplate.broker.auto-create-topic-enable is false; {meant}Add it to mqtemplate.broker.topics, or "
                "create it by Broker.create_topic"
            )
        self._log.info("topic.created", topic=topic, reason=reason, **({"nearest": nearest} if nearest else {}))

    def nearest(self, topic: str, existing: Callable[[], Iterable[str]]) -> str | None:
        """Return the known or existing topic whose name is most similar; None if none is similar."""
        return nearest_topic(topic, self._known.union(existing()))


_log = get_logger("mqtemplate.broker")
_REASON = "a client used it, and no listener or setting names it"


class _Route(NamedTuple):
    """The queues of a topic. ``next_queue`` returns them in turn; any thread may call it."""

    queues: tuple[MessageQueue, ...]
    next_queue: Callable[[], MessageQueue]


class StoredTopics(Protocol):
    """The topics of a store; see `mqtemplate.store.tables.TopicTable`."""

    def names(self) -> list[str]: ...
    def queue_count(self, topic: str) -> int: ...
    def create(self, topic: str, queue_count: int) -> int: ...
    def delete(self, topic: str) -> bool: ...


class TopicRoutes:
    """The routes of one broker. An unknown topic is created when it is used first, as by RocketMQ.

    A topic is known if it exists, a listener of the application reads it, or the configuration names it.

    Args:
        on_grow: Called after a topic got more queues, so that they are assigned to consumers.
        auto_create: False: a message to an unknown topic is refused.

    Attributes:
        table: The topics that exist.
        unknown: Knows the topics that the application reads, or that its configuration names.
    """

    def __init__(
        self,
        table: StoredTopics,
        broker_name: str,
        default_queue_count: int,
        on_grow: Callable[[], None],
        *,
        auto_create: bool = True,
    ) -> None:
        self.table = table
        self._broker_name = broker_name
        self._default_queue_count = default_queue_count
        self._on_grow = on_grow
        self.unknown = UnknownTopics(_log, auto_create=auto_create)
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()

    def select(self, topic: str, queue: MessageQueue | None) -> MessageQueue:
        """Return the queue that a message to *topic* goes to: *queue*, or the next one if it is None.

        Raises:
            DestinationError: The name is illegal, only the broker writes to the topic, it has no such queue, or it is
                unknown and must not be created. Source: ``TopicValidator``.
        """
        route = self._routes.get(topic) or self._add(topic)
        if queue is None:
            return route.next_queue()
        if queue not in route.queues:
            raise DestinationError(
                f"{queue} is not a queue of the topic; broker {self._broker_name!r} has queues "
                f"0..{len(route.queues) - 1} of {topic!r}"
            )
        return queue

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic, for producers and consumers.

        Raises:
            DestinationError: The name is illegal, or the topic belongs to the broker.
        """
        if topic != TRANS_CHECK_MAX_TIME_TOPIC:  # consumers may read that one, and only the broker writes to it
            return (self._routes.get(topic) or self._add(topic)).queues
        return self._queues(topic, 1)

    def create(self, topic: str, queue_count: int) -> None:
        """Create *topic*, or add queues to it."""
        before = self.table.queue_count(topic)
        self._add(topic, queue_count)
        if 0 < before < queue_count:
            self._on_grow()

    def refresh(self, topic: str) -> None:
        """Read the route from the table again, after an administrator changed or deleted the topic."""
        with self._lock:
            self._routes.pop(topic, None)
        self._on_grow()

    def _add(self, topic: str, queue_count: int | None = None) -> _Route:
        check_send_topic(topic)
        if queue_count is None:
            queue_count = self.table.queue_count(topic)
        if queue_count == 0:
            self.unknown.check(topic, self.table.names, _REASON)
            queue_count = self._default_queue_count
        with self._lock:
            queues = self._queues(topic, queue_count)
            self._routes[topic] = route = _Route(queues, itertools.cycle(queues).__next__)
            return route

    def _queues(self, topic: str, queue_count: int) -> tuple[MessageQueue, ...]:
        count = self.table.create(topic, queue_count)
        return tuple(MessageQueue(topic, self._broker_name, queue_id) for queue_id in range(count))


class EntryWriter:
    """Writes tables some time after entries were added to them, once for all that were added in between.

    Args:
        interval_ms: Time from the first addition to the write.
        tables: The first of them.

    Attributes:
        service: Does it.
    """

    def __init__(self, clock: Clock, interval_ms: int, *tables: EntryTable[Any]) -> None:
        self.service = AfterChangeService("broker.tables", self.persist, clock, interval_ms)
        self._tables: list[EntryTable[Any]] = []
        for table in tables:
            self.add(table)

    def add(self, table: EntryTable[Any]) -> None:
        """Write this table, too."""
        self._tables.append(table)
        table.on_change(self.service.changed)

    def persist(self) -> None:
        """Write what was added.

        Raises:
            StoreError: A table cannot be written; the others are.
        """
        with ExitStack() as stack:
            for table in self._tables:
                stack.callback(table.persist)
