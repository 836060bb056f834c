"""Clocks set forward and back: levels, timers, retries, schedules and transactions, with restarts and kills."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.context.application import MQApplication
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import RequestTimeoutError
from mqtemplate.listener.declaration.decorator import message_listener
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.results import TransactionState
from mqtemplate.scheduling import ScheduledRun, scheduled
from mqtemplate.testing.harness import Harness

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
YEARS = 10 * 365 * DAY
LEVEL_MS = {3: 10 * SECOND, 5: MINUTE, 14: 10 * MINUTE}
RETRY_MS = 20 * SECOND
LONGEST_MS = 10 * MINUTE
EVERY_MS = 5 * MINUTE
SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000, mapped_file_size_timer_log=5_216
)


def started(broker: EmbeddedBroker, *components: object) -> MQApplication:
    """Start an application on a broker."""
    settings = {"rocketmq.name-server": "embedded:memory"}
    app = MQApplication(*components, settings=settings, environment={}, starters=[], overrides={Broker: broker})
    app.start()
    return app


# --- one message at a time --------------------------------------------------------------------------


class OneBroker:
    """An embedded broker in a folder, and the times at which messages become visible in one queue."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, VirtualClock()
        self.open()

    def open(self) -> None:
        self.broker = EmbeddedBroker(self.folder, clock=self.clock)
        self.broker.start()
        self.harness = Harness(self.broker)
        [self.queue, *_] = self.broker.queues("orders")

    def reopen(self, how: str) -> None:
        if how == "clean":
            self.broker.close()
        elif how == "kill":
            self.broker.store.release()
            self.broker.engine.delayed.timers.close()
        if how != "none":
            self.open()

    def send(self, body: bytes, **properties: object) -> None:
        texts = {name: str(value) for name, value in properties.items()}
        self.broker.sends.send(Message("orders", body, texts), self.queue)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.broker.reader.pull(self.queue, 0, 32).messages]


@pytest.fixture
def one(tmp_path: Path) -> OneBroker:
    return OneBroker(tmp_path)


RESTARTS = ["none", "clean", "kill"]
DELAYS = [{"DELAY": 3}, {"TIMER_DELAY_MS": 10_000}, {"TIMER_DELAY_SEC": 10}]


@pytest.mark.feature("F15")
@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("ahead_ms", [HOUR, DAY, YEARS])
@pytest.mark.parametrize("delay", DELAYS, ids=lambda delay: next(iter(delay)))
def test_a_message_sent_while_the_clock_was_ahead_delays_no_later_one_and_comes_itself(
    one: OneBroker, delay: dict[str, int], ahead_ms: int, restart: str
) -> None:
    """Both are on time: the delay of the first counts from the moment at which the clock was right again."""
    one.clock.move_ms(ahead_ms)
    one.send(b"ahead", **delay)
    one.clock.move_ms(-ahead_ms)
    one.reopen(restart)
    one.send(b"later", **delay)

    one.harness.advance("9s 999ms")
    assert one.bodies == []
    one.harness.advance("1ms")
    assert sorted(one.bodies) == [b"ahead", b"later"]
    one.harness.advance("2h")
    assert len(one.bodies) == 2
    one.broker.close()


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_deliver_time_that_the_producer_gave_is_kept(one: OneBroker, restart: str) -> None:
    """It does not depend on the clock at the send."""
    deliver_ms = one.clock.now_ms() + 2 * DAY
    one.clock.step_ms(DAY)
    one.send(b"absolute", TIMER_DELIVER_MS=deliver_ms)
    one.clock.step_ms(-DAY)
    one.reopen(restart)

    one.harness.advance("47h 59m 59s 999ms")
    assert one.bodies == []
    one.harness.advance("1ms")
    assert one.bodies == [b"absolute"]
    one.broker.close()


def test_a_clock_that_was_behind_for_a_moment_releases_nothing_early(one: OneBroker) -> None:
    """The due time of a message that was pending before is right again as soon as the clock is."""
    one.send(b"two hours", DELAY=18)
    one.clock.step_ms(-HOUR)
    one.harness.advance("1s")
    one.clock.step_ms(HOUR)

    one.harness.advance("1h 59m 58s 999ms")
    assert one.bodies == []
    one.harness.advance("1ms")
    assert one.bodies == [b"two hours"]
    one.broker.close()


