"""Callbacks beside a future, for who does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

import structlog

_log = structlog.stdlib.get_logger("mqtemplate.template")

T = TypeVar("T")


def report_to(
    on_success: Callable[[T], object] | None,
    on_error: Callable[[BaseException], object] | None,
    destination: str,
    what: str,
) -> Callable[[Future[T]], None]:
    """Calls the one callback or the other; an error that nobody else would see is logged.

    Args:
        what: Begins the name of the event: ``send`` or ``request``.
    """

    def report(future: Future[T]) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        try:
            if error is None and on_success is not None:
                on_success(future.result())
            elif error is not None and on_error is not None:
                on_error(error)
            elif error is not None:
                _log.error(f"{what}.failed", destination=destination, exc_info=error)
        except Exception:
            _log.exception(f"{what}.callback_failed", destination=destination)

    return report
