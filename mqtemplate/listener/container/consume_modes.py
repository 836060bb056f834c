"""Consume services of the two modes: messages are handled side by side, also as tasks, or each queue in its order.

``CONCURRENTLY`` sends a failed message back to the broker; ``ORDERLY`` retries it before the next one of its queue.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from mqtemplate.durations import format_ms
from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.consume_service import ConsumePool, ConsumeService, ReplaceThread, RunningCall
from mqtemplate.listener.container.loops import HandlerLoop
from mqtemplate.listener.container.process_queue import ProcessQueue
from mqtemplate.listener.failures.failure import Decision, Failure, NextStep, raise_if_not_of_handler
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.user_code import is_interrupt

_Delivery = tuple[ProcessQueue, MessageExt]

_SEND_BACK_RETRY_MS = 5_000
_COMMIT_EVERY = 32


class ConcurrentConsumeService(ConsumeService[_Delivery, _Delivery]):
    """One queue of messages, from which every consume thread takes the next.

    - A failed message is sent back with the delay that the failure policy decides, or to the dead letter topic. If the
      broker does not take it, it is handled here again after 5 s.
    - In a broadcasting group a failed message is reported and dropped, as RocketMQ does.
    - A queue is committed up to its first unfinished message, after about 32 messages or when no message is ready.

    Source: RocketMQ ``client: ConsumeMessageConcurrentlyService``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uncommitted = 0  # messages finished since the last commit; roughly, since threads share it

    def accept(self, messages: Sequence[MessageExt]) -> None:
        of, ready = self.queues.of, self._ready
        for message in messages:
            process = of(message)
            if process.add(message):
                ready.append((process, message))

    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        """Report hanging handlers, send back their messages, and replace their threads."""
        for running in self._watchdog.hanging():
            if not running.take_away(replace_thread):
                continue
            messages = [message for _, message in running.work]
            blocked_ms, stack = self.clock.steady_ms() - running.since_ms, self._stack_of(running)
            decisions = [self.policy.decide(message, None) for message in messages]
            error = TimeoutError(f"the handler has not returned after {format_ms(blocked_ms)}")
            for (process, message), decision in zip(running.work, decisions, strict=True):
                self._finish_failed(process, message, decision, error)
            self.failures.blocked(messages, blocked_ms, stack, decisions[0].next_step.value)

    def discard_dropped(self) -> None:
        with self._delayed_lock:
            self._delayed = [each for each in self._delayed if not each[2][0].dropped]
            heapq.heapify(self._delayed)

    def run_next(self) -> bool:
        work = self._take()
        if not work:
            return False
        self.taken += 1
        if not self._handle(work):
            self.queues.commit()  # the listener pauses, perhaps for long
            return False
        self._uncommitted += len(work)
        if not self._ready or self._uncommitted >= _COMMIT_EVERY:
            self._commit()
        return True

    def _commit(self) -> None:
        self._uncommitted = 0
        self.queues.commit()

    def begin_next(self) -> RunningCall[_Delivery] | None:
        """Take the next message, for a task on an event loop. Return None if none is ready, or the listener pauses."""
        work = self._take()
        if not work:
            return None
        running = self._watchdog.start(work, -next(self._numbers) - 1)
        if not self.is_paused:
            return running
        if self._watchdog.finish(running):
            self._ready.extendleft(work)
        return None

    def give_back(self, running: RunningCall[_Delivery]) -> None:
        """Make a message of `begin_next` ready again that was not handled."""
        if self._watchdog.finish(running):
            self._ready.extendleft(running.work)

    def end(self, running: RunningCall[_Delivery], failure: Failure | None) -> None:
        """Settle a message of `begin_next`. It waits for the broker only if there is a failure."""
        if not self._watchdog.finish(running):
            return  # the message was sent back while the handler hung
        [(process, message)] = running.work
        if failure is None:
            process.finish(message.queue_offset)
        else:
            self._settle_failed(list(running.work), [failure])
        self._uncommitted += 1
        if not self._ready or self._uncommitted >= _COMMIT_EVERY:
            self._commit()

    def _take(self) -> list[_Delivery]:
        ready, missing = self._ready, self._take_size
        work: list[_Delivery] = []
        try:
            while missing:
                delivery = ready.popleft()
                if not delivery[0].dropped:
                    work.append(delivery)
                    missing -= 1
        except IndexError:
            pass  # another thread took the last one
        return work

    def _handle(self, work: list[_Delivery]) -> bool:
        """Call the handler. Return False if the listener was paused instead."""
        running = self._watchdog.start(work)
        if self.is_paused:
            if self._watchdog.finish(running):
                self._ready.extendleft(reversed(work))
            return False
        try:
            if self._is_batch:
                failures = self.invocation.handle([message for _, message in work])
            else:
                failure = self.invocation.handle_one(work[0][1])
                failures = [] if failure is None else [failure]
        except BaseException as error:
            try:
                failures = self._failed_around(running, [message for _, message in work], error)
            except BaseException:
                self._ready.extendleft(reversed(work))  # nothing is settled: they are handled again
                raise
        if not self._watchdog.finish(running):
            return True  # the messages were sent back while the handler hung
        if failures:
            return self._settle_failed(work, failures)
        for process, message in work:
            process.finish(message.queue_offset)
        return True

    def _settle_failed(self, work: list[_Delivery], failures: Sequence[Failure]) -> bool:
        """Send back the messages that failed; the others are done. Return False if the listener pauses instead."""
        if self._pauses(failures):
            self._ready.extendleft(reversed(work))
            return False
        try:
            failed = self._send_back_failed(work, failures)
        except BaseException:  # an error of this library, or Ctrl-C
            for process, message in work:
                if message.queue_offset in process:
                    self._delay((process, message), _SEND_BACK_RETRY_MS)
            raise
        for process, message in work:
            if id(message) not in failed:
                process.finish(message.queue_offset)
        return True

    def _send_back_failed(self, work: list[_Delivery], failures: Sequence[Failure]) -> frozenset[int]:
        """Send back the messages that failed, and then report them. Return their `id`s."""
        processes = {id(message): process for process, message in work}
        for failure in failures:
            decisions = [self.policy.decide(message, failure.error) for message in failure.messages]
            for message, decision in zip(failure.messages, decisions, strict=True):
                process = processes[id(message)]
                # A reassigned queue is read by its new owner. Sending back would duplicate the message.
                if not process.dropped or process.superseded:
                    self._finish_failed(process, message, decision, failure.error)
            self.failures.failed(failure, decisions[0])
        return frozenset(id(message) for failure in failures for message in failure.messages)

    def _finish_failed(
        self, process: ProcessQueue, message: MessageExt, decision: Decision, error: BaseException | None
    ) -> None:
        """Send a message back; if the broker does not take it, delay it here and handle it again."""
        if decision.next_step is not NextStep.DROPPED:
            try:
                self._send_back.send(message, decision, error)
            except BaseException as refusal:
                raise_if_not_of_handler(refusal)
                self.failures.send_back_failed(message, refusal, _SEND_BACK_RETRY_MS)
                message.reconsume_times += 1
                self._delay((process, message), _SEND_BACK_RETRY_MS)
                return
        process.finish(message.queue_offset)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._suspend_ms = self.endpoint.settings.suspend_current_queue_time_millis
        self._ordered: dict[MessageQueue, _OrderedQueue] = {}
        self._locked: set[MessageQueue] = set()
        self._lock_retries: dict[MessageQueue, int] = {}  # queue locked by another member -> time of the next try

    def excluded(self) -> frozenset[MessageQueue]:
        """Return the queues that are full, and those that another member or a thread of this one has not finished."""
        self._drop_lost()
        assignment = self.consumer.assignment()
        if self._locked - assignment:
            self.discard_dropped()
        for queue in self._locked - assignment:
            self._unlock_when_idle(queue)
        for queue in self._lock_retries.keys() - assignment:
            del self._lock_retries[queue]
        return super().excluded().union([queue for queue in assignment if not self._may_read(queue)])

    def _drop_lost(self) -> None:
        """Drop the queues whose locks another member may have by now; they are locked again before they are read."""
        lost = self._locked & self.consumer.lost_locks()
        if lost:
            for queue in lost:
                self.queues.drop(queue)
            self._locked -= lost
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
        self._locked.remove(queue)
        self.consumer.unlock_soon(queue)

    def accept(self, messages: Sequence[MessageExt]) -> None:
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
        for running in self._watchdog.hanging():
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
        """Make suspended queues that were dropped ready, so that a thread discards their messages now."""
        with self._delayed_lock:
            dropped = [each for each in self._delayed if each[2].process.dropped]
            self._delayed = [each for each in self._delayed if not each[2].process.dropped]
            heapq.heapify(self._delayed)
            self._ready.extend(ordered for _, _, ordered in dropped)

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


