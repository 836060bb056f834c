"""Calls of hooks, plain and ``async def``, by an application that starts and stops with or without an event loop.

The steps of the start and of the stop are coroutines. `start()` runs them to their end without a loop: then an async
hook runs on the loop of the handlers, and the calling thread waits. `start_async()` awaits them.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mqtemplate.callables import name_of_callable, unfinished
from mqtemplate.errors import ConfigurationError, EventLoopBlockedError
from mqtemplate.listener.container.loops import HandlerLoop

T = TypeVar("T")


def finish(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, since each of its calls blocks, and return its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a step of a blocking start or stop suspended")


class HookCaller(ABC):
    """Caller of hooks.

    Args:
        loop: Returns the loop of the ``async def`` handlers, on which async hooks run too.
    """

    def __init__(self, loop: Callable[[], HandlerLoop]) -> None:
        self._loop = loop

    @abstractmethod
    def check(self, name: str, hook: Callable[[], object]) -> None:
        """Raise `EventLoopBlockedError` if the hook is async, and can only run on the loop that the caller blocks."""

    async def call(self, hook: Callable[[], object]) -> None:
        """Call a hook; if it is async, wait for its end."""
        result = hook()
        if inspect.isawaitable(result):
            await self._complete(result)
        elif (found := unfinished(result)) is not None:
            raise ConfigurationError(
                f"{name_of_callable(hook)} returned {found}, so it did nothing; write it without 'yield', with "
                "'def' or 'async def'"
            )

    @abstractmethod
    async def _complete(self, awaitable: Any) -> None: ...

    @abstractmethod
    async def call_blocking(self, stop: Callable[[], object]) -> None:
        """Call a function that may block."""


class BlockingCaller(HookCaller):
    """Caller of hooks for ``start()`` and ``stop()``."""

    def check(self, name: str, hook: Callable[[], object]) -> None:
        if inspect.iscoroutinefunction(hook) and self._loop().is_current():
            raise EventLoopBlockedError(
                f"{name} is async, and start() and stop() block the event loop on which it would run; use "
                "'async with MQApplication(...) as app:', or await app.start_async() and app.stop_async()"
            )

    async def _complete(self, awaitable: Any) -> None:
        self._loop().run(awaitable)

    async def call_blocking(self, stop: Callable[[], object]) -> None:
        stop()


class AwaitingCaller(HookCaller):
    """Caller of hooks for ``start_async()`` and ``stop_async()``.

    The event loop goes on while a stop blocks in a thread: handlers that still run need it. On a virtual clock there
    are no threads, and handlers do not need this loop.
    """

    def __init__(self, loop: Callable[[], HandlerLoop], *, is_virtual: bool) -> None:
        super().__init__(loop)
        self._is_virtual = is_virtual

    def check(self, name: str, hook: Callable[[], object]) -> None:
        pass

    async def _complete(self, awaitable: Any) -> None:
        loop = self._loop()
        if loop.is_current():
            await awaitable
        else:
            loop.run(awaitable)

    async def call_blocking(self, stop: Callable[[], object]) -> None:
        if self._is_virtual:
            stop()
        else:
            await asyncio.to_thread(stop)
