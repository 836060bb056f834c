"""Event loops for ``async def`` handlers: one loop for all listeners of an application, and the tasks of a listener."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from mqtemplate.errors import EventLoopBlockedError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import handler_loops, running_loop
from mqtemplate.listener.failures.failure import Failure, raise_if_not_of_handler
from mqtemplate.message import MessageExt
from mqtemplate.processes import call_after_fork
from mqtemplate.user_code import is_interrupt


class Cancellable(Protocol):
    """Something that runs on a loop until it is cancelled."""

    def cancel(self) -> object:
        """Cancel it, from any thread."""


class HandlerLoop(ABC):
    """Event loop of the ``async def`` handlers of one application.

    The consume thread that passes a coroutine waits for it. So the number of consume threads of a listener limits how
    many of its coroutines run at once. A coroutine sees the context variables of that thread.

    Attributes:
        running: What `cancel` cancels: coroutines, and handlers that still run after their listener was stopped.
    """

    def __init__(self) -> None:
        self.running: set[Cancellable] = set()

    def run(self, awaitable: Awaitable[object]) -> object:
        """Run an awaitable on the loop, wait for it in this thread, and return its result.

        Raises:
            EventLoopBlockedError: This thread runs the loop.
        """
        try:
            self._refuse_to_wait()
            loop = self.open()
        except Exception:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise
        future = asyncio.run_coroutine_threadsafe(_outcome_of(awaitable), loop)
        self.running.add(future)
        try:
            outcome = self.wait(future)
        finally:
            self.running.discard(future)
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def _refuse_to_wait(self) -> None:
        if self.is_current():
            raise EventLoopBlockedError(
                "a coroutine would have to run on the event loop that this call blocks; await start_async() and "
                "stop_async() of the application, or use 'async with'"
            )

    @abstractmethod
    def open(self) -> asyncio.AbstractEventLoop:
        """Return the loop; start it if it does not run yet."""

    def wait(self, future: Future[object]) -> object:
        """Wait in this thread for a coroutine on the loop, and return its result."""
        return future.result()

    @abstractmethod
    def is_current(self) -> bool:
        """Return True if this thread runs the loop: a call that waits for a handler would wait for itself."""

    def serve(self) -> None:
        """Note that handlers run on the loop from now on, until `stop`."""
        handler_loops.add(self)

    def call_outside(self, function: Callable[[], object]) -> None:
        """Call a function soon, while the loop goes on or has ended: the function may stop the loop."""
        threading.Thread(target=function, name="mqtemplate-stop").start()

    def cancel(self) -> None:
        """Cancel the handlers that still run. Stop the listeners before."""
        for running in tuple(self.running):
            running.cancel()

    @abstractmethod
    def stop(self) -> None:
        """End the loop, if the application started it. What still runs on it is cancelled."""


async def cancel_others() -> None:
    """Cancel all other tasks of the running loop, and wait for their end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception that a task does not raise: for some asyncio ends the loop, which all listeners use."""

    error: BaseException


async def _outcome_of(awaitable: Awaitable[object]) -> object:
    """Return the result of a handler, or what it raised; see `raise_if_not_of_handler`."""
    try:
        return await awaitable
    except Exception:
        raise
    except BaseException as error:
        raise_if_not_of_handler(error)
        return _Raised(error)


_log = get_logger("mqtemplate.listener")
_CANCEL_S = 10.0


class RunningLoop(HandlerLoop):
    """Event loop in which the application was started. The program that runs it also ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def open(self) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed():
            raise ListenerError(
                "the event loop in which the application was started is closed, and its handlers run there; stop the "
                "application before the loop ends: 'async with MQApplication(...)', or await app.stop_async()"
            )
        return self._loop

    def is_current(self) -> bool:
        return running_loop() is self._loop

    def stop(self) -> None:
        self.cancel()
        handler_loops.discard(self)


class LoopThread(HandlerLoop):
    """Event loop in a thread of its own, started with the first coroutine."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="mqtemplate-listener-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def stop(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        handler_loops.discard(self)
        if thread is threading.current_thread():  # a handler stops the application
            loop.call_soon(loop.stop)
            return
        try:
            asyncio.run_coroutine_threadsafe(cancel_others(), loop).result(_CANCEL_S)
        except TimeoutError:
            _log.warning("listener.tasks_not_cancelled", seconds=_CANCEL_S, reason="they ignore the cancellation")
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CANCEL_S)
        if not thread.is_alive():
            loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped.

    For ``SystemExit`` and ``KeyboardInterrupt`` asyncio ends the loop, also if they come from a task that a handler
    started. Here they are errors of that task: the handlers of all listeners use this loop.
    """
    while True:
        try:
            loop.run_forever()
            return
        except BaseException:
            _log.exception("listener.task_failed", hint="a task that a handler has started raised it")


