"""Topics that first messages create: one write of the table creates those of all messages that wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mqtemplate.errors import MQTemplateError
from mqtemplate.server.limits.creation import CreationLimit
from mqtemplate.server.limits.quota import Owner


class Topics(Protocol):
    """The methods of `TopicConfigs` that create topics."""

    def has(self, topic: str) -> bool: ...

    def settings_of_new(self, topic: str, default_topic: str, queue_nums: int) -> dict[str, int]: ...

    def create_all(self, changes: Mapping[str, Mapping[str, int]]) -> None: ...


@dataclass(slots=True, eq=False)
class FirstMessage:
    """A message to a topic that does not exist.

    Attributes:
        default_topic: Topic whose settings the new one gets.
        queue_nums: Number of queues that the producer requests. *default_topic* limits it.
        owner: Client that sends the message.
        is_done: True when the topic exists, or *error* says why it cannot be created.
    """

    topic: str
    default_topic: str
    queue_nums: int
    owner: Owner
    is_done: bool = False
    error: MQTemplateError | None = None


class FirstMessages:
    """First messages that wait for a thread which creates their topics. Thread-safe.

    Each write of the table takes the disk several milliseconds, in which it flushes no messages of others.

    Args:
        limit: Limits the number of topics that a client creates.
    """

    def __init__(self, topics: Topics, limit: CreationLimit) -> None:
        self._topics = topics
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[FirstMessage] = deque()

    def add(self, first: FirstMessage) -> None:
        """Let the next `create` create the topic of this message, too, unless that has happened."""
        if not first.is_done:
            self._waiting.append(first)

    def create(self, first: FirstMessage) -> None:
        """Create the topic of a message, and those of all messages that wait.

        Raises:
            RefusedError: The message may not create the topic, or its client has created too many.
            DestinationError: The topic name is illegal.
            StoreError: The topic table could not be written.
        """
        with self._lock:
            if not first.is_done:
                self._create([first, *(self._waiting.popleft() for _ in range(len(self._waiting)))])
        if first.error is not None:
            raise first.error

    def _create(self, waiting: list[FirstMessage]) -> None:
        found: dict[str, dict[str, int]] = {}
        for each in waiting:
            if not (each.is_done or each.topic in found or self._topics.has(each.topic)):
                self._check(each, found)
        try:
            self._topics.create_all(found)
        except MQTemplateError as exc:
            for each in waiting:
                if each.topic in found:
                    each.error = type(exc)(str(exc))  # several threads must not raise the same exception
        for each in waiting:
            each.is_done = True

    def _check(self, first: FirstMessage, found: dict[str, dict[str, int]]) -> None:
        try:
            settings = self._topics.settings_of_new(first.topic, first.default_topic, first.queue_nums)
            self._limit.take(first.owner)
        except MQTemplateError as exc:
            first.error = exc
        else:
            found[first.topic] = settings
