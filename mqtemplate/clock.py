"""Clocks: the wall clock of the machine, and a virtual clock for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Source of the current time. Everything that waits or sets timestamps takes one, so tests control the time."""

    @property
    def is_virtual(self) -> bool:
        """True if only calls move the clock. Threads must not wait on such a clock."""

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the epoch."""

    def seconds_until(self, due_ms: int) -> float:
        """Return the time from now to *due_ms*, with a resolution below a millisecond; negative if it has passed."""


class SystemClock:
    """The wall clock of the machine."""

    is_virtual = False

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def seconds_until(self, due_ms: int) -> float:
        return due_ms / 1_000 - time.time()


class VirtualClock:
    """A clock that moves only when a method moves it.

    It starts at a fixed time, so a test has the same result in each run.

    Args:
        start_ms: Milliseconds since the epoch; the default is 2026-01-01T00:00:00Z.
    """

    is_virtual = True

    def __init__(self, start_ms: int = 1_767_225_600_000) -> None:
        self._now_ms = start_ms
        self._advance_until: Callable[[Callable[[], bool]], None] | None = None

    def drive_with(self, advance_until: Callable[[Callable[[], bool]], None]) -> None:
        """Set the function that `wait_for` calls.

        Args:
            advance_until: Moves this clock and steps services until its argument returns True, or nothing is due.
        """
        self._advance_until = advance_until

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Let time pass until *condition* is true.

        Returns:
            False if it is still not true: no harness drives the clock, or no service has work left.
        """
        if self._advance_until is not None and not condition():
            self._advance_until(condition)
        return condition()

    def now_ms(self) -> int:
        return self._now_ms

    def seconds_until(self, due_ms: int) -> float:
        return (due_ms - self._now_ms) / 1_000

    def set_ms(self, now_ms: int) -> None:
        """Set the time; it may go back, as a wall clock may. No service is stepped: that is the harness's task."""
        self._now_ms = now_ms

    def move_ms(self, milliseconds: int) -> None:
        """Move the time by *milliseconds*; a negative number moves it back."""
        self._now_ms += milliseconds