# --- workers of one listener ---------------------------------------------------------------------


class ReadyMessages(Protocol):
    """Messages for tasks. See `ConcurrentConsumeService`, which has them."""

    @property
    def ready_count(self) -> int: ...

    def begin_next(self) -> Any: ...

    def give_back(self, running: Any) -> None: ...

    def end(self, running: Any, failure: Failure | None) -> None: ...


class ConsumePool(ABC):
    """Workers of one listener, threads or tasks: at most *number* at a time, and more in place of hanging ones.

    Args:
        number: Maximum number of workers.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(self, name: str, number: int, maximum: int) -> None:
        self._name = name
        self._number = number
        self._maximum = max(number, maximum)
        self._lock = threading.Lock()
        self._hanging = 0
        self._abandoned = False
        call_after_fork(self)

    @abstractmethod
    def after_fork(self) -> None:
        """Handle no further message in a forked child. See `UsedByOneProcess`."""

    @abstractmethod
    def wake(self) -> None:
        """Let a worker take the work that is ready."""

    @abstractmethod
    def supervise(self) -> bool:
        """Let more workers take work if it stays ready. Return True to be called again in about a millisecond."""

    @abstractmethod
    def resize(self, number: int, maximum: int) -> None:
        """Change the number of workers. Workers above it finish their work; none is interrupted."""

    @abstractmethod
    def finish(self, timeout_s: float) -> int:
        """Wait until no work is ready and no worker runs, at most *timeout_s*. Return how many still run."""

    @abstractmethod
    def abandon(self) -> None:
        """Let the workers that still run end after their handlers."""

    @abstractmethod
    def add_worker(self) -> None:
        """Start one more worker, if there may be more and work is ready.

        Raises:
            RuntimeError: No thread can be started.
        """

    def replace(self) -> Callable[[], None] | None:
        """Start a worker in place of a hanging one; None if there are *maximum*.

        Returns:
            A function for the hanging worker to call when it is back; then one worker ends.
        """
        with self._lock:
            if self._number + self._hanging >= self._maximum:
                return None
            self._hanging += 1
        try:
            self.add_worker()
        except RuntimeError:  # no thread can be started; the message is taken away from the hanging one all the same
            self._end_replacement()
            return None
        return self._end_replacement

    def _end_replacement(self) -> None:
        with self._lock:
            self._hanging = max(0, self._hanging - 1)


# --- tasks on an event loop ----------------------------------------------------------------------

_SETTLING_THREADS = 4
StartTask = Callable[[MessageExt, asyncio.AbstractEventLoop], "asyncio.Task[Failure | None]"]
"""Function that creates the task for one message."""


class AsyncConsumePool(ConsumePool):
    """Tasks of one listener on the event loop of the handlers, at most *number* at a time.

    A `ConsumeThreadPool` would pass each message from a consume thread to the loop and its result back. Here the loop
    takes the messages itself. Calls that wait for the broker, such as sending failed messages back, are in threads.

    Args:
        number: Maximum number of tasks.
        maximum: Maximum number with those that `replace` adds.
    """

    def __init__(
        self,
        name: str,
        work: ReadyMessages,
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
        self._ending = 0  # messages that are settled in threads
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
                self._settle_in_thread(running, Failure((running.work[0][1],), error))
                continue
            running.task = task
            self._tasks.add(task)
            task.add_done_callback(lambda task, running=running: self._done(task, running))  # type: ignore[misc]
        if self._idle is not None and not self._tasks and not self._ending and not self._work.ready_count:
            self._idle.set()

    def _done(self, task: asyncio.Task[Failure | None], running: Any) -> None:
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
            self._settle_in_thread(running, failure)
        self._fill()

    def _settle_in_thread(self, running: Any, failure: Failure | None) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_SETTLING_THREADS, f"{self._name}-settling")
        try:
            settling = self._loop.run_in_executor(self._threads, self._settle, running, failure)
        except RuntimeError:  # no thread can be started
            self._settle(running, failure)
            return
        self._ending += 1
        settling.add_done_callback(self._settled)

    def _settle(self, running: Any, failure: Failure | None) -> None:
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
