"""Property over random actions during a hand-over: sends, cancels, reschedules, releases, and kills at any call.

Each message arrives once, not early, in one of the two brokers; a cancelled one in none.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from mqtemplate.handover.limits import MoverSettings
from tests.handover.two_brokers import TwoBrokers

LEVELS = (1, 3, 5, 6)  # 1s, 10s, 1m, 2m
numbers = st.integers(0, 1 << 30)


class HandOver(RuleBasedStateMachine):
    """Random actions on two brokers and the mover between them."""

    def __init__(self) -> None:
        super().__init__()
        self.brokers = TwoBrokers(MoverSettings(rate=20, lead_ms=2_000))
        self.sent: list[str] = []

    @rule(levels=st.lists(st.sampled_from(LEVELS), max_size=3), delays=st.lists(st.integers(1, 120_000), max_size=3))
    def send(self, levels: list[int], delays: list[int]) -> None:
        for delay in [*({"DELAY": each} for each in levels), *({"TIMER_DELAY_MS": each} for each in delays)]:
            self.sent.append(self.brokers.send(len(self.sent), **delay))

    @rule(at=st.integers(0, 12), is_after=st.booleans(), kills=st.booleans(), span_ms=st.integers(0, 5_000))
    def interrupt(self, at: int, is_after: bool, kills: bool, span_ms: int) -> None:
        faults = self.brokers.faults
        faults.at, faults.is_after, faults.kills = len(faults.calls) + at, is_after, kills
        self.brokers.advance(span_ms)

    @rule(span_ms=st.integers(0, 30_000))
    def pass_time(self, span_ms: int) -> None:
        self.brokers.advance(span_ms)

    @rule()
    def kill_new(self) -> None:
        self.brokers.kill_new()

    @rule()
    def kill_old(self) -> None:
        self.brokers.kill_old()

    @precondition(lambda self: self.sent)
    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        self.brokers.cancel(self.sent[number % len(self.sent)])

    @precondition(lambda self: self.sent)
    @rule(number=numbers, delay_ms=st.integers(1, 90_000))
    def reschedule(self, number: int, delay_ms: int) -> None:
        msg_id = self.sent[number % len(self.sent)]
        self.brokers.reschedule(msg_id, self.brokers.clock.now_ms() + delay_ms)

    def teardown(self) -> None:
        self.brokers.faults.at = None
        self.brokers.advance(150_000)
        self.brokers.check()
        self.brokers.close()


@pytest.mark.parametrize(
    ("examples", "steps"), [(8, 12), pytest.param(300, 40, marks=pytest.mark.thorough)], ids=["short", "thorough"]
)
def test_random_actions_and_kills_lose_repeat_and_revive_nothing(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        HandOver, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
