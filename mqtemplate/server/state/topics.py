"""Topics of a broker as RocketMQ's clients and tools see them, and the topics and queues that messages are sent to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Set
from logging import INFO
from typing import Any

from mqtemplate.engine.engine import Engine
from mqtemplate.errors import DestinationError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.route import DataVersionBody, TopicConfig
from mqtemplate.remoting.protocol.codes import Perm, ResponseCode
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.settings import ServerOptions
from mqtemplate.topics import (
    AUTO_CREATE_TOPIC,
    DLQ_TOPIC_PREFIX,
    HALF_TOPIC,
    NOT_SENDABLE_TOPICS,
    OFFSET_MOVED_TOPIC,
    OP_TOPIC,
    RETRY_TOPIC_PREFIX,
    SELF_TEST_TOPIC,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
    TRACE_TOPIC,
    check_topic,
    nearest_topic,
    reply_topic,
)

_log = get_logger("mqtemplate.server")

_TOPICS_WITH_ONE_QUEUE = (OFFSET_MOVED_TOPIC, HALF_TOPIC, OP_TOPIC, SELF_TEST_TOPIC, TRACE_TOPIC)

_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "message.type": ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "PRIORITY", "LITE"),
    "queue.type": ("SimpleCQ",),
    "cleanup.policy": ("DELETE",),
}
"""Attribute -> allowed values. Source: RocketMQ ``common: TopicAttributes``, less what this broker does not support."""
_MAX_QUEUES = 1_024


def queue_id_error(topic: str, queue_id: int, count: int) -> RefusedError:
    """Return the error for a queue that a topic does not have. The client has an old route, or a defect."""
    return RefusedError(
        ResponseCode.INVALID_PARAMETER,
        f"the queue ID of topic {topic!r} must be 0..{count - 1}, got {queue_id}; update the route",
    )


class TopicConfigs:
    """The `TopicTable` and the routes built from it: in the types of the protocol, and for messages.

    If a message may not create its topic, `AUTO_CREATE_TOPIC` is hidden, even if the store has it.

    Attributes:
        peer_log: Log of the topics that clients create.
        table: The table of the engine.
    """

    def __init__(self, engine: Engine, settings: ServerOptions) -> None:
        self.peer_log = LimitedLog(_log, engine.clock.steady_ms)
        self.table = engine.topics
        self._routes = engine.routes
        self._store = engine.store
        self.cluster_name = settings.cluster_name
        self.broker_name = engine.name
        self._auto_create = settings.auto_create_topic_enable and engine.settings.auto_create_topic_enable
        self._on_created: Callable[[Set[str]], None] = lambda topics: None
        # A name only: the broker forwards replies to the producer of the request and stores none.
        self._reply_topic = reply_topic(self.cluster_name)
        self._system_topics = SYSTEM_TOPICS | {self.cluster_name, self.broker_name, self._reply_topic}

    def create_system_topics(self) -> None:
        """Create the topics that clients expect of a broker, if they are missing.

        Raises:
            StoreError: The table could not be written.
        """
        expected = {config.topic_name: config.to_json() for config in self._expected_topics()}
        self.table.update_all({topic: settings for topic, settings in expected.items() if not self.table.has(topic)})

    def _expected_topics(self) -> list[TopicConfig]:
        """Return the topics that RocketMQ creates. Source: ``TopicConfigManager.init``."""
        usual = Perm.READ | Perm.WRITE
        configs = [_config(topic, 1, usual) for topic in (*_TOPICS_WITH_ONE_QUEUE, self._reply_topic)]
        configs.append(_config(self.cluster_name, 16, usual | Perm.INHERIT))
        configs.append(_config(self.broker_name, 1, usual | Perm.INHERIT))
        if self._auto_create:
            configs.append(_config(AUTO_CREATE_TOPIC, 8, usual | Perm.INHERIT))
        return configs

    def on_created(self, callback: Callable[[Set[str]], None]) -> None:
        """Call *callback* with the topics that a client creates at once, in the thread that creates them."""
        self._on_created = callback

    @property
    def auto_create(self) -> bool:
        """True if the first message to a topic creates it: both the server and its broker allow it."""
        return self._auto_create

    @property
    def version(self) -> DataVersionBody:
        """Number of changes of the table, for clients that compare tables."""
        return DataVersionBody(**vars(self.table.version))

    def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted(name for name in self.table.names() if self._is_visible(name))

    def all(self) -> dict[str, TopicConfig]:
        """Return all topics by name, sorted."""
        return {name: config for name in self.names() if (config := self.find(name)) is not None}

    def find(self, topic: str) -> TopicConfig | None:
        """Return the settings of *topic*, or None if it does not exist."""
        config = self.table.config(topic) if self._is_visible(topic) else None
        return None if config is None else _read(topic, config)

    def get(self, topic: str) -> TopicConfig:
        """Return the settings of *topic*.

        Raises:
            RefusedError: It does not exist.
        """
        config = self.find(topic)
        if config is None:
            of_group = topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
            hint = "it is created when its group needs it" if of_group else "create it with mqadmin updateTopic"
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; {hint}")
        return config

    def is_system(self, topic: str) -> bool:
        """Return True if *topic* belongs to the broker."""
        return topic in self._system_topics or topic.startswith(SYSTEM_TOPIC_PREFIX)

    def put(self, config: TopicConfig) -> None:
        """Create a topic, or change its settings.

        Raises:
            DestinationError: The name is illegal or a system topic's, or a number is out of range.
            StoreError: The table could not be written; it is as before.
        """
        topic = check_topic(config.topic_name)
        self._check_no_system_topic(topic, "changed")
        for name, count in (("readQueueNums", config.read_queue_nums), ("writeQueueNums", config.write_queue_nums)):
            if not 1 <= count <= _MAX_QUEUES:
                raise DestinationError(f"{name} of topic {topic!r} must be 1..{_MAX_QUEUES}, got {count}")
        if not 0 <= config.perm <= (Perm.READ | Perm.WRITE | Perm.INHERIT):
            raise DestinationError(
                f"perm of topic {topic!r} must be a sum of 4 (read), 2 (write) and 1 (inherit), got {config.perm}"
            )
        is_new = not self.table.has(topic)
        self.table.update(topic, config.to_json())
        self._routes.refresh(topic)
        if is_new:
            self._on_created({topic})

    def delete(self, topic: str) -> bool:
        """Delete *topic*. Return False if it does not exist.

        Raises:
            DestinationError: It is a system topic.
            StoreError: The table could not be written; it is as before.
        """
        self._check_no_system_topic(topic, "deleted")
        deleted = self.table.delete(topic)
        self._routes.refresh(topic)
        return deleted

    # --- messages ------------------------------------------------------------------------------

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Return True if neither the topic nor the file of the queue has to be written. A disk may take 100 ms.

        Args:
            queue_id: If negative, any queue.
        """
        return self.table.file.is_written(topic) and (queue_id < 0 or self._store.has_queue(topic, queue_id))

    def queue_count(self, topic: str) -> int:
        """Return the number of queues that *topic* has for producers or for consumers; 0 if it does not exist."""
        config = self.table.config(topic) or {}
        return max(int(config.get(name, 0)) for name in ("readQueueNums", "writeQueueNums"))

    def queue(self, topic: str, queue_id: int) -> int:
        """Return the ID of the queue for a message to *topic*: *queue_id*, or a random queue if it is negative.

        Raises:
            RefusedError: The topic is a system topic, is not writable, is missing, or has no such queue.
        """
        if topic in NOT_SENDABLE_TOPICS:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"topic {topic!r} is a system topic; send to the real topic of the message, with a delay option",
            )
        config = self.table.config(topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; create it first")
        if not config["perm"] & Perm.WRITE:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"topic {topic!r} is not writable (perm)")
        write_count = config.get("writeQueueNums", 0)
        if queue_id < 0:
            return random.randrange(max(1, write_count))
        count = max(write_count, config.get("readQueueNums", 0))
        if queue_id >= count:
            raise queue_id_error(topic, queue_id, count)
        return queue_id

    def check_readable(self, topic: str, queue_id: int) -> None:
        """Check that a queue exists and can be read.

        Raises:
            RefusedError: The topic is missing or not readable, or it has no such queue.
        """
        config = self.table.config(topic)
        if config is None:
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; its first message creates it"
            )
        if not config["perm"] & Perm.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"topic {topic!r} is not readable (perm)")
        count = config.get("readQueueNums", 0)
        if not 0 <= queue_id < count:
            raise queue_id_error(topic, queue_id, count)

    def create_by_first_message(self, topic: str, default_topic: str, queue_nums: int) -> None:
        """Create *topic* with the settings of *default_topic*. RocketMQ: ``createTopicInSendMessageMethod``.

        Args:
            queue_nums: Number of queues that the producer requests. *default_topic* limits it.

        Raises:
            RefusedError: A message may not create the topic.
            DestinationError: The topic name is illegal.
            StoreError: The topic table could not be written.
        """
        template = self.check_first_message(topic, default_topic)
        count = max(1, min(queue_nums, int(template.get("writeQueueNums", 1))))
        self._create(topic, count, int(template["perm"]) & ~Perm.INHERIT)

    def check_first_message(self, topic: str, default_topic: str) -> dict[str, Any]:
        """Check that a message may create *topic*, and return the settings of *default_topic*.

        Raises:
            RefusedError, DestinationError: As `create_by_first_message`.
        """
        check_topic(topic)
        template = self.table.config(default_topic)
        may_create = self._auto_create or default_topic != AUTO_CREATE_TOPIC
        if template is None or not template["perm"] & Perm.INHERIT or not may_create:
            nearest = nearest_topic(topic, self.table.names())
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {topic!r} does not exist, and a message may not create it like {default_topic!r}; "
                f"{f'did you mean {nearest!r}? Else create' if nearest else 'create'} it first, or set "
                "auto-create-topic-enable to true",
            )
        return template

    def create_group_topic(self, topic: str, queue_nums: int) -> None:
        """Create the retry topic or the dead letter topic of a group, if it is missing, for a message to it.

        A crash may lose a topic of `create_retry_topics`, but none that has messages: so it is in the file after this.

        Raises:
            DestinationError, StoreError: As `create_by_first_message`.
        """
        check_topic(topic)
        self._create(topic, queue_nums, Perm.READ | Perm.WRITE)

    def create_retry_topics(self, groups: Iterable[SubscriptionGroupConfig]) -> None:
        """Create the missing retry topics of *groups*. They are written soon; see `create_group_topic`.

        Raises:
            DestinationError: A name is too long.
        """
        changes = {}
        for group in groups:
            topic, count = RETRY_TOPIC_PREFIX + group.group_name, group.retry_queue_nums
            if count > 0 and not self.table.has(topic):
                changes[check_topic(topic)] = _settings(count, Perm.READ | Perm.WRITE)
        if changes:
            self.table.add_later(changes)
            self._report_created(changes)

    def _create(self, topic: str, queue_nums: int, perm: int) -> None:
        if not self.table.has(topic):
            changes = {topic: _settings(queue_nums, perm)}
            self.table.update_all(changes)
            self._report_created(changes)
        elif not self.table.file.is_written(topic):
            self.table.file.persist()

    def _report_created(self, changes: dict[str, dict[str, int]]) -> None:
        topic, settings = next(iter(changes.items()))
        if len(changes) > 1:
            self.peer_log.log(INFO, "server.topics_created", count=len(changes), first=topic)
        else:
            self.peer_log.log(INFO, "server.topic_created", topic=topic, queues=settings["writeQueueNums"])
        self._on_created(changes.keys())

    # --- checks --------------------------------------------------------------------------------

    def _check_no_system_topic(self, topic: str, done: str) -> None:
        if self.is_system(topic):
            raise DestinationError(f"topic {topic!r} is a system topic and cannot be {done}")

    def _is_visible(self, topic: str) -> bool:
        return self._auto_create or topic != AUTO_CREATE_TOPIC


