"""Generators around a call: they run to their ``yield`` before it, and from there on after it.

The part that calls decides how to wait: the same generator works around a plain function, a coroutine function, and a
send whose result arrives later in another thread. Two kinds of generators share the rules of this module:

- Middlewares and observers get a call. What they yield is the call to go on with; what they return is the result.
- Providers create a value for one call. They are closed after it, and can neither replace its result nor suppress an
  exception.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias, cast

from mqtemplate.errors import ListenerError

Steps: TypeAlias = Generator[Any, Any, Any]
AsyncSteps: TypeAlias = AsyncGenerator[Any, Any]
Around: TypeAlias = Callable[[Any], Steps]
"""Function that returns a generator that yields once."""
AnyAround: TypeAlias = Callable[[Any], Steps | AsyncSteps]
Next: TypeAlias = Callable[[Any], Any]
"""The rest of the way of a call: a function of the call. On an event loop it is a coroutine function."""
Wrapper: TypeAlias = Callable[[Next], Next]
"""Function that returns a `Next` with something around another one: a coroutine function if the other one is."""
RunAwaitable: TypeAlias = Callable[[Awaitable[Any]], Any]
"""Function that runs an awaitable to its end, while this thread waits."""


def unwrapped(next_: Next) -> Next:
    """Return a `Next` itself. The wrapper that puts nothing around it."""
    return next_


def chained(wrappers: Sequence[Wrapper]) -> Wrapper:
    """Return wrappers as one, the first one outermost."""

    def wrap(next_: Next) -> Next:
        for wrapper in reversed(wrappers):
            next_ = wrapper(next_)
        return next_

    return wrap


def wrapper_of(arounds: Sequence[AnyAround], run: RunAwaitable | None = None) -> Wrapper:
    """Return generator functions as one wrapper, the first one outermost. Without any it puts nothing around.

    Args:
        run: Runs the steps of ``async def`` generators around a plain function.
    """

    def wrap(next_: Next) -> Next:
        if not arounds:
            return next_
        if inspect.iscoroutinefunction(next_):
            pairs = [(each, is_async_around(each)) for each in arounds]

            async def call_async(call: Any) -> Any:
                return await call_around_async(pairs, call, next_)

            return call_async
        plain: list[Any] = [_waiting(cast("Any", each), run) if is_async_around(each) else each for each in arounds]
        return lambda call: call_around(plain, call, next_)

    return wrap


def is_async_around(around: AnyAround) -> bool:
    """Return True for an ``async def`` with ``yield``."""
    return inspect.isasyncgenfunction(around)


# --- middlewares and observers around a plain function ---------------------------------------------


def call_around(arounds: Sequence[Around], call: Any, next_: Next) -> Any:
    """Do a call inside of generators, the first one outermost. Return the result that leaves the first one."""
    opened: list[Steps] = []
    error: BaseException | None = None
    try:
        is_passed, result = enter(arounds, call, opened)
        if is_passed:
            result = next_(result)
    except BaseException as raised:
        result, error = None, raised
    return leave(opened, result, error)


def enter(arounds: Sequence[Around], call: Any, opened: list[Steps]) -> tuple[bool, Any]:
    """Run generators up to their ``yield``.

    Args:
        opened: Gets them, for `leave`.

    Returns:
        True and the call to go on with; or False and a result, if a generator ended without ``yield``.
    """
    for around in arounds:
        steps = around(call)
        try:
            passed = next(steps)
        except StopIteration as end:
            return False, end.value
        opened.append(steps)
        if passed is not None:
            call = passed
    return True, call


def leave(opened: list[Steps], result: Any, error: BaseException | None) -> Any:
    """Run generators to their end, the last one first. Return the result, or raise the error that is left."""
    while opened:
        steps = opened.pop()
        try:
            # In place: a function for it would take a tenth of the time of a middleware (measured).
            if error is None:
                steps.send(result)
            else:
                steps.throw(error)
        except StopIteration as end:
            result, error = (result if error is None and end.value is None else end.value), None
        except BaseException as raised:
            result, error = None, raised
        else:
            result, error = None, _after_second_yield(steps)
    if error is None:
        return result
    try:
        raise error
    finally:
        del error  # else its traceback would contain this frame, and the frame the error


def _after_second_yield(steps: Steps) -> BaseException:
    """Close a generator that yielded again. Return the error for it, or the error that it raises at its end."""
    try:
        steps.close()
    except BaseException as raised:
        return raised
    return _middleware_yielded_twice(steps)


def _middleware_yielded_twice(steps: Any) -> RuntimeError:
    return RuntimeError(f"middleware {steps.__qualname__} yielded twice; it yields once, and the call happens there")


# --- middlewares and observers on an event loop ----------------------------------------------------


async def call_around_async(arounds: Sequence[tuple[AnyAround, bool]], call: Any, next_: Next) -> Any:
    """Do `call_around` with a coroutine function.

    Args:
        arounds: Each with True if it is an async generator.
    """
    opened: list[tuple[Any, bool]] = []
    error: BaseException | None = None
    try:
        is_passed, result = True, call
        for around, is_async in arounds:
            steps: Any = around(result)
            is_passed, passed = await _start_async(steps) if is_async else _start(steps)
            if not is_passed:
                result = passed
                break
            opened.append((steps, is_async))
            if passed is not None:
                result = passed
        if is_passed:
            result = await next_(result)
    except BaseException as raised:
        result, error = None, raised
    while opened:
        steps, is_async = opened.pop()
        try:
            if is_async:
                await _end_async(steps, result, error, _middleware_yielded_twice)
            else:
                result = leave([steps], result, error)
            error = None
        except BaseException as raised:
            result, error = None, raised
    if error is None:
        return result
    try:
        raise error
    finally:
        del error


def _start(steps: Steps) -> tuple[bool, Any]:
    try:
        return True, next(steps)
    except StopIteration as end:
        return False, end.value


async def _start_async(steps: AsyncSteps) -> tuple[bool, Any]:
    try:
        return True, await anext(steps)
    except StopAsyncIteration:
        return False, None


async def _end_async(
    steps: AsyncSteps, result: Any, error: BaseException | None, twice: Callable[[Any], Exception]
) -> None:
    """Run an async generator from its ``yield`` to its end. It returns nothing, so it cannot replace the result."""
    try:
        if error is None:
            await steps.asend(result)
        else:
            await steps.athrow(error)
    except StopAsyncIteration:
        return
    await steps.aclose()
    raise twice(steps)


def _waiting(around: Callable[[Any], AsyncSteps], run: RunAwaitable | None) -> Around:
    """Return an async middleware as a plain one: this thread waits for each of its steps."""
    assert run is not None  # a listener has one

    def plain(call: Any) -> Steps:
        steps = around(call)
        is_passed, passed = run(_start_async(steps))
        if not is_passed:
            return None
        try:
            result = yield passed
        except BaseException as error:
            run(_end_async(steps, None, error, _middleware_yielded_twice))
            return None
        run(_end_async(steps, result, None, _middleware_yielded_twice))
        return result

    return plain


# --- providers of values ----------------------------------------------------------------------------


def first_value(steps: Steps, name: str) -> object:
    """Return the value that a provider yields.

    Args:
        name: Name of the provider for errors.

    Raises:
        ListenerError: It ends without a value.
    """
    for value in steps:  # the fastest way to one step
        return value
    raise _no_value(name)


async def first_value_async(steps: AsyncSteps, name: str) -> object:
    """Do `first_value` with an async generator."""
    is_passed, value = await _start_async(steps)
    if not is_passed:
        raise _no_value(name)
    return value


def close_provider(steps: Steps, error: BaseException | None, name: str) -> None:
    """Run a provider to its end after the call.

    Args:
        error: Exception of the call. If the provider does not raise another one, the caller raises it again: a
            provider sees it, and cannot suppress it.
    """
    if error is None:
        for _ in steps:  # as in `first_value`
            break
        else:
            return
    else:
        try:
            steps.throw(error)
        except StopIteration:
            return
        except BaseException as raised:
            if raised is error:
                return
            raise
    steps.close()
    raise _provider_yielded_twice(name)


async def close_provider_async(steps: AsyncSteps, error: BaseException | None, name: str) -> None:
    """Do `close_provider` with an async generator."""
    try:
        await _end_async(steps, None, error, lambda _: _provider_yielded_twice(name))
    except BaseException as raised:
        if raised is not error:
            raise


def _no_value(name: str) -> ListenerError:
    return ListenerError(f"provider {name} ended without a yield, so there is no value for the handler")


def _provider_yielded_twice(name: str) -> ListenerError:
    return ListenerError(f"provider {name} yielded twice; it yields one value, and is closed after the handler")
