"""Fetching ahead: a pull is out for each queue that has room, and what comes waits here until it is asked for.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.pullMessage``; sections 10 and 23 of the specification.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError
from mqtemplate.message import MessageExt, MessageQueue

_log = structlog.stdlib.get_logger("mqtemplate.remote")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Messages of a queue, or none.

    Attributes:
        next_offset: Where to go on, behind what the selector left out too.
        broker_id: Which of the broker's addresses to ask next; 0 is the master.
        lags: The queue is read to its end, and messages that this client has sent to it are not in it yet.
    """

    messages: list[MessageExt]
    next_offset: int
    broker_id: int = 0
    lags: bool = False


@dataclass(frozen=True, slots=True)
class OffsetMoved:
    """The queue does not hold the offset that was asked for."""

    next_offset: int
    broker_id: int = 0


@dataclass(frozen=True, slots=True)
class PullFailed:
    """It is to be tried again after *retry_ms*."""

    reason: str
    retry_ms: int


Outcome: TypeAlias = Fetched | OffsetMoved | PullFailed


class Fetch(Protocol):
    """Asks for messages, and does not block; *done* is told the outcome, once and from any thread.

    With *may_wait* the broker may keep the question while there is nothing.
    """

    def __call__(
        self, queue: MessageQueue, queue_offset: int, broker_id: int, may_wait: bool, done: Callable[[Outcome], None], /
    ) -> None: ...


@dataclass(slots=True)
class _Line:
    """One queue: what was fetched of it, and the pull that is out.

    Attributes:
        is_fresh: No pull from here was answered yet; the first one does not wait, so that it is known what is there.
        is_settled: A pull from here was answered, and the queue held what this client had sent to it.
        epoch: Counts up when it is read from elsewhere: an answer to an older pull is nothing then.
        retry_ms: When to pull again after a failure.
    """

    queue: MessageQueue
    next_offset: int
    messages: deque[MessageExt] = field(default_factory=deque)
    size: int = 0
    is_fresh: bool = True
    is_settled: bool = False
    epoch: int = 0
    in_flight: bool = False
    retry_ms: int | None = None
    broker_id: int = 0

    @property
    def position(self) -> int:
        return self.messages[0].queue_offset if self.messages else self.next_offset