def test_a_corrected_message_can_be_cancelled_and_listed(one: OneBroker) -> None:
    one.clock.step_ms(YEARS)
    handle = one.broker.sends.send(Message("orders", b"ahead", {"DELAY": "3", "KEYS": "k"}), one.queue).handle
    one.clock.step_ms(-YEARS)
    one.harness.advance("1s")
    assert one.broker.delayed.count_pending(PendingQuery(), HOUR).total == 1

    assert one.broker.delayed.cancel(handle).count == 1
    one.harness.advance("1h")

    assert one.bodies == []
    one.broker.close()


def test_a_prepared_message_of_the_future_is_checked_in_time(one: OneBroker) -> None:
    """Its check was due ten years from now, also after a restart."""
    checked: list[MessageExt] = []

    def check(message: MessageExt) -> TransactionState:
        checked.append(message)
        return TransactionState.COMMIT

    one.clock.move_ms(YEARS)
    one.broker.sends.send_half(Message("orders", b"half"), "billing", one.queue)
    one.clock.move_ms(-YEARS)
    one.reopen("clean")
    one.broker.transactions.check_transactions("billing", check)

    one.harness.advance(timedelta(milliseconds=one.broker.settings.transaction_timeout_ms))

    assert [message.body for message in checked] == [b"half"]
    assert one.bodies == [b"half"]
    one.broker.close()


def test_requests_time_out_after_their_time_whatever_the_clock_does(one: OneBroker) -> None:
    one.clock.move_ms(YEARS)
    future = one.broker.engine.requests.pending.add(Message("orders", b"?", {Property.CORRELATION_ID: "1"}), 3_000)
    one.clock.move_ms(-YEARS)

    one.harness.advance("2s 999ms")
    assert not future.done()
    one.harness.advance("1ms")
    assert future.done()
    assert isinstance(future.exception(), RequestTimeoutError)
    one.broker.close()


def test_an_orderly_queue_that_was_suspended_goes_on_after_its_time(one: OneBroker) -> None:
    """It was suspended while the clock was ahead by ten years."""
    times: list[int] = []

    @message_listener("orders", "billing", consume_mode="ORDERLY", suspend_current_queue_time_millis=5_000)
    def bill(message: MessageExt) -> None:
        times.append(one.clock.steady_ms())
        if len(times) == 1:
            raise RuntimeError("fails the first time")

    app = started(one.broker, bill)
    harness = Harness(one.broker, *app.containers, raise_handler_errors=False)
    one.clock.step_ms(YEARS)
    one.send(b"order")
    harness.advance("1ms")
    one.clock.step_ms(-YEARS)

    harness.advance("10s")

    assert [at_ms - times[0] for at_ms in times] == [0, 5_000]
    app.stop()
    one.broker.close()


# --- random sequences -------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A message or run: its name, and the time that has passed until then (`Clock.steady_ms`)."""

    name: str
    at_ms: int


@dataclass
class Sent:
    """A message: the time that had passed at its send, and its delay."""

    at_ms: int
    delay_ms: int


