"""Process queues: the messages that were fetched and are not finished, and the offset that may be committed.

`Repositioning` lets the queues of a running listener continue at other offsets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from mqtemplate.broker import Broker, Consumer
from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.topics import RETRY_TOPIC_PREFIX


class ProcessQueue:
    """Messages of one queue that were fetched and are not finished.

    - Every message before `commit_offset` is finished. A message that is finished before an earlier one is not
      committed until the earlier one is finished. After a crash it is redelivered rather than lost.
    - The queue is full from 1,000 messages or 64 MiB on, until half of that is finished.
    - Dropped means that the queue belongs to another member now, or that the listener continues at another position
      (superseded): no message of it is handled or committed any more.

    Source: RocketMQ ``client: ProcessQueue``, ``pullThresholdForQueue``.

    Args:
        on_resume: Called when the queue is no longer full.
    """

    MOST_MESSAGES = 1_000
    MOST_BYTES = 64 * 1024 * 1024

    def __init__(self, queue: MessageQueue, on_resume: Callable[[], None]) -> None:
        self.queue = queue
        self.is_full = False
        self.dropped = False
        self.superseded = False
        self._on_resume = on_resume
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # queue offset -> bytes, in the order of the offsets
        self._bytes = 0
        self._next = -1  # no message was fetched yet, so no offset may be committed
        self._committed: int | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, queue_offset: int) -> bool:
        """Return True for a message that was fetched and is not finished."""
        return queue_offset in self._sizes

    def add(self, message: MessageExt) -> bool:
        """Note a fetched message. Return False if it is unfinished already, since the queue was read again."""
        offset = message.queue_offset
        with self._lock:
            if offset in self._sizes:
                return False
            self._sizes[offset] = message.store_size
            self._bytes += message.store_size
            if offset < self._next:
                self._sizes = dict(sorted(self._sizes.items()))
            else:
                self._next = offset + 1
            if len(self._sizes) >= self.MOST_MESSAGES or self._bytes >= self.MOST_BYTES:
                self.is_full = True
        return True

    def finish(self, queue_offset: int) -> None:
        """Note that a message is handled or sent back."""
        with self._lock:
            self._bytes -= self._sizes.pop(queue_offset, 0)
            is_half_empty = len(self._sizes) * 2 <= self.MOST_MESSAGES and self._bytes * 2 <= self.MOST_BYTES
            resumes = self.is_full and is_half_empty
            if resumes:
                self.is_full = False
        if resumes:
            self._on_resume()

    def supersede(self) -> None:
        """Drop the queue, since the listener continues at another position. No commit is running afterwards."""
        with self._lock:
            self.dropped = self.superseded = True

    @property
    def commit_offset(self) -> int:
        """First queue offset that is not finished; -1 before the first message."""
        return next(iter(self._sizes), self._next)

    def commit(self, consumer: Consumer, position: int = 0) -> None:
        """Commit the finished messages, unless the queue was dropped.

        Args:
            position: Offset of the next fetch. It counts only while no message is unfinished: it is past the messages
                that the selector left out, and these are known from nothing else.
        """
        with self._lock:
            offset = self.commit_offset
            if not self._sizes and position > offset:
                self._next = offset = position
            if not self.dropped:
                self._commit(consumer, offset)

    def commit_dropped(self, consumer: Consumer) -> None:
        """Commit a dropped queue. It must still be locked for this member, so that no other one has read it."""
        with self._lock:
            if not self.superseded:
                self._commit(consumer, self.commit_offset)

    def _commit(self, consumer: Consumer, offset: int) -> None:
        if offset != self._committed and offset >= 0:
            consumer.commit(self.queue, offset)
            self._committed = offset


class ProcessQueues:
    """Process queues of one container."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._retry_topic = f"{RETRY_TOPIC_PREFIX}{consumer.spec.group}"
        self._queues: dict[MessageQueue, ProcessQueue] = {}
        self._by_message: dict[tuple[str, str, int, bool], ProcessQueue] = {}
        self._assignment: frozenset[MessageQueue] = frozenset()

    def of(self, message: MessageExt) -> ProcessQueue:
        """Return the process queue from which a message was fetched."""
        is_retry = message.properties.get(Property.RETRY_TOPIC) == message.topic
        key = (message.topic, message.broker_name, message.queue_id, is_retry)
        found = self._by_message.get(key)
        if found is None:
            # A redelivered message has its first topic, but its queue offset is one of the group's retry topic.
            topic = self._retry_topic if is_retry else message.topic
            found = self._by_message[key] = self._of_queue(MessageQueue(topic, message.broker_name, message.queue_id))
        return found

    def _of_queue(self, queue: MessageQueue) -> ProcessQueue:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = ProcessQueue(queue, self._consumer.wake)
        return found

    def full(self) -> frozenset[MessageQueue]:
        """Return the queues from which no more may be fetched now."""
        return frozenset([process.queue for process in self._queues.values() if process.is_full])

    @property
    def in_flight(self) -> int:
        """Number of messages that were fetched and are not finished."""
        return sum(map(len, self._queues.values()))

    def refresh(self) -> None:
        """Drop the queues that are no longer assigned to this member."""
        assignment = self._consumer.assignment()
        if assignment is self._assignment or assignment == self._assignment:
            return
        self._assignment = assignment
        for queue in [queue for queue in self._queues if queue not in assignment]:
            self._queues.pop(queue).dropped = True
        self._by_message = {key: process for key, process in self._by_message.items() if not process.dropped}

    def drop(self, queue: MessageQueue) -> None:
        """Drop a queue that another member may have by now, although it is assigned to this one."""
        if (process := self._remove(queue)) is not None:
            process.dropped = True

    def supersede(self, queue: MessageQueue) -> None:
        """Forget the messages of a queue, since the listener continues at another position of it."""
        if (process := self._remove(queue)) is not None:
            process.supersede()

    def _remove(self, queue: MessageQueue) -> ProcessQueue | None:
        process = self._queues.pop(queue, None)
        if process is not None:
            self._by_message = {key: other for key, other in self._by_message.items() if other is not process}
        return process

    def commit(self) -> None:
        """Commit the finished messages of every queue."""
        for process in list(self._queues.values()):
            process.commit(self._consumer)

    def commit_positions(self, without: frozenset[MessageQueue] = frozenset()) -> None:
        """Commit, and count messages that the selector left out as finished.

        Only the polling thread may call it, between two fetches: the read position must not be ahead of `add`.

        Args:
            without: Queues that were not fetched. Another member may have them, and its commits must stay.
        """
        for queue in self._assignment.intersection(self._consumer.assignment()) - without:
            self._of_queue(queue).commit(self._consumer, self._consumer.position(queue))


