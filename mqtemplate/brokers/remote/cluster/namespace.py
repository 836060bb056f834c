"""Namespaces in RocketMQ's older form: a prefix that separates the topics and groups of several users of a cluster.

Source: RocketMQ ``remoting: NamespaceUtil``.
"""

from __future__ import annotations

from typing import TypedDict

from mqtemplate.message import MessageQueue
from mqtemplate.topics import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
    is_system_group,
)

_KIND_PREFIXES = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


class QueueFields(TypedDict):
    """Fields that name a queue in the header of a request."""

    topic: str
    queue_id: int
    broker_name: str


class Namespace:
    """Translation of topic and group names between the application and the wire.

    On the wire, the namespace stands before the name and after ``%RETRY%`` or ``%DLQ%``. RocketMQ's own topics and
    groups have no namespace.

    Args:
        name: The namespace; empty leaves all names as they are.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}%" if name else ""

    def wrap(self, name: str) -> str:
        """Return the name of a topic or group on the wire."""
        if not self._prefix or not name or _is_system(name):
            return name
        kind, rest = _split(name)
        return name if rest.startswith(self._prefix) else f"{kind}{self._prefix}{rest}"

    def unwrap(self, name: str) -> str:
        """Return the application's name of a topic or group; names of other namespaces stay as they are."""
        if not self._prefix:
            return name
        kind, rest = _split(name)
        return kind + rest.removeprefix(self._prefix)

    def queue_fields(self, queue: MessageQueue) -> QueueFields:
        """Return the header fields of *queue*, with the name of its topic on the wire."""
        return {"topic": self.wrap(queue.topic), "queue_id": queue.queue_id, "broker_name": queue.broker_name}

    def wrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return *queue* with the name of its topic on the wire."""
        return MessageQueue(self.wrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue

    def unwrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return *queue* with the application's name of its topic."""
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue


def _is_system(name: str) -> bool:
    return name in SYSTEM_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX) or is_system_group(name)


def _split(name: str) -> tuple[str, str]:
    for kind in _KIND_PREFIXES:
        if name.startswith(kind):
            return kind, name[len(kind) :]
    return "", name
