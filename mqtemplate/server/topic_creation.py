"""Topics and queues that a message may be sent to, and the creation of topics by their first message."""

from __future__ import annotations

import random
from dataclasses import dataclass

import structlog

from mqtemplate.remoting.protocol.codes import Perm, ResponseCode
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.store.topics import TopicTable
from mqtemplate.topics import AUTO_CREATE_TOPIC, NOT_SENDABLE_TOPICS, check_topic

_log = structlog.stdlib.get_logger("mqtemplate.server")


def queue_id_error(topic: str, queue_id: int, count: int) -> RefusedError:
    """Return the error for a queue that a topic does not have. The client has an old route, or a defect."""
    return RefusedError(
        ResponseCode.INVALID_PARAMETER,
        f"the queue ID of topic {topic!r} must be 0..{count - 1}, got {queue_id}; update the route",
    )


@dataclass(frozen=True, slots=True)
class TopicCreation:
    """Checks the queue that a message is sent to, and creates missing topics.

    Raises:
        RefusedError: The topic is a system topic, is not writable, is missing and may not be created, or has no such
            queue.
        DestinationError: The topic name is illegal.
        StoreError: The topic table could not be written.
    """

    table: TopicTable
    settings: BrokerServerSettings

    def has(self, topic: str) -> bool:
        """Return True if *topic* exists."""
        return self.table.config(topic) is not None

    def queue(self, topic: str, queue_id: int) -> int:
        """Return the ID of the queue for a message to *topic*: *queue_id*, or a random queue if it is negative."""
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

    def create_by_first_message(self, topic: str, default_topic: str, queue_nums: int) -> None:
        """Create *topic* with the settings of *default_topic*. RocketMQ: ``createTopicInSendMessageMethod``.

        Args:
            queue_nums: Number of queues that the producer requests. *default_topic* limits it.
        """
        check_topic(topic)
        template = self.table.config(default_topic)
        may_create = self.settings.auto_create_topic_enable or default_topic != AUTO_CREATE_TOPIC
        if template is None or not template["perm"] & Perm.INHERIT or not may_create:
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {topic!r} does not exist, and a message may not create it like {default_topic!r}; create it "
                "first, or set auto-create-topic-enable to true",
            )
        count = max(1, min(queue_nums, int(template.get("writeQueueNums", 1))))
        self._create(topic, count, int(template["perm"]) & ~Perm.INHERIT)

    def create_group_topic(self, topic: str, queue_nums: int) -> None:
        """Create the retry topic or the dead letter topic of a group, if it is missing."""
        check_topic(topic)
        self._create(topic, queue_nums, Perm.READ | Perm.WRITE)

    def _create(self, topic: str, queue_nums: int, perm: int) -> None:
        if not self.has(topic):
            self.table.update(topic, {"readQueueNums": queue_nums, "writeQueueNums": queue_nums, "perm": perm})
            _log.info("server.topic_created", topic=topic, queues=queue_nums)
