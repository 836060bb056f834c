"""A scripted broker with delayed messages in RocketMQ's system topics."""

from __future__ import annotations

import time

from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import (
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicOffset,
    TopicStatsTable,
)
from mqtemplate.remoting.protocol.headers.admin import TopicNameRequestHeader
from mqtemplate.remoting.protocol.headers.group import OffsetResponseHeader, TopicQueueRequestHeader
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.brokers.remote.clients import message_ext
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.remoting.protocol.other_side import encode_message

CONFIG = "messageDelayLevel=1s 24h\ntimerPrecisionMs=1000\ntimerRollWindowSlot=172800\ntimerMaxDelaySec=259200\n"
DAY_MS = 86_400_000
SLOT_MS = (time.time_ns() // 1_000_000_000) * 1_000 + DAY_MS
"""A day later than the start of the tests: pending until their end."""


class SystemTopics(ScriptedBroker):
    """A broker with records in its system topics.

    Attributes:
        queues: Topic and queue id -> the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[tuple[str, int], list[MessageExt]] = {}
        self.topic(TIMER_TOPIC, queues=1)
        self.topic(SCHEDULE_TOPIC, queues=18)
        self.script(RequestCode.GET_BROKER_CONFIG, lambda request: request.response(body=CONFIG.encode()))
        self.script(RequestCode.GET_MAX_OFFSET, self._end)
        self.script(RequestCode.GET_TOPIC_STATS_INFO, self._stats)
        self.script(RequestCode.GET_ALL_TOPIC_CONFIG, self._topics)
        self.script(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, lambda request: _offset(request, 0))
        self.script(RequestCode.PULL_MESSAGE, self._pull)

    def store(self, topic: str, queue_id: int, *, stored_ms: int = 0, **properties: str) -> None:
        queue = self.queues.setdefault((topic, queue_id), [])
        at = len(queue)
        queue.append(
            message_ext(
                topic,
                properties={Property.REAL_TOPIC: "orders", **properties},
                queue_id=queue_id,
                queue_offset=at,
                physical_offset=at,
                store_timestamp=stored_ms or SLOT_MS - DAY_MS,
                store_size=0,
            )
        )

    def timer(self, msg_id: str, after_s: int = 0, **properties: str) -> None:
        slot_ms = str(SLOT_MS + after_s * 1_000)
        self.store(TIMER_TOPIC, 0, **{Property.UNIQ_KEY: msg_id, Property.TIMER_OUT_MS: slot_ms}, **properties)

    def delivered(self, topic: str, *, late_ms: int | None) -> None:
        """Store a timer that was delivered so late; None for a message that was not delayed."""
        stored_ms = SLOT_MS - DAY_MS
        due = {} if late_ms is None else {Property.TIMER_OUT_MS: str(stored_ms - late_ms)}
        self.store(topic, 0, stored_ms=stored_ms, **due)

    def _records(self, request: RemotingCommand) -> list[MessageExt]:
        header = request.header(TopicQueueRequestHeader)
        return self.queues.get((header.topic, header.queue_id), [])

    def _end(self, request: RemotingCommand) -> RemotingCommand:
        return _offset(request, len(self._records(request)))

    def _topics(self, request: RemotingCommand) -> RemotingCommand:
        table = {name: TopicConfig(topic_name=name) for name in self.routes}
        return request.response(body=TopicConfigSerializeWrapper(topic_config_table=table).encode())

    def _stats(self, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        if topic not in self.routes:
            return request.response(ResponseCode.TOPIC_NOT_EXIST, remark="no such topic")
        queue = MessageQueue(topic, self.name, 0)
        offsets = TopicOffset(min_offset=0, max_offset=len(self.queues.get((topic, 0), ())))
        return request.response(body=TopicStatsTable(offset_table={queue: offsets}).encode())

    def _pull(self, request: RemotingCommand) -> RemotingCommand:
        header = request.header(PullMessageRequestHeader)
        records = self.queues.get((header.topic, header.queue_id), [])
        found = records[header.queue_offset : header.queue_offset + 2]
        answer = PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=header.queue_offset + len(found),
            min_offset=0,
            max_offset=len(records),
        )
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        return request.response(code, header=answer, body=b"".join(map(encode_message, found)))


def _offset(request: RemotingCommand, offset: int) -> RemotingCommand:
    return request.response(header=OffsetResponseHeader(offset=offset))
