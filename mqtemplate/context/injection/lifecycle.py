"""Stops of everything that an application started, in reverse order; and the hooks of services.

The steps of the start and of the stop are coroutines. `start()` runs them to their end without a loop: then an async
hook runs on the loop of the handlers, and the calling thread waits. `start_async()` awaits them.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from mqtemplate.callables import name_of_callable, takes_no_arguments, unfinished
from mqtemplate.errors import ConfigurationError, DependencyError, EventLoopBlockedError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.loops import HandlerLoop
from mqtemplate.listener.failures.failure import raise_if_not_of_handler
from mqtemplate.user_code import error_text

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


_log = get_logger("mqtemplate.context")


class _Stop(NamedTuple):
    name: str
    call: Callable[[], object]
    is_hook: bool


class Lifecycle:
    """A stack of stops. Every stop runs, even if another one fails."""

    def __init__(self) -> None:
        self._stops: list[_Stop] = []

    def push(self, name: str, stop: Callable[[], object], *, is_hook: bool = False) -> None:
        """Add a stop; the last one added runs first.

        Args:
            is_hook: True for a method of a service. It is called on the event loop, where the application has one, and
                may be ``async``. Other stops may block, and run in a thread beside the loop.
        """
        self._stops.append(_Stop(name, stop, is_hook))

    def hooks(self) -> list[tuple[str, Callable[[], object]]]:
        """Return the methods of services that are still to be called, with their names."""
        return [(stop.name, stop.call) for stop in self._stops if stop.is_hook]

    async def stop(self, caller: HookCaller) -> None:
        """Run all stops, once.

        Raises:
            ExceptionGroup: The errors of the stops that failed. All others succeeded.
        """
        errors: list[Exception] = []
        while self._stops:
            stop = self._stops.pop()
            try:
                await (caller.call(stop.call) if stop.is_hook else caller.call_blocking(stop.call))
            except BaseException as raised:  # whatever a service raises, the others are stopped
                raise_if_not_of_handler(raised)
                exc = raised if isinstance(raised, Exception) else DependencyError(error_text(raised))
                errors.append(exc)
                _log.error("application.stop_failed", part=stop.name, exc_info=raised)
                exc.add_note(f"while stopping {stop.name}")
        if errors:
            raise ExceptionGroup("the application did not stop cleanly", errors)


def hook_of(instance: object, name: str) -> Callable[[], object] | None:
    """Return the method ``on_start`` or ``on_stop`` of a service, which may be ``async``; None without one.

    Raises:
        DependencyError: The method needs arguments.
    """
    method = _method_of(instance, name)
    if method is not None and not takes_no_arguments(method):
        title = f"{type(instance).__qualname__}.{name}"
        raise DependencyError(f"{title} is called without arguments; give its parameters defaults")
    return method


def closing_of(instance: object) -> Callable[[], object] | None:
    """Return the method that ends an object: ``aclose()``, ``close()`` or ``stop()``, the first that works.

    It may be ``async``. None if the object has no such method, or all need arguments.
    """
    for name in ("aclose", "close", "stop"):
        method = _method_of(instance, name)
        if method is not None and takes_no_arguments(method):
            return method
    return None


def _method_of(instance: object, name: str) -> Callable[[], object] | None:
    method = getattr(instance, name, None) if hasattr(type(instance), name) else None
    return method if callable(method) else None
