"""Timers: in order, once, and forgotten when cancelled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.timers import Timers


@given(st.lists(st.integers(0, 50)), st.integers(0, 50))
def test_what_is_due_comes_in_order_and_the_rest_stays(due: list[int], now: int) -> None:
    timers = Timers()
    for due_ms in due:
        timers.add(due_ms, lambda: None)

    taken = [timer.due_ms for timer in timers.take_due(now)]

    assert taken == sorted(due_ms for due_ms in due if due_ms <= now)
    assert timers.next_due_ms() == min((due_ms for due_ms in due if due_ms > now), default=None)


def test_a_cancelled_timer_does_nothing() -> None:
    timers, done = Timers(), []
    timer = timers.add(1, lambda: done.append("cancelled"))
    timers.add(2, lambda: done.append("kept"))

    timer.cancel()
    timer.cancel()
    for due in timers.take_due(5):
        due.run()

    assert done == ["kept"]


def test_a_timer_cancelled_after_it_was_taken_does_nothing() -> None:
    """What ran before it in the same turn may have made it needless."""
    timers, done = Timers(), []
    later = timers.add(2, lambda: done.append("too late"))
    timers.add(1, later.cancel)

    for due in timers.take_due(5):
        due.run()

    assert done == []


def test_a_million_answered_requests_leave_no_heap_behind() -> None:
    """Their time-outs are cancelled long before they are due."""
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
