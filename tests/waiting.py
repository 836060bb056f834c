"""Waiting for something real: another thread, process or broker. Tests on the virtual clock do not need it."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01


def eventually(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Return the first true value of *condition*, which is called again and again.

    Args:
        what: The condition in words, for the failure.
        timeout_s: A guard against hanging, not a measurement: generous, since the machine may be busy.
    """
    deadline = time.monotonic() + timeout_s
    pause = Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        pause.wait(_POLL_S)
    return value
