"""Consume service: base of the ways in which fetched messages are handled, its watchdog, and its consume threads.

Source: RocketMQ ``client: ConsumeMessageService``.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.loops import ConsumePool
from mqtemplate.listener.failures.failure import Decision, Failure, is_kind, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog, stack_of_task
from mqtemplate.listener.failures.policy import FailurePolicy
from mqtemplate.listener.handler.invoke import HandlerInvocation
from mqtemplate.listener.handler.plan import Endpoint
from mqtemplate.message import MessageExt
from mqtemplate.user_code import error_text, safe_text

if TYPE_CHECKING:
    import asyncio


_Work = TypeVar("_Work")
ReplaceThread = Callable[[], Callable[[], None] | None]
"""Function that starts a thread in place of a hanging one. It returns a function that ends the replacement, or None
if there may be no more threads."""


class RunningCall(Generic[_Work]):
    """One call of a handler. The first thread that claims its work owns it: the consume thread, or the watchdog's."""

    __slots__ = ("_claim", "_end_replacement", "since_ms", "task", "thread_id", "work")

    def __init__(self, work: Sequence[_Work], since_ms: int, thread_id: int) -> None:
        self.work = work
        self.since_ms = since_ms
        self.thread_id = thread_id
        self.task: asyncio.Task[Any] | None = None  # set if the handler is a task on an event loop
        self._claim = [None]
        self._end_replacement: Callable[[], None] | None = None

    def claim(self) -> bool:
        """Claim the work. Return False if another thread has claimed it."""
        try:
            self._claim.pop()  # one step of the interpreter: two threads cannot both succeed
        except IndexError:
            return False
        return True

    def take_away(self, replace_thread: ReplaceThread) -> bool:
        """Claim the work for the watchdog, and replace its thread. Return False if the handler returned first."""
        self._end_replacement = replace_thread()  # before the claim: a thread that loses the claim reads it
        if self.claim():
            return True
        self.end_replacement()
        return False

    def end_replacement(self) -> None:
        """End the replacement thread, since this call's own thread is back."""
        if self._end_replacement is not None:
            self._end_replacement()

    def stack(self) -> str:
        """Return the current stack of its thread, or of its task."""
        if self.task is not None:
            return stack_of_task(self.task)
        frame = sys._current_frames().get(self.thread_id)
        return "".join(traceback.format_stack(frame)) if frame else ""


class Watchdog(Generic[_Work]):
    """Handlers that run now.

    Args:
        timeout_ms: Time after which a handler counts as hanging.
    """

    def __init__(self, timeout_ms: int, clock: Clock) -> None:
        self._timeout_ms = timeout_ms
        self._now_ms = clock.steady_ms
        self._running: dict[int, RunningCall[_Work]] = {}
        self._hanging: set[RunningCall[_Work]] = set()  # found by `hanging`, and not finished

    def start(self, work: Sequence[_Work], task_number: int | None = None) -> RunningCall[_Work]:
        """Note that this thread calls a handler now.

        Args:
            task_number: Number of a task, below 0, if it runs on an event loop: many of them share a thread.
        """
        thread_id = threading.get_ident() if task_number is None else task_number
        running = self._running[thread_id] = RunningCall(work, self._now_ms(), thread_id)
        return running

    def finish(self, running: RunningCall[_Work]) -> bool:
        """Note that a handler returned. Return False if its work was taken away before."""
        if self._running.get(running.thread_id) is running:
            del self._running[running.thread_id]
        else:
            self._hanging.discard(running)
        if running.claim():
            return True
        running.end_replacement()
        return False

    @property
    def hanging_count(self) -> int:
        """Number of handlers that were found to hang and have not returned."""
        return len(self._hanging)

    def hanging(self, may_take_longer: Callable[[Sequence[_Work]], bool]) -> list[RunningCall[_Work]]:
        """Return the handlers that hang. Each one is returned once."""
        latest = self._now_ms() - self._timeout_ms
        running = list(self._running.values())
        late = [each for each in running if each.since_ms < latest and not may_take_longer(each.work)]
        for each in late:
            self._running.pop(each.thread_id, None)
            self._hanging.add(each)
        return late

    def abandon(self) -> int:
        """Take the work away from all handlers that run. Return how many messages they have."""
        running = list(self._running.values())
        self._running.clear()
        return sum(len(each.work) for each in running if each.claim())


