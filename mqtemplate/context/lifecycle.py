"""Stops of everything that an application started, in reverse order."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mqtemplate.errors import DependencyError
from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.context")


class Lifecycle:
    """A stack of stops. Every stop runs, even if another one fails."""

    def __init__(self) -> None:
        self._stops: list[tuple[str, Callable[[], object]]] = []

    def push(self, name: str, stop: Callable[[], object]) -> None:
        """Add a stop; the last one added runs first."""
        self._stops.append((name, stop))

    def stop(self) -> None:
        """Run all stops, once.

        Raises:
            ExceptionGroup: The errors of the stops that failed. All others succeeded.
        """
        errors: list[Exception] = []
        while self._stops:
            name, stop = self._stops.pop()
            try:
                stop()
            except Exception as exc:
                exc.add_note(f"while stopping {name}")
                _log.exception("application.stop_failed", part=name)
                errors.append(exc)
        if errors:
            raise ExceptionGroup("the application did not stop cleanly", errors)


def hook_of(instance: object, name: str) -> Callable[[], object] | None:
    """Return the method ``on_start`` or ``on_stop`` of a service; None if it has none.

    Raises:
        DependencyError: The method is ``async`` or needs arguments.
    """
    method = _method_of(instance, name)
    if method is None:
        return None
    title = f"{type(instance).__qualname__}.{name}"
    if inspect.iscoroutinefunction(method):
        raise DependencyError(f"{title} is async; hooks are called from a plain thread, make it def")
    if not _needs_no_arguments(method):
        raise DependencyError(f"{title} is called without arguments; give its parameters defaults")
    return method


def closing_of(instance: object) -> Callable[[], object] | None:
    """Return the method that ends an object: ``close()``, else ``stop()``; None if neither works without arguments."""
    for name in ("close", "stop"):
        method = _method_of(instance, name)
        if method is not None and not inspect.iscoroutinefunction(method) and _needs_no_arguments(method):
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
