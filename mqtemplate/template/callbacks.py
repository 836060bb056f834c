"""Callbacks of an asynchronous send or request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
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
) -> None:
    """Call one of the callbacks when the future is done. An error without *on_error* is logged.

    Args:
        kind: First part of the names of log events: ``send`` or ``request``.
    """

    def report(done: Future[T]) -> None:
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

    if on_success is not None or on_error is not None:
        future.add_done_callback(report)
