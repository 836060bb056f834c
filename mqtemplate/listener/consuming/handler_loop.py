"""Interface of the event loops for ``async def`` handlers, and what they share."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

RunAwaitable = Callable[[Awaitable[object]], object]
"""Function that runs the result of an ``async def`` handler to its end and returns its result; the calling thread
waits."""


class HandlerLoop(ABC):
    """Event loop of the ``async def`` handlers of one application.

    The consume thread that passes a coroutine waits for it. So the number of consume threads of a listener limits how
    many of its coroutines run at once. A coroutine sees the context variables of that thread.
    """

    @abstractmethod
    def run(self, awaitable: Awaitable[object]) -> object:
        """Run an awaitable on the loop, wait for it in this thread, and return its result."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return True if this thread runs the loop: a call that waits for a handler would wait for itself."""

    @abstractmethod
    def serve(self) -> None:
        """Note that handlers run on the loop from now on, until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """Cancel the handlers that still run. Stop the listeners before."""


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


async def without_exit(awaitable: Awaitable[object]) -> object:
    """Return the result of a handler; a `SystemExit` becomes an error of the handler."""
    try:
        return await awaitable
    except SystemExit as error:
        # asyncio would end the loop, which runs the handlers of all listeners.
        raise RuntimeError(f"the handler called sys.exit({error.code!r})") from error
