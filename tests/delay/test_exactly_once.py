"""Properties over random actions: each delayed message arrives once, never early, and in order of due time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from tests.delay.delay_engine import DelayEngine
from tests.delay.killed_engine import Action, KilledEngine
from tests.thirds import examples

LEVEL_MS = {1: 1_000, 2: 5_000, 3: 10_000, 4: 30_000}
LONGEST_MS = 3 * 3_600_000

levels = st.sampled_from(sorted(LEVEL_MS)).map(lambda level: {"DELAY": level})
times = st.one_of(st.integers(1, 3_000), st.integers(1, 100_000), st.integers(1, LONGEST_MS), st.just(5_000))
timers = times.map(lambda delay_ms: {"TIMER_DELAY_MS": delay_ms})
delays = st.one_of(levels, timers)
spans = st.one_of(st.integers(0, 50), st.integers(0, 6_000), st.integers(0, LONGEST_MS))


@given(st.lists(st.tuples(delays, st.one_of(st.just(0), spans)), max_size=40))
@settings(max_examples=examples(60))
def test_any_mix_arrives_once_and_at_its_millisecond(plan: list[tuple[dict[str, int], int]]) -> None:
    """On a virtual clock no message is late. So the messages arrive in order of due time."""
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


kills = st.one_of(st.none(), st.none(), st.integers(1, 40))
actions = st.one_of(
    st.builds(Action, st.just("send"), st.lists(delays, min_size=1, max_size=5), kills),
    st.builds(Action, st.just("send"), st.lists(delays, min_size=1, max_size=5), kills),
    st.builds(Action, st.just("advance"), spans, kills),
    st.builds(Action, st.just("set clock"), st.integers(-LONGEST_MS, LONGEST_MS)),
    st.builds(Action, st.just("checkpoint"), st.none(), kills),
    st.builds(Action, st.just("close")),
    st.builds(Action, st.just("kill")),
)


class Scenario(KilledEngine):
    """Actions on delayed messages, and when each acknowledged message is due."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.due: dict[bytes, int] = {}  # for levels counted from the store time
        self.count = 0
        super().__init__()

    def open(self) -> DelayEngine:
        return DelayEngine(self.folder, clock=self.clock, log_file_size=40_000)

    def do(self, action: Action) -> None:
        match action.name:
            case "send":
                self.run(lambda: [self.send(delay) for delay in action.argument], action)
            case "advance":
                self.run(lambda: self.engine.advance(action.argument), action)
            case "set clock":
                self.clock.move_ms(action.argument)
            case "checkpoint":
                self.run(self.engine.store.take_checkpoint, action)
            case "close":
                self.engine.close()
                self.engine = self.open()
            case "kill":
                self.reopen()

    def send(self, delay: dict[str, int]) -> None:
        body = b"%d" % self.count
        self.count += 1
        now_ms = VirtualClock.now_ms(self.clock)  # this reading does not count
        put = self.engine.send(body, **delay)
        level = delay.get("DELAY")
        self.due[body] = put.store_timestamp + LEVEL_MS[level] if level else now_ms + delay["TIMER_DELAY_MS"]


@given(st.lists(actions, max_size=25))
@settings(max_examples=examples(60))
def test_kills_at_any_moment_neither_lose_nor_repeat_messages_nor_release_them_early(plan: list[Action]) -> None:
    """An acknowledged message arrives exactly once. One that a kill interrupted arrives once or not at all."""
    with TemporaryDirectory() as folder:
        scenario = Scenario(Path(folder))
        for action in plan:
            scenario.do(action)
        for _ in range(4):
            scenario.engine.advance(LONGEST_MS)  # enough for a clock that was set back

        arrived = scenario.engine.arrived()
        scenario.engine.close()

    counts = Counter(message.body for message in arrived)
    assert [body for body in scenario.due if counts[body] != 1] == []
    assert [body for body, count in counts.items() if count > 1] == []
    assert [message.body for message in arrived if message.at_ms < scenario.due.get(message.body, 0)] == []
