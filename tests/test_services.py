"""Threads of services: what a step raises ends neither the thread nor the other services."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import pytest

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.services import PeriodicService, Service, ServiceRunner, ServiceThread
from tests.listener.hostile import KINDS
from tests.waiting import PATIENCE_S


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


# --- a periodic action --------------------------------------------------------------------------------


class PausingAction:
    def __init__(self, *pauses: int | Exception | None) -> None:
        self.runs = 0
        self._pauses = list(pauses)

    def __call__(self) -> int | None:
        self.runs += 1
        pause = self._pauses.pop(0) if self._pauses else None
        if isinstance(pause, Exception):
            raise pause
        return pause


def test_the_action_runs_each_interval() -> None:
    clock, action = VirtualClock(), PausingAction()
    service = PeriodicService("remote.test", action, clock, 1_000)

    assert (service.step(), action.runs) == (clock.now_ms() + 1_000, 0)
    clock.move_ms(1_000)

    assert (service.step(), action.runs) == (clock.now_ms() + 1_000, 1)


def test_the_action_runs_at_once_when_triggered() -> None:
    clock, action, woken = VirtualClock(), PausingAction(), []
    service = PeriodicService("remote.test", action, clock, 1_000)
    service.on_wake(lambda: woken.append("wake"))

    service.trigger()
    service.step()

    assert (action.runs, woken) == (1, ["wake"])


def test_a_trigger_during_a_run_causes_another_run() -> None:
    clock = VirtualClock()
    runs: list[str] = []

    def action() -> None:
        runs.append("run")
        if len(runs) == 1:
            service.trigger()

    service = PeriodicService("remote.test", action, clock, 1_000)
    service.trigger()

    assert service.step() == clock.now_ms()
    service.step()
    assert runs == ["run", "run"]


def test_the_action_can_choose_the_pause() -> None:
    clock = VirtualClock()
    service = PeriodicService("remote.test", PausingAction(50), clock, 1_000)

    service.trigger()

    assert service.step() == clock.now_ms() + 50


def test_a_failed_action_runs_again_after_a_second() -> None:
    clock, action = VirtualClock(), PausingAction(ValueError("no"))
    service = PeriodicService("remote.test", action, clock, 30_000)
    service.trigger()

    with pytest.raises(ValueError, match="no"):
        service.step()

    assert service.step() == clock.now_ms() + 1_000


def test_a_runner_lets_a_harness_step_its_service_on_a_virtual_clock_and_has_a_thread_on_another() -> None:
    virtual, steps = VirtualClock(), SimpleQueue[str]()
    runner = ServiceRunner(Hostile("panic", steps), virtual, "test", lambda service, error: None)
    for _ in range(2):
        runner.start()
        runner.start()
        assert len(virtual.services) == 1
        runner.stop()
        runner.stop()
        assert virtual.services == []

    threaded = ServiceRunner(Hostile("panic", steps), SystemClock(), "test", lambda service, error: None)
    threaded.start()
    assert steps.get(timeout=PATIENCE_S) == "step"
    threaded.stop()
