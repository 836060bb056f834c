"""`Depends`: parameters of handlers whose values are created for one call and closed after it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mqtemplate.errors import ListenerError

ReadSource = Callable[[Any], object]
"""Function that returns a value of the message; for a batch handler, of the list of messages."""


@dataclass(frozen=True, slots=True)
class Depends:
    """Annotation of a parameter whose value a function makes for each call: ``Annotated[Session, Depends(session)]``.

    A function with ``yield`` is closed after the call: it sees the exception of the handler, and cannot suppress it.
    Its own parameters are like those of a handler after the payload.
    """

    provider: Callable[..., object]


class ProviderKind(Enum):
    """Kind of a provider function."""

    VALUE = "value"
    GENERATOR = "generator"
    COROUTINE = "coroutine"
    ASYNC_GENERATOR = "async generator"

    @property
    def is_async(self) -> bool:
        """True if it has to run on an event loop."""
        return self in (ProviderKind.COROUTINE, ProviderKind.ASYNC_GENERATOR)


def kind_of(provider: Callable[..., object], where: str) -> ProviderKind:
    """Return the kind of a provider function.

    Raises:
        ListenerError: It is a context manager.
    """
    target: Any = provider
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = type(target).__call__
    if inspect.isasyncgenfunction(target):
        return ProviderKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(target):
        return ProviderKind.GENERATOR
    if inspect.iscoroutinefunction(target):
        return ProviderKind.COROUTINE
    wrapped = inspect.unwrap(target)
    if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
        raise ListenerError(
            f"{where}: {target.__qualname__} is wrapped, probably by contextmanager, and would not be opened; "
            "give Depends the function with yield itself"
        )
    return ProviderKind.VALUE


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a function by name.

    Attributes:
        reads: Values of the message.
        constants: Objects of the application.
        slots: Values of providers, by their number.
    """

    reads: Mapping[str, ReadSource] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)

    def bind(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function with the objects of the application."""
        return functools.partial(function, **self.constants) if self.constants else function


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider of a handler, with its arguments."""

    function: Callable[..., object]
    name: str
    kind: ProviderKind
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Scope:
    """Providers of one handler, each after those that it uses.

    Value 0 is the payload, value 1 that of the first provider.

    Attributes:
        sender: Number of the value that sends the results of the handler; None if the template sends them.
    """

    providers: tuple[Provider, ...] = ()
    sender: int | None = None
