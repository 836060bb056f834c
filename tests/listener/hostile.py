"""Exceptions of application code that no library expects: each function raises one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mqtemplate import BatchFailure, DeadLetter, PauseListener, RetryLater

Raise = Callable[[], object]


class Panic(BaseException):
    """As PyO3's PanicException, gevent.Timeout, func_timeout.FunctionTimedOut: no `Exception`."""


def refuse(*_: object) -> NoReturn:
    raise Panic("not even this")


class WithoutText(Exception):  # noqa: N818
    __str__ = __repr__ = refuse


class WithoutAnything(Exception):  # noqa: N818
    """Whatever a library may want to know of an exception."""

    __str__ = __repr__ = __hash__ = __eq__ = __reduce__ = __reduce_ex__ = __getstate__ = refuse  # type: ignore[assignment]
    __class__ = property(refuse)  # type: ignore[assignment]
    __traceback__ = property(refuse)  # type: ignore[assignment]
    __cause__ = __context__ = __suppress_context__ = property(refuse)  # type: ignore[assignment]
    __notes__ = args = property(refuse)  # type: ignore[assignment]


class Kind(type):
    """A class of a class that answers nothing."""

    __hash__ = __eq__ = __repr__ = __instancecheck__ = __subclasscheck__ = refuse  # type: ignore[assignment]
    __name__ = property(refuse)  # type: ignore[assignment]


class OfKind(Exception, metaclass=Kind):  # noqa: N818
    pass


class Later(RetryLater):
    def __init__(self) -> None:
        """Leave the delay out."""


class Pause(PauseListener):
    def __init__(self) -> None:
        """Leave the duration out."""


class Some(BatchFailure):
    def __init__(self) -> None:
        """Leave the indices out."""


class Never(DeadLetter):
    __str__ = refuse


class TextThatIsNoText(Exception):  # noqa: N818
    def __str__(self) -> str:
        return 4466  # type: ignore[return-value]  # noqa: PLE0307


def raising(error: BaseException | type[BaseException]) -> Raise:
    def raise_it() -> NoReturn:
        raise error

    return raise_it


def caused() -> None:
    try:
        raise WithoutAnything
    except WithoutAnything as error:
        raise WithoutText from error


def recurse() -> object:
    return recurse()


def noted() -> None:
    error = ValueError("with a note")
    error.__notes__ = [WithoutText(), object()]  # type: ignore[list-item]
    raise error


def canceled_future() -> object:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.cancel()
    return future.result()


def in_a_loop_of_causes() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


KINDS: Mapping[str, Raise] = {
    "panic": raising(Panic("attempt to subtract with overflow")),
    "panic class": raising(Panic),
    "exit": raising(SystemExit(3)),
    "sys.exit": sys.exit,
    "interrupt": raising(KeyboardInterrupt),
    "generator exit": raising(GeneratorExit),
    "cancelled": raising(asyncio.CancelledError),
    "cancelled future": canceled_future,
    "stop iteration": raising(StopIteration(3)),
    "stop async iteration": raising(StopAsyncIteration),
    "group": raising(ExceptionGroup("many", [ValueError("one"), OSError("two")])),
    "base group": raising(BaseExceptionGroup("many", [Panic("one"), KeyboardInterrupt(), WithoutText()])),
    "recursion": recurse,
    "memory": raising(MemoryError),
    "without text": raising(WithoutText),
    "without anything": raising(WithoutAnything),
    "of a kind": raising(OfKind),
    "caused": caused,
    "noted": noted,
    "loop of causes": in_a_loop_of_causes,
    "text of another type": raising(TextThatIsNoText),
    "long text": raising(ValueError("x\x01\x02\x00\ud800\n" * 100_000)),
    "later": raising(Later),
    "pause": raising(Pause),
    "some": raising(Some),
    "never": raising(Never("no")),
}

ATTEMPTS: Mapping[str, int] = {"never": 1}
"""Number of calls before the dead letter, with one retry; 2 for the others."""


def hostile_repr() -> Any:
    return type("Hostile", (), {"__repr__": refuse, "__str__": refuse, "__format__": refuse})()