_log = get_logger("mqtemplate.listener")
_SECONDS_BELOW = 100_000_000_000  # a smaller number is epoch seconds, given by mistake: in milliseconds it is in 1973


class Repositioning:
    """New read positions for one membership of a container.

    Only the thread that fetches may call it, between two fetches. Messages of a queue that were fetched before and that
    no handler has are dropped. The new position is committed, so it holds after a restart too.

    Args:
        discard_dropped: Discards the messages of queues that were dropped; see `ConsumeService.discard_dropped`.
    """

    def __init__(
        self, broker: Broker, consumer: Consumer, queues: ProcessQueues, discard_dropped: Callable[[], None]
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._queues = queues
        self._discard_dropped = discard_dropped

    def to_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at these queue offsets; one that does not exist becomes the nearest that does.

        Raises:
            ListenerError: A queue is not assigned to this member.
        """
        assignment = self._consumer.assignment()
        for queue in offsets:
            if queue not in assignment:
                assigned = ", ".join(f"{each.topic}/{each.queue_id}" for each in sorted(assignment)) or "none"
                raise ListenerError(
                    f"queue {queue.topic}/{queue.queue_id} of broker {queue.broker_name} is not assigned to this "
                    f"listener; assigned are: {assigned}"
                )
        self._queues.refresh()
        for queue, queue_offset in offsets.items():
            low, high = self._broker.reader.min_offset(queue), self._broker.reader.max_offset(queue)
            self._move(queue, min(max(queue_offset, low), high))
        self._discard_dropped()

    def by_administrator(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at the offsets that an administrator has set at the broker."""
        for queue, queue_offset in offsets.items():
            self._move(queue, queue_offset)
        self._discard_dropped()

    def _move(self, queue: MessageQueue, target: int) -> None:
        self._queues.supersede(queue)
        self._consumer.seek(queue, target)
        self._consumer.commit(queue, target)
        group = self._consumer.spec.group
        _log.info("listener.repositioned", group=group, topic=queue.topic, queue=queue.queue_id, next_offset=target)

    def to_time(self, time_ms: int) -> None:
        """Continue with the first message of each queue that was stored at this time (epoch ms) or later.

        The retry topic is left as it is: its messages are retried when they are due.
        """
        self.to_offsets({queue: self._broker.reader.search_offset(queue, time_ms) for queue in self._without_retries()})

    def to_latest(self) -> None:
        """Continue after the last message of each queue. The retry topic is left as it is."""
        self.to_offsets({queue: self._broker.reader.max_offset(queue) for queue in self._without_retries()})

    def _without_retries(self) -> list[MessageQueue]:
        return sorted(queue for queue in self._consumer.assignment() if not queue.topic.startswith(RETRY_TOPIC_PREFIX))


def epoch_ms(time: datetime | int) -> int:
    """Return a time as epoch milliseconds.

    Raises:
        ListenerError: It is a datetime without a time zone, or epoch seconds.
    """
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise ListenerError(f"the time {time.isoformat()} has no time zone; give it one, such as tzinfo=UTC")
        return round((time - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000)
    if not 0 < time < _SECONDS_BELOW:
        return time
    raise ListenerError(f"the time {time} is epoch seconds; give epoch milliseconds ({time * 1_000}) or a datetime")
