"""Error handler of a listener around each call: it decides what an exception of the handler means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.calls.steps import RunAwaitable
from mqtemplate.errors import ListenerError
from mqtemplate.listener.consume_status import ConsumeStatus
from mqtemplate.listener.failures.failure import raise_if_not_of_handler
from mqtemplate.listener.handler_result import BatchFailure
from mqtemplate.user_code import safe_text

ErrorHandler = Callable[[BaseException, Any], object]
"""Function (error, message or messages) that may decide what happens to them."""

_NO_ERRORS = (BatchFailure, PauseListener)
"""Exceptions that decide themselves."""


def deciding(
    call: Callable[..., Any], on_error: ErrorHandler, run: RunAwaitable, *, is_async: bool
) -> Callable[..., Any]:
    """Return a handler with its error handler: it returns the status of the error handler, or raises.

    Args:
        call: Function whose last argument is the message, or the list of a batch.
        run: Runs an awaitable of a plain handler or error handler, while this thread waits.
    """

    def call_or_decide(*source: Any) -> object:
        try:
            return _awaited(call(*source), run)
        except _NO_ERRORS:
            raise
        except BaseException as error:
            raise_if_not_of_handler(error)
            status = _checked(_awaited(on_error(error, source[-1]), run))
            if status is None:
                raise
            return status

    async def await_or_decide(*source: Any) -> object:
        try:
            return await call(*source)
        except _NO_ERRORS:
            raise
        except BaseException as error:
            raise_if_not_of_handler(error)
            verdict = on_error(error, source[-1])
            status = _checked(await verdict if inspect.isawaitable(verdict) else verdict)
            if status is None:
                raise
            return status

    return await_or_decide if is_async else call_or_decide


def _awaited(result: Any, run: RunAwaitable) -> Any:
    return run(result) if result is not None and inspect.isawaitable(result) else result


def _checked(verdict: object) -> ConsumeStatus | None:
    if verdict is None or isinstance(verdict, ConsumeStatus):
        return verdict
    raise ListenerError(f"the error handler returned {safe_text(verdict, 200, repr)}; return None or a ConsumeStatus")
