"""Callbacks of an asynchronous send or request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from functools import partial
from typing import TypeVar

from mqtemplate.event_log import get_logger

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
    error = CancelledError() if done.cancelled() else done.exception()
    try:
        if error is None and on_success is not None:
            on_success(done.result())
        elif error is not None and on_error is not None:
            on_error(error)
        elif error is not None:
            _log.error(f"{kind}.failed", destination=destination, exc_info=error)
    except Exception:
        _log.exception(f"{kind}.callback_failed", destination=destination)
