"""The error handler of one listener: found by its attribute, and what its result means."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from mqtemplate.errors import ListenerError
from mqtemplate.listener.attributes import check_handler
from mqtemplate.listener.calling.error_decision import ErrorHandler

_ALLOWED = "a function (error, message), or the name of a method of the listener class"


def error_handler_of(given: Any, target: object, listener: str) -> ErrorHandler | None:
    """Return the error handler that an attribute names; None if it names none.

    Args:
        given: A function, the name of a method of *target*, or the dotted name of a function.

    Raises:
        ListenerError: There is no such function, or it does not take an error and a message.
    """
    if given is None or given == "":
        return None
    found = _named(given, target) if isinstance(given, str) else given
    if not callable(found):
        raise ListenerError(f"{listener}: error_handler must be {_ALLOWED}, got {given!r}")
    check_handler(found, f"{listener}: error_handler {given!r}")
    try:
        inspect.signature(found).bind(ValueError(), object())
    except TypeError as exc:
        raise ListenerError(f"{listener}: error_handler {given!r} cannot take (error, message): {exc}") from exc
    handler: ErrorHandler = found
    return handler


def _named(name: str, target: object) -> Any:
    if "." not in name:
        return getattr(target, name, None)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except ImportError:
        return None  # reported by the caller, with the name