class PullLoop:
    """The queues of one member. A `Service`: its step tries again what failed.

    - One pull is out for a queue at most; an answer starts the next one, unless the queue is full.
    - A queue is full with *most_messages*, or *most_bytes* of bodies, that nobody asked for yet.

    Args:
        on_arrival: Called, from any thread, when there is something to take, or known that there is nothing.
    """

    def __init__(
        self, name: str, fetch: Fetch, clock: Clock, most_messages: int, most_bytes: int, on_arrival: Callable[[], None]
    ) -> None:
        self.name = name
        self._fetch = fetch
        self._clock = clock
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._lines: dict[MessageQueue, _Line] = {}
        self._turn: list[_Line] = []
        self._wake: Callable[[], None] = lambda: None

    # --- queues --------------------------------------------------------------------------------

    def add(self, queue: MessageQueue, queue_offset: int) -> None:
        """Read a queue from here on."""
        line = _Line(queue, queue_offset)
        with self._lock:
            self._lines[queue] = line
            self._turn = sorted(self._lines.values(), key=lambda each: each.queue)
        self._pull(line)

    def drop(self, queue: MessageQueue) -> None:
        """Read it no more; what was fetched of it is thrown away."""
        with self._lock:
            line = self._lines.pop(queue, None)
            if line is not None:
                line.epoch += 1
                self._turn = [each for each in self._turn if each is not line]

    def queues(self) -> frozenset[MessageQueue]:
        return frozenset(self._lines)

    def position(self, queue: MessageQueue) -> int | None:
        """The offset that is taken next; None of a queue that is not read here."""
        with self._lock:
            line = self._lines.get(queue)
            return None if line is None else line.position

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Go on from another offset. What was fetched is kept where it begins with that one."""
        with self._lock:
            line = self._lines.get(queue)
            if line is None or line.position == queue_offset:
                return
            line.epoch += 1
            line.is_fresh = True
            line.is_settled = False
            line.next_offset = queue_offset
            line.messages.clear()
            line.size = 0
            line.in_flight = False
            line.retry_ms = None
        self._pull(line)

    def buffered(self, queue: MessageQueue) -> int:
        """How many messages wait here."""
        line = self._lines.get(queue)
        return 0 if line is None else len(line.messages)

    def is_settling(self, without: frozenset[MessageQueue]) -> bool:
        """Whether it is not known yet of a queue what is there to take."""
        with self._lock:
            return any(not line.is_settled and line.queue not in without for line in self._lines.values())

    # --- taking --------------------------------------------------------------------------------

    def take(self, max_count: int, without: frozenset[MessageQueue]) -> list[MessageExt]:
        """What is there, each queue in order; the queues take turns at being first."""
        taken: list[MessageExt] = []
        with self._lock:
            turn = self._turn
            self._turn = turn[1:] + turn[:1]
            for line in turn:
                if line.messages and line.queue not in without:
                    self._take_from(line, max_count - len(taken), taken)
                if len(taken) >= max_count:
                    break
        for line in turn:
            if not line.in_flight:
                self._pull(line)
        return taken

    @staticmethod
    def _take_from(line: _Line, max_count: int, taken: list[MessageExt]) -> None:
        for _ in range(min(max_count, len(line.messages))):
            message = line.messages.popleft()
            line.size -= len(message.body)
            taken.append(message)

    # --- pulling -------------------------------------------------------------------------------

    def _pull(self, line: _Line) -> None:
        """Send a pull unless one is out, the queue is full, or rests after a failure."""
        with self._lock:
            is_dropped = self._lines.get(line.queue) is not line
            if is_dropped or line.in_flight or line.retry_ms is not None or self._is_full(line):
                return
            line.in_flight = True
            epoch, queue_offset, broker_id, may_wait = line.epoch, line.next_offset, line.broker_id, not line.is_fresh
        try:
            self._fetch(line.queue, queue_offset, broker_id, may_wait, lambda outcome: self._done(line, epoch, outcome))
        except BrokerError as exc:
            self._done(line, epoch, PullFailed(str(exc), 1_000))

    def _is_full(self, line: _Line) -> bool:
        return len(line.messages) >= self._most_messages or line.size >= self._most_bytes

    def _done(self, line: _Line, epoch: int, outcome: Outcome) -> None:
        with self._lock:
            if line.epoch != epoch:
                return
            line.in_flight = False
            was_settled, line.is_fresh = line.is_settled, False
            line.is_settled |= not (isinstance(outcome, Fetched) and outcome.lags)
            if isinstance(outcome, PullFailed):
                line.retry_ms = self._clock.now_ms() + outcome.retry_ms
            else:
                line.next_offset = outcome.next_offset
                line.broker_id = outcome.broker_id
            if isinstance(outcome, Fetched):
                line.messages.extend(outcome.messages)
                line.size += sum([len(message.body) for message in outcome.messages])
        self._tell(line, outcome)
        if (line.is_settled and not was_settled) or (isinstance(outcome, Fetched) and outcome.messages):
            self._on_arrival()
        self._pull(line)

    def _tell(self, line: _Line, outcome: Outcome) -> None:
        if isinstance(outcome, Fetched):
            return
        queue = line.queue
        if isinstance(outcome, OffsetMoved):
            _log.warning(
                "remote.offset_moved", topic=queue.topic, queue=queue.queue_id, next_offset=outcome.next_offset
            )
            return
        _log.warning(
            "remote.pull_failed",
            topic=queue.topic,
            queue=queue.queue_id,
            broker=queue.broker_name,
            reason=outcome.reason,
            retry_in_ms=outcome.retry_ms,
        )
        self._wake()

    # --- trying again --------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def step(self) -> int | None:
        now_ms = self._clock.now_ms()
        due = []
        with self._lock:
            for line in self._lines.values():
                if line.retry_ms is not None and line.retry_ms <= now_ms:
                    line.retry_ms = None
                    due.append(line)
        for line in due:
            self._pull(line)
        with self._lock:
            return min((line.retry_ms for line in self._lines.values() if line.retry_ms is not None), default=None)
