"""``@middleware``, and the check of what is given as a middleware."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar, overload

from mqtemplate.errors import ConfigurationError
from mqtemplate.middlewares.delivery import ListenerInfo
from mqtemplate.middlewares.steps import AnyAround

MIDDLEWARE_ATTRIBUTE = "__mqtemplate_middleware__"
"""Attribute of a marked class, function or object that holds its order."""

_Target = TypeVar("_Target")
_FORM = "def consume(self, delivery): result = yield delivery"


@overload
def middleware(*, order: int = 0) -> Callable[[_Target], _Target]: ...


@overload
def middleware(target: _Target, /) -> _Target: ...


def middleware(target: Any = None, /, *, order: int = 0) -> Any:
    """Mark a class as a middleware of all listeners and of the template of the application that is given it.

    The class has ``consume``, ``send``, or both; each is a generator that yields once. The application builds one
    object, with arguments by the types of the parameters, as for a service. A function may be marked too, if it
    returns such an object and its return type is annotated; and a finished object.

    Args:
        order: Middlewares with a lower number are further outside; equal ones in the order of their registration.

    Raises:
        ConfigurationError: A class or an object has neither method, or one that does not yield.
    """

    def mark(marked: Any) -> Any:
        if not inspect.isfunction(marked):
            check_middleware(marked)
        setattr(marked, MIDDLEWARE_ATTRIBUTE, order)
        return marked

    return mark if target is None else mark(target)


def middleware_order(target: object) -> int | None:
    """Return the order of what is marked, or of an object of a marked class; None for anything else."""
    for holder in (target, type(target)):
        order: int | None = getattr(holder, "__dict__", {}).get(MIDDLEWARE_ATTRIBUTE)
        if order is not None:
            return order
    return None


def check_middleware(target: Any) -> None:
    """Refuse a class or an object that cannot be a middleware.

    Raises:
        ConfigurationError: It has neither ``consume`` nor ``send``, or one of them yields nothing.
    """
    name = name_of(target)
    methods = {method: getattr(target, method) for method in ("consume", "send") if hasattr(target, method)}
    if not methods:
        raise ConfigurationError(f"middleware {name} has neither consume nor send; write '{_FORM}'")
    for method, function in methods.items():
        is_async = inspect.isasyncgenfunction(function)
        if is_async and method == "send":
            raise ConfigurationError(
                f"middleware {name}: send is async, and it runs in the thread that sends; write it with 'def'"
            )
        if not is_async and not inspect.isgeneratorfunction(function):
            raise ConfigurationError(f"middleware {name}: {method} has no yield; write '{_FORM}'")


def arounds(middlewares: Iterable[object], method: str) -> Sequence[AnyAround]:
    """Return the methods of this name, of the middlewares that have it.

    Raises:
        ConfigurationError: Something is no middleware.
    """
    found = list(middlewares)
    for each in found:
        check_middleware(each)
    return tuple(getattr(each, method) for each in found if hasattr(each, method))


def check_listener(middlewares: Iterable[object], listener: ListenerInfo) -> None:
    """Let middlewares refuse a listener around which they cannot work: those that have ``check_listener``."""
    for each in middlewares:
        check: Callable[[ListenerInfo], None] | None = getattr(each, "check_listener", None)
        if check is not None:
            check(listener)


def read_middlewares(given: Any) -> tuple[object, ...]:
    """Return objects and classes for objects, classes or their dotted names: one of them, or several.

    Raises:
        ValueError: A name has no module, or the module does not exist.
        AttributeError: A module has no such name.
    """
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return tuple(_named(item.strip()) if isinstance(item, str) else item for item in items if item != "")


def _named(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(name)
    try:
        found: object = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(name) from error
    return found


def name_of(target: object) -> str:
    """Return the name of a middleware for errors and logs."""
    return str(getattr(target, "__qualname__", type(target).__qualname__)).rpartition("<locals>.")[2]
