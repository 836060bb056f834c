"""Harness: virtual time, and the order of steps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ConfigurationError
from mqtemplate.listener import ListenerRegistry, message_listener
from mqtemplate.message import MessageExt
from mqtemplate.testing import Harness, Inbox, NotIdleError, RecordingTemplate
from mqtemplate.testing.harness import span_ms


class Alarm:
    """Service with due times. It records its name and each due time in the log."""

    def __init__(self, name: str, clock: VirtualClock, log: list[tuple[str, int]], *after_ms: int) -> None:
        self.name = name
        self._clock = clock
        self._log = log
        self._due = [clock.now_ms() + each for each in after_ms]
        self.wake: Callable[[], None] = lambda: None

    def on_wake(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def step(self) -> int | None:
        now_ms = self._clock.now_ms()
        while self._due and self._due[0] <= now_ms:
            self._log.append((self.name, self._due.pop(0)))
        return self._due[0] if self._due else None


class Alarms:
    """Alarms over one broker and clock, and the log that they share."""

    def __init__(self, broker: EmbeddedBroker, clock: VirtualClock) -> None:
        self.broker, self.clock = broker, clock
        self.log: list[tuple[str, int]] = []

    def alarm(self, name: str, *after_ms: int, kind: type[Alarm] = Alarm) -> Alarm:
        return kind(name, self.clock, self.log, *after_ms)


@pytest.fixture
def alarms(mqtemplate_broker: EmbeddedBroker, mqtemplate_clock: VirtualClock) -> Alarms:
    return Alarms(mqtemplate_broker, mqtemplate_clock)


def listeners_of(broker: EmbeddedBroker, *targets: object) -> ListenerRegistry:
    registry = ListenerRegistry(broker, JsonMessageConverter())
    for target in targets:
        registry.register(target)
    registry.start()
    return registry


@pytest.mark.feature("X4", "F22")
def test_hours_pass_at_once_and_all_due_messages_are_handled(
    mqtemplate_broker: EmbeddedBroker, mqtemplate_template: RecordingTemplate
) -> None:
    """Three hours are longer than the longest delay level."""
    inbox = Inbox()
    registry = listeners_of(mqtemplate_broker, inbox.listener("orders", "billing"))
    harness = Harness(mqtemplate_broker, *registry)
    mqtemplate_template.sync_send("orders:paid", "in three hours", delay=timedelta(hours=3))

    harness.advance("2h 59m 59s")
    assert inbox.received == []
    harness.advance("1s")

    assert inbox.bodies == [b"in three hours"]
    registry.stop()


@pytest.mark.feature("B15", "B16")
def test_a_listener_receives_a_message_of_level_3_after_ten_seconds(
    mqtemplate_broker: EmbeddedBroker, mqtemplate_template: RecordingTemplate
) -> None:
    received: list[tuple[str, int]] = []

    @message_listener(
        topic="schedule-message-topic", consumer_group="schedule-consumer-group", selector_expression="sync-tags"
    )
    class ScheduleListener:
        def on_message(self, message: str) -> None:
            received.append((message, mqtemplate_broker.clock.now_ms()))

    registry = listeners_of(mqtemplate_broker, ScheduleListener())
    sent_ms = mqtemplate_broker.clock.now_ms()
    mqtemplate_template.syncSend("schedule-message-topic:sync-tags", "hello4466", 100, 3)

    Harness(mqtemplate_broker, *registry).advance("1m")

    assert received == [("hello4466", sent_ms + 10_000)]
    registry.stop()


def test_a_message_that_a_handler_sends_is_delivered_within_the_same_span(
    mqtemplate_broker: EmbeddedBroker, mqtemplate_template: RecordingTemplate
) -> None:
    """The clock stops at each due time, so a delay starts when its message is sent."""
    inbox = Inbox()

    @message_listener(topic="first", consumer_group="relay")
    def relay(message: MessageExt) -> None:
        mqtemplate_template.sync_send("second", message.body, delay=timedelta(minutes=1))

    registry = listeners_of(mqtemplate_broker, relay, inbox.listener("second", "audit"))
    harness = Harness(mqtemplate_broker, *registry)
    start_ms = harness.clock.now_ms()
    mqtemplate_template.sync_send("first", b"body", delay=timedelta(hours=1))

    harness.advance("1h 1m")

    assert [message.store_timestamp - start_ms for message in inbox.received] == [3_660_000]
    registry.stop()


def test_services_are_stepped_in_the_order_given_and_at_their_times(alarms: Alarms) -> None:
    now = alarms.clock.now_ms()
    early, late = alarms.alarm("early", 1_000, 5_000), alarms.alarm("late", 2_000, 5_000)

    Harness(alarms.broker, late, early).advance("5s")

    assert alarms.log == [("early", now + 1_000), ("late", now + 2_000), ("late", now + 5_000), ("early", now + 5_000)]
    assert alarms.clock.now_ms() == now + 5_000


def test_no_time_passes_after_the_span(alarms: Alarms) -> None:
    harness = Harness(alarms.broker, alarms.alarm("alarm", 5_000))

    harness.advance("4999ms")

    assert alarms.log == []
    assert harness.run_until_idle() == alarms.clock.now_ms() + 1


def test_a_service_that_another_one_wakes_is_stepped_again(alarms: Alarms) -> None:
    """The sleeper comes before its waker, so in the first round it has no work yet."""
    sleeper = alarms.alarm("sleeper")

    class Waker(Alarm):
        def step(self) -> int | None:
            if not sleeper._due and not alarms.log:
                sleeper._due.append(alarms.clock.now_ms())
                sleeper.wake()
            return None

    Harness(alarms.broker, sleeper, alarms.alarm("waker", kind=Waker)).run_until_idle()

    assert alarms.log == [("sleeper", alarms.clock.now_ms())]


def test_a_service_may_be_added_later(mqtemplate_harness: Harness, alarms: Alarms) -> None:
    mqtemplate_harness.advance("1s")
    mqtemplate_harness.add(alarms.alarm("alarm", 1_000))

    mqtemplate_harness.advance("1s")

    assert [name for name, _ in alarms.log] == ["alarm"]


def test_the_error_for_endless_work_names_the_busy_service(alarms: Alarms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.testing.harness._MAX_ROUNDS", 50)

    class Restless(Alarm):
        def step(self) -> int | None:
            return alarms.clock.now_ms()

    harness = Harness(alarms.broker, alarms.alarm("restless", kind=Restless))

    with pytest.raises(NotIdleError, match="after 50 rounds at one instant there is still work for restless; does"):
        harness.advance("1s")


def test_an_error_in_a_service_reaches_the_test(alarms: Alarms) -> None:
    class Broken(Alarm):
        def step(self) -> int | None:
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        Harness(alarms.broker, alarms.alarm("broken", kind=Broken)).advance("1s")


def test_a_broker_on_a_real_clock_is_refused() -> None:
    with (
        EmbeddedBroker(None, clock=SystemClock()) as broker,
        pytest.raises(
            ConfigurationError, match=r"this broker runs on a SystemClock; create it with clock=VirtualClock\(\)"
        ),
    ):
        Harness(broker)


@pytest.mark.parametrize(
    ("span", "milliseconds"),
    [
        ("3h", 10_800_000),
        ("1h 30m", 5_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("250ms", 250),
        ("1.5s", 1_500),
        ("0s", 0),
        (timedelta(minutes=1), 60_000),
        (42, 42),
    ],
)
def test_a_span_is_text_timedelta_or_milliseconds(span: str | timedelta | int, milliseconds: int) -> None:
    assert span_ms(span) == milliseconds


@pytest.mark.parametrize("span", ["", "soon", "3", "3 weeks", "-3h", -1, timedelta(seconds=-1)])
def test_a_malformed_span_is_refused(span: str | timedelta | int) -> None:
    with pytest.raises(ValueError, match="a span of time must be"):
        span_ms(span)


def test_a_clock_refuses_a_start_that_is_not_a_number() -> None:
    with pytest.raises(TypeError) as refused:
        VirtualClock(datetime(2026, 1, 1, tzinfo=UTC))  # type: ignore[arg-type]

    assert str(refused.value) == (
        "start_ms must be whole epoch milliseconds, got datetime datetime.datetime(2026, 1, 1, 0, 0, "
        "tzinfo=datetime.timezone.utc); for a datetime pass int(when.timestamp() * 1000)"
    )
