"""Consume service: base of the two ways in which fetched messages are handled; and its watchdog.

Source: RocketMQ ``client: ConsumeMessageService``.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.clock import Clock
from mqtemplate.listener.failures.failure import Failure, is_kind, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
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
            return "".join(line for frame in _frames(self.task) for line in traceback.format_stack(frame, 1))
        frame = sys._current_frames().get(self.thread_id)
        return "".join(traceback.format_stack(frame)) if frame else ""


def _frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of the coroutines that a task awaits, the outermost first; the task itself knows only that."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        prefix = next((name for name in ("cr", "gi", "ag") if hasattr(awaited, f"{name}_frame")), None)
        if prefix is None:
            return
        if (frame := getattr(awaited, f"{prefix}_frame")) is not None:
            yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


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

    def hanging(self) -> list[RunningCall[_Work]]:
        """Return the handlers that hang. Each one is returned once."""
        latest = self._now_ms() - self._timeout_ms
        late = [running for running in list(self._running.values()) if running.since_ms < latest]
        for running in late:
            self._running.pop(running.thread_id, None)
            self._hanging.add(running)
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
