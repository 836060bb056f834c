"""Where time comes from: the machine, or a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Whatever waits or dates takes one of these, so that a test can own the time."""

    @property
    def is_virtual(self) -> bool:
        """Whether time stands still unless somebody moves it; threads must not wait on such a clock."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def seconds_until(self, due_ms: int) -> float:
        """How long from now to *due_ms*, finer than a millisecond; negative once it has passed."""


class SystemClock:
    """The machine's wall clock."""

    is_virtual = False

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def seconds_until(self, due_ms: int) -> float:
        return due_ms / 1_000 - time.time()


class VirtualClock:
    """A clock that moves only when told to.

    It starts at a fixed instant, so a test gives the same result each time.

    Args:
        start_ms: Milliseconds since the epoch; the default is 2026-01-01T00:00:00Z.

    Attributes:
        let_pass: Lets time pass until something happened, or nothing is left that could; whoever steps the services
            of this clock says how.
    """

    is_virtual = True

    def __init__(self, start_ms: int = 1_767_225_600_000) -> None:
        self._now_ms = start_ms
        self.let_pass: Callable[[Callable[[], bool]], None] | None = None

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Let time pass until *happened*; False if it did not, as nobody steps anything or nothing is left to do."""
        if self.let_pass is not None and not happened():
            self.let_pass(happened)
        return happened()

    def now_ms(self) -> int:
        return self._now_ms

    def seconds_until(self, due_ms: int) -> float:
        return (due_ms - self._now_ms) / 1_000

    def set_ms(self, now_ms: int) -> None:
        """Jump to an instant; backwards too, as a machine's clock may.

        Nothing is stepped: that is the harness's part.
        """
        self._now_ms = now_ms

    def move_ms(self, milliseconds: int) -> None:
        """Move by a span; negative goes back."""
        self._now_ms += milliseconds