_Item = TypeVar("_Item")


@dataclass(eq=False, kw_only=True)
class ConsumeService(ABC, Generic[_Item, _Work]):
    """Items that are ready for a consume thread, and items that are delayed before they are ready again.

    The polling thread calls `next_due`, `release_due` and `check_hanging`. Consume threads call `run_next`.

    Args:
        on_earlier_due: Called when `next_due` may have become earlier.
        on_pause: Called to pause the listener until a time (ms), with a reason.

    Attributes:
        taken: Number of items taken so far. It does not change while all threads are in long handlers.
        is_paused: True: no handler is called. A thread notes its call in the watchdog first and reads this second, so
            that every call that is not noted when this becomes True does not happen.
        must_yield: True: more threads are awake than there may be, so a thread handles no second message in `run_next`.
    """

    endpoint: Endpoint
    invocation: HandlerInvocation
    policy: FailurePolicy
    failures: FailureLog
    clock: Clock
    on_earlier_due: Callable[[], None]
    on_pause: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self._is_batch = self.endpoint.plan.is_batch
        # Single messages one at a time: else a thread could not stop between two of them when the listener is paused.
        self._take_size = self.endpoint.take_size if self._is_batch else 1
        self._watchdog: Watchdog[_Work] = Watchdog(self.endpoint.settings.consume_timeout_ms, self.clock)
        self._ready: deque[_Item] = deque()
        self._delayed: list[tuple[int, int, _Item]] = []  # a heap: due time, number, item
        self._delayed_lock = threading.Lock()
        self._numbers = itertools.count()
        self.taken = 0
        self.is_paused = False
        self.must_yield = False

    @property
    def ready_count(self) -> int:
        """Number of items that are ready for a consume thread; 0 while the listener is paused."""
        return 0 if self.is_paused else len(self._ready)

    @property
    def hanging_count(self) -> int:
        """Number of calls of the handler that run longer than ``consume_timeout``."""
        return self._watchdog.hanging_count

    @abstractmethod
    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        """Report hanging handlers."""

    @abstractmethod
    def run_next(self) -> bool:
        """Handle the next item. Return False if none is ready."""

    def resume(self) -> None:
        """Let handlers be called again."""
        self.is_paused = False

    def next_due(self) -> int | None:
        """Return when the next delayed item becomes ready; None if no item is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def release_due(self, now_ms: int) -> None:
        """Make the delayed items ready whose time has come."""
        with self._delayed_lock:
            while self._delayed and self._delayed[0][0] <= now_ms:
                self._ready.append(heapq.heappop(self._delayed)[2])

    def abandon(self) -> int:
        """Forget all unfinished messages; they stay uncommitted. Return how many a handler still has."""
        self._ready.clear()
        self._delayed.clear()
        return self._watchdog.abandon()

    def _failed_around(
        self, running: RunningCall[_Work], messages: Sequence[MessageExt], error: BaseException
    ) -> list[Failure]:
        """Return the failure for an exception that no handler raised, but what is around it, such as a metric.

        Raises:
            BaseException: It is meant for this thread; see `raise_if_not_of_handler`.
        """
        try:
            raise_if_not_of_handler(error)
        except BaseException:
            self._watchdog.finish(running)
            raise
        return [Failure(messages, error)]

    def _may_take_longer(self, work: Sequence[_Work]) -> bool:
        """Return True if the handler of some work has requested more time than ``consume_timeout``."""
        return False

    def _pauses(self, failures: Sequence[Failure]) -> bool:
        """Pause the listener if one of the failures requests it. Return True then: no message counts as handled."""
        for failure in failures:
            if is_kind(failure.error, PauseListener) and (pause_ms := _pause_ms(failure.error)) is not None:
                self.on_pause(self.clock.steady_ms() + pause_ms, safe_text(failure.error))
                return True
        return False

    def _stack_of(self, running: RunningCall[_Work]) -> str:
        """Return the stack of a hanging handler. The loader of its sources may be the application's."""
        try:
            return running.stack()
        except BaseException as error:
            raise_if_not_of_handler(error)
            return error_text(error)

    def _delay(self, item: _Item, delay_ms: int) -> None:
        due_ms = self.clock.steady_ms() + delay_ms
        with self._delayed_lock:
            heapq.heappush(self._delayed, (due_ms, next(self._numbers), item))
        self.on_earlier_due()


