"""Topics that are made by their first message, and the queues that a message may go to."""

from __future__ import annotations

import random
from typing import Any

import structlog

from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.store import TopicTable
from mqtemplate.topics import AUTO_CREATE_TOPIC, NOT_SENDABLE_TOPICS, check_topic

_log = structlog.stdlib.get_logger("mqtemplate.server")


class TopicMaker:
    """Knows which queue a message may go to, and makes topics that are asked for.

    Raises:
        RefusedError: The topic is the broker's own, closed to writing, missing where it may not be made, or has no such
            queue.
        DestinationError: The topic's name is illegal.
        StoreError: The table of topics could not be written.
    """

    def __init__(self, table: TopicTable, settings: BrokerServerSettings) -> None:
        self._table = table
        self._auto_create = settings.auto_create_topic_enable

    def has(self, topic: str) -> bool:
        return self._table.config(topic) is not None

    def queue(self, topic: str, queue_id: int) -> int:
        """The queue that a message to *topic* goes to: the one asked for, or any where that is negative."""
        if topic in NOT_SENDABLE_TOPICS:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"topic {topic!r} belongs to the broker; send to the topic the message is for, with a delay option",
            )
        config = self._table.config(topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"there is no topic {topic!r}; create it first")
        if not config["perm"] & Perm.WRITE:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"topic {topic!r} is closed to writing")
        write_count = config.get("writeQueueNums", 0)
        if queue_id < 0:
            return random.randrange(max(1, write_count))
        if queue_id >= max(write_count, config.get("readQueueNums", 0)):
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic!r} has queues 0..{write_count - 1}, asked was queue {queue_id}; the route is an old one",
            )
        return queue_id

    def make_by_first_message(self, topic: str, default_topic: str, queue_nums: int) -> None:
        """Make *topic* after the pattern of *default_topic*. Source: ``createTopicInSendMessageMethod``.

        Args:
            queue_nums: How many queues the sender wishes; the pattern has the last word.
        """
        check_topic(topic)
        pattern = self._table.config(default_topic)
        if pattern is None or not pattern["perm"] & Perm.INHERIT or not self._may_make(default_topic):
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"there is no topic {topic!r}, and a message does not make it after {default_topic!r}; create it "
                "first, or set auto-create-topic-enable to true",
            )
        count = max(1, min(queue_nums, int(pattern.get("writeQueueNums", 1))))
        self._make(topic, count, int(pattern["perm"]) & ~Perm.INHERIT)

    def make(self, topic: str, queue_nums: int) -> None:
        """Make one of a group's own topics, for retries or dead letters, if it is missing."""
        check_topic(topic)
        self._make(topic, queue_nums, Perm.READ | Perm.WRITE)

    def _may_make(self, default_topic: str) -> bool:
        return self._auto_create or default_topic != AUTO_CREATE_TOPIC

    def _make(self, topic: str, queue_nums: int, perm: int) -> None:
        if self.has(topic):
            return
        changes: dict[str, Any] = {"readQueueNums": queue_nums, "writeQueueNums": queue_nums, "perm": perm}
        self._table.update(topic, changes)
        _log.info("server.topic_made", topic=topic, queues=queue_nums)