# --- tasks of one listener -----------------------------------------------------------------------

_log = get_logger("mqtemplate.listener")
_THREADS_FOR_FAILURES = 4
StartTask = Callable[[MessageExt, asyncio.AbstractEventLoop], "asyncio.Task[Failure | None]"]
"""Function that creates the task for one message."""

_Running = RunningCall[Any]


class AsyncConsumePool(ConsumePool):
    """Tasks of one listener on the event loop of the handlers, at most *number* at a time.

    A `ConsumeThreadPool` would pass each message from a consume thread to the loop and its result back. Here the loop
    takes the messages itself. Messages that failed are sent back in threads, since that waits for the broker.

    Args:
        number: Maximum number of tasks.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(
        self,
        name: str,
        work: ConcurrentConsumeService,
        start_task: StartTask,
        loop: HandlerLoop,
        number: int,
        maximum: int,
    ) -> None:
        super().__init__(name, number, maximum)
        self._work = work
        self._start_task = start_task
        self._handler_loop = loop
        self._loop = loop.open()
        self._tasks: set[asyncio.Task[Failure | None]] = set()
        self._ending = 0  # failures that are sent back
        self._is_scheduled = False
        self._idle: threading.Event | None = None
        self._threads: ThreadPoolExecutor | None = None

    def after_fork(self) -> None:
        """Handle nothing in a forked child. See `UsedByOneProcess`."""
        self._abandoned = True

    def wake(self) -> None:
        """Let the loop take the messages that are ready."""
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._handler_loop.open().call_soon_threadsafe(self._fill)
            except ListenerError as error:  # the program has closed its loop
                self._is_scheduled = False
                self._fail_ready(error)

    def _fail_ready(self, error: ListenerError) -> None:
        while not self._abandoned and (running := self._work.begin_next()) is not None:
            self._settle(running, Failure((running.work[0][1],), error))

    def supervise(self) -> bool:
        """Return False: a task that ends takes the next message at once."""
        return False

    def add_worker(self) -> None:
        self.wake()

    def resize(self, number: int, maximum: int) -> None:
        """Change the number of tasks. Tasks above it finish their messages, and none starts until fewer run."""
        with self._lock:
            self._number, self._maximum = number, max(number, maximum)
        self.wake()

    def finish(self, timeout_s: float) -> int:
        if timeout_s > 0 and not self._loop.is_closed():
            self._idle = threading.Event()
            self._loop.call_soon_threadsafe(self._fill)
            self._idle.wait(timeout_s)
        return len(self._tasks) + self._ending

    def abandon(self) -> None:
        self._abandoned = True
        if self._tasks:
            self._handler_loop.running.add(self)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def cancel(self) -> None:
        """Cancel the tasks that still run. The loop of the handlers calls it at its end."""
        if not self._loop.is_closed():
            for task in tuple(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    # --- on the loop -------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._is_scheduled = False
        while not self._abandoned and len(self._tasks) < self._number + self._hanging:
            running = self._work.begin_next()
            if running is None:
                break
            try:
                task = self._start_task(running.work[0][1], self._loop)
            except BaseException as error:  # of what is around the handler, such as a trace
                if is_interrupt(error):
                    self._work.give_back(running)
                    raise
                self._end_failed(running, Failure((running.work[0][1],), error))
                continue
            running.task = task
            self._tasks.add(task)
            task.add_done_callback(lambda task, running=running: self._done(task, running))  # type: ignore[misc]
        if self._idle is not None and not self._tasks and not self._ending and not self._work.ready_count:
            self._idle.set()

    def _done(self, task: asyncio.Task[Failure | None], running: _Running) -> None:
        self._tasks.discard(task)
        message = running.work[0][1]
        if task.cancelled():
            failure: Failure | None = Failure((message,), asyncio.CancelledError())
        elif (error := task.exception()) is None:
            failure = task.result()
        elif is_interrupt(error):  # Ctrl-C ends the loop, and nothing of it is the message's fault
            self._work.give_back(running)
            return
        else:  # something around the handler raised it
            failure = Failure((message,), error)
        if failure is None:
            self._settle(running, None)
        elif not self._abandoned:
            self._end_failed(running, failure)
        self._fill()

    def _end_failed(self, running: _Running, failure: Failure) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_FOR_FAILURES, f"{self._name}-failures")
        try:
            settling = self._loop.run_in_executor(self._threads, self._settle, running, failure)
        except RuntimeError:  # no thread can be started
            self._settle(running, failure)
            return
        self._ending += 1
        settling.add_done_callback(self._settled)

    def _settle(self, running: _Running, failure: Failure | None) -> None:
        try:
            self._work.end(running, failure)
        except BaseException as error:
            # What handlers raise is in the failure. This comes from a broker that cannot be reached.
            if is_interrupt(error):
                raise
            _log.exception("listener.worker_failed", worker=self._name)

    def _settled(self, _: asyncio.Future[None]) -> None:
        self._ending -= 1
        self._fill()
