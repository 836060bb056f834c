"""Work that comes again: in its time, at once when it is asked for, and soon after it failed."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.periodic_service import PeriodicService
from mqtemplate.clock import VirtualClock


class Work:
    def __init__(self, *pauses: int | Exception | None) -> None:
        self.done = 0
        self._pauses = list(pauses)

    def __call__(self) -> int | None:
        self.done += 1
        pause = self._pauses.pop(0) if self._pauses else None
        if isinstance(pause, Exception):
            raise pause
        return pause


def test_it_works_each_interval() -> None:
    clock, work = VirtualClock(), Work()
    service = PeriodicService("work", work, clock, 1_000)

    assert (service.step(), work.done) == (clock.now_ms() + 1_000, 0)
    clock.move_ms(1_000)

    assert (service.step(), work.done) == (clock.now_ms() + 1_000, 1)


def test_it_works_at_once_when_it_is_asked_for() -> None:
    clock, work, woken = VirtualClock(), Work(), []
    service = PeriodicService("work", work, clock, 1_000)
    service.on_wake(lambda: woken.append("wake"))

    service.trigger()
    service.step()

    assert (work.done, woken) == (1, ["wake"])


def test_who_asks_while_it_works_gets_another_turn() -> None:
    clock = VirtualClock()
    done: list[str] = []

    def work() -> None:
        done.append("work")
        if len(done) == 1:
            service.trigger()

    service = PeriodicService("work", work, clock, 1_000)
    service.trigger()

    assert service.step() == clock.now_ms()
    service.step()
    assert done == ["work", "work"]


def test_the_work_may_say_when_it_wants_to_come_again() -> None:
    clock = VirtualClock()
    service = PeriodicService("work", Work(50), clock, 1_000)

    service.trigger()

    assert service.step() == clock.now_ms() + 50


def test_what_failed_is_due_again_a_second_later() -> None:
    clock, work = VirtualClock(), Work(ValueError("no"))
    service = PeriodicService("work", work, clock, 30_000)
    service.trigger()

    with pytest.raises(ValueError, match="no"):
        service.step()

    assert service.step() == clock.now_ms() + 1_000
