"""Callbacks of an asynchronous send or request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

from mqtemplate.callables import name_of_callable, unfinished
from mqtemplate.event_log import get_logger
from mqtemplate.user_code import error_text, is_interrupt

_log = get_logger("mqtemplate.template")

T = TypeVar("T")


def add_callbacks(
    future: Future[T],
    on_success: Callable[[T], object] | None,
    on_error: Callable[[BaseException], object] | None,
    *,
    kind: str,
    destination: str,
    executor: Executor | None = None,
) -> None:
    """Call one of the callbacks when the future is done. An error without *on_error* is logged.

    Args:
        executor: Runs the callbacks; without one, the thread that receives the result does.
        kind: First part of the names of log events: ``send`` or ``request``.
    """
    if on_success is None and on_error is None:
        return
    # Not a closure: thousands may wait, and the garbage collector visits each cell of a closure.
    report = partial(_report, on_success, on_error, kind, destination)
    future.add_done_callback(report if executor is None else partial(executor.submit, report))


def _report(
    on_success: Callable[[T], object] | None,
    on_error: Callable[[BaseException], object] | None,
    kind: str,
    destination: str,
    done: Future[T],
) -> None:
    try:
        result = done.result()
    except BaseException as exc:  # also what a middleware of the application raised
        _report_error(on_error, kind, destination, exc)
        return
    if on_success is not None:
        _call(on_success, result, kind, destination)


def _report_error(
    on_error: Callable[[BaseException], object] | None, kind: str, destination: str, error: BaseException
) -> None:
    if on_error is None:
        _log.error(f"{kind}.failed", destination=destination, exc_info=error)
        return
    _call(on_error, error, kind, destination)


def _call(callback: Callable[[T], object], value: T, kind: str, destination: str) -> None:
    """Call a callback of the application. Whatever it raises, this thread goes on: others wait for their results."""
    try:
        if (found := unfinished(callback(value))) is not None:
            raise TypeError(
                f"the callback {name_of_callable(callback)} returned {found}, so it did nothing; write it with 'def', "
                "or await the future"
            )
    except BaseException as exc:
        if is_interrupt(exc):
            raise
        _log.error(f"{kind}.callback_failed", destination=destination, error=error_text(exc), exc_info=exc)
