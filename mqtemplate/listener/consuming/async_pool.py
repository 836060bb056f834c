"""Tasks on an event loop that handle the messages of one listener, without a thread for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.consuming.handler_loop import HandlerLoop
from mqtemplate.listener.consuming.watchdog import RunningCall
from mqtemplate.listener.failures.failure import Failure
from mqtemplate.message import MessageExt
from mqtemplate.processes import call_after_fork
from mqtemplate.user_code import is_interrupt

_log = get_logger("mqtemplate.listener")

_THREADS_FOR_FAILURES = 4

StartTask = Callable[[MessageExt, asyncio.AbstractEventLoop], "asyncio.Task[Failure | None]"]
"""Function that creates the task for one message."""
_Running = RunningCall[Any]


class LoopWork(Protocol):
    """Source of messages for tasks."""

    def begin_next(self) -> _Running | None:
        """Take the next message; None if none is ready."""

    def end(self, running: _Running, failure: Failure | None) -> None:
        """Settle a message. It waits for the broker only if there is a failure."""

    def give_back(self, running: _Running) -> None:
        """Make a message ready again that was not handled."""

    @property
    def ready_count(self) -> int:
        """Number of messages that are ready."""


class AsyncConsumePool:
    """Tasks of one listener on the event loop of the handlers, at most *number* at a time.

    A `ConsumeThreadPool` would pass each message from a consume thread to the loop and its result back. Here the loop
    takes the messages itself. Messages that failed are sent back in threads, since that waits for the broker.

    Args:
        number: Maximum number of tasks.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(
        self, name: str, work: LoopWork, start_task: StartTask, loop: HandlerLoop, number: int, maximum: int
    ) -> None:
        self._name = name
        self._work = work
        self._start_task = start_task
        self._handler_loop = loop
        self._loop = loop.open()
        self._number = number
        self._maximum = max(number, maximum)
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Failure | None]] = set()
        self._ending = 0  # failures that are sent back
        self._hanging = 0
        self._is_scheduled = False
        self._abandoned = False
        self._idle: threading.Event | None = None
        self._threads: ThreadPoolExecutor | None = None
        call_after_fork(self)

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

    def replace(self) -> Callable[[], None] | None:
        """Let one more task run in place of a hanging one; None if there are *maximum*."""
        with self._lock:
            if self._number + self._hanging >= self._maximum:
                return None
            self._hanging += 1
        self.wake()
        return self._end_replacement

    def resize(self, number: int, maximum: int) -> None:
        """Change the number of tasks. Tasks above it finish their messages, and none starts until fewer run."""
        with self._lock:
            self._number, self._maximum = number, max(number, maximum)
        self.wake()

    def _end_replacement(self) -> None:
        with self._lock:
            self._hanging = max(0, self._hanging - 1)

    def stop(self, timeout_s: float) -> int:
        """Let the tasks finish the ready messages, for at most *timeout_s*. Return how many tasks still run."""
        if timeout_s > 0 and not self._loop.is_closed():
            self._idle = threading.Event()
            self._loop.call_soon_threadsafe(self._fill)
            self._idle.wait(timeout_s)
        self._abandoned = True
        if self._tasks:
            self._handler_loop.note_running(self)
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        return len(self._tasks)

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
        except RuntimeError:  # there is no thread for it
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
