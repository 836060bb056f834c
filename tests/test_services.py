"""Threads of services: what a step raises ends neither the thread nor the other services."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.services import Service, ServiceThread
from tests.listener.hostile import KINDS

PATIENCE_S = 30


class Hostile:
    """A service that raises in its first step, and is due at once after it."""

    name = "hostile"

    def __init__(self, kind: str, steps: SimpleQueue[str]) -> None:
        self._kind, self._steps = kind, steps
        self._is_first = True

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Never wake by itself."""

    def step(self) -> int | None:
        self._steps.put("step")
        if self._is_first:
            self._is_first = False
            KINDS[self._kind]()
        return None


@pytest.mark.parametrize("kind", ["panic", "exit", "interrupt", "generator exit", "without anything"])
def test_a_step_may_raise_whatever_it_wants(kind: str) -> None:
    steps: SimpleQueue[str] = SimpleQueue()
    reported: SimpleQueue[tuple[str, bool]] = SimpleQueue()

    def report(service: Service, error: Exception) -> None:
        reported.put((service.name, issubclass(type(error), Exception)))

    thread = ServiceThread("hostile", [Hostile(kind, steps)], SystemClock(), report)
    thread.start()
    assert reported.get(timeout=PATIENCE_S) == ("hostile", True)
    assert steps.get(timeout=PATIENCE_S) == "step"
    thread.wake()

    assert steps.get(timeout=PATIENCE_S) == "step"
    thread.stop()
