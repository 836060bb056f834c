"""Namespaces of the older form: a prefix that keeps the topics and groups of several users of one cluster apart.

Source: RocketMQ ``remoting: NamespaceUtil``.
"""

from __future__ import annotations

from mqtemplate.message import MessageQueue
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS

_SYSTEM_GROUPS = frozenset(
    {
        "DEFAULT_CONSUMER",
        "DEFAULT_PRODUCER",
        "TOOLS_CONSUMER",
        "SCHEDULE_CONSUMER",
        "FILTERSRV_CONSUMER",
        "__MONITOR_CONSUMER",
        "CLIENT_INNER_PRODUCER",
        "SELF_TEST_P_GROUP",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PULL",
    }
)
_SYSTEM_PREFIXES = (SYSTEM_TOPIC_PREFIX, "CID_RMQ_SYS_")
_KINDS = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


def is_system(name: str) -> bool:
    """Whether a topic or group is RocketMQ's own."""
    return name in SYSTEM_TOPICS or name in _SYSTEM_GROUPS or name.startswith(_SYSTEM_PREFIXES)


class Namespace:
    """Puts the prefix on names as they go out, and takes it off as they come in, behind ``%RETRY%`` and ``%DLQ%``.

    Args:
        name: Empty: names travel as they are.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}%" if name else ""

    def wrap(self, name: str) -> str:
        """The name of a topic or group as the cluster knows it."""
        if not self._prefix or not name or is_system(name):
            return name
        kind, rest = _split(name)
        return name if rest.startswith(self._prefix) else f"{kind}{self._prefix}{rest}"

    def unwrap(self, name: str) -> str:
        """The name as the application knows it; one of another namespace stays as it is."""
        if not self._prefix:
            return name
        kind, rest = _split(name)
        return kind + rest.removeprefix(self._prefix)

    def wrap_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(self.wrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue

    def unwrap_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id) if self._prefix else queue


def _split(name: str) -> tuple[str, str]:
    for kind in _KINDS:
        if name.startswith(kind):
            return kind, name[len(kind) :]
    return "", name
