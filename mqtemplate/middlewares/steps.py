"""Steps of middlewares: generators that run to their ``yield`` before a call, and from there on after it.

The part that calls decides how to wait: the same generator works around a plain handler, a coroutine, and a send whose
result arrives later in another thread.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias

Steps: TypeAlias = Generator[Any, Any, Any]
AsyncSteps: TypeAlias = AsyncGenerator[Any, Any]
Around: TypeAlias = Callable[[Any], Steps]
"""A middleware's method: it returns a generator that yields once."""
AnyAround: TypeAlias = Callable[[Any], Steps | AsyncSteps]
RunAwaitable: TypeAlias = Callable[[Awaitable[Any]], Any]
"""Function that runs an awaitable to its end, while this thread waits."""


def is_async_around(around: AnyAround) -> bool:
    """Return True for an ``async def`` with ``yield``."""
    return inspect.isasyncgenfunction(around)


# --- plain generators ----------------------------------------------------------------------------


def call_around(arounds: Sequence[Around], item: Any, call: Callable[[Any], Any]) -> Any:
    """Call a function inside of middlewares, the first one outermost. Return the result that leaves the first one."""
    opened: list[Steps] = []
    error: BaseException | None = None
    try:
        is_passed, result = enter(arounds, item, opened)
        if is_passed:
            result = call(result)
    except BaseException as raised:
        result, error = None, raised
    return leave(opened, result, error)


def enter(arounds: Sequence[Around], item: Any, opened: list[Steps]) -> tuple[bool, Any]:
    """Run middlewares up to their ``yield``.

    Args:
        opened: Gets their generators, for `leave`.

    Returns:
        True and the item to go on with; or False and a result, if a middleware ended without ``yield``.
    """
    for around in arounds:
        steps = around(item)
        try:
            passed = next(steps)
        except StopIteration as end:
            return False, end.value
        opened.append(steps)
        if passed is not None:
            item = passed
    return True, item


def leave(opened: list[Steps], result: Any, error: BaseException | None) -> Any:
    """Run middlewares to their end, the last one first. Return the result, or raise the error that is left."""
    while opened:
        steps = opened.pop()
        try:
            if error is None:
                steps.send(result)
            else:
                steps.throw(error)
        except StopIteration as end:
            if error is not None:
                result, error = end.value, None
            elif end.value is not None:
                result = end.value
        except BaseException as raised:
            result, error = None, raised
        else:
            result, error = None, _ended_after_second_yield(steps)
    if error is None:
        return result
    try:
        raise error
    finally:
        del error  # else its traceback would contain this frame, and the frame the error


def _ended_after_second_yield(steps: Steps) -> BaseException:
    """End a generator that yielded again. Return the error for it, or what it raises at its end."""
    try:
        steps.close()
    except BaseException as raised:
        return raised
    return _yielded_twice(steps)


def _yielded_twice(steps: Any) -> RuntimeError:
    return RuntimeError(f"middleware {steps.__qualname__} yielded twice; it yields once, and the call happens there")


# --- on an event loop ----------------------------------------------------------------------------


async def call_around_async(
    arounds: Sequence[tuple[AnyAround, bool]], item: Any, call: Callable[[Any], Awaitable[Any]]
) -> Any:
    """Await a coroutine function inside of middlewares.

    Args:
        arounds: Each with True if it is an async generator.
    """
    opened: list[tuple[Any, bool]] = []
    error: BaseException | None = None
    try:
        is_passed, result = True, item
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
            result = await call(result)
    except BaseException as raised:
        result, error = None, raised
    return await _leave_async(opened, result, error)


async def _leave_async(opened: list[tuple[Any, bool]], result: Any, error: BaseException | None) -> Any:
    while opened:
        steps, is_async = opened.pop()
        try:
            result = await _end_async(steps, result, error) if is_async else leave([steps], result, error)
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


async def _end_async(steps: AsyncSteps, result: Any, error: BaseException | None) -> Any:
    """Run an async generator to its end. Return the result, which it cannot replace."""
    try:
        if error is None:
            await steps.asend(result)
        else:
            await steps.athrow(error)
    except StopAsyncIteration:
        return result
    await steps.aclose()
    raise _yielded_twice(steps)


def waiting(around: Callable[[Any], AsyncSteps], run: RunAwaitable) -> Around:
    """Return an async middleware as a plain one: this thread waits for each of its steps."""

    def plain(item: Any) -> Steps:
        steps = around(item)
        is_passed, passed = run(_start_async(steps))
        if not is_passed:
            return None
        try:
            result = yield passed
        except BaseException as error:
            return run(_end_async(steps, None, error))
        return run(_end_async(steps, result, None))

    return plain
