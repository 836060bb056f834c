"""Members of groups for everything that reads by offsets: listeners that pull, and ``template.receive``.

The protocol has no queues that belong to a member. A member receives by POP; a commit acknowledges the messages before
its offset.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import NoReturn

from mqtemplate.broker import Consumer, ConsumerSpec, ReceivedMessage
from mqtemplate.brokers.grpc.consuming import GrpcPop
from mqtemplate.brokers.grpc.producing import GrpcProducer
from mqtemplate.brokers.grpc.sessions import Routes
from mqtemplate.errors import BrokerClosedError, BrokerError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.services import join_woken
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from mqtemplate.user_code import is_interrupt

_log = get_logger("mqtemplate.remote")

_FETCH_WAIT_MS = 20_000
_AFTER_ERROR_S = 1.0
_FIRST_RETRY_LEVEL = 3
_JOIN_S = 5.0
_NO_OFFSETS = "RocketMQ's gRPC protocol has no offsets of queues; set rocketmq.name-server, or use mqadmin"


class PopMember(Consumer):
    """A member of a group that receives by POP.

    - A thread for each topic requests messages when a `poll` finds none. The proxy keeps them invisible to others while
      this client is alive.
    - All queues are assigned to each member.
    - What is not acknowledged when the member leaves is visible at once, with the same attempt.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        pop: GrpcPop,
        routes: Routes,
        producer: GrpcProducer,
    ) -> None:
        self.spec = spec
        self._pop = pop
        self._routes = routes
        self._settings = producer.context.settings
        self._encoder = producer.encoder
        self._changed = threading.Condition()
        self._fetched: deque[ReceivedMessage] = deque()
        self._held: dict[MessageQueue, dict[int, ReceivedMessage]] = {}
        self._positions: dict[MessageQueue, int] = {}
        self._queues: frozenset[MessageQueue] = frozenset()
        self._failure: BrokerError | None = None
        self._wanted = 0
        self._is_woken = False
        self._closed = threading.Event()
        self._registration = pop.join(spec)
        self._threads = [
            threading.Thread(target=self._fetch, args=(topic,), name=f"mqtemplate-receive-{topic}", daemon=True)
            for topic in spec.subscriptions
        ]
        for thread in self._threads:
            thread.start()

    # --- reading -------------------------------------------------------------------------------

    def assignment(self) -> frozenset[MessageQueue]:
        """Return the readable queues of all topics, and those of the retry topic that messages came from."""
        found = set(self._positions)
        for topic in self.spec.subscriptions:
            found.update(each.queue for each in self._routes.get(topic).queues if each.is_readable)
        if found != self._queues:
            self._queues = frozenset(found)
        return self._queues

    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        """See `Consumer.poll`. While a queue is left out nothing is received: the broker chooses the queues."""
        deadline = time.monotonic() + wait_ms / 1_000
        with self._changed:
            self._check_open()
            if without:
                self._wait(deadline, keeps_wake=wait_ms <= 0)
                return []
            if not self._fetched:
                self._wanted = max_count
                self._changed.notify_all()
                self._wait(deadline, keeps_wake=wait_ms <= 0)
                self._wanted = 0  # a request that waits at the proxy goes on; its messages are for the next call
            failure, self._failure = self._failure, None
            if failure is not None and not self._fetched:
                raise failure
            taken = [self._fetched.popleft() for _ in range(min(max_count, len(self._fetched)))]
            return [self._take(received) for received in taken]

    def _wait(self, deadline: float, *, keeps_wake: bool) -> None:
        """Wait for messages, an error, or a wake; the caller has the lock."""
        while not (self._fetched or self._failure is not None or self._is_woken or self._closed.is_set()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        if not keeps_wake:
            self._is_woken = False
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise BrokerClosedError(f"this member of group {self.spec.group!r} is closed")

    def _take(self, received: ReceivedMessage) -> MessageExt:
        queue, message = self._queue_of(received.message), received.message
        self._held.setdefault(queue, {})[message.queue_offset] = received
        self._positions[queue] = max(self._positions.get(queue, 0), message.queue_offset + 1)
        return message

    def _queue_of(self, message: MessageExt) -> MessageQueue:
        """Return the queue that an offset of a message belongs to: for a retry it is one of the retry topic."""
        is_retry = message.properties.get(Property.RETRY_TOPIC) == message.topic
        topic = f"{RETRY_TOPIC_PREFIX}{self.spec.group}" if is_retry else message.topic
        return MessageQueue(topic, message.broker_name, message.queue_id)

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return not self._closed.is_set()

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def position(self, queue: MessageQueue) -> int:
        return self._positions.get(queue, 0)

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Let the next `poll` return the messages from an offset on that this member has, and no others.

        Raises:
            UnsupportedError: The offset is one that this member has not read.
        """
        with self._changed:
            held = self._held.get(queue, {})
            if queue_offset > self._positions.get(queue, 0):
                _refuse(f"continue at offset {queue_offset} of queue {queue.queue_id} of {queue.topic!r}")
            again = [held.pop(offset) for offset in sorted(held) if offset >= queue_offset]
            self._fetched.extendleft(reversed(again))
            self._positions[queue] = queue_offset

    def _fetch(self, topic: str) -> None:
        """Receive messages of one topic whenever a `poll` wants some. This is the loop of a thread."""
        group, selector, invisible_ms = self.spec.group, self.spec.subscriptions[topic], self._settings.invisible_ms
        while True:
            with self._changed:
                while not self._wanted and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    return
                count = self._wanted
            try:
                received = self._pop.receive(
                    group, topic, count, invisible_ms, _FETCH_WAIT_MS, selector, auto_renew=True
                )
            except BaseException as exc:
                if is_interrupt(exc):
                    raise
                self._failed(exc)
                continue
            with self._changed:
                if self._closed.is_set():
                    self._release(received)
                    return
                if received:
                    self._fetched.extend(received)
                    self._wanted = 0
                    self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        """Let the waiting `poll` raise an error, and pause."""
        if not isinstance(error, BrokerError):
            _log.error("remote.receive_failed", group=self.spec.group, exc_info=error)
            error = BrokerError(f"receive for group {self.spec.group!r} failed: {error!r}")
        with self._changed:
            self._failure = error
            self._wanted = 0
            self._changed.notify_all()
            if not self._closed.is_set():
                self._changed.wait(_AFTER_ERROR_S)

    # --- progress ------------------------------------------------------------------------------

    def committed(self, queue: MessageQueue) -> int | None:
        """Return None: a proxy does not tell offsets."""
        return None

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Acknowledge the messages before an offset that this member has."""
        with self._changed:
            held = self._held.get(queue, {})
            done = [held.pop(offset) for offset in sorted(held) if offset < queue_offset]
        of_topic: dict[str, list[str]] = {}
        for received in done:
            of_topic.setdefault(received.message.topic, []).append(received.receipt)
        for topic, receipts in of_topic.items():
            for failure in dict.fromkeys(self._pop.ack_all(self.spec.group, topic, receipts)):
                if failure is not None:
                    _log.warning("message.ack_refused", topic=topic, group=self.spec.group, reason=str(failure))

    def send_back(
        self,
        message: MessageExt,
        delay_level: int = 0,
        *,
        delay_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """See `Consumer.send_back`: a retry is a change of the invisible time. It carries no *properties*."""
        queue = self._queue_of(message)
        received = self._held.get(queue, {}).get(message.queue_offset)
        if received is None:
            raise BrokerError(
                f"message {message.msg_id} was received by another member of group {self.spec.group!r}, or is finished"
            )
        if delay_level < 0 or received.attempt > self.spec.max_reconsume_times:
            self._pop.dead_letter(self.spec.group, message.topic, received, properties)
        else:
            if delay_ms is None:
                level = delay_level or received.attempt - 1 + _FIRST_RETRY_LEVEL
                levels = self._encoder.levels
                delay_ms = levels.delay_ms(levels.clamp(level))
            self._pop.change_invisible(self.spec.group, message.topic, received.receipt, delay_ms)
        with self._changed:
            self._held.get(queue, {}).pop(message.queue_offset, None)

    def lock(self, queue: MessageQueue) -> bool:
        """Return True: the broker keeps the order.

        Raises:
            UnsupportedError: The group is not one for messages in order.
        """
        self._pop.check_ordered(self.spec.group)
        return True

    def unlock(self, queue: MessageQueue) -> None:
        """Do nothing: the broker has no locks for this protocol."""

    def _release(self, messages: Collection[ReceivedMessage]) -> None:
        """Make messages visible to other members at once."""
        for received in messages:
            try:
                self._pop.change_invisible(self.spec.group, received.message.topic, received.receipt, 0, counts=False)
            except BrokerError as exc:
                _log.debug("message.release_failed", msg_id=received.message.msg_id, reason=str(exc))

    def close(self) -> None:
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            left = [*self._fetched, *(each for held in self._held.values() for each in held.values())]
            self._fetched.clear()
            self._held.clear()
            self._changed.notify_all()
        self._pop.wake(self.spec.group)
        self._release(left)
        join_woken(self._threads, lambda: self._pop.wake(self.spec.group), _JOIN_S)
        self._registration.close()


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"{what}: {_NO_OFFSETS}")


class GrpcGroups:
    """Consumer groups. A `ConsumerGroups`."""

    def __init__(self, pop: GrpcPop, routes: Routes, producer: GrpcProducer) -> None:
        self._pop = pop
        self._routes = routes
        self._producer = producer
        self._lock = threading.Lock()
        self._members: list[PopMember] = []

    def subscribe(self, spec: ConsumerSpec) -> PopMember:
        """See `ConsumerGroups.subscribe`."""
        member = PopMember(spec, self._pop, self._routes, self._producer)
        with self._lock:
            self._members = [each for each in self._members if each.is_open] + [member]
        return member

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """See `ConsumerGroups.committed_offset`; this protocol cannot do it."""
        _refuse(f"the offset of group {group!r}")

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `ConsumerGroups.commit_offset`; this protocol cannot do it."""
        _refuse(f"a new offset of group {group!r}")

    def lock_queue(self, group: str, queue: MessageQueue) -> NoReturn:
        """See `ConsumerGroups.lock_queue`; this protocol cannot do it."""
        _refuse(f"the lock of a queue for group {group!r}")

    def consumed_topics(self) -> Mapping[str, Collection[str]] | None:
        """Return None: the broker has the offsets."""
        return None

    def close(self) -> None:
        """Close all members."""
        for member in self._members:
            member.close()
