"""Work of a remote broker that comes again and again, or at once when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.clock import Clock


class PeriodicService:
    """Does something each *interval_ms*; see `mqtemplate.services.Service`.

    Args:
        action: Gives how long to wait until the next time (ms), or None for the interval. One that raises is due again
            a second later.
    """

    _AFTER_ERROR_MS = 1_000

    def __init__(self, name: str, action: Callable[[], int | None], clock: Clock, interval_ms: int) -> None:
        self.name = name
        self._action = action
        self._clock = clock
        self._interval_ms = interval_ms
        self._due_ms = clock.now_ms() + interval_ms
        self._is_asked_for = False
        self._wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def soon(self) -> None:
        """Do it at the next step, which comes at once."""
        self._is_asked_for = True
        self._wake()

    def step(self) -> int | None:
        if self._is_asked_for or self._due_ms <= self._clock.now_ms():
            self._is_asked_for = False  # before it is done: who asks meanwhile wants it once more
            self._due_ms = self._clock.now_ms() + self._AFTER_ERROR_MS
            pause_ms = self._action()
            self._due_ms = self._clock.now_ms() + (self._interval_ms if pause_ms is None else pause_ms)
        return self._clock.now_ms() if self._is_asked_for else self._due_ms
