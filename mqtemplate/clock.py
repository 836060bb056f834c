"""Clocks: the wall clock of the machine, and a virtual clock for tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

__all__ = ["AdvanceUntil", "Clock", "SystemClock", "VirtualClock", "lease_time_ms"]


AdvanceUntil: TypeAlias = Callable[[Callable[[], bool], int | None], None]
"""Function (condition, until_ms) that moves a virtual clock and steps services until the condition is true, or nothing
is due before *until_ms*; then it moves the clock there."""


class Clock(Protocol):
    """Source of the current time. Everything that waits or sets timestamps takes one, so tests control the time."""

    @property
    def is_virtual(self) -> bool:
        """True if only calls move the clock. Threads must not wait on such a clock."""

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the epoch."""

    def steady_ms(self) -> int:
        """Return milliseconds since any fixed moment. They grow with the time that passes, also while the wall clock is
        set forward or back: use them for intervals and expiry, and `now_ms` for times that others see."""

    def seconds_until(self, due_ms: int) -> float:
        """Return the time from now to *due_ms*, with a resolution below a millisecond; negative if it has passed."""

    def sleep(self, seconds: float) -> None:
        """Wait in this thread. On a virtual clock it takes no real time."""


class SystemClock:
    """The wall clock of the machine."""

    is_virtual = False

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, due_ms: int) -> float:
        return due_ms / 1_000 - time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


_ALSO_ASLEEP = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; elsewhere the monotonic clock counts sleep


def lease_time_ms(clock: Clock) -> int:
    """Return milliseconds since any fixed moment, for leases: on Linux also those in which the machine slept.

    While a machine sleeps, its steady time may stand still, and another machine may get what it had leased.
    """
    if _ALSO_ASLEEP is None or clock.is_virtual:
        return clock.steady_ms()
    return time.clock_gettime_ns(_ALSO_ASLEEP) // 1_000_000


class VirtualClock:
    """A clock that moves only when a method moves it.

    It starts at a fixed time, so a test has the same result in each run.

    Args:
        start_ms: Milliseconds since the epoch; the default is 2026-01-01T00:00:00Z.

    Raises:
        TypeError: It is something else, such as a datetime.

    Attributes:
        services: Each a `mqtemplate.services.Service` that runs on the clock itself, such as an event loop; a harness
            steps them too.
        awaited: Number of coroutines inside of `awaiting`.
    """

    is_virtual = True

    def __init__(self, start_ms: int = 1_767_225_600_000) -> None:
        if type(start_ms) is not int:
            raise TypeError(
                f"start_ms must be whole epoch milliseconds, got {type(start_ms).__name__} {start_ms!r}; "
                "for a datetime pass int(when.timestamp() * 1000)"
            )
        self._now_ms = self._steady_ms = start_ms
        self.awaited = 0
        self.services: list[Any] = []
        self._advance_until: AdvanceUntil | None = None

    def drive_with(self, advance_until: AdvanceUntil) -> None:
        """Set the function that `wait_for` and `sleep` call; a harness does."""
        self._advance_until = advance_until

    @property
    def is_driven(self) -> bool:
        """True if a harness drives the clock."""
        return self._advance_until is not None

    def wait_for(self, condition: Callable[[], bool], until_ms: int | None = None) -> bool:
        """Let time pass until *condition* is true, at most until *until_ms*.

        Returns:
            False if it is still not true: no harness drives the clock, or no service has work left.
        """
        if self._advance_until is not None and not condition():
            self._advance_until(condition, until_ms)
        return condition()

    def sleep(self, seconds: float) -> None:
        """Let time pass: a harness does all work that is due meanwhile, and without a harness the clock is moved."""
        if seconds < 0:
            raise ValueError(f"sleep length must not be negative, got {seconds}")
        due_ms = self._now_ms + math.ceil(round(seconds * 1_000, 6))
        self.wait_for(lambda: self._now_ms >= due_ms, due_ms)
        self.set_ms(max(self._now_ms, due_ms))

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Count a coroutine on this clock that waits for work of services: it is not blocked by something real."""
        self.awaited += 1
        try:
            yield
        finally:
            self.awaited -= 1

    def now_ms(self) -> int:
        return self._now_ms

    def steady_ms(self) -> int:
        return self._steady_ms

    def seconds_until(self, due_ms: int) -> float:
        return (due_ms - self._now_ms) / 1_000

    def set_ms(self, now_ms: int) -> None:
        """Set the time; it may go back, as a wall clock may. No service is stepped: that is the harness's task."""
        self.move_ms(now_ms - self._now_ms)

    def move_ms(self, milliseconds: int) -> None:
        """Let this time pass. A negative number sets the clock back: then no time passes, see `steady_ms`."""
        self._now_ms += milliseconds
        self._steady_ms += max(milliseconds, 0)

    def step_ms(self, milliseconds: int) -> None:
        """Set the wall clock forward or back without time passing, as an administrator or NTP does."""
        self._now_ms += milliseconds
