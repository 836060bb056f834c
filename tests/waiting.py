"""Waiting for something real: another thread, process or broker. Tests on the virtual clock do not need it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from math import ceil
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # programs of tests import this module, too
    import pytest

T = TypeVar("T")

_POLL_S = 0.01
_UNIT_S = 0.03
"""Time to start and end a Python process without its site packages, on a machine that does nothing else."""
_BUSY_S = 0.1


def slowness() -> float:
    """Return how many times longer a program takes now than on a machine that does nothing else; at least 1.

    A short process shows the speed of the machine, but a scheduler prefers it. So a longer use of the processor shows
    how many others want it.
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    speed = max(1.0, (time.monotonic() - start) / _UNIT_S)
    start, end_s = time.monotonic(), time.thread_time() + _BUSY_S
    while time.thread_time() < end_s:
        pass
    return speed * max(1.0, (time.monotonic() - start) / _BUSY_S)


PATIENCE_S = min(60 * ceil(slowness()), 3_600)
"""Limit for calls that take one, such as ``queue.get(timeout=PATIENCE_S)``: a guard against hanging, see `Patience`.
An hour at most: settings take no longer time."""


class Patience:
    """Guard against hanging, which grows with the load of the machine: no measurement and no limit of real time.

    Args:
        patience_s: Time that is more than enough on a machine that does nothing else.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s
        self._start = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True after *patience_s*, times the slowness of the machine. The slowness is measured only then."""
        passed = time.monotonic() - self._start
        return passed > self.patience_s and passed > self.patience_s * slowness()


def eventually(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Return the first true value of *condition*, which is called again and again.

    Args:
        what: The condition in words, for the failure.
        timeout_s: A guard against hanging, see `Patience`.
    """
    patience = Patience(timeout_s)
    pause = Event()
    while not (value := condition()):
        assert not patience.is_over, f"not within {timeout_s:.0f} s, and longer on a slow machine: {what}"
        pause.wait(_POLL_S)
    return value


def receive_after_a_wake(monkeypatch: pytest.MonkeyPatch, pop: Any) -> Event:
    """Let each receive of a `PopConsumers` begin after it was woken: that wake has no effect on it.

    Returns:
        Set when a thread is about to receive.
    """
    receiving, woken = Event(), Event()
    receive, wake = pop.receive, pop.wake

    def receive_late(*arguments: Any, **options: Any) -> Any:
        receiving.set()
        assert woken.wait(PATIENCE_S)
        return receive(*arguments, **options)

    def wake_first(group: str) -> None:
        wake(group)
        woken.set()

    monkeypatch.setattr(pop, "receive", receive_late)
    monkeypatch.setattr(pop, "wake", wake_first)
    return receiving