def _pause_ms(error: PauseListener) -> int | None:
    """Return the time that an exception requests. A class of the application may have left it out."""
    try:
        duration_ms: object = error.duration_ms
    except BaseException as raised:
        raise_if_not_of_handler(raised)
        return None
    return duration_ms if isinstance(duration_ms, int) else None


class Holder(Protocol):
    """Holder of a fetched message until it is finished: its process queue, or its delivery by POP.

    Attributes:
        dropped: Another member may have the message: it is not handled here any more.
        superseded: Dropped, since the listener continues at another position. A failed message is still sent back.
    """

    dropped: bool
    superseded: bool

    def finish(self, queue_offset: int) -> None:
        """Note that a message is handled or sent back."""


_Holder = TypeVar("_Holder", bound=Holder)


@dataclass(eq=False, kw_only=True)
class ConcurrentConsumeService(ConsumeService[tuple[_Holder, MessageExt], tuple[_Holder, MessageExt]]):
    """One queue of messages, from which every consume thread takes the next. Base of the services that do so."""

    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        """Report hanging handlers, send back their messages, and replace their threads."""
        for running in self._watchdog.hanging(self._may_take_longer):
            if not running.take_away(replace_thread):
                continue
            messages = [message for _, message in running.work]
            blocked_ms, stack = self.clock.steady_ms() - running.since_ms, self._stack_of(running)
            decisions = [self.policy.decide(message, None) for message in messages]
            error = TimeoutError(f"the handler has not returned after {format_ms(blocked_ms)}")
            for (holder, message), decision in zip(running.work, decisions, strict=True):
                self._finish_failed(holder, message, decision, error)
            self.failures.blocked(messages, blocked_ms, stack, decisions[0].next_step.value)

    def run_next(self) -> bool:
        work = self._take()
        if not work:
            return False
        self.taken += 1
        try:
            is_handled = self._handle(work)
        finally:
            self._ended(work)
        self._settled(len(work), is_pausing=not is_handled)
        return is_handled

    def begin_next(self) -> RunningCall[tuple[_Holder, MessageExt]] | None:
        """Take the next message, for a task on an event loop. Return None if none is ready, or the listener pauses."""
        work = self._take()
        if not work:
            return None
        running = self._watchdog.start(work, -next(self._numbers) - 1)
        if not self.is_paused:
            return running
        if self._watchdog.finish(running):
            self._put_back(work)
        self._ended(work)
        return None

    def give_back(self, running: RunningCall[tuple[_Holder, MessageExt]]) -> None:
        """Make a message of `begin_next` ready again that was not handled."""
        if self._watchdog.finish(running):
            self._put_back(running.work)
        self._ended(running.work)

    def end(self, running: RunningCall[tuple[_Holder, MessageExt]], failure: Failure | None) -> None:
        """Settle a message of `begin_next`. After a failure it may wait for the broker."""
        try:
            self._end(running, failure)
        finally:
            self._ended(running.work)

    def _end(self, running: RunningCall[tuple[_Holder, MessageExt]], failure: Failure | None) -> None:
        if not self._watchdog.finish(running):
            return  # the message was sent back while the handler hung
        if failure is None:
            [(holder, message)] = running.work
            holder.finish(message.queue_offset)
            is_pausing = False
        else:
            is_pausing = not self._settle_failed(running.work, [failure])
        self._settled(1, is_pausing=is_pausing)

    def _take(self) -> list[tuple[_Holder, MessageExt]]:
        ready, missing = self._ready, self._take_size
        work: list[tuple[_Holder, MessageExt]] = []
        try:
            while missing:
                delivery = ready.popleft()
                if delivery[0].dropped:
                    self._ended((delivery,))
                else:
                    work.append(delivery)
                    missing -= 1
        except IndexError:
            pass  # another thread took the last one
        return work

    def _ended(self, work: Sequence[tuple[_Holder, MessageExt]]) -> None:
        """Note that no handler has messages of `_take` any more."""

    def _put_back(self, work: Sequence[tuple[_Holder, MessageExt]]) -> None:
        """Make messages of `_take` ready again that are not settled, before the others."""
        self._ready.extendleft(reversed(work))

    def _handle(self, work: list[tuple[_Holder, MessageExt]]) -> bool:
        """Call the handler. Return False if the listener was paused instead."""
        running = self._watchdog.start(work)
        if self.is_paused:
            if self._watchdog.finish(running):
                self._put_back(work)
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
                self._put_back(work)  # nothing is settled: they are handled again
                raise
        if not self._watchdog.finish(running):
            return True  # the messages were sent back while the handler hung
        if failures:
            return self._settle_failed(work, failures)
        for holder, message in work:
            holder.finish(message.queue_offset)
        return True

    def _settle_failed(self, work: Sequence[tuple[_Holder, MessageExt]], failures: Sequence[Failure]) -> bool:
        """Send back the messages that failed; the others are done. Return False if the listener pauses instead."""
        if self._pauses(failures):
            self._put_back(work)
            return False
        try:
            failed = self._send_back_failed(work, failures)
        except BaseException:  # an error of this library, or Ctrl-C
            self._not_settled(work)
            raise
        for holder, message in work:
            if id(message) not in failed:
                holder.finish(message.queue_offset)
        return True

    def _send_back_failed(
        self, work: Sequence[tuple[_Holder, MessageExt]], failures: Sequence[Failure]
    ) -> frozenset[int]:
        """Send back the messages that failed, and then report them. Return their `id`s."""
        holders = {id(message): holder for holder, message in work}
        for failure in failures:
            decisions = [self.policy.decide(message, failure.error) for message in failure.messages]
            for message, decision in zip(failure.messages, decisions, strict=True):
                holder = holders[id(message)]
                # A reassigned queue is read by its new owner. Sending back would duplicate the message.
                if not holder.dropped or holder.superseded:
                    self._finish_failed(holder, message, decision, failure.error)
            self.failures.failed(failure, decisions[0])
        return frozenset(id(message) for failure in failures for message in failure.messages)

    @abstractmethod
    def _finish_failed(
        self, holder: _Holder, message: MessageExt, decision: Decision, error: BaseException | None
    ) -> None:
        """Send a message that failed back to the broker."""

    @abstractmethod
    def _not_settled(self, work: Sequence[tuple[_Holder, MessageExt]]) -> None:
        """Note that an error of this library, or Ctrl-C, has ended the settling of messages."""

    def _settled(self, count: int, *, is_pausing: bool) -> None:
        """Note that this many messages are settled, or that the listener pauses."""


