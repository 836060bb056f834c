"""Values and contexts that are opened for one call of a handler: providers (`Depends`), and scopes of frameworks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias

from mqtemplate.calls.steps import close_provider, close_provider_async, first_value, first_value_async
from mqtemplate.errors import ListenerError
from mqtemplate.listener.handler.results import ResultPublisher

ReadSource = Callable[[Any], object]
"""Function that returns a value of the message; for a batch handler, of the list of messages."""


@dataclass(frozen=True, slots=True)
class Depends:
    """Annotation of a parameter whose value a function makes for each call: ``Annotated[Session, Depends(session)]``.

    A function with ``yield`` is closed after the call: it sees the exception of the handler, and cannot suppress it.
    Its own parameters are like the parameters of a handler after the payload.
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
class HandlerArguments:
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
    arguments: HandlerArguments


@dataclass(frozen=True, slots=True)
class Scope:
    """Providers of one handler, each after those that it uses.

    Value 0 is the payload, value 1 the value of the first provider.

    Attributes:
        sender: Number of the value that sends the results of the handler; None if the template sends them.
    """

    providers: tuple[Provider, ...] = ()
    sender: int | None = None


class ObjectSource(Protocol):
    """Source of objects for parameters, and of middlewares."""

    def argument(self, target: Callable[..., object], parameter: inspect.Parameter, annotation: Any) -> object:
        """Return the object for a parameter.

        Raises:
            DependencyError: No object or several objects have the type.
        """

    def middleware(self, kind: type) -> object:
        """Return the application's object of a class of middlewares; build it if it is missing."""

    def middlewares(self) -> Sequence[object]:
        """Return the middlewares of all listeners, the outermost first."""


def is_async(handler: Callable[..., object]) -> bool:
    """Return True if a handler is an ``async def`` function, or an object with an ``async def __call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


@dataclass(frozen=True, slots=True)
class HandlerScope:
    """A context that is entered before a handler and left after it, also if it raises.

    Attributes:
        enter: Returns the context for a plain handler; it is entered in the thread of the handler.
        enter_async: Returns the context for an ``async def`` handler; None: *enter*, on the event loop.
    """

    enter: Callable[[], AbstractContextManager[object]]
    enter_async: Callable[[], AbstractAsyncContextManager[object]] | None = None


def scope_middlewares(scopes: Sequence[HandlerScope], *, is_async: bool) -> tuple[object, ...]:
    """Return the scopes as middlewares, to stand outside of all others: these may use what a framework provides.

    Args:
        is_async: True for an ``async def`` handler.
    """
    return tuple(
        _Scope(scope.enter) if scope.enter_async is None or not is_async else _AsyncScope(scope.enter_async)
        for scope in scopes
    )


@dataclass(frozen=True, slots=True)
class _Scope:
    enter: Callable[[], AbstractContextManager[object]]

    def consume(self, delivery: Any) -> Generator[Any, Any, None]:
        with self.enter():
            yield delivery


@dataclass(frozen=True, slots=True)
class _AsyncScope:
    enter: Callable[[], AbstractAsyncContextManager[object]]

    async def consume(self, delivery: Any) -> AsyncGenerator[Any, Any]:
        async with self.enter():
            yield delivery


Values: TypeAlias = list[Any]
"""Values of one call: the payload, then the values of the providers."""

Call: TypeAlias = Callable[[Any, Values], Any]
"""Function of the message (of a batch: the list of messages) and the values so far."""


def compose(
    handler: Callable[..., object],
    arguments: HandlerArguments,
    scope: Scope,
    publisher: ResultPublisher,
    *,
    is_async: bool,
) -> Call:
    """Return a handler with its scope as a function. The function is a coroutine function for an async handler."""
    call = _handler(handler, arguments)
    if scope.sender is not None:
        call = (_sending_async if is_async else _sending)(call, scope.sender, publisher)
    for provider in reversed(scope.providers):
        call = (_opened_async if is_async else _opened)(provider, call)
    return call


def _handler(handler: Callable[..., object], arguments: HandlerArguments) -> Call:
    function, named = arguments.bind(handler), _named(arguments)
    if named is None:
        return lambda _source, values: function(values[0])
    return lambda source, values: function(values[0], **named(source, values))


def _made(provider: Provider) -> Call:
    """Return the function that calls a provider."""
    function, named = provider.function, _named(provider.arguments)
    if named is None:
        return lambda _source, _values: function()
    return lambda source, values: function(**named(source, values))


def _named(arguments: HandlerArguments) -> Callable[[Any, Values], dict[str, object]] | None:
    """Return the function that returns arguments by name; None without arguments."""
    reads, slots = tuple(arguments.reads.items()), tuple(arguments.slots.items())
    if not reads:
        return (lambda _source, values: {name: values[slot] for name, slot in slots}) if slots else None

    def named(source: Any, values: Values) -> dict[str, object]:
        found = {name: read(source) for name, read in reads}
        for name, slot in slots:
            found[name] = values[slot]
        return found

    return named


# --- results that the scope sends -----------------------------------------------------------------


def _sending(call: Call, sender: int, publisher: ResultPublisher) -> Call:
    def send(source: Any, values: Values) -> object:
        result = call(source, values)
        for sent in publisher.through(values[sender], result):
            if inspect.isawaitable(sent):
                if inspect.iscoroutine(sent):
                    sent.close()
                name = type(values[sender]).__name__
                raise ListenerError(f"{name}.send is async; write the handler with 'async def'")
        return result

    return send


def _sending_async(call: Call, sender: int, publisher: ResultPublisher) -> Call:
    async def send(source: Any, values: Values) -> object:
        result = await call(source, values)
        for sent in publisher.through(values[sender], result):
            if inspect.isawaitable(sent):
                await sent
        return result

    return send


# --- the scope of one call ------------------------------------------------------------------------


def _opened(provider: Provider, call: Call) -> Call:
    """Return a call with a value of a provider, which is closed after it."""
    make, name = _made(provider), provider.name

    def open_value(source: Any, values: Values) -> object:
        values.append(make(source, values))
        return call(source, values)

    def open_generator(source: Any, values: Values) -> object:
        steps: Any = make(source, values)
        values.append(first_value(steps, name))
        try:
            result = call(source, values)
        except BaseException as error:
            close_provider(steps, error, name)
            raise
        close_provider(steps, None, name)
        return result

    return open_generator if provider.kind is ProviderKind.GENERATOR else open_value


def _opened_async(provider: Provider, call: Call) -> Call:
    """Do `_opened` on an event loop."""
    make, name, kind = _made(provider), provider.name, provider.kind

    async def close(steps: Any, error: BaseException | None) -> None:
        if kind is ProviderKind.GENERATOR:
            close_provider(steps, error, name)
        else:
            await close_provider_async(steps, error, name)

    async def open_value(source: Any, values: Values) -> object:
        value: Any = make(source, values)
        values.append(await value if kind is ProviderKind.COROUTINE else value)
        return await call(source, values)

    async def open_generator(source: Any, values: Values) -> object:
        steps: Any = make(source, values)
        is_plain = kind is ProviderKind.GENERATOR
        values.append(first_value(steps, name) if is_plain else await first_value_async(steps, name))
        try:
            result = await call(source, values)
        except BaseException as error:
            await close(steps, error)
            raise
        await close(steps, None)
        return result

    return open_generator if kind in (ProviderKind.GENERATOR, ProviderKind.ASYNC_GENERATOR) else open_value
