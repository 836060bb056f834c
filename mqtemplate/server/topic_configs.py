"""The topics of a broker as RocketMQ's clients and tools see them: typed, with those that are the broker's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mqtemplate.brokers.embedded.routing import TopicRoutes
from mqtemplate.errors import DestinationError
from mqtemplate.remoting.protocol.bodies.route import DataVersion, TopicConfig
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.store import TopicTable
from mqtemplate.topics import (
    AUTO_CREATE_TOPIC,
    HALF_TOPIC,
    OFFSET_MOVED_TOPIC,
    OP_TOPIC,
    SELF_TEST_TOPIC,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
    TRACE_TOPIC,
    check_topic,
)

_ONE_QUEUE_EACH = (OFFSET_MOVED_TOPIC, HALF_TOPIC, OP_TOPIC, SELF_TEST_TOPIC, TRACE_TOPIC)

_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "message.type": ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"),
    "queue.type": ("SimpleCQ",),
    "cleanup.policy": ("DELETE",),
}
_MOST_QUEUES = 1_024


def reply_topic(cluster_name: str) -> str:
    """Where replies to requests go: a name only, since the broker hands them to whoever asked."""
    return f"{cluster_name}_REPLY_TOPIC"


def system_configs(cluster_name: str, broker_name: str, *, auto_create: bool) -> list[TopicConfig]:
    """The topics that clients expect of a broker. Source: ``TopicConfigManager.init``."""
    usual = Perm.READ | Perm.WRITE
    configs = [_config(topic, 1, usual) for topic in (*_ONE_QUEUE_EACH, reply_topic(cluster_name))]
    configs.append(_config(cluster_name, 16, usual | Perm.INHERIT))
    configs.append(_config(broker_name, 1, usual | Perm.INHERIT))
    if auto_create:
        configs.append(_config(AUTO_CREATE_TOPIC, 8, usual | Perm.INHERIT))
    return configs


def _config(topic: str, queue_count: int, perm: int) -> TopicConfig:
    return TopicConfig(topic_name=topic, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=perm)


class TopicConfigs:
    """`TopicTable` and the routes made of it, in the protocol's words.

    Args:
        auto_create: Whether a first message may make its topic. If not, `AUTO_CREATE_TOPIC` is not to be seen,
            even where it stands in the folder.
    """

    def __init__(
        self, table: TopicTable, routes: TopicRoutes, cluster_name: str, broker_name: str, *, auto_create: bool = True
    ) -> None:
        self._table = table
        self._routes = routes
        self.cluster_name = cluster_name
        self.broker_name = broker_name
        self._auto_create = auto_create
        self._own = SYSTEM_TOPICS | {cluster_name, broker_name, reply_topic(cluster_name)}

    def make_system_topics(self) -> None:
        """Add what clients expect and the folder does not have yet.

        Raises:
            StoreError: The table could not be written.
        """
        for config in system_configs(self.cluster_name, self.broker_name, auto_create=self._auto_create):
            if self._table.config(config.topic_name) is None:
                self._table.update(config.topic_name, _written(config))

    @property
    def version(self) -> DataVersion:
        """Counts the changes of the table."""
        found = self._table.version
        return DataVersion(counter=found.counter, state_version=found.state_version, timestamp=found.timestamp)

    def names(self) -> list[str]:
        """All topics, sorted."""
        return sorted(name for name in self._table.names() if self._is_seen(name))

    def all(self) -> dict[str, TopicConfig]:
        """All topics by name, sorted."""
        return {name: config for name in self.names() if (config := self.find(name)) is not None}

    def find(self, topic: str) -> TopicConfig | None:
        """What *topic* is on this broker; None if there is no such topic."""
        config = self._table.config(topic) if self._is_seen(topic) else None
        return None if config is None else _read(topic, config)

    def is_system(self, topic: str) -> bool:
        """Whether the broker keeps *topic* for itself."""
        return topic in self._own or topic.startswith(SYSTEM_TOPIC_PREFIX)

    def put(self, config: TopicConfig) -> None:
        """Make a topic, or change it as an administrator says.

        Raises:
            DestinationError: The name is illegal or the broker's own, or the numbers cannot be.
            StoreError: The table could not be written; it is as before.
        """
        topic = check_topic(config.topic_name)
        if self.is_system(topic):
            raise DestinationError(f"topic {topic!r} belongs to the broker itself and cannot be changed")
        for name, count in (("readQueueNums", config.read_queue_nums), ("writeQueueNums", config.write_queue_nums)):
            if not 1 <= count <= _MOST_QUEUES:
                raise DestinationError(f"{name} of topic {topic!r} must be 1..{_MOST_QUEUES}, got {count}")
        if not 0 <= config.perm <= (Perm.READ | Perm.WRITE | Perm.INHERIT):
            raise DestinationError(
                f"perm of topic {topic!r} must be made of 4 (read), 2 (write) and 1 (inherit), got {config.perm}"
            )
        self._table.update(topic, _written(config))
        self._routes.refresh(topic)

    def delete(self, topic: str) -> bool:
        """Forget *topic*; False if there is none.

        Raises:
            DestinationError: It is the broker's own.
            StoreError: The table could not be written; it is as before.
        """
        if self.is_system(topic):
            raise DestinationError(f"topic {topic!r} belongs to the broker itself and cannot be deleted")
        deleted = self._table.delete(topic)
        self._routes.refresh(topic)
        return deleted

    def _is_seen(self, topic: str) -> bool:
        return self._auto_create or topic != AUTO_CREATE_TOPIC


def apply_attributes(attributes: Mapping[str, str], changes: str | None) -> dict[str, str]:
    """*attributes* after *changes*: ``+name=value`` and ``-name``, separated by commas.

    Raises:
        DestinationError: A change cannot be read, or names an attribute or value that there is not.
    """
    result = dict(attributes)
    for change in (changes or "").split(","):
        sign, (name, equals, value) = change.strip()[:1], change.strip()[1:].partition("=")
        if not change.strip():
            continue
        allowed = _ATTRIBUTES.get(name)
        if allowed is None:
            raise DestinationError(f"topic attribute {change!r}: known are {', '.join(_ATTRIBUTES)}, as +name=value")
        if sign == "-" and not equals:
            result.pop(name, None)
        elif sign == "+" and value in allowed:
            result[name] = value
        else:
            raise DestinationError(f"topic attribute {change!r}: write +{name}=… with one of {', '.join(allowed)}")
    return result


def _read(topic: str, config: Mapping[str, Any]) -> TopicConfig:
    write_count = int(config.get("writeQueueNums", 0))
    return TopicConfig(
        topic_name=topic,
        read_queue_nums=int(config.get("readQueueNums", write_count)),
        write_queue_nums=write_count,
        perm=int(config.get("perm", Perm.READ | Perm.WRITE)),
        topic_filter_type=str(config.get("topicFilterType") or "SINGLE_TAG"),
        topic_sys_flag=int(config.get("topicSysFlag") or 0),
        order=bool(config.get("order", False)),
        attributes={str(name): str(value) for name, value in (config.get("attributes") or {}).items()},
    )


def _written(config: TopicConfig) -> dict[str, Any]:
    return {
        "attributes": dict(config.attributes),
        "order": config.order,
        "perm": config.perm,
        "readQueueNums": config.read_queue_nums,
        "topicFilterType": config.topic_filter_type,
        "topicName": config.topic_name,
        "topicSysFlag": config.topic_sys_flag,
        "writeQueueNums": config.write_queue_nums,
    }
