"""Statistics of queues and groups for administration tools, read from the store for each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import ConsumeStats, OffsetWrapper, QueueTimeSpan
from mqtemplate.remoting.protocol.bodies.route import TopicConfig, TopicOffset, TopicStatsTable
from mqtemplate.server.admin.traffic import Traffic
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.store.tables import ConsumerOffsets


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Reads offsets and store times. It reads a few messages of each queue, so it must not run in the I/O thread."""

    raw: RawReader
    offsets: ConsumerOffsets
    traffic: Traffic
    broker_name: str

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """Return a queue of this broker."""
        return MessageQueue(topic, self.broker_name, queue_id)

    def topic_stats(self, config: TopicConfig) -> TopicStatsTable:
        """Return the offsets of each queue of a topic."""
        table = {}
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            last_ms = self._store_time(queue, high - 1) if high > low else 0
            table[queue] = TopicOffset(min_offset=low, max_offset=high, last_update_timestamp=last_ms)
        return TopicStatsTable(offset_table=table, topic_put_tps=self.traffic.topic_rate(config.topic_name))

    def consume_stats(self, group: str, topics: Iterable[TopicConfig]) -> ConsumeStats:
        """Return the progress of *group* in each queue of *topics*."""
        table, rate = {}, 0.0
        for config in topics:
            rate += self.traffic.group_rate(group, config.topic_name)
            for queue_id in range(config.read_queue_nums):
                queue = self.queue(config.topic_name, queue_id)
                table[queue] = self._progress(group, queue)
        return ConsumeStats(offset_table=table, consume_tps=rate)

    def _progress(self, group: str, queue: MessageQueue) -> OffsetWrapper:
        consumed = self.offsets.offset(group, queue.topic, queue.queue_id) or 0
        return OffsetWrapper(
            broker_offset=self.raw.reader.max_offset(queue),
            consumer_offset=consumed,
            pull_offset=consumed,
            last_timestamp=self._store_time(queue, consumed - 1) if consumed > 0 else 0,
        )

    def time_spans(self, group: str, config: TopicConfig, now_ms: int) -> list[QueueTimeSpan]:
        """Return the store times of the first, the last and the consumed message of each queue.

        The delay time is the age (ms) of the next message that *group* has not consumed.
        """
        spans = []
        for queue_id in range(config.write_queue_nums):
            queue = self.queue(config.topic_name, queue_id)
            low, high = self.span(queue)
            consumed = self.offsets.offset(group, config.topic_name, queue_id)
            next_ms = self._store_time(queue, consumed) if consumed is not None and consumed < high else 0
            spans.append(
                QueueTimeSpan(
                    message_queue=queue,
                    min_time_stamp=self._store_time(queue, low) if high > low else 0,
                    max_time_stamp=self._store_time(queue, high - 1) if high > low else 0,
                    consume_time_stamp=self._store_time(queue, consumed - 1) if consumed else 0,
                    delay_time=max(now_ms - next_ms, 0) if next_ms else 0,
                )
            )
        return spans

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the first queue offset stored at *timestamp* (ms) or later, or the maximum offset.

        A negative timestamp stands for the maximum offset.
        """
        return self.raw.reader.max_offset(queue) if timestamp < 0 else self.raw.reader.search_offset(queue, timestamp)

    def span(self, queue: MessageQueue) -> tuple[int, int]:
        """Return the first queue offset, and the queue offset of the next message."""
        return self.raw.reader.min_offset(queue), self.raw.reader.max_offset(queue)

    def _store_time(self, queue: MessageQueue, queue_offset: int) -> int:
        """Return when (ms) a message was stored, or 0 if it was deleted or is corrupt."""
        return self.raw.store_time(queue, queue_offset) or 0
