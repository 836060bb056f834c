"""Which queues a topic has, and which of them is next."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.errors import DestinationError
from mqtemplate.message import MessageQueue
from mqtemplate.store import TopicTable
from mqtemplate.topics import TRANS_CHECK_MAX_TIME_TOPIC, check_send_topic


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The queues of a topic; ``next_queue`` gives them in turn, to any number of threads."""

    queues: tuple[MessageQueue, ...]
    next_queue: Callable[[], MessageQueue]

    def queue(self, queue: MessageQueue) -> MessageQueue:
        """Return *queue* if it is one of these, else raise `DestinationError`."""
        if queue not in self.queues:
            known = self.queues[0]
            raise DestinationError(
                f"{queue} is no queue of the topic; broker {known.broker_name!r} has queues "
                f"0..{len(self.queues) - 1} of {known.topic!r}"
            )
        return queue


class TopicRoutes:
    """The routes of one broker. A topic nobody knows is made when it is asked for, as upstream's brokers do.

    Args:
        on_grow: Called when a topic got more queues, so that they find readers.
    """

    def __init__(
        self, table: TopicTable, broker_name: str, default_queue_count: int, on_grow: Callable[[], None]
    ) -> None:
        self._table = table
        self._broker_name = broker_name
        self._default_queue_count = default_queue_count
        self._on_grow = on_grow
        self._routes: dict[str, TopicRoute] = {}
        self._lock = threading.Lock()

    def route(self, topic: str) -> TopicRoute:
        """The route of *topic*.

        Raises:
            DestinationError: The name is illegal, or the broker keeps it for itself. Source: ``TopicValidator``.
        """
        return self._routes.get(topic) or self._make(topic, self._table.queue_count(topic) or self._default_queue_count)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic, to send to or to read.

        Raises:
            DestinationError: The name is illegal, or the broker keeps the topic for itself.
        """
        if topic != TRANS_CHECK_MAX_TIME_TOPIC:
            return self.route(topic).queues
        count = self._table.create(topic, 1)
        return tuple(MessageQueue(topic, self._broker_name, queue_id) for queue_id in range(count))

    def create(self, topic: str, queue_count: int) -> None:
        """Make *topic*, or give it more queues."""
        before = self._table.queue_count(topic)
        self._make(topic, queue_count)
        if 0 < before < queue_count:
            self._on_grow()

    def refresh(self, topic: str) -> None:
        """Read the table again: somebody changed what it says of *topic*, or deleted it."""
        with self._lock:
            self._routes.pop(topic, None)
        self._on_grow()

    def _make(self, topic: str, queue_count: int) -> TopicRoute:
        check_send_topic(topic)
        with self._lock:
            count = self._table.create(topic, queue_count)
            queues = tuple(MessageQueue(topic, self._broker_name, queue_id) for queue_id in range(count))
            self._routes[topic] = route = TopicRoute(queues, itertools.cycle(queues).__next__)
            return route
