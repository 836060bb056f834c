"""The pace of the mover: it gives way to the sends of the application, fits its window, rests, and keeps its rate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.pace import FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW, Pace
from tests.kit import TimedClock

ALL_THE_TIME = MoverSettings(busy_share=1, rate=100_000)
HALF_THE_TIME = MoverSettings(rate=100_000)


class Steps:
    """Steps of a mover that take a given processor time.

    Attributes:
        used_s: Processor time of the thread.
    """

    def __init__(self, settings: MoverSettings, is_sending: Callable[[], bool] = lambda: False) -> None:
        self.clock = TimedClock()
        self.used_s = 0.0
        self.pace = Pace(self.clock, settings, is_sending, lambda: self.used_s)

    def step(self, count: int, used_ms: float, wait_ms: int = 0, burst_ms: int = 0) -> int:
        """Do a step that sends *count* messages; return the rest after it.

        Args:
            wait_ms: Time until the first answer of the new broker.
            burst_ms: Time from there to the last answer.
        """
        self.pace.begin()
        self.used_s += used_ms / 1_000
        self.clock.move_ms(round(used_ms))
        sent_ms = self.clock.steady_ms()
        self.clock.move_ms(wait_ms)
        first_ms = self.clock.steady_ms()
        self.clock.move_ms(burst_ms)
        self.pace.answered(sent_ms, first_ms)
        return self.pace.rest_ms(count)


def test_a_mover_waits_while_the_application_sends_but_not_longer_than_ten_milliseconds() -> None:
    sends = [True, True, False]
    steps = Steps(ALL_THE_TIME, lambda: sends.pop(0))
    start_ms = steps.clock.now_ms()
    steps.pace.give_way()
    assert (sends, steps.clock.now_ms() - start_ms) == ([], 2)  # this clock has no time below a millisecond

    busy = Steps(ALL_THE_TIME, lambda: True)
    busy.pace.give_way()
    assert busy.clock.now_ms() - start_ms == 10


@pytest.mark.parametrize(("busy_share", "rest_ms"), [(1, 1), (0.5, 20), (0.25, 60)])
def test_a_mover_rests_for_the_share_of_the_time_that_is_not_its_own(busy_share: float, rest_ms: int) -> None:
    """The time until the new broker answers loads nothing here, so no rest is needed for it."""
    steps = Steps(MoverSettings(busy_share=busy_share, rate=100_000))

    assert steps.step(8, used_ms=20, wait_ms=500) == rest_ms


def test_the_rate_is_a_limit_of_its_own() -> None:
    assert Steps(MoverSettings(rate=100)).step(8, used_ms=1) == 80


def test_the_window_grows_while_a_full_step_is_a_small_load() -> None:
    steps = Steps(HALF_THE_TIME)
    windows = []
    for _ in range(4):
        steps.step(steps.pace.window, used_ms=1)
        windows.append(steps.pace.window)

    assert windows == [2 * FIRST_WINDOW, 4 * FIRST_WINDOW, 8 * FIRST_WINDOW, MOST_WINDOW]
    steps.step(3, used_ms=6)
    assert steps.pace.window == MOST_WINDOW // 2


@pytest.mark.parametrize(("used_ms", "burst_ms"), [(6, 0), (1, 6)], ids=["processor time", "work of the new broker"])
def test_the_window_shrinks_when_a_send_of_the_application_would_wait_too_long(used_ms: int, burst_ms: int) -> None:
    steps = Steps(HALF_THE_TIME)
    for _ in range(3):
        steps.step(steps.pace.window, used_ms, burst_ms=burst_ms)

    assert steps.pace.window == LEAST_WINDOW


def test_the_window_stays_when_a_step_was_not_full_or_a_middling_load() -> None:
    steps = Steps(HALF_THE_TIME)
    steps.step(FIRST_WINDOW - 1, used_ms=1)
    steps.step(FIRST_WINDOW, used_ms=2)

    assert steps.pace.window == FIRST_WINDOW


def test_the_window_is_larger_without_an_application() -> None:
    """Nothing waits while the mover works."""
    steps = Steps(ALL_THE_TIME)
    for _ in range(4):
        steps.step(steps.pace.window, used_ms=8)

    assert steps.pace.window == MOST_WINDOW


def test_the_rate_shown_is_that_of_the_last_ten_seconds() -> None:
    steps = Steps(ALL_THE_TIME)
    steps.pace.moved(50)
    steps.clock.move_ms(6_000)
    steps.pace.moved(30)
    assert steps.pace.rate == 8.0

    steps.clock.move_ms(6_000)
    assert steps.pace.rate == 3.0
