"""Consume service: base of the two ways in which fetched messages are handled.

Source: RocketMQ ``client: ConsumeMessageService``.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mqtemplate.broker import Consumer
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.clock import Clock
from mqtemplate.listener.consuming.process_queue import ProcessQueues
from mqtemplate.listener.consuming.watchdog import ReplaceThread, RunningCall, Watchdog
from mqtemplate.listener.failures.failure import Decision, Failure, is_kind, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.failures.send_back import SendBack
from mqtemplate.listener.settings import ListenerSettings
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.user_code import error_text, safe_text

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")


Decide = Callable[[MessageExt, BaseException | None], Decision]
"""Function that decides about a message that failed with an exception; see `FailurePolicy.decide`."""


class Handling(Protocol):
    """Handler of a listener: it returns the failures."""

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages."""

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeContext:
    """Collaborators of a consume service, for one membership of a container in its group.

    Attributes:
        take_size: Number of messages that a thread takes at a time.
        on_earlier_due: Called when `ConsumeService.next_due` may have become earlier.
        on_pause: Called to pause the listener until a time (ms), with a reason.
    """

    settings: ListenerSettings
    take_size: int
    is_batch: bool
    consumer: Consumer
    queues: ProcessQueues
    handling: Handling
    failures: FailureLog
    decide: Decide
    clock: Clock
    on_earlier_due: Callable[[], None]
    on_pause: Callable[[int, str], None]


class ConsumeService(ABC, Generic[_Item, _Work]):
    """Items that are ready for a consume thread, and items that are delayed before they are ready again.

    The polling thread calls `excluded`, `accept`, `next_due`, `release_due` and `check_hanging`. Consume threads
    call `run_next`.

    Attributes:
        is_paused: True: no handler is called. A thread notes its call in the watchdog first and reads this second, so
            that every call that is not noted when this becomes True does not happen.
        must_yield: True: more threads are awake than there may be, so a thread handles no second message in `run_next`.
    """

    def __init__(self, context: ConsumeContext) -> None:
        self._settings = context.settings
        self._take_size = context.take_size
        self._consumer = context.consumer
        self._queues = context.queues
        self._handling = context.handling
        self._failures = context.failures
        self._decide = context.decide
        self._send_back = SendBack(context.settings.id, context.consumer, context.clock)
        self._clock = context.clock
        self._on_earlier_due = context.on_earlier_due
        self._on_pause = context.on_pause
        self._watchdog: Watchdog[_Work] = Watchdog(context.settings.consume_timeout_ms, context.clock)
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
    def excluded(self) -> frozenset[MessageQueue]:
        """Return the queues from which no message may be fetched now."""

    @abstractmethod
    def accept(self, messages: Sequence[MessageExt]) -> None:
        """Take fetched messages."""

    @abstractmethod
    def check_hanging(self, replace_thread: ReplaceThread) -> None:
        """Report hanging handlers."""

    @abstractmethod
    def run_next(self) -> bool:
        """Handle the next item. Return False if none is ready."""

    @abstractmethod
    def discard_dropped(self) -> None:
        """Discard the items of dropped queues, which need not be due."""

    def next_due(self) -> int | None:
        """Return when the next delayed item becomes ready; None if there is none."""
        return self._delayed[0][0] if self._delayed else None

    def release_due(self, now_ms: int) -> None:
        """Make the delayed items ready whose time has come."""
        with self._delayed_lock:
            while self._delayed and self._delayed[0][0] <= now_ms:
                self._ready.append(heapq.heappop(self._delayed)[2])

    def abandon(self) -> int:
        """Forget all unfinished messages; they stay uncommitted. Return how many messages that are."""
        unfinished = self._queues.in_flight
        self._ready.clear()
        self._delayed.clear()
        self._watchdog.abandon()
        return unfinished

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
                self._on_pause(self._clock.steady_ms() + pause_ms, safe_text(failure.error))
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
        due_ms = self._clock.steady_ms() + delay_ms
        with self._delayed_lock:
            heapq.heappush(self._delayed, (due_ms, next(self._numbers), item))
        self._on_earlier_due()


def _pause_ms(error: PauseListener) -> int | None:
    """Return the time that an exception requests. A class of the application may have left it out."""
    try:
        duration_ms: object = error.duration_ms
    except BaseException as raised:
        raise_if_not_of_handler(raised)
        return None
    return duration_ms if isinstance(duration_ms, int) else None
