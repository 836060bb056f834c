"""Interface of the event loops for ``async def`` handlers, and what they share."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from mqtemplate.errors import EventLoopBlockedError
from mqtemplate.futures import handler_loops
from mqtemplate.listener.failures.failure import raise_if_not_of_handler

RunAwaitable = Callable[[Awaitable[object]], object]
"""Function that runs the result of an ``async def`` handler to its end and returns its result; the calling thread
waits."""


class Cancellable(Protocol):
    """Something that runs on a loop until it is cancelled."""

    def cancel(self) -> object:
        """Cancel it, from any thread."""


class HandlerLoop(ABC):
    """Event loop of the ``async def`` handlers of one application.

    The consume thread that passes a coroutine waits for it. So the number of consume threads of a listener limits how
    many of its coroutines run at once. A coroutine sees the context variables of that thread.
    """

    def __init__(self) -> None:
        self._running: set[Cancellable] = set()

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
        self._running.add(future)
        try:
            outcome = self.wait(future)
        finally:
            self._running.discard(future)
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

    @abstractmethod
    def call_outside(self, function: Callable[[], object]) -> None:
        """Call a function soon, while the loop goes on or has ended: the function may stop the loop."""

    def note_running(self, running: Cancellable) -> None:
        """Note handlers that still run after their listener was stopped, for `cancel`."""
        self._running.add(running)

    def cancel(self) -> None:
        """Cancel the handlers that still run. Stop the listeners before."""
        for running in tuple(self._running):
            running.cancel()

    @abstractmethod
    def stop(self) -> None:
        """End the loop, if the application started it. What still runs on it is cancelled."""


def is_async(handler: Callable[..., object]) -> bool:
    """Return True if a handler is an ``async def`` function, or an object with an ``async def __call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


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