def apply_attributes(attributes: Mapping[str, str], changes: str | None) -> dict[str, str]:
    """Return *attributes* after *changes*: ``+name=value`` and ``-name``, separated by commas.

    Raises:
        DestinationError: A change has another form, or an unknown attribute or value.
    """
    result = dict(attributes)
    for change in filter(None, map(str.strip, (changes or "").split(","))):
        sign, (name, equals, value) = change[0], change[1:].partition("=")
        allowed = _ATTRIBUTES.get(name)
        if allowed is None:
            raise DestinationError(f"topic attribute {change!r}: allowed are {', '.join(_ATTRIBUTES)}, as +name=value")
        if sign == "-" and not equals:
            result.pop(name, None)
        elif sign == "+" and value in allowed:
            result[name] = value
        else:
            raise DestinationError(f"topic attribute {change!r}: write +{name}=… with one of {', '.join(allowed)}")
    return result


def _config(topic: str, queue_count: int, perm: int) -> TopicConfig:
    return TopicConfig(topic_name=topic, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=perm)


def _settings(queue_nums: int, perm: int) -> dict[str, int]:
    return {"readQueueNums": queue_nums, "writeQueueNums": queue_nums, "perm": perm}


def _read(topic: str, config: Mapping[str, Any]) -> TopicConfig:
    write_count = config.get("writeQueueNums", 0)
    return TopicConfig.from_json(
        {"readQueueNums": write_count, **config, "writeQueueNums": write_count, "topicName": topic}
    )
