"""CONCURRENTLY: messages are handled side by side; one that fails goes back to the broker and comes again later."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from mqtemplate.broker import Consumer
from mqtemplate.clock import Clock
from mqtemplate.listener.consuming.failure import FailureLog, NextStep
from mqtemplate.listener.consuming.invocation import Failure, Invocation
from mqtemplate.listener.consuming.process_queue import ProcessQueue, ProcessQueues
from mqtemplate.listener.consuming.watchdog import Watchdog
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.message import MessageExt, MessageQueue

_Delivery = tuple[ProcessQueue, MessageExt]

_SEND_BACK_RETRY_MS = 5_000
_BLOCKED_LEVEL = 3
_COMMIT_EVERY = 32


class Concurrently:
    """One line of messages, from which every thread takes the next.

    - A message that failed is sent back at ``delay_level_when_next_consume``; the broker counts its retries and
      knows when it is dead. If the broker does not take it, it stays here and is handled again after 5 seconds.
    - In a broadcasting group there is nobody to give it back to: it is reported and dropped, as RocketMQ does.
    - A queue is committed up to its first unfinished message, after some 32 messages or when the line is empty.

    Source: RocketMQ ``client: ConsumeMessageConcurrentlyService``.
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
        self._take_size = endpoint.take_size
        self._is_single = not endpoint.plan.is_batch
        self._consumer = consumer
        self._queues = queues
        self._invocation = invocation
        self._log = log
        self._clock = clock
        self._watchdog: Watchdog[_Delivery] = Watchdog(endpoint.settings.consume_timeout_ms, clock)
        self._line: deque[_Delivery] = deque()
        self._postponed: list[tuple[int, int, _Delivery]] = []
        self._later_lock = threading.Lock()
        self._count = itertools.count()
        self._unreported = 0  # finished since the last commit; roughly, as threads share it
        self.taken = 0
        self.on_late_return: Callable[[], None] = lambda: None  # a thread that had been replaced came back
        self.on_later: Callable[[], None] = lambda: None  # `next_due` may have become earlier

    @property
    def waiting(self) -> int:
        return len(self._line)

    # --- the thread that fetches -------------------------------------------------------------------

    def excluded(self) -> frozenset[MessageQueue]:
        """The queues of which no more may be fetched now."""
        return self._queues.full()

    def accept(self, messages: Sequence[MessageExt]) -> None:
        """Put fetched messages in line."""
        of, line = self._queues.of, self._line
        for message in messages:
            process = of(message)
            if process.add(message):
                line.append((process, message))

    def next_due(self) -> int | None:
        """When a message that stays here is to be handled again."""
        return self._postponed[0][0] if self._postponed else None

    def release_due(self, now_ms: int) -> None:
        with self._later_lock:
            while self._postponed and self._postponed[0][0] <= now_ms:
                self._line.append(heapq.heappop(self._postponed)[2])

    def check_overdue(self, replace: Callable[[], bool]) -> None:
        """Send back what handlers keep for too long; *replace* is asked for another thread."""
        for running in self._watchdog.overdue():
            running.substitute = replace()
            if not running.claim():
                if running.substitute:
                    self.on_late_return()
                continue
            messages = [message for _, message in running.work]
            blocked_ms = self._clock.now_ms() - running.since_ms
            self._log.blocked(messages, blocked_ms, running.stack(), self._next_step(messages[0]).value)
            for process, message in running.work:
                self._send_back_one(process, message, self._settings.delay_level_when_next_consume or _BLOCKED_LEVEL)

    def abandon(self) -> int:
        """Forget what is not finished, it stays uncommitted; returns how many messages that are."""
        left = len(self._line) + len(self._postponed)
        self._line.clear()
        self._postponed.clear()
        return left + self._watchdog.abandon()

    # --- the threads that handle -------------------------------------------------------------------

    def run_next(self) -> bool:
        work = self._take()
        if not work:
            return False
        self.taken += 1
        self._handle(work)
        self._unreported += len(work)
        if not self._line or self._unreported >= _COMMIT_EVERY:
            self._unreported = 0
            self._queues.commit()
        return True

    def _take(self) -> list[_Delivery]:
        line, work = self._line, []
        try:
            for _ in range(self._take_size):
                delivery = line.popleft()
                if not delivery[0].dropped:
                    work.append(delivery)
        except IndexError:
            pass  # another thread took the last one
        return work

    def _handle(self, work: list[_Delivery]) -> None:
        running = self._watchdog.begin(work)
        if self._is_single and len(work) == 1:
            failure = self._invocation.handle_one(work[0][1])
            failures = [] if failure is None else [failure]
        else:
            failures = self._invocation.handle([message for _, message in work])
        if not self._watchdog.end(running):
            if running.substitute:
                self.on_late_return()
            return  # it was sent back meanwhile
        failed = self._send_back(work, failures) if failures else frozenset()
        for process, message in work:
            if not failed or id(message) not in failed:
                process.finish(message.queue_offset)

    def _send_back(self, work: list[_Delivery], failures: Sequence[Failure]) -> frozenset[int]:
        """Report and send back what failed; returns the ids of the messages that this has taken care of."""
        processes = {id(message): process for process, message in work}
        for messages, error in failures:
            self._log.failed(messages, error, self._next_step(messages[0]))
            for message in messages:
                process = processes[id(message)]
                # What belongs to another member by now comes there; sending it back as well would make two of it.
                if not process.dropped:
                    self._send_back_one(process, message, self._settings.delay_level_when_next_consume)
        return frozenset(id(message) for messages, _ in failures for message in messages)

    def _send_back_one(self, process: ProcessQueue, message: MessageExt, delay_level: int) -> None:
        if not self._settings.is_broadcasting:
            try:
                self._consumer.send_back(message, delay_level)
            except Exception as error:
                self._log.send_back_failed(message, error, _SEND_BACK_RETRY_MS)
                self._keep(process, message)
                return
        process.finish(message.queue_offset)

    def _keep(self, process: ProcessQueue, message: MessageExt) -> None:
        message.reconsume_times += 1
        due_ms = self._clock.now_ms() + _SEND_BACK_RETRY_MS
        with self._later_lock:
            heapq.heappush(self._postponed, (due_ms, next(self._count), (process, message)))
        self.on_later()

    def _next_step(self, message: MessageExt) -> NextStep:
        settings = self._settings
        if settings.is_broadcasting:
            return NextStep.DROPPED
        is_dead = settings.delay_level_when_next_consume < 0 or message.reconsume_times >= settings.retry_limit
        return NextStep.DEAD_LETTER if is_dead else NextStep.REDELIVERY
