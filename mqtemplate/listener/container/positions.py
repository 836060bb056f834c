"""Positions of a running listener: changes of them, and the actions that other threads have the polling thread run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime

from mqtemplate.broker import Broker, Consumer
from mqtemplate.durations import Duration, duration_ms
from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.process_queue import ProcessQueues
from mqtemplate.message import MessageQueue
from mqtemplate.topics import RETRY_TOPIC_PREFIX

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


def span_ms(span: Duration) -> int:
    """Return a span of time in milliseconds; a number is seconds."""
    try:
        return duration_ms(span, 1_000)
    except ValueError as exc:
        raise ValueError(f"span must be {exc}") from None


class PollingRequests:
    """Queue of actions. `submit` waits until the polling thread has run the action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._is_closed = False

    def submit(self, action: Callable[[], None], wake: Callable[[], None]) -> None:
        """Run an action in the polling thread and wait for its end.

        Args:
            wake: Function that ends the wait of the polling thread.

        Raises:
            ListenerError: The polling thread has ended.
            Exception: The error of the action.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                raise self._stopped()
            self._pending.append((action, done))
        wake()
        done.result()

    def run(self) -> None:
        """Run the actions that are pending. The polling thread calls it."""
        while self._pending:
            action, done = self._pending.popleft()
            try:
                action()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

    def close(self) -> None:
        """Refuse the pending actions and all later ones. The polling thread calls it at its end."""
        with self._lock:
            self._is_closed = True
            pending, self._pending = self._pending, deque()
        for _, done in pending:
            done.set_exception(self._stopped())

    def _stopped(self) -> ListenerError:
        return ListenerError(f"{self._name} is not running; start it first")
