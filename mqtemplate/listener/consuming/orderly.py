"""ORDERLY: each queue one message after the other; one that fails is tried again before its successors."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from mqtemplate.broker import Consumer
from mqtemplate.clock import Clock
from mqtemplate.listener.consuming.failure import FailureLog, NextStep
from mqtemplate.listener.consuming.invocation import Failure, Invocation
from mqtemplate.listener.consuming.process_queue import ProcessQueue, ProcessQueues
from mqtemplate.listener.consuming.watchdog import Watchdog
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.message import MessageExt, MessageQueue

_TURN = 64  # pieces of one queue before the next queue has its turn
_LOCK_RETRY_MS = 1_000
_DEAD = -1


class _OrderedQueue:
    """The messages of one queue in their order.

    It is *busy* while it stands in the line, a thread works on it, or it is suspended: at most one of these.
    """

    __slots__ = ("busy", "lock", "messages", "process")

    def __init__(self, process: ProcessQueue) -> None:
        self.process = process
        self.messages: deque[MessageExt] = deque()
        self.lock = threading.Lock()
        self.busy = False


class Orderly:
    """A line of queues; the thread that takes one has it alone.

    - A queue is handled only while the group's lock on it is held, so that a member that hands it over is through
      with it before the next one begins.
    - After a failure the queue rests for ``suspend_current_queue_time_millis`` and then tries the same message again,
      with ``reconsume_times`` one higher. Beyond ``max_reconsume_times`` the message is a dead letter.
    - Of a batch that failed in part, those that failed are tried again, in their order and before what follows.
    - A handler that takes longer than ``consume_timeout`` is reported; taking its message away would break the order.

    Source: RocketMQ ``client: ConsumeMessageOrderlyService``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        consumer: Consumer,
        queues: ProcessQueues,
        invocation: Invocation,
        log: FailureLog,
        clock: Clock,
    ) -> None:
        self._settings = endpoint.settings
        self._take_size = endpoint.take_size if endpoint.plan.is_batch else 1
        self._consumer = consumer
        self._queues = queues
        self._invocation = invocation
        self._log = log
        self._clock = clock
        self._watchdog: Watchdog[MessageExt] = Watchdog(endpoint.settings.consume_timeout_ms, clock)
        self._ordered: dict[MessageQueue, _OrderedQueue] = {}
        self._line: deque[_OrderedQueue] = deque()
        self._suspended: list[tuple[int, int, _OrderedQueue]] = []
        self._suspended_lock = threading.Lock()
        self._count = itertools.count()
        self._locked: set[MessageQueue] = set()
        self._lock_again: dict[MessageQueue, int] = {}  # queue another member still has -> when to ask again
        self.taken = 0
        self.on_late_return: Callable[[], None] = lambda: None  # a thread that had been replaced came back
        self.on_later: Callable[[], None] = lambda: None  # `next_due` may have become earlier

    @property
    def waiting(self) -> int:
        return len(self._line)

    # --- the thread that fetches -------------------------------------------------------------------

    def excluded(self) -> frozenset[MessageQueue]:
        """The queues that are full, or that somebody is not yet through with."""
        assignment = self._consumer.assignment()
        for queue in self._locked - assignment:
            self._hand_over(queue)
        for queue in self._lock_again.keys() - assignment:
            del self._lock_again[queue]
        return self._queues.full().union([queue for queue in assignment if not self._may_read(queue)])

    def _may_read(self, queue: MessageQueue) -> bool:
        ordered = self._ordered.get(queue)
        if ordered is not None and ordered.process.dropped:
            if ordered.busy:
                return False  # the queue went away and came back, and the thread that had it is still at it
            del self._ordered[queue]
        return queue in self._locked or self._lock(queue)

    def _lock(self, queue: MessageQueue) -> bool:
        now_ms = self._clock.now_ms()
        if self._lock_again.get(queue, 0) > now_ms:
            return False
        self._lock_again[queue] = now_ms + _LOCK_RETRY_MS
        if not self._consumer.lock(queue):
            return False
        # The member before may have committed more since this one was assigned the queue.
        committed = self._consumer.committed(queue)
        if committed is not None and committed > self._consumer.position(queue):
            self._consumer.seek(queue, committed)
        del self._lock_again[queue]
        self._locked.add(queue)
        return True

    def _hand_over(self, queue: MessageQueue) -> None:
        """Unlock a queue that went to another member, unless a thread is still at it; then it is asked again."""
        ordered = self._ordered.get(queue)
        if ordered is not None:
            if ordered.busy:
                return
            ordered.process.commit_last(self._consumer)
            del self._ordered[queue]
        self._locked.remove(queue)
        self._consumer.unlock(queue)

    def accept(self, messages: Sequence[MessageExt]) -> None:
        """Put fetched messages in line."""
        for message in messages:
            process = self._queues.of(message)
            queue = process.queue
            if not self._may_read(queue):
                # It was assigned between the look at the assignment and the fetch: it is read again from here.
                self._consumer.seek(queue, min(message.queue_offset, self._consumer.position(queue)))
            elif process.add(message):
                ordered = self._ordered.get(queue) or self._ordered.setdefault(queue, _OrderedQueue(process))
                with ordered.lock:
                    ordered.messages.append(message)
                    if not ordered.busy:
                        ordered.busy = True
                        self._line.append(ordered)

    def next_due(self) -> int | None:
        """When a queue that rests goes on, or a lock is asked for again."""
        rests = [self._suspended[0][0]] if self._suspended else []
        return min([*rests, *self._lock_again.values()], default=None)

    def release_due(self, now_ms: int) -> None:
        with self._suspended_lock:
            while self._suspended and self._suspended[0][0] <= now_ms:
                self._line.append(heapq.heappop(self._suspended)[2])

    def check_overdue(self, _replace: Callable[[], bool]) -> None:
        """Report handlers that take too long."""
        for running in self._watchdog.overdue():
            self._log.blocked(running.work, self._clock.now_ms() - running.since_ms, running.stack(), "wait")

    def abandon(self) -> int:
        """Forget what is not finished, it stays uncommitted; returns how many messages that are."""
        self._line.clear()
        self._suspended.clear()
        self._watchdog.abandon()
        return self._queues.in_flight

    # --- the threads that handle -------------------------------------------------------------------

    def run_next(self) -> bool:
        try:
            ordered = self._line.popleft()
        except IndexError:
            return False
        self.taken += 1
        for _ in range(_TURN):
            if ordered.process.dropped:
                with ordered.lock:
                    ordered.messages.clear()
            if not ordered.messages:
                break
            if self._handle_next(ordered):
                self._suspend(ordered)
                self._queues.commit()
                return True
        self._queues.commit()
        self._end_turn(ordered)
        return True

    def _end_turn(self, ordered: _OrderedQueue) -> None:
        with ordered.lock:
            if ordered.messages:
                self._line.append(ordered)
                return
            ordered.busy = False
        if ordered.process.dropped:
            self.on_later()  # the thread that fetches hands the queue over now

    def _handle_next(self, ordered: _OrderedQueue) -> bool:
        """Handle the next message or batch; returns whether the queue must rest."""
        with ordered.lock:
            messages = list(islice(ordered.messages, self._take_size))
        running = self._watchdog.begin(messages)
        failures = self._invocation.handle(messages)
        if not self._watchdog.end(running):
            return False  # the container was stopped
        kept = self._retry_or_bury(failures) if failures else []
        kept_offsets = {message.queue_offset for message in kept}
        for message in messages:
            ordered.messages.popleft()
            if message.queue_offset not in kept_offsets:
                ordered.process.finish(message.queue_offset)
        ordered.messages.extendleft(reversed(kept))
        return bool(kept)

    def _retry_or_bury(self, failures: Sequence[Failure]) -> list[MessageExt]:
        """Report what failed, send away what failed too often; returns what is to be tried again, in order."""
        kept: list[MessageExt] = []
        for messages, error in failures:
            is_dead = messages[0].reconsume_times >= self._settings.retry_limit
            self._log.failed(messages, error, NextStep.DEAD_LETTER if is_dead else NextStep.RETRY_IN_PLACE)
            kept += [message for message in messages if not self._bury(message)]
        for message in kept:
            message.reconsume_times += 1
        return sorted(kept, key=lambda message: message.queue_offset)

    def _bury(self, message: MessageExt) -> bool:
        """Send a message that failed too often to the dead letters; False if it is to be tried again here."""
        if message.reconsume_times < self._settings.retry_limit:
            return False
        try:
            self._consumer.send_back(message, _DEAD)
        except Exception as error:
            self._log.send_back_failed(message, error, self._settings.suspend_ms)
            return False
        return True

    def _suspend(self, ordered: _OrderedQueue) -> None:
        due_ms = self._clock.now_ms() + self._settings.suspend_ms
        with self._suspended_lock:
            heapq.heappush(self._suspended, (due_ms, next(self._count), ordered))
        self.on_later()
