"""Scope of one call: providers are opened before the handler and closed after it. Composed once, at the start."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeAlias

from mqtemplate.errors import ListenerError
from mqtemplate.listener.calling.depends import Arguments, Provider, ProviderKind, Scope
from mqtemplate.listener.calling.publisher import Publisher

Values: TypeAlias = list[Any]
"""Values of one call: the payload, then those of the providers."""
Call: TypeAlias = Callable[[Any, Values], Any]
"""Function of the message (of a batch: the list of messages) and the values so far."""


def compose(
    handler: Callable[..., object], arguments: Arguments, scope: Scope, publisher: Publisher, *, is_async: bool
) -> Call:
    """Return a handler with its scope as a function. The function is a coroutine function for an async handler."""
    handle = _handler(handler, arguments)
    if scope.sender is not None:
        handle = (_sending_async if is_async else _sending)(handle, scope.sender, publisher)
    call: Call = handle
    for provider in reversed(scope.providers):
        call = (_LAYERS_ASYNC if is_async else _LAYERS)[provider.kind](provider, call)
    return call


def _handler(handler: Callable[..., object], arguments: Arguments) -> Call:
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


def _named(arguments: Arguments) -> Callable[[Any, Values], dict[str, object]] | None:
    """Return the function that returns arguments by name; None if there are none."""
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


def _sending(call: Call, sender: int, publisher: Publisher) -> Call:
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


def _sending_async(call: Call, sender: int, publisher: Publisher) -> Call:
    async def send(source: Any, values: Values) -> object:
        result = await call(source, values)
        for sent in publisher.through(values[sender], result):
            if inspect.isawaitable(sent):
                await sent
        return result

    return send


# --- providers of plain handlers ------------------------------------------------------------------


def _value(provider: Provider, call: Call) -> Call:
    made = _made(provider)

    def open_value(source: Any, values: Values) -> object:
        values.append(made(source, values))
        return call(source, values)

    return open_value


def _generator(provider: Provider, call: Call) -> Call:
    made, name = _made(provider), provider.name

    def open_generator(source: Any, values: Values) -> object:
        steps: Any = made(source, values)
        values.append(_first(steps, name))
        try:
            result = call(source, values)
        except BaseException as error:
            _throw(steps, error, name)
            raise
        _close(steps, name)
        return result

    return open_generator


def _first(steps: Generator[Any, Any, Any], name: str) -> object:
    try:
        return next(steps)
    except StopIteration:
        raise _no_value(name) from None


def _no_value(name: str) -> ListenerError:
    return ListenerError(f"provider {name} ended without a yield, so there is no value for the handler")


def _throw(steps: Generator[Any, Any, Any], error: BaseException, name: str) -> None:
    """Let a provider see an exception. One that it suppresses is raised all the same, by the caller."""
    try:
        steps.throw(error)
    except StopIteration:
        return
    except BaseException as raised:
        if raised is error:
            return
        raise
    _yielded_twice(steps, name)


def _close(steps: Generator[Any, Any, Any], name: str) -> None:
    try:
        next(steps)
    except StopIteration:
        return
    _yielded_twice(steps, name)


def _yielded_twice(steps: Generator[Any, Any, Any], name: str) -> None:
    steps.close()
    raise ListenerError(f"provider {name} yielded twice; it yields one value, and is closed after the handler")


# --- providers of async handlers ------------------------------------------------------------------


def _value_async(provider: Provider, call: Call) -> Call:
    made = _made(provider)

    async def open_value(source: Any, values: Values) -> object:
        values.append(made(source, values))
        return await call(source, values)

    return open_value


def _coroutine(provider: Provider, call: Call) -> Call:
    made = _made(provider)

    async def open_value(source: Any, values: Values) -> object:
        values.append(await made(source, values))
        return await call(source, values)

    return open_value


def _generator_async(provider: Provider, call: Call) -> Call:
    made, name = _made(provider), provider.name

    async def open_generator(source: Any, values: Values) -> object:
        steps: Any = made(source, values)
        values.append(_first(steps, name))
        try:
            result = await call(source, values)
        except BaseException as error:
            _throw(steps, error, name)
            raise
        _close(steps, name)
        return result

    return open_generator


def _async_generator(provider: Provider, call: Call) -> Call:
    made, name = _made(provider), provider.name

    async def open_generator(source: Any, values: Values) -> object:
        steps: Any = made(source, values)
        try:
            values.append(await anext(steps))
        except StopAsyncIteration:
            raise ListenerError(
                f"provider {name} ended without a yield, so there is no value for the handler"
            ) from None
        try:
            result = await call(source, values)
        except BaseException as error:
            await _end(steps.athrow(error), error, steps, name)
            raise
        await _end(anext(steps), None, steps, name)
        return result

    return open_generator


async def _end(step: Awaitable[Any], error: BaseException | None, steps: AsyncGenerator[Any, Any], name: str) -> None:
    try:
        await step
    except StopAsyncIteration:
        return
    except BaseException as raised:
        if raised is error:
            return
        raise
    await steps.aclose()
    raise ListenerError(f"provider {name} yielded twice; it yields one value, and is closed after the handler")


_LAYERS: dict[ProviderKind, Callable[[Provider, Call], Call]] = {
    ProviderKind.VALUE: _value,
    ProviderKind.GENERATOR: _generator,
}
_LAYERS_ASYNC: dict[ProviderKind, Callable[[Provider, Call], Call]] = {
    ProviderKind.VALUE: _value_async,
    ProviderKind.GENERATOR: _generator_async,
    ProviderKind.COROUTINE: _coroutine,
    ProviderKind.ASYNC_GENERATOR: _async_generator,
}
