"""A periodic action: at its interval, at once when triggered, and soon after an exception."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.services import PeriodicService


class Action:
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
    clock, action = VirtualClock(), Action()
    service = PeriodicService("remote.test", action, clock, 1_000)

    assert (service.step(), action.runs) == (clock.now_ms() + 1_000, 0)
    clock.move_ms(1_000)

    assert (service.step(), action.runs) == (clock.now_ms() + 1_000, 1)


def test_the_action_runs_at_once_when_triggered() -> None:
    clock, action, woken = VirtualClock(), Action(), []
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
    service = PeriodicService("remote.test", Action(50), clock, 1_000)

    service.trigger()

    assert service.step() == clock.now_ms() + 50


def test_a_failed_action_runs_again_after_a_second() -> None:
    clock, action = VirtualClock(), Action(ValueError("no"))
    service = PeriodicService("remote.test", action, clock, 30_000)
    service.trigger()

    with pytest.raises(ValueError, match="no"):
        service.step()

    assert service.step() == clock.now_ms() + 1_000
