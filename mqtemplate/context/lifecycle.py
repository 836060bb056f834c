"""Start in order, stop in reverse order, and let no stop keep another from happening."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import structlog

from mqtemplate.errors import DependencyError

_log = structlog.stdlib.get_logger("mqtemplate.context")


class Lifecycle:
    """Remembers how to undo what was started.

    Each stop is tried even if others fail; the errors come together in one group.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    def push(self, name: str, stop: Callable[[], object]) -> None:
        """Remember a stop; the last one remembered runs first."""
        self._undo.append((name, stop))

    def stop(self) -> None:
        """Stop everything, once.

        Raises:
            ExceptionGroup: What could not stop cleanly. Everything else did.
        """
        errors: list[Exception] = []
        while self._undo:
            name, stop = self._undo.pop()
            try:
                stop()
            except Exception as exc:
                exc.add_note(f"while stopping {name}")
                _log.exception("application.stop_failed", part=name)
                errors.append(exc)
        if errors:
            raise ExceptionGroup("the application did not stop cleanly", errors)


def hook_of(instance: object, name: str) -> Callable[[], object] | None:
    """A service's ``on_start`` or ``on_stop``.

    Raises:
        DependencyError: It is ``async`` or wants arguments.
    """
    method = _plain_method(instance, name)
    if method is None:
        return None
    if inspect.iscoroutinefunction(method):
        raise DependencyError(
            f"{type(instance).__qualname__}.{name} is async; hooks are called from a plain thread, make it def"
        )
    if not _needs_nothing(method):
        raise DependencyError(
            f"{type(instance).__qualname__}.{name} is called without arguments; give its parameters defaults"
        )
    return method


def closing_of(instance: object) -> Callable[[], object] | None:
    """How to end an object that the application built: ``close()``, else ``stop()``, if it can be called so."""
    for name in ("close", "stop"):
        method = _plain_method(instance, name)
        if method is not None and not inspect.iscoroutinefunction(method) and _needs_nothing(method):
            return method
    return None


def _plain_method(instance: object, name: str) -> Callable[[], object] | None:
    method = getattr(instance, name, None) if hasattr(type(instance), name) else None
    return method if callable(method) else None


def _needs_nothing(method: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(parameter.default is not parameter.empty or parameter.kind in variable for parameter in parameters)