@dataclass
class Scenario:
    """An application with a listener and a schedule on an embedded broker, and what a model knows about it."""

    folder: Path
    clock: VirtualClock = field(default_factory=VirtualClock)
    lead_ms: int = 0
    disturbed: list[int] = field(default_factory=list)  # when the clock was set, or the process ended
    sent: dict[str, Sent] = field(default_factory=dict)
    arrived: list[Seen] = field(default_factory=list)
    handled: list[Seen] = field(default_factory=list)
    runs: list[Seen] = field(default_factory=list)
    kills: int = 0
    failing: int = 0
    read_to: int = 0
    name = "probe"

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.broker = EmbeddedBroker(self.folder, SMALL, self.clock)
        self.broker.start()
        [self.queue, *_] = self.broker.queues("orders")
        handled, runs, clock = self.handled, self.runs, self.clock

        @message_listener("retried", "billing", retry=["20s"])
        def bill(message: MessageExt) -> None:
            handled.append(Seen(message.body.decode(), clock.steady_ms()))
            if message.reconsume_times == 0:
                raise RuntimeError("fails the first time")

        @scheduled(every="5m", name="report")
        def report(run: ScheduledRun) -> None:
            runs.append(Seen(run.scheduled_at.isoformat(), clock.steady_ms()))

        self.app = started(self.broker, bill, report)
        self.harness = Harness(self.broker, *self.app.containers, self, raise_handler_errors=False)

    # A service of the harness: it notes at once what arrives.

    def on_wake(self, wake: object) -> None: ...

    def step(self) -> None:
        for message in self.broker.reader.pull(self.queue, self.read_to, 32).messages:
            self.arrived.append(Seen(message.body.decode(), self.clock.steady_ms()))
            self.read_to += 1

    # --- actions -------------------------------------------------------------------------------

    def set_lead(self, lead_ms: int) -> None:
        self.clock.step_ms(lead_ms - self.lead_ms)
        self.lead_ms = lead_ms
        self.disturbed.append(self.clock.steady_ms())

    def advance(self, milliseconds: int) -> None:
        self.harness.advance(timedelta(milliseconds=milliseconds))

    def send(self, delay: dict[str, int]) -> None:
        name = str(len(self.sent))
        level = delay.get("DELAY")
        delay_ms = LEVEL_MS[level] if level else delay["TIMER_DELAY_MS"]
        self.sent[name] = Sent(self.clock.steady_ms(), delay_ms)
        properties = {key: str(value) for key, value in delay.items()}
        self.broker.sends.send(Message("orders", name.encode(), properties), self.queue)

    def fail(self, _: None) -> None:
        queue: MessageQueue = self.broker.queues("retried")[0]
        self.failing += 1
        self.broker.sends.send(Message("retried", b"%d" % self.failing), queue)

    def restart(self, kind: str) -> None:
        if kind == "kill":
            self.kills += 1
            self.broker.store.release()
            self.broker.engine.delayed.timers.close()
            for container in self.app.containers:
                container.member.service.abandon()
        else:
            self.app.stop()
            self.broker.close()
        self.clock.services.clear()
        self.disturbed.append(self.clock.steady_ms())
        self.open()

    # --- the model -----------------------------------------------------------------------------

    def check(self) -> None:
        counts = Counter(seen.name for seen in self.arrived)
        assert {name: counts[name] for name in self.sent if counts[name] != 1} == {}
        for name, at_ms in self.arrived:
            sent = self.sent[name]
            if not any(sent.at_ms <= at <= at_ms for at in self.disturbed):
                assert at_ms == sent.at_ms + sent.delay_ms, name
        tries: dict[str, list[int]] = {}
        for name, at_ms in self.handled:
            tries.setdefault(name, []).append(at_ms)
        for name, times in tries.items():
            assert len(times) >= 2, name
            if not any(times[0] <= at <= times[1] for at in self.disturbed):
                assert times[1] == times[0] + RETRY_MS, name
        if not self.kills:
            assert [name for name, count in Counter(seen.name for seen in self.runs).items() if count > 1] == []


DELAY_CHOICES = [*({"DELAY": level} for level in LEVEL_MS), {"TIMER_DELAY_MS": 15_000}, {"TIMER_DELAY_MS": 400_000}]
ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(DELAY_CHOICES)),
    st.tuples(st.just("send"), st.sampled_from(DELAY_CHOICES)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("set_lead"), st.sampled_from([0, HOUR, DAY, YEARS, -HOUR, -DAY])),
    st.tuples(st.just("set_lead"), st.sampled_from([0, HOUR, DAY, YEARS, -HOUR, -DAY])),
    st.tuples(st.just("advance"), st.sampled_from([1, 5_000, 20_000, MINUTE, 12 * MINUTE])),
    st.tuples(st.just("restart"), st.sampled_from(["clean", "kill"])),
)


@given(st.lists(ACTIONS, min_size=2, max_size=8))
@settings(max_examples=20, derandomize=True)
def test_whatever_the_clock_does_all_is_delivered_once_on_time_and_never_early(
    plan: list[tuple[str, object]],
) -> None:
    """Once the clock is right, what waits comes within its own delay, and schedules run as if nothing had happened.

    Where the clock is not set between a send and the delivery, the delay is exact, whatever the clock showed.
    """
    with TemporaryDirectory() as folder:
        scenario = Scenario(Path(folder))
        for action, argument in plan:
            getattr(scenario, action)(argument)
        scenario.set_lead(0)
        right_from_ms = scenario.clock.now_ms()
        scenario.advance(LONGEST_MS)
        scenario.advance(2 * EVERY_MS)
        end_ms = scenario.clock.now_ms()
        labels = {run.name for run in scenario.runs}

        scenario.check()
        due = range(right_from_ms // EVERY_MS * EVERY_MS + EVERY_MS, end_ms, EVERY_MS)
        assert [at_ms for at_ms in due if _label(at_ms) not in labels] == []
        scenario.app.stop()
        scenario.broker.close()


def _label(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat()
