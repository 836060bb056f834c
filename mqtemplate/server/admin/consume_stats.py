"""How full the queues are and how far the groups have come: figures for tools, read from the store when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mqtemplate.brokers.embedded.queue_reader import QueueReader
from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import ConsumeStats, OffsetWrapper, QueueTimeSpan
from mqtemplate.remoting.protocol.bodies.route import TopicConfig, TopicOffset, TopicStatsTable
from mqtemplate.server.topic_configs import TopicConfigs
from mqtemplate.store import ConsumerOffsets, MessageStore


class QueueFigures:
    """Reads offsets and times. It reads a message or two for each queue, so not in the I/O thread.

    Args:
        topic_rate: Messages per second that are stored in a topic.
        group_rate: Messages per second that a group gets of a topic.
    """

    def __init__(
        self,
        store: MessageStore,
        reader: QueueReader,
        topics: TopicConfigs,
        offsets: ConsumerOffsets,
        topic_rate: Callable[[str], float] = lambda topic: 0.0,
        group_rate: Callable[[str, str], float] = lambda group, topic: 0.0,
    ) -> None:
        self._store = store
        self._reader = reader
        self._topics = topics
        self._offsets = offsets
        self._topic_rate = topic_rate
        self._group_rate = group_rate

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._topics.broker_name, queue_id)

    def store_time(self, queue: MessageQueue, queue_offset: int) -> int:
        """When (ms) the message at *queue_offset* was stored; 0 if it is not there any more, or cannot be read."""
        try:
            unit = self._store.consume_queue(queue.topic, queue.queue_id).unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size).store_timestamp
        except (CorruptRecordError, IndexError):
            return 0

    def topic_stats(self, config: TopicConfig) -> TopicStatsTable:
        """The ends of each queue of a topic."""
        table = {}
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            last_ms = self.store_time(queue, high - 1) if high > low else 0
            table[queue] = TopicOffset(min_offset=low, max_offset=high, last_update_timestamp=last_ms)
        return TopicStatsTable(offset_table=table, topic_put_tps=self._topic_rate(config.topic_name))

    def consume_stats(self, group: str, topics: Iterable[str]) -> ConsumeStats:
        """How far *group* is in each queue of *topics*; those that there are not are passed over."""
        table, rate = {}, 0.0
        for topic in topics:
            config = self._topics.find(topic)
            if config is None:
                continue
            rate += self._group_rate(group, topic)
            for queue_id in range(config.read_queue_nums):
                queue = self.queue(topic, queue_id)
                table[queue] = self._progress(group, queue)
        return ConsumeStats(offset_table=table, consume_tps=rate)

    def _progress(self, group: str, queue: MessageQueue) -> OffsetWrapper:
        consumed = self._offsets.offset(group, queue.topic, queue.queue_id) or 0
        return OffsetWrapper(
            broker_offset=self._reader.max_offset(queue),
            consumer_offset=consumed,
            pull_offset=consumed,
            last_timestamp=self.store_time(queue, consumed - 1) if consumed > 0 else 0,
        )

    def time_spans(self, group: str, config: TopicConfig, now_ms: int) -> list[QueueTimeSpan]:
        """From when to when the messages of each queue are, and how long (ms) the next one has waited for *group*."""
        spans = []
        for queue_id in range(config.write_queue_nums):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            consumed = self._offsets.offset(group, config.topic_name, queue_id)
            waiting_ms = self.store_time(queue, consumed) if consumed is not None and consumed < high else 0
            spans.append(
                QueueTimeSpan(
                    message_queue=queue,
                    min_time_stamp=self.store_time(queue, low) if high > low else 0,
                    max_time_stamp=self.store_time(queue, high - 1) if high > low else 0,
                    consume_time_stamp=self.store_time(queue, consumed - 1) if consumed else 0,
                    delay_time=max(now_ms - waiting_ms, 0) if waiting_ms else 0,
                )
            )
        return spans

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """The first queue offset stored at *timestamp* (ms) or later; the end for -1, and if none is."""
        return self._reader.max_offset(queue) if timestamp < 0 else self._reader.search_offset(queue, timestamp)

    def span(self, queue: MessageQueue) -> tuple[int, int]:
        """The first queue offset that is there, and the one that the next message gets."""
        return self._reader.min_offset(queue), self._reader.max_offset(queue)
