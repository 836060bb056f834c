"""Service that runs an action at an interval, and at once when it is triggered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.clock import Clock
from mqtemplate.services import wall_time

_AFTER_ERROR_MS = 1_000


@dataclass(eq=False)
class PeriodicService:
    """A `Service` that runs an action each *interval_ms*, and when it is triggered.

    Args:
        action: Returns the pause until the next run in ms, or None for the interval. After an exception, it runs again
            in a second.
    """

    name: str
    action: Callable[[], int | None]
    clock: Clock
    interval_ms: int

    def __post_init__(self) -> None:
        self._due_ms = self.clock.steady_ms() + self.interval_ms
        self._is_triggered = False
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def trigger(self) -> None:
        """Run the action at the next step, and have that step taken at once."""
        self._is_triggered = True
        self._wake()

    def step(self) -> int | None:
        if self._is_triggered or self._due_ms <= self.clock.steady_ms():
            self._is_triggered = False  # before the action: a trigger while it runs causes another run
            self._due_ms = self.clock.steady_ms() + _AFTER_ERROR_MS
            pause_ms = self.action()
            self._due_ms = self.clock.steady_ms() + (self.interval_ms if pause_ms is None else pause_ms)
        return self.clock.now_ms() if self._is_triggered else wall_time(self.clock, self._due_ms)
