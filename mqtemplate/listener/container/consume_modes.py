"""Pulling: consume services of the two modes, side by side or each queue in its order, and the membership of both.

``CONCURRENTLY`` sends a failed message back to the broker; ``ORDERLY`` retries it before the next one of its queue.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mqtemplate.broker import Broker, Consumer
from mqtemplate.errors import BrokerClosedError, CorruptRecordError, ForkedError
from mqtemplate.listener.container.consume_service import (
    ConcurrentConsumeService,
    ConsumeService,
    ReplaceThread,
    RunningCall,
)
from mqtemplate.listener.container.membership import Membership
from mqtemplate.listener.container.process_queue import ProcessQueue, ProcessQueues, Repositioning
from mqtemplate.listener.failures.failure import Decision, Failure, NextStep, raise_if_not_of_handler
from mqtemplate.listener.failures.policy import FailureSender
from mqtemplate.message import MessageExt, MessageQueue

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyedQueue

_SEND_BACK_RETRY_MS = 5_000
_COMMIT_EVERY = 32


@dataclass(eq=False, kw_only=True)
class PullConcurrentService(ConcurrentConsumeService[ProcessQueue]):
    """Messages of the queues that are assigned to this member, side by side.

    - A failed message is sent back with the delay that the failure policy decides, or to the dead letter topic. If the
      broker does not take it, it is handled here again after 5 s.
    - In a broadcasting group a failed message is reported and dropped, as RocketMQ does.
    - With ``fair_by`` the keys of the fetched messages take turns, within their limits.
    - A queue is committed up to its first unfinished message, after about 32 messages or when no message is ready.

    Source: RocketMQ ``client: ConsumeMessageConcurrentlyService``.
    """

    consumer: Consumer
    queues: ProcessQueues

    def __post_init__(self) -> None:
        super().__post_init__()
        self._send_back = FailureSender(self.endpoint.id, self.consumer, self.clock)
        self._keyed: KeyedQueue[tuple[ProcessQueue, MessageExt]] | None = None
        if (limits := self.endpoint.settings.key_limits) is not None:
            from mqtemplate.key_limits import KeyedQueue

            self._keyed = KeyedQueue(
                limits, lambda item: limits.key_of(item[1].properties), self.clock.steady_ms, self.on_earlier_due
            )
            self._ready = self._keyed  # type: ignore[assignment]  # it has the methods of a deque that are called
        self._uncommitted = 0  # messages finished since the last commit; roughly, since threads share it

    def give_up_reassigned(self) -> None:
        """Do nothing: the messages of dropped queues are discarded when a thread takes them."""

    def excluded(self) -> frozenset[MessageQueue]:
        """Return the queues from which no message may be fetched now: those that are full."""
        return self.queues.full()

    def accept(self, messages: Sequence[MessageExt]) -> None:
        """Take fetched messages."""
        of, ready = self.queues.of, self._ready
        for message in messages:
            process = of(message)
            if process.add(message):
                ready.append((process, message))

    def next_due(self) -> int | None:
        dues_ms = (super().next_due(), None if self._keyed is None else self._keyed.next_due_ms)
        return min((due_ms for due_ms in dues_ms if due_ms is not None), default=None)

    def release_due(self, now_ms: int) -> None:
        super().release_due(now_ms)
        if self._keyed is not None:
            self._keyed.release_due(now_ms)

    def _ended(self, work: Sequence[tuple[ProcessQueue, MessageExt]]) -> None:
        if self._keyed is not None:
            for item in work:
                self._keyed.end(item)

    def discard_dropped(self) -> None:
        """Discard the messages of dropped queues, which need not be due."""
        with self._delayed_lock:
            self._delayed = [each for each in self._delayed if not each[2][0].dropped]
            heapq.heapify(self._delayed)

    def _settled(self, count: int, *, is_pausing: bool) -> None:
        self._uncommitted += count
        if is_pausing or not self._ready or self._uncommitted >= _COMMIT_EVERY:  # a pause may be long
            self._uncommitted = 0
            self.queues.commit()

    def _finish_failed(
        self, holder: ProcessQueue, message: MessageExt, decision: Decision, error: BaseException | None
    ) -> None:
        """Send a message back; if the broker does not take it, delay it here and handle it again."""
        if decision.next_step is not NextStep.DROPPED:
            try:
                self._send_back.send(message, decision, error)
            except BaseException as refusal:
                raise_if_not_of_handler(refusal)
                self.failures.send_back_failed(message, refusal, _SEND_BACK_RETRY_MS)
                message.reconsume_times += 1
                self._delay((holder, message), _SEND_BACK_RETRY_MS)
                return
        holder.finish(message.queue_offset)

    def _not_settled(self, work: Sequence[tuple[ProcessQueue, MessageExt]]) -> None:
        for process, message in work:
            if message.queue_offset in process:
                self._delay((process, message), _SEND_BACK_RETRY_MS)


_MAX_CALLS_IN_A_ROW = 64  # handler calls for one queue before another queue is handled
_LOCK_RETRY_MS = 1_000


class _OrderedQueue:
    """Messages of one queue in their order.

    It is *busy* while it is ready for a thread, while a thread handles it, or while it is suspended. Only one of these
    is true at a time.
    """

    __slots__ = ("busy", "lock", "messages", "process")

    def __init__(self, process: ProcessQueue) -> None:
        self.process = process
        self.messages: deque[MessageExt] = deque()
        self.lock = threading.Lock()
        self.busy = False


@dataclass(eq=False, kw_only=True)
class OrderlyConsumeService(ConsumeService[_OrderedQueue, MessageExt]):
    """Queues that are ready for a thread. The thread that takes a queue is the only one that handles it.

    - A queue is handled only while this member holds the group's lock on it. So the previous member has finished the
      queue before this one starts with it.
    - After a failure the queue is suspended for the delay that the failure policy decides. Then the same message is
      handled again with ``reconsume_times`` one higher. After its last retry it goes to the dead letter topic.
    - If some messages of a batch failed, these are handled again in their order, before the messages that follow.
    - A hanging handler is only reported: sending its message back would break the order.

    Source: RocketMQ ``client: ConsumeMessageOrderlyService``.
    """

    consumer: Consumer
    queues: ProcessQueues

    def __post_init__(self) -> None:
        super().__post_init__()
        self._send_back = FailureSender(self.endpoint.id, self.consumer, self.clock)
        self._suspend_ms = self.endpoint.settings.suspend_current_queue_time_millis
        self._ordered: dict[MessageQueue, _OrderedQueue] = {}
        self._locked: set[MessageQueue] = set()
        self._lost: set[MessageQueue] = set()  # their locks were lost, and not locked again; not unlocked either
        self._lock_retries: dict[MessageQueue, int] = {}  # queue locked by another member -> time of the next try

    def excluded(self) -> frozenset[MessageQueue]:
        """Return the queues that are full, and those that another member or a thread of this one has not finished."""
        self.give_up_reassigned()
        assignment = self.consumer.assignment()
        for queue in self._lock_retries.keys() - assignment:
            del self._lock_retries[queue]
        return self.queues.full().union([queue for queue in assignment if not self._may_read(queue)])

    def give_up_reassigned(self) -> None:
        """Unlock the queues that other members have by now, also while the listener is paused: they wait for that."""
        self._drop_lost()
        given_up = (self._locked | self._lost) - self.consumer.assignment()
        if given_up:
            self.discard_dropped()
        for queue in given_up:
            self._unlock_when_idle(queue)

    def _drop_lost(self) -> None:
        """Drop the queues whose locks another member may have by now; they are locked again before they are read."""
        lost = self._locked & self.consumer.lost_locks()
        if lost:
            for queue in lost:
                self.queues.drop(queue)
            self._locked -= lost
            self._lost |= lost
            self.discard_dropped()

    def _may_read(self, queue: MessageQueue) -> bool:
        ordered = self._ordered.get(queue)
        if ordered is not None and ordered.process.dropped:
            if ordered.busy:
                return False  # a thread still handles messages that were fetched before the queue was dropped
            self._finish_dropped(ordered)
        return queue in self._locked or self._lock(queue)

    def _finish_dropped(self, ordered: _OrderedQueue) -> None:
        ordered.process.commit_dropped(self.consumer)
        del self._ordered[ordered.process.queue]

    def _lock(self, queue: MessageQueue) -> bool:
        if self.consumer.lock_soon(queue):
            self._lock_retries.pop(queue, None)
            self._locked.add(queue)
            self._lost.discard(queue)
            return True
        now_ms = self.clock.steady_ms()
        if self._lock_retries.get(queue, 0) <= now_ms:
            self._lock_retries[queue] = now_ms + _LOCK_RETRY_MS
        return False

    def _unlock_when_idle(self, queue: MessageQueue) -> None:
        """Commit and unlock a queue that was assigned to another member, unless a thread still handles it."""
        ordered = self._ordered.get(queue)
        if ordered is not None:
            if ordered.busy:
                return
            self._finish_dropped(ordered)
        self._locked.discard(queue)
        self._lost.discard(queue)  # its lock may have been regained meanwhile
        self.consumer.unlock_soon(queue)

    def accept(self, messages: Sequence[MessageExt]) -> None:
        """Take fetched messages."""
        refused: set[MessageQueue] = set()
        for message in messages:
            process = self.queues.of(message)
            queue = process.queue
            ordered = self._ordered.get(queue)
            if queue not in self._locked or (ordered is not None and ordered.process.dropped):
                # The queue was assigned after `excluded` and before the fetch. Fetch its messages again later.
                if queue not in refused:
                    refused.add(queue)
                    self.consumer.seek(queue, message.queue_offset)
            elif process.add(message):
                if ordered is None:
                    ordered = self._ordered[queue] = _OrderedQueue(process)
                with ordered.lock:
                    ordered.messages.append(message)
                    if not ordered.busy:
                        ordered.busy = True
                        self._ready.append(ordered)

    def next_due(self) -> int | None:
        """Return when a suspended queue is handled again, or a lock is tried again; None if there is neither."""
        suspended = [self._delayed[0][0]] if self._delayed else []
        return min([*suspended, *self._lock_retries.values()], default=None)

    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        for running in self._watchdog.hanging(self._may_take_longer):
            blocked_ms = self.clock.steady_ms() - running.since_ms
            self.failures.blocked(running.work, blocked_ms, self._stack_of(running), "wait")

    def run_next(self) -> bool:
        try:
            ordered = self._ready.popleft()
        except IndexError:
            return False
        self.taken += 1
        # Whatever is raised here, a thread takes the queue again: else its messages would stay unhandled for ever.
        delay_ms: int | None = self._suspend_ms
        try:
            delay_ms = self._handle_next_ones(ordered)
        finally:
            if delay_ms is None:
                self._release(ordered)
            else:
                self._delay(ordered, delay_ms)
                if ordered.process.dropped:  # while its handler ran: the polling thread has looked for it before
                    self.discard_dropped()
        self.queues.commit()
        return delay_ms is not None or not self.is_paused

    def _handle_next_ones(self, ordered: _OrderedQueue) -> int | None:
        """Handle some messages of a queue. Return the time (ms) for which it must be suspended, or None."""
        for _ in range(_MAX_CALLS_IN_A_ROW):
            if ordered.process.dropped:
                with ordered.lock:
                    ordered.messages.clear()
            if not ordered.messages:
                break
            if not self.consumer.has_lock(ordered.process.queue):
                return self._suspend_ms  # until the polling thread has dropped the queue
            with ordered.lock:
                messages = list(islice(ordered.messages, self._take_size))
            running = self._watchdog.start(messages)
            if self.is_paused:
                self._watchdog.finish(running)
                break
            if (delay_ms := self._handle(ordered, messages, running)) is not None:
                return delay_ms
            if self.must_yield:
                break
        return None

    def discard_dropped(self) -> None:
        """Discard the messages of dropped queues that no thread has: of suspended ones, and while no thread runs."""
        with self._delayed_lock:
            dropped = [each[2] for each in self._delayed if each[2].process.dropped]
            self._delayed = [each for each in self._delayed if not each[2].process.dropped]
            heapq.heapify(self._delayed)
        for ordered in self._ready.copy():
            if ordered.process.dropped:
                with contextlib.suppress(ValueError):  # a thread has taken it meanwhile
                    self._ready.remove(ordered)
                    dropped.append(ordered)
        for ordered in dropped:
            with ordered.lock:
                ordered.messages.clear()
            self._release(ordered)

    def _release(self, ordered: _OrderedQueue) -> None:
        with ordered.lock:
            if ordered.messages:
                self._ready.append(ordered)
                return
            ordered.busy = False
        if ordered.process.dropped:
            self.on_earlier_due()  # the polling thread can unlock the queue now

    def _handle(
        self, ordered: _OrderedQueue, messages: list[MessageExt], running: RunningCall[MessageExt]
    ) -> int | None:
        """Handle a message or a batch. Return the time (ms) for which the queue must be suspended, or None."""
        try:
            failures = self.invocation.handle(messages)
        except BaseException as error:
            failures = self._failed_around(running, messages, error)
        if not self._watchdog.finish(running):
            return None  # the container was stopped
        if failures and self._pauses(failures):
            return None
        retried, delay_ms = self._retried(failures) if failures else ([], None)
        retried_offsets = {message.queue_offset for message in retried}
        for message in messages:
            ordered.messages.popleft()
            if message.queue_offset not in retried_offsets:
                ordered.process.finish(message.queue_offset)
        ordered.messages.extendleft(reversed(retried))
        return delay_ms

    def _retried(self, failures: Sequence[Failure]) -> tuple[list[MessageExt], int | None]:
        """Send messages without retries left to the dead letter topic, and report the failures.

        Returns:
            The other messages, and the delay (ms) before they are handled again; None without other messages.
        """
        retried: list[MessageExt] = []
        delays_ms: list[int] = []
        for failure in failures:
            decisions = [self.policy.decide(message, failure.error) for message in failure.messages]
            for message, decision in zip(failure.messages, decisions, strict=True):
                if not self._is_sent_to_dead_letters(message, decision, failure.error):
                    retried.append(message)
                    is_retry = decision.next_step is NextStep.RETRY_IN_PLACE
                    delays_ms.append(decision.delay_ms if is_retry else self._suspend_ms)
            self.failures.failed(failure, decisions[0])
        for message in retried:
            message.reconsume_times += 1
        return sorted(retried, key=lambda message: message.queue_offset), max(delays_ms, default=None)

    def _is_sent_to_dead_letters(self, message: MessageExt, decision: Decision, error: BaseException | None) -> bool:
        """Send a message without retries left to the dead letter topic. Return False if it must be retried here."""
        if decision.next_step is not NextStep.DEAD_LETTER:
            return False
        try:
            self._send_back.send(message, decision, error)
        except BaseException as refusal:
            raise_if_not_of_handler(refusal)
            self.failures.send_back_failed(message, refusal, self._suspend_ms)
            return False
        return True


class PullMembership(Membership):
    """Membership that pulls from the queues that are assigned to it, and commits offsets.

    Attributes:
        consumer: The member of the group at the broker.
        queues: Messages that were fetched and are not finished.
    """

    def _join(self, broker: Broker) -> ConsumeService[Any, Any]:
        settings = self.endpoint.settings
        self.consumer = broker.groups.subscribe(settings.consumer_spec(self._clock.now_ms()))
        self.queues = ProcessQueues(self.consumer)
        kind = OrderlyConsumeService if settings.is_orderly else PullConcurrentService
        service = kind(consumer=self.consumer, queues=self.queues, **self._service_arguments())
        self._take: Callable[[Sequence[MessageExt]], None] = service.accept
        self._excluded = service.excluded
        self._give_up_reassigned = service.give_up_reassigned
        self.wake_fetch = self.consumer.wake
        self._repositioning = Repositioning(broker, self.consumer, self.queues, service.discard_dropped)
        return service

    @property
    def in_flight(self) -> int:
        return self.queues.in_flight

    def positions(self) -> dict[MessageQueue, int | None]:
        return {queue: self.consumer.committed(queue) for queue in self.consumer.assignment()}

    def reposition(self, move: Callable[[Repositioning], None]) -> None:
        self.run_when_polling(lambda: move(self._repositioning))

    def _follow_assignment(self) -> None:
        self.queues.refresh()
        self._give_up_reassigned()

    def _fetch(self, wait_ms: int) -> bool:
        self.queues.refresh()
        if resets := self.consumer.take_resets():
            self._repositioning.by_administrator(resets)
        without = self._excluded()
        settings = self.endpoint.settings
        try:
            messages = self.consumer.poll(settings.pull_batch_size, wait_ms, without=without)
        except CorruptRecordError as error:
            self._log.error(
                "listener.record_corrupt", file=str(error.path), offset=error.physical_offset, reason=error.reason
            )
            return True
        if not messages:
            self.queues.commit_positions(without)
            return False
        self._take(messages)
        if settings.pull_interval:
            self._next_poll_ms = self._clock.steady_ms() + settings.pull_interval
        return True

    def _leave(self) -> None:
        try:
            self.queues.commit()
        except (BrokerClosedError, ForkedError):
            self._log.warning("listener.commit_failed", reason="the broker was closed first")
        finally:
            self.consumer.close()
