"""Middlewares: ``@middleware``, the check of what is given as one, and middlewares around sends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast, overload

from mqtemplate.callables import load_name
from mqtemplate.calls.handling import ListenerInfo
from mqtemplate.calls.send import LATER, ONE_WAY, SendCall, SendNext, SendWrapper
from mqtemplate.calls.steps import AnyAround, Around, Steps, call_around, enter, leave, unwrapped
from mqtemplate.errors import ConfigurationError, MessageDroppedError, MessageError
from mqtemplate.futures import AwaitableFuture

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
        ConfigurationError: Something is not a middleware.
    """
    found = list(middlewares)
    for each in found:
        check_middleware(each)
    return tuple(getattr(each, method) for each in found if hasattr(each, method))


def check_listener(middlewares: Iterable[object], listener: ListenerInfo) -> None:
    """Let the middlewares that have ``check_listener`` refuse a listener around which they cannot work."""
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
    return tuple(load_name(item) if isinstance(item, str) else item for item in items if item != "")


def name_of(target: object) -> str:
    """Return the name of a middleware for errors and logs."""
    return str(getattr(target, "__qualname__", type(target).__qualname__)).rpartition("<locals>.")[2]


# --- around sends -----------------------------------------------------------------------------------


def middleware_sends(middlewares: Iterable[object]) -> SendWrapper:
    """Return the wrapper that puts middlewares around sends, the first one outermost; without any it does nothing.

    They get the messages as the broker gets them: converted, with all properties. The part of a middleware before its
    ``yield`` runs in the thread that sends, so the order of sends stays. The part after it runs in the thread that
    gets the result.

    Raises:
        ConfigurationError: Something is not a middleware.
    """
    found = cast("Sequence[Around]", arounds(middlewares, "send"))
    if not found:
        return unwrapped

    def wrap(next_: SendNext) -> SendNext:
        def pass_on(call: SendCall) -> Any:
            return next_(call) if call.messages else None

        def send(call: SendCall) -> Any:
            if call.kind in LATER:
                return _send_later(found, call, next_)
            result = call_around(found, call, pass_on)
            if result is None and call.kind is not ONE_WAY:  # a dropped one-way send raises no error
                raise _dropped(call)
            return result

        return send

    return wrap


def _send_later(middlewares: Sequence[Around], call: SendCall, next_: SendNext) -> AwaitableFuture[Any]:
    opened: list[Steps] = []
    answer: AwaitableFuture[Any] = AwaitableFuture()
    answer.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled
    result: Any = None
    error: BaseException | None = None
    try:
        is_passed, passed = enter(middlewares, call, opened)
        if is_passed and passed.messages:
            next_(passed).add_done_callback(lambda done: _settle(answer, opened, call, done))
            return answer
        result = None if is_passed else passed
    except BaseException as raised:
        error = raised
    if isinstance(error, MessageError):
        leave(opened, None, error)  # an invalid call raises at once
    _finish(answer, opened, call, result, error)
    return answer


def _settle(answer: Future[Any], opened: list[Steps], call: SendCall, done: Future[Any]) -> None:
    error = done.exception()
    _finish(answer, opened, call, None if error is not None else done.result(), error)


def _finish(answer: Future[Any], opened: list[Steps], call: SendCall, result: Any, error: BaseException | None) -> None:
    try:
        result = leave(opened, result, error)
        if result is None:
            raise _dropped(call)
    except BaseException as raised:
        answer.set_exception(raised)
    else:
        answer.set_result(result)


def _dropped(call: SendCall) -> MessageDroppedError:
    return MessageDroppedError(
        f"a middleware dropped the message for {call.message.topic!r}; nothing was sent. To let the call succeed, "
        "the middleware returns a SendResult"
    )