# --- consume threads -----------------------------------------------------------------------------

_log = get_logger("mqtemplate.listener")
_TICK_S = 0.001
_BUSY_PROCESS = 0.7  # of one core


class ConsumeThreadPool(ConsumePool):
    """Threads that are woken as the work needs them.

    Waking a thread for each message would cost more than most handlers do. So a thread that is awake takes a new
    message, and one thread is woken if none is awake. While messages stay ready, the polling thread calls
    `supervise` about each millisecond, which wakes more threads:

    - at once if all threads that are awake hang in long handlers, or if the handlers leave the processor idle;
    - else one each `_HELP_INTERVAL_S`, since threads do not help handlers that keep the processor busy.

    Args:
        number: Maximum number of threads.
        maximum: Maximum number of threads with those that `replace` starts.
    """

    _HELP_INTERVAL_S = 0.01

    def __init__(self, name: str, work: ConsumeService[Any, Any], number: int, maximum: int) -> None:
        super().__init__(name, number, maximum)
        self._work = work
        self._wake_event: SimpleQueue[None] = SimpleQueue()  # one entry wakes one sleeping thread
        self._threads: list[threading.Thread] = []
        self._awake = 0
        self._stopping = False
        self._must_leave = False  # abandoned, or more threads are awake than there may be
        self._ramp = 1
        self._last_tick = (0.0, 0.0, -1)  # time, processor time of the process, pieces taken
        self._last_help = 0.0

    def after_fork(self) -> None:
        """Let the thread end that forked in a handler: it handles no further message. See `UsedByOneProcess`."""
        self._lock = threading.Lock()  # a thread that is missing here may hold the other one
        self._stopping = self._abandoned = self._must_leave = True

    def wake(self) -> None:
        """Wake a thread for work that arrived, unless one is awake."""
        if self._awake == 0:
            self.add_worker()

    def supervise(self) -> bool:
        """Wake more threads if work stays ready. Return True to be called again in about a millisecond."""
        if not self._work.ready_count or self._awake >= self._number + self._hanging:
            self._ramp = 1
            return False
        now, (tick, cpu, taken) = time.monotonic(), self._last_tick
        if now - tick < _TICK_S:
            return True
        cpu_now, taken_now = time.process_time(), self._work.taken
        self._last_tick = (now, cpu_now, taken_now)
        if now - tick > 20 * _TICK_S:
            return True  # too long ago to compare with
        is_stuck = taken_now == taken
        is_idle = (cpu_now - cpu) < _BUSY_PROCESS * (now - tick)
        if is_stuck or is_idle or now - self._last_help > self._HELP_INTERVAL_S:
            self._last_help = now
            for _ in range(self._ramp):
                self.add_worker()
            self._ramp = min(self._ramp * 2, 16) if is_stuck or is_idle else 1
        return True

    def resize(self, number: int, maximum: int) -> None:
        """Change the number of threads. Threads above it end when their handlers return; none is interrupted.

        When this returns, no work starts while *number* threads or more are in handlers that do not hang.
        """
        with self._lock:
            self._number, self._maximum = number, max(number, maximum)
            self._ramp = 1
            self._check_excess()
        if self._work.ready_count:
            self.add_worker()

    def _end_replacement(self) -> None:
        super()._end_replacement()
        with self._lock:
            self._check_excess()

    def _check_excess(self) -> None:
        """With the lock: let threads end if more are awake than there may be."""
        has_excess = self._awake > self._number + self._hanging
        self._must_leave = self._abandoned or has_excess
        self._work.must_yield = has_excess

    def finish(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in threads:
            self._wake_event.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def abandon(self) -> None:
        self._abandoned = self._must_leave = True

    def add_worker(self) -> None:
        """Wake a thread that sleeps, or start one, unless as many are awake as there may be."""
        with self._lock:
            if self._stopping or self._awake >= self._number + self._hanging:
                return
            self._awake += 1
            if self._awake <= len(self._threads):
                self._wake_event.put(None)
                return
            thread = threading.Thread(target=self._loop, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # no memory for it, or the interpreter is shutting down
            with self._lock:
                self._threads.remove(thread)
                self._awake -= 1
            raise

    def _loop(self) -> None:
        while True:
            self._run_ready_work()
            with self._lock:
                self._awake -= 1
                self._check_excess()
                may_continue = not self._abandoned and self._awake < self._number + self._hanging
                if self._work.ready_count and may_continue:
                    # A race: work arrived while this thread still counted as awake, so `wake` woke no other one.
                    self._awake += 1
                    continue
                if self._stopping or len(self._threads) > self._number + self._hanging:
                    self._threads.remove(threading.current_thread())
                    return
            self._sleep()

    def _sleep(self) -> None:
        while True:
            try:
                self._wake_event.get()
                return
            except BaseException:  # raised into this thread by another one, as time limits do that come too late
                _log.exception("listener.worker_failed", worker=self._name)

    def _run_ready_work(self) -> None:
        while not self._must_leave:
            try:
                if not self._work.run_next():
                    return
            except BaseException:
                # What handlers raise is caught before. This comes from a broker that cannot be reached, or from
                # another thread that raises it in this one.
                _log.exception("listener.worker_failed", worker=self._name)
