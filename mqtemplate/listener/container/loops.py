"""Event loops for ``async def`` handlers: one loop for all listeners of an application."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from mqtemplate.errors import EventLoopBlockedError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import handler_loops, running_loop
from mqtemplate.listener.failures.failure import raise_if_not_of_handler


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
