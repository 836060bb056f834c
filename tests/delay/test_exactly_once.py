"""Whatever happens, in whatever order: each delayed message arrives once, none early, and in order of due time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from tests.delay.delay_engine import DelayEngine

LEVEL_MS = {1: 1_000, 2: 5_000, 3: 10_000, 4: 30_000}
LONGEST_MS = 3 * 3_600_000

levels = st.sampled_from(sorted(LEVEL_MS)).map(lambda level: {"DELAY": level})
times = st.one_of(st.integers(1, 3_000), st.integers(1, 100_000), st.integers(1, LONGEST_MS), st.just(5_000))
timers = times.map(lambda delay_ms: {"TIMER_DELAY_MS": delay_ms})
delays = st.one_of(levels, timers)
spans = st.one_of(st.integers(0, 50), st.integers(0, 6_000), st.integers(0, LONGEST_MS))


@given(st.lists(st.tuples(delays, st.one_of(st.just(0), spans)), max_size=40))
@settings(max_examples=60)
def test_any_mix_arrives_once_and_at_its_millisecond(plan: list[tuple[dict[str, int], int]]) -> None:
    """On a virtual clock nothing is late either, so the order is that of the due times."""
    engine = DelayEngine()
    due = {}
    for number, (delay, pause_ms) in enumerate(plan):
        body = b"%d" % number
        engine.send(body, **delay)
        due[body] = engine.clock.now_ms() + (delay.get("TIMER_DELAY_MS") or LEVEL_MS[delay["DELAY"]])
        engine.advance(pause_ms)
    engine.advance(LONGEST_MS)

    arrived = engine.arrived()

    assert {message.body: message.at_ms for message in arrived} == due
    assert len(arrived) == len(due)
    assert [message.at_ms for message in arrived] == sorted(due.values())
    engine.close()


class Killed(BaseException):
    """What ends a process at any moment; nothing catches it."""


class MortalClock(VirtualClock):
    """Kills whoever looks at it for the n-th time: in the middle of an append, a batch, a checkpoint, a recovery."""

    looks_left: int | None = None

    def now_ms(self) -> int:
        if self.looks_left is not None:
            self.looks_left -= 1
            if self.looks_left <= 0:
                self.looks_left = None
                raise Killed
        return super().now_ms()


@dataclass(frozen=True)
class Act:
    """One thing that happens, and after how many looks at the clock a kill interrupts it, if one does."""

    name: str
    argument: Any = None
    killed_after: int | None = None


kills = st.one_of(st.none(), st.none(), st.integers(1, 40))
acts = st.one_of(
    st.builds(Act, st.just("send"), st.lists(delays, min_size=1, max_size=5), kills),
    st.builds(Act, st.just("send"), st.lists(delays, min_size=1, max_size=5), kills),
    st.builds(Act, st.just("wait"), spans, kills),
    st.builds(Act, st.just("set clock"), st.integers(-LONGEST_MS, LONGEST_MS)),
    st.builds(Act, st.just("checkpoint"), st.none(), kills),
    st.builds(Act, st.just("close")),
    st.builds(Act, st.just("kill")),
)


class Life:
    """A folder, and the processes that own it one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = MortalClock()
        self.due: dict[bytes, int] = {}  # of acknowledged messages, by store time for levels
        self.count = 0
        self.engine = self.open()

    def open(self) -> DelayEngine:
        return DelayEngine(self.folder, clock=self.clock, log_file_size=40_000)

    def do(self, act: Act) -> None:
        match act.name:
            case "send":
                self.mortally(lambda: [self.send(delay) for delay in act.argument], act.killed_after)
            case "wait":
                self.mortally(lambda: self.engine.advance(act.argument), act.killed_after)
            case "set clock":
                self.clock.move_ms(act.argument)
            case "checkpoint":
                self.mortally(self.engine.store.take_checkpoint, act.killed_after)
            case "close":
                self.engine.close()
                self.engine = self.open()
            case "kill":
                self.engine.crash()
                self.engine = self.open()

    def mortally(self, action: Callable[[], object], killed_after: int | None) -> None:
        self.clock.looks_left = killed_after
        try:
            action()
        except Killed:
            self.engine.crash()
            self.engine = self.open()
        self.clock.looks_left = None

    def send(self, delay: dict[str, int]) -> None:
        body = b"%d" % self.count
        self.count += 1
        now_ms = VirtualClock.now_ms(self.clock)
        put = self.engine.send(body, **delay)
        level = delay.get("DELAY")
        self.due[body] = put.store_timestamp + LEVEL_MS[level] if level else now_ms + delay["TIMER_DELAY_MS"]


@given(st.lists(acts, max_size=25))
@settings(max_examples=60)
def test_kills_at_any_moment_neither_lose_nor_repeat_nor_hurry(plan: list[Act]) -> None:
    """What was acknowledged arrives exactly once; what a kill kept from being acknowledged, once or not at all."""
    with TemporaryDirectory() as folder:
        life = Life(Path(folder))
        for act in plan:
            life.do(act)
        for _ in range(4):
            life.engine.advance(LONGEST_MS)  # enough for a clock that was set back

        arrived = life.engine.arrived()
        life.engine.close()

    counts = Counter(message.body for message in arrived)
    assert [body for body in life.due if counts[body] != 1] == []
    assert [body for body, count in counts.items() if count > 1] == []
    assert [message.body for message in arrived if message.at_ms < life.due.get(message.body, 0)] == []
