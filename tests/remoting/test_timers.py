"""Timers run in order and once, and cancelled ones are removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.io_loop import Timers


@given(st.lists(st.integers(0, 50)), st.integers(0, 50))
def test_due_timers_are_returned_in_order_and_others_stay(due: list[int], now: int) -> None:
    timers = Timers()
    for due_ms in due:
        timers.add(due_ms, lambda: None)

    taken = [timer.due_ms for timer in timers.take_due(now)]

    assert taken == sorted(due_ms for due_ms in due if due_ms <= now)
    assert timers.next_due_ms() == min((due_ms for due_ms in due if due_ms > now), default=None)


def test_a_cancelled_timer_does_not_run() -> None:
    timers, done = Timers(), []
    timer = timers.add(1, lambda: done.append("cancelled"))
    timers.add(2, lambda: done.append("kept"))

    timer.cancel()
    timer.cancel()
    for due in timers.take_due(5):
        due.run()

    assert done == ["kept"]


def test_a_timer_that_is_cancelled_after_it_was_returned_does_not_run() -> None:
    """A timer that runs before it, in the same turn of the loop, may cancel it."""
    timers, done = Timers(), []
    later = timers.add(2, lambda: done.append("too late"))
    timers.add(1, later.cancel)

    for due in timers.take_due(5):
        due.run()

    assert done == []


def test_timeouts_of_answered_requests_leave_the_heap() -> None:
    """They are cancelled long before they are due."""
    timers = Timers()
    last = timers.add(1_000, lambda: None)

    longest = 0
    for number in range(20_000):
        timers.add(2_000 + number, lambda: None).cancel()
        longest = max(longest, len(timers))

    assert longest < 1_000
    assert timers.next_due_ms() == last.due_ms
    last.cancel()
    assert timers.next_due_ms() is None
