"""Contexts around each call of a handler, such as the application context of a web framework."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any


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
