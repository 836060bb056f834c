"""A delay engine that is killed in the middle of its actions, for properties over random actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mqtemplate.clock import VirtualClock
from tests.delay.delay_engine import DelayEngine


class Killed(BaseException):
    """Ends a process at any moment. No code catches it."""


class KillingClock(VirtualClock):
    """Raises `Killed` at its n-th reading: in the middle of an append, a batch, a checkpoint, or a recovery."""

    readings_left: int | None = None

    def now_ms(self) -> int:
        if self.readings_left is not None:
            self.readings_left -= 1
            if self.readings_left <= 0:
                self.readings_left = None
                raise Killed
        return super().now_ms()


@dataclass(frozen=True)
class Action:
    """One action, and the number of clock readings after which a kill interrupts it; None for no kill."""

    name: str
    argument: Any = None
    killed_after: int | None = None


class KilledEngine(ABC):
    """A store directory, and the engines that use it one after the other."""

    def __init__(self) -> None:
        self.clock = KillingClock()
        self.engine = self.open()

    @abstractmethod
    def open(self) -> DelayEngine:
        """Open the store directory."""

    def reopen(self) -> None:
        """Kill the engine, and open the next one."""
        self.engine.crash()
        self.engine = self.open()

    def run(self, steps: Callable[[], object], action: Action) -> None:
        """Run *steps*; if *action* is interrupted by a kill, open the next engine."""
        self.clock.readings_left = action.killed_after
        try:
            steps()
        except Killed:
            self.reopen()
        self.clock.readings_left = None
