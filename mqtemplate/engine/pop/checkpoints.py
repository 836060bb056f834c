"""Deliveries by POP of a RocketMQ broker that used the store directory before.

RocketMQ moves the committed offset of a group when it delivers messages. A checkpoint message says what was delivered,
acknowledgement messages what is done, and both come to the revive topic by a timer when the time of the delivery is
over. Without reading them, messages that were in flight when that broker stopped would be lost.

Source: ``PopReviveService``, ``PopCheckPoint``, ``AckMsg``, ``BatchAckMsg``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mqtemplate.engine.pop.deliveries import retry_draft
from mqtemplate.engine.pop.requests import RecordReader
from mqtemplate.errors import MessageError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import TAGS, find_property
from mqtemplate.services import wall_time
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets, TopicTable

_log = get_logger("mqtemplate.broker")

REVIVE_TOPIC_PREFIX = "rmq_sys_REVIVE_LOG_"
"""Prefix of the revive topic; the name of the cluster follows."""
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
"""Group whose committed offsets are the last messages of the revive topic that are done."""

_CHECKPOINT, _ACK, _BATCH_ACK = "ck", "ack", "bAck"
_ACKS_LATER_MS = 2_000
"""Acknowledgements come up to a second after their checkpoint."""
_QUIET_MS = 10_000
"""After a start the timers may be late: time without new messages in the revive topics, after which none is missing."""
_MAX_QUIET_MS = 60_000
_PAGE = 256


class _Delivered(NamedTuple):
    """Identity of a delivery: the fields that a checkpoint and its acknowledgements share."""

    topic: str
    group: str
    queue_id: int
    start_offset: int
    pop_ms: int


@dataclass(slots=True)
class _Checkpoint:
    """A delivery whose checkpoint came.

    Attributes:
        revive_offset: Queue offset of the checkpoint message.
        queue_offsets: The delivered messages that are not acknowledged.
        counts: False if the delivery is no attempt.
    """

    delivered: _Delivered
    invisible_ms: int
    revive_offset: int
    queue_offsets: list[int]
    counts: bool


@dataclass(slots=True)
class _ReviveQueue:
    """One queue of a revive topic.

    Attributes:
        next: Next queue offset to read.
        open: Checkpoints whose messages are not copied yet.
    """

    topic: str
    queue_id: int
    next: int
    open: dict[_Delivered, _Checkpoint] = field(default_factory=dict)


class RocketMQCheckpoints:
    """Copies messages to the retry topics that a RocketMQ broker delivered, and that were not acknowledged. A `Service`.

    Without revive topics it does nothing. A crash may lead to two copies of a message, but to no loss.

    Args:
        create_topic: Creates a topic with a number of queues, unless it exists.
    """

    name = "broker.pop_checkpoints"

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        create_topic: Callable[[str, int], None],
    ) -> None:
        self._store = store
        self._clock = store.clock
        self._topics = topics
        self._offsets = offsets
        self._create_topic = create_topic
        self._log = LimitedLog(_log, store.clock.steady_ms)
        self._reader = RecordReader(store, self._log)
        self._queues: dict[tuple[str, int], _ReviveQueue] = {}
        self._revive_topics: list[str] = []
        self._started_ms = self._arrived_ms = 0
        self._wake: Callable[[], None] = lambda: None
        self._revived = store.metrics.counter("pop.revived_of_rocketmq")

    def load(self) -> None:
        """Find the revive topics, after the tables were loaded."""
        self._started_ms = self._arrived_ms = self._clock.steady_ms()
        self._revive_topics = [name for name in self._topics.names() if name.startswith(REVIVE_TOPIC_PREFIX)]
        for topic in self._revive_topics:
            self._store.watch(topic, self._notified)

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _notified(self) -> None:
        self._wake()

    def step(self) -> int | None:
        for topic in self._revive_topics:
            for queue_id in self._store.queue_ids(topic):
                self._read(self._queue(topic, queue_id))
        quiet_ms = self._clock.steady_ms() - self._arrived_ms
        is_complete = quiet_ms >= _QUIET_MS or self._clock.steady_ms() - self._started_ms >= _MAX_QUIET_MS
        due: list[int] = []
        for queue in self._queues.values():
            for checkpoint in list(queue.open.values()):
                due_ms = checkpoint.delivered.pop_ms + checkpoint.invisible_ms + _ACKS_LATER_MS
                if is_complete and due_ms <= self._clock.now_ms():
                    self._revive(checkpoint)
                    del queue.open[checkpoint.delivered]
                else:
                    due.append(due_ms)
            self._commit(queue)
        if not due:
            return None
        complete_ms = min(self._arrived_ms + _QUIET_MS, self._started_ms + _MAX_QUIET_MS)
        return max(min(due), wall_time(self._clock, complete_ms) or 0)

    def _queue(self, topic: str, queue_id: int) -> _ReviveQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            done = self._offsets.offset(REVIVE_GROUP, topic, queue_id)
            first = self._store.consume_queue(topic, queue_id).min_offset
            start = first if done is None else max(done + 1, first)
            queue = self._queues[topic, queue_id] = _ReviveQueue(topic, queue_id, start)
        return queue

    def _read(self, queue: _ReviveQueue) -> None:
        for at, record in self._reader.records(queue.topic, queue.queue_id, queue.next, _PAGE, None):
            queue.next = at + 1
            self._arrived_ms = self._clock.steady_ms()
            if record is not None:
                try:
                    self._note(queue, record)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
                    self._log.warning("pop.checkpoint_unreadable", queue_offset=at, reason=str(exc))

    def _note(self, queue: _ReviveQueue, record: StoredRecord) -> None:
        """Note a checkpoint, or an acknowledgement of one."""
        tag, values = find_property(record.properties_bytes, TAGS), json.loads(record.body)
        if tag == _CHECKPOINT:
            checkpoint = _checkpoint(values, record.queue_offset)
            queue.open[checkpoint.delivered] = checkpoint
            return
        delivered = _Delivered(
            str(values["t"]), str(values["c"]), int(values["q"]), int(values["so"]), int(values["pt"])
        )
        acked = {_ACK: lambda: [int(values["ao"])], _BATCH_ACK: lambda: list(map(int, values["aol"]))}
        found = queue.open.get(delivered)
        if found is not None and tag in acked:
            done = set(acked[tag]())
            found.queue_offsets = [offset for offset in found.queue_offsets if offset not in done]

    def _revive(self, checkpoint: _Checkpoint) -> None:
        """Copy the messages of a checkpoint that are not acknowledged."""
        topic, group, queue_id, _, pop_ms = checkpoint.delivered
        if self._offsets.offset(group, topic, queue_id) is None or not self._topics.has(topic):
            return  # the group or the topic was deleted
        for queue_offset in checkpoint.queue_offsets:
            record = self._reader.record(topic, queue_id, queue_offset, None)
            if record is None:
                continue
            draft = retry_draft(record, topic, group, record.reconsume_times + checkpoint.counts, pop_ms)
            try:
                self._create_topic(draft.topic, 1)
                self._store.confirm_async(self._store.put(draft).end, (draft.topic,))
            except MessageError as exc:
                self._log.warning("pop.revive_failed", group=group, topic=topic, reason=str(exc))
                continue
            self._revived.add()

    def _commit(self, queue: _ReviveQueue) -> None:
        first_open = min((each.revive_offset for each in queue.open.values()), default=queue.next)
        if first_open > 0:
            self._offsets.commit(REVIVE_GROUP, queue.topic, queue.queue_id, first_open - 1)


def _checkpoint(values: Any, revive_offset: int) -> _Checkpoint:
    """Return the checkpoint in a message."""
    start, count, bits = int(values["so"]), int(values["n"]), int(values.get("bm", 0))
    differences = [int(each) for each in values.get("d") or range(count)]
    offsets = [start + each for index, each in enumerate(differences) if not bits >> index & 1]
    delivered = _Delivered(str(values["t"]), str(values["c"]), int(values["q"]), start, int(values["pt"]))
    return _Checkpoint(delivered, int(values["it"]), revive_offset, offsets, not values.get("sp"))
