"""Threads of services: what a step raises ends neither the thread nor the other services."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import StoreFullError
from mqtemplate.services import ClockStepWatch, PeriodicService, Service, ServiceRunner, ServiceThread
from tests.forking import in_child
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

    def report(service: Service, error: Exception, repeated: int) -> None:
        reported.put((service.name, issubclass(type(error), Exception)))

    thread = ServiceThread("hostile", [Hostile(kind, steps)], SystemClock(), report)
    thread.start()
    assert reported.get(timeout=PATIENCE_S) == ("hostile", True)
    assert steps.get(timeout=PATIENCE_S) == "step"
    thread.wake()

    assert steps.get(timeout=PATIENCE_S) == "step"
    thread.stop()


class Failing:
    """A service that raises the next of these errors in each step, as on a full disk; then it works."""

    name = "failing"

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.steps = 0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Never wake by itself."""

    def step(self) -> int | None:
        self.steps += 1
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return None


def stepped(service: Service, clock: VirtualClock, seconds: list[int]) -> list[tuple[str, int]]:
    """Step a service at these times, as its thread does. Return class and number of repetitions of each report."""
    reports: list[tuple[str, int]] = []
    thread = ServiceThread(
        "test", [service], clock, lambda service, error, repeated: reports.append((type(error).__name__, repeated))
    )
    start_ms = clock.now_ms()
    for second in seconds:
        clock.set_ms(start_ms + second * 1_000)
        thread._step(service)
    return reports


def test_a_step_that_fails_each_second_is_reported_once_a_minute() -> None:
    service = Failing(*(StoreFullError("no room") for _ in range(120)))

    reports = stepped(service, VirtualClock(), list(range(120)))

    assert service.steps == 120
    assert reports == [("StoreFullError", 0), ("StoreFullError", 60)]


def test_each_class_of_error_is_reported() -> None:
    service = Failing(StoreFullError("no room"), OSError("no disk"), StoreFullError("no room"), OSError("no disk"))

    assert stepped(service, VirtualClock(), [0, 1, 2, 3]) == [("StoreFullError", 0), ("OSError", 0)]


def test_a_service_works_again_when_it_has_not_failed_for_a_minute() -> None:
    """A step that succeeds may have had no work. So a disk that is full each other second is one report a minute."""
    service = Failing(*(StoreFullError("no room") if number % 2 == 0 else None for number in range(40)))

    with capture_logs() as logs:
        reports = stepped(service, VirtualClock(), [*range(40), 41, 97, 98, 99])

    assert reports == [("StoreFullError", 0)]
    assert logs == [
        {
            "event": "service.works_again",
            "service": "failing",
            "error": "StoreFullError",
            "failed_steps": 20,
            "log_level": "info",
        }
    ]


# --- steps of the clock -------------------------------------------------------------------------------


class SteppedClock(SystemClock):
    """The clock of the machine with a wall clock that a test sets."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def seconds_until(self, due_ms: int) -> float:
        return super().seconds_until(due_ms - self.ahead_ms)


class DueAt:
    """A service whose work is due at a wall time."""

    name = "due"

    def __init__(self, clock: SystemClock, due_ms: int) -> None:
        self._clock, self._due_ms = clock, due_ms
        self.steps: SimpleQueue[bool] = SimpleQueue()

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Never wake by itself."""

    def step(self) -> int | None:
        self.steps.put(self._clock.now_ms() >= self._due_ms)
        return self._due_ms


def test_a_waiting_thread_notices_that_the_wall_clock_was_set() -> None:
    """Work that is due in an hour is done when the clock is set an hour ahead, not a minute later."""
    clock, watch = SteppedClock(), ClockStepWatch(interval_s=None)
    service = DueAt(clock, clock.now_ms() + 3_600_000)
    thread = ServiceThread("test", [service], clock, lambda service, error, repeated: None, watch)
    thread.start()
    assert service.steps.get(timeout=PATIENCE_S) is False

    watch.check()
    clock.ahead_ms = 3_600_000
    watch.check()

    assert service.steps.get(timeout=PATIENCE_S) is True
    thread.stop()


def test_only_a_clock_that_was_set_wakes_threads() -> None:
    clock, watch, woken = SteppedClock(), ClockStepWatch(interval_s=None), list[str]()

    def wake() -> None:
        woken.append("woken")

    watch.add(clock, wake)
    watch.check()
    clock.ahead_ms = 50  # less is the time between two readings
    watch.check()
    assert woken == []
    clock.ahead_ms = -3_600_000
    watch.check()
    watch.check()
    watch.remove(wake)
    clock.ahead_ms = 0
    watch.check()

    assert woken == ["woken"]


def test_one_thread_of_the_process_compares_the_clocks_while_others_wait() -> None:
    watch, clock = ClockStepWatch(interval_s=0.001), SteppedClock()
    woken: SimpleQueue[int] = SimpleQueue()
    waits = [partial(woken.put, number) for number in range(3)]
    before = set(threading.enumerate())
    for wake in waits:
        watch.add(clock, wake)
    (thread,) = set(threading.enumerate()) - before

    clock.ahead_ms = 3_600_000

    assert {woken.get(timeout=PATIENCE_S) for _ in waits} == {0, 1, 2}
    for wake in waits:
        watch.remove(wake)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_a_watch_of_its_own() -> None:
    watch, woken = ClockStepWatch(interval_s=0.001), list[str]()
    wake = partial(woken.append, "woken")
    watch.add(SystemClock(), wake)

    def use() -> str:
        threads = threading.active_count()
        watch.add(SystemClock(), wake)
        started = threading.active_count() - threads
        watch.remove(wake)
        return f"{started} started, {threading.active_count() - threads} left"

    assert in_child(use) == "1 started, 0 left"
    watch.remove(wake)


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
    runner = ServiceRunner(Hostile("panic", steps), virtual, "test", lambda service, error, repeated: None)
    for _ in range(2):
        runner.start()
        runner.start()
        assert len(virtual.services) == 1
        runner.stop()
        runner.stop()
        assert virtual.services == []

    threaded = ServiceRunner(Hostile("panic", steps), SystemClock(), "test", lambda service, error, repeated: None)
    threaded.start()
    assert steps.get(timeout=PATIENCE_S) == "step"
    threaded.stop()
