"""Contexts around each call of a handler, such as the application context of a web framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mqtemplate.listener.consuming.handler_loop import is_async
from mqtemplate.listener.endpoint import Handler, HandlerPlan


@dataclass(frozen=True, slots=True)
class HandlerScope:
    """A context that is entered before a handler and left after it, also if it raises.

    Attributes:
        enter: Returns the context for a plain handler; it is entered in the thread of the handler.
        enter_async: Returns the context for an ``async def`` handler; None: *enter*, on the event loop.
    """

    enter: Callable[[], AbstractContextManager[object]]
    enter_async: Callable[[], AbstractAsyncContextManager[object]] | None = None


def within_scopes(plan: HandlerPlan, scopes: Sequence[HandlerScope]) -> HandlerPlan:
    """Return the plan with its handler inside the scopes, the first one outermost. Without scopes nothing is added."""
    return plan.with_handlers(lambda handler: _within_all(handler, scopes)) if scopes else plan


def _within_all(handler: Handler, scopes: Sequence[HandlerScope]) -> Handler:
    for scope in reversed(scopes):
        handler = _async_within(handler, scope) if is_async(handler) else _within(handler, scope.enter)
    return handler


def _within(handler: Handler, enter: Callable[[], AbstractContextManager[object]]) -> Handler:
    @functools.wraps(handler)
    def call(*arguments: Any, **named: Any) -> object:
        with enter():
            return handler(*arguments, **named)

    return call


def _async_within(handler: Handler, scope: HandlerScope) -> Handler:
    enter, enter_async = scope.enter, scope.enter_async

    @functools.wraps(handler)
    async def call(*arguments: Any, **named: Any) -> object:
        if enter_async is not None:
            async with enter_async():
                return await handler(*arguments, **named)  # type: ignore[misc]  # the handler is async
        with enter():
            return await handler(*arguments, **named)  # type: ignore[misc]

    return call
