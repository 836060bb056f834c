"""Which messages of a queue are under way, and how far the queue may be committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from mqtemplate.broker import Consumer
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.topics import RETRY_TOPIC_PREFIX


class ProcessQueue:
    """The messages of one queue that were fetched and are not finished.

    - Everything before `floor` is finished, so `floor` may be committed: what is finished out of turn waits for its
      predecessors, and comes again after a crash rather than being lost.
    - It is full from 1,000 messages or 64 MiB on, until half of that is finished.
    - Dropped means that the queue now belongs to another member: nothing more is begun or committed.

    Source: RocketMQ ``client: ProcessQueue``, ``pullThresholdForQueue``.
    """

    MOST_MESSAGES = 1_000
    MOST_BYTES = 64 * 1024 * 1024

    def __init__(self, queue: MessageQueue, on_room: Callable[[], None]) -> None:
        self.queue = queue
        self.is_full = False
        self.dropped = False
        self._on_room = on_room
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # queue offset -> bytes, in the order of the offsets
        self._bytes = 0
        self._next = -1  # nothing is known of the queue yet, so nothing may be committed
        self._committed: int | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, message: MessageExt) -> bool:
        """Note a message that was fetched; False if it is under way already, as after a queue was read again."""
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
        """Note a message as done, or as given back."""
        with self._lock:
            self._bytes -= self._sizes.pop(queue_offset, 0)
            has_room = (
                self.is_full and len(self._sizes) * 2 <= self.MOST_MESSAGES and self._bytes * 2 <= self.MOST_BYTES
            )
            if has_room:
                self.is_full = False
        if has_room:
            self._on_room()

    @property
    def floor(self) -> int:
        """The first queue offset that is not finished; -1 while nothing is known of the queue."""
        with self._lock:
            return self._floor()

    def _floor(self) -> int:
        return next(iter(self._sizes), self._next)

    def commit(self, consumer: Consumer, position: int = 0) -> None:
        """Tell the broker how far the queue is done.

        Args:
            position: Where the next fetch begins. It counts only while nothing is under way: it lies behind messages
                that the selector left out, of which nobody else tells.
        """
        with self._lock:
            floor = self._floor()
            if not self._sizes and position > floor:
                self._next = floor = position
            if not self.dropped:
                self._commit(consumer, floor)

    def commit_last(self, consumer: Consumer) -> None:
        """Commit a queue that was taken away but is still locked for this member, so nobody else was at it."""
        with self._lock:
            self._commit(consumer, self._floor())

    def _commit(self, consumer: Consumer, floor: int) -> None:
        if floor != self._committed and floor >= 0:
            consumer.commit(self.queue, floor)
            self._committed = floor


class ProcessQueues:
    """The process queues of one container."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._retry_topic = f"{RETRY_TOPIC_PREFIX}{consumer.spec.group}"
        self._queues: dict[MessageQueue, ProcessQueue] = {}
        self._shortcuts: dict[tuple[str, str, int, bool], ProcessQueue] = {}
        self._assignment: frozenset[MessageQueue] = frozenset()

    def __iter__(self) -> Iterator[ProcessQueue]:
        return iter(list(self._queues.values()))

    def of(self, message: MessageExt) -> ProcessQueue:
        """The queue that a message was read from."""
        came_back = message.properties.get(Property.RETRY_TOPIC) == message.topic
        key = (message.topic, message.broker_name, message.queue_id, came_back)
        found = self._shortcuts.get(key)
        if found is None:
            # A message that comes again bears its first topic, yet its offset counts in the group's retry topic.
            topic = self._retry_topic if came_back else message.topic
            found = self._shortcuts[key] = self.of_queue(MessageQueue(topic, message.broker_name, message.queue_id))
        return found

    def of_queue(self, queue: MessageQueue) -> ProcessQueue:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = ProcessQueue(queue, self._consumer.wake)
        return found

    def full(self) -> frozenset[MessageQueue]:
        """The queues to leave alone until there is room."""
        return frozenset([process.queue for process in self._queues.values() if process.is_full])

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._queues.values()))

    def refresh(self) -> None:
        """Follow the assignment: what was taken away is dropped."""
        assignment = self._consumer.assignment()
        if assignment is self._assignment or assignment == self._assignment:
            return
        self._assignment = assignment
        for queue in [queue for queue in self._queues if queue not in assignment]:
            self._queues.pop(queue).dropped = True
        self._shortcuts = {key: process for key, process in self._shortcuts.items() if not process.dropped}

    def commit(self) -> None:
        for process in list(self._queues.values()):
            process.commit(self._consumer)

    def commit_positions(self) -> None:
        """Commit, behind messages that were left out too. Only for the thread that fetches, between two fetches."""
        for queue in self._assignment:
            self.of_queue(queue).commit(self._consumer, self._consumer.position(queue))
