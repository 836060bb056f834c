"""Stops of everything that an application started, in reverse order; and the hooks of services."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from mqtemplate.context.hooks import HookCaller
from mqtemplate.errors import DependencyError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.failures.failure import raise_if_not_of_handler
from mqtemplate.user_code import error_text

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
    """Return the method ``on_start`` or ``on_stop`` of a service, which may be ``async``; None if it has none.

    Raises:
        DependencyError: The method needs arguments.
    """
    method = _method_of(instance, name)
    if method is not None and not _needs_no_arguments(method):
        title = f"{type(instance).__qualname__}.{name}"
        raise DependencyError(f"{title} is called without arguments; give its parameters defaults")
    return method


def closing_of(instance: object) -> Callable[[], object] | None:
    """Return the method that ends an object: ``aclose()``, ``close()`` or ``stop()``, the first that works.

    It may be ``async``. None if the object has none, or all need arguments.
    """
    for name in ("aclose", "close", "stop"):
        method = _method_of(instance, name)
        if method is not None and _needs_no_arguments(method):
            return method
    return None


def _method_of(instance: object, name: str) -> Callable[[], object] | None:
    method = getattr(instance, name, None) if hasattr(type(instance), name) else None
    return method if callable(method) else None


def _needs_no_arguments(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):  # an argument is missing, or a method in C shows no signature
        return False
    return True
