"""Delay options: every option on every verb."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.message import Message
from mqtemplate.template import RocketMQTemplate
from mqtemplate.template.delays import delay_properties
from mqtemplate.testing import Harness, RecordingTemplate, messages_in

NOW_MS = VirtualClock().now_ms()
NOW = datetime.fromtimestamp(NOW_MS / 1_000, UTC)

Send = Callable[..., object]

VERBS: dict[str, Callable[[RocketMQTemplate], Send]] = {
    "sync_send": lambda template: template.sync_send,
    "async_send": lambda template: template.async_send,
    "send_one_way": lambda template: template.send_one_way,
}
FORMS: dict[str, tuple[object, dict[str, Any], int]] = {
    "single": (b"body", {}, 1),
    "ordered": (b"body", {"hash_key": "customer-1"}, 1),
    "batch": ([b"one", b"two"], {}, 2),
    "ordered batch": ([b"one", b"two"], {"hash_key": "customer-1"}, 2),
    "finished message": (Message("orders", b"body"), {}, 1),
}
TEN_SECONDS: dict[str, dict[str, Any]] = {
    "level": {"delay_level": 3},
    "timedelta": {"delay": timedelta(seconds=10)},
    "seconds": {"delay": 10.0},
    "datetime": {"deliver_at": NOW + timedelta(seconds=10)},
    "epoch milliseconds": {"deliver_at": NOW_MS + 10_000},
    "header DELAY": {"headers": {"DELAY": 3}},
    "header TIMER_DELAY_SEC": {"headers": {"rocketmq_TIMER_DELAY_SEC": "10"}},
    "header TIMER_DELAY_MS": {"headers": {"TIMER_DELAY_MS": 10_000}},
    "header TIMER_DELIVER_MS": {"headers": {"TIMER_DELIVER_MS": NOW_MS + 10_000}},
    "header __STARTDELIVERTIME": {"headers": {"__STARTDELIVERTIME": str(NOW_MS + 10_000)}},
}


@pytest.mark.feature("X13", "A4", "A17", "A19")
@pytest.mark.parametrize("kind", TEN_SECONDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_delay_works_on_every_verb(
    verb: str,
    form: str,
    kind: str,
    mqtemplate_template: RecordingTemplate,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_harness: Harness,
) -> None:
    """All of them mean the same time: ten seconds from now, to the millisecond."""
    payload, options, count = FORMS[form]

    VERBS[verb](mqtemplate_template)("orders:paid", payload, **options, **TEN_SECONDS[kind])

    mqtemplate_harness.advance("9999ms")
    assert messages_in(mqtemplate_broker, "orders") == []
    mqtemplate_harness.advance("1ms")
    delivered = messages_in(mqtemplate_broker, "orders")
    assert [message.store_timestamp for message in delivered] == [NOW_MS + 10_000] * count
    assert {message.tags for message in delivered} == {"paid"}


@pytest.mark.feature("A17", "A19")
def test_springs_three_delay_methods_work_in_a_loop(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, mqtemplate_harness: Harness
) -> None:
    for number in range(3):
        body = f"Hello{number}"
        mqtemplate_template.syncSendDelayTimeSeconds("TimerTopic", body, 10)
        mqtemplate_template.syncSendDelayTimeMills("TimerTopic", body, 10_000)
        mqtemplate_template.syncSendDeliverTimeMills("TimerTopic", body, NOW_MS + 10_000)

    mqtemplate_harness.advance("10s")

    delivered = messages_in(mqtemplate_broker, "TimerTopic")
    assert sorted(message.body for message in delivered) == [b"Hello0"] * 3 + [b"Hello1"] * 3 + [b"Hello2"] * 3


@pytest.mark.feature("A8")
def test_level_five_is_a_minute(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, mqtemplate_harness: Harness
) -> None:
    mqtemplate_template.sync_send("TopicA:Tag", "this is a delay message", delay_level=5)

    mqtemplate_harness.advance("59999ms")
    assert messages_in(mqtemplate_broker, "TopicA") == []
    mqtemplate_harness.advance("1ms")
    assert [message.body for message in messages_in(mqtemplate_broker, "TopicA")] == [b"this is a delay message"]


# --- properties ------------------------------------------------------------------------------------


@pytest.mark.feature("G2", "G4", "A18")
@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"delay_level": 3}, {"DELAY": "3"}),
        ({"delay": timedelta(seconds=10)}, {"TIMER_DELAY_MS": "10000"}),
        ({"delay": 10}, {"TIMER_DELAY_MS": "10000"}),
        ({"deliver_at": NOW_MS + 10_000}, {"TIMER_DELIVER_MS": str(NOW_MS + 10_000)}),
        ({"deliver_at": NOW.astimezone(timezone(timedelta(hours=-7)))}, {"TIMER_DELIVER_MS": str(NOW_MS)}),
    ],
)
def test_a_relative_delay_and_a_deliver_time_have_different_properties(
    options: dict[str, Any], written: dict[str, str]
) -> None:
    """The broker counts a relative delay, so the producer's clock does not matter."""
    everything = {"delay_level": 0, "delay": None, "deliver_at": None, **options}

    assert delay_properties(**everything, now_ms=NOW_MS) == written


@pytest.mark.parametrize("nothing", [{"delay": 0}, {"delay": timedelta(0)}, {"delay_level": 0}])
def test_without_a_delay_there_is_no_property(nothing: dict[str, Any]) -> None:
    everything = {"delay_level": 0, "delay": None, "deliver_at": None, **nothing}

    assert delay_properties(**everything, now_ms=NOW_MS) == {}


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (0.1 + 0.2, "300"),  # not 301: the binary error of the sum is rounded off
        (0.0001, "1"),
        (1.0005, "1001"),
        (timedelta(microseconds=1), "1"),
        (timedelta(seconds=1, microseconds=1), "1001"),
    ],
)
def test_fractions_of_a_millisecond_are_rounded_up(delay: timedelta | float, milliseconds: str) -> None:
    """A message is never early; late by a fraction of a millisecond is allowed."""
    assert delay_properties(0, delay, None, NOW_MS) == {"TIMER_DELAY_MS": milliseconds}


class SummerTime(tzinfo):
    """A time zone with summer time that needs no time zone files."""

    def utcoffset(self, at: datetime | None) -> timedelta:
        return timedelta(hours=2 if at is not None and 4 <= at.month <= 9 else 1)

    def tzname(self, at: datetime | None) -> str:
        return "summer time"

    def dst(self, at: datetime | None) -> timedelta:
        return self.utcoffset(at) - timedelta(hours=1)


@pytest.mark.parametrize("month", [1, 7])
def test_a_deliver_time_is_the_same_in_every_time_zone(month: int) -> None:
    """The difference of two local times of one zone would be wrong by an hour in summer."""
    instant = datetime(2026, month, 15, 12, tzinfo=UTC)

    for zone in (UTC, SummerTime(), timezone(timedelta(hours=5, minutes=30))):
        written = delay_properties(0, None, instant.astimezone(zone), NOW_MS)
        assert written == {"TIMER_DELIVER_MS": str(int(instant.timestamp()) * 1_000)}


def test_a_deliver_time_between_two_milliseconds_is_rounded_up() -> None:
    between = NOW + timedelta(microseconds=1)

    assert delay_properties(0, None, between, NOW_MS) == {"TIMER_DELIVER_MS": str(NOW_MS + 1)}


# --- refusals --------------------------------------------------------------------------------------

NAIVE = datetime(2026, 1, 1, 10)  # noqa: DTZ001 - the naive datetime is the point


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"delay_level": -1}, "delay_level must be 0 (no delay) or a position in the level table (1 = 1s"),
        ({"delay_level": 2.5}, "got float 2.5; for other delays pass delay= or deliver_at="),
        ({"delay_level": "3"}, "delay_level must be 0 (no delay) or a position in the level table"),
        ({"delay_level": True}, "got bool True"),
        ({"delay_level": 3, "delay": 10}, "delay_level=3 and delay are two delays for one message"),
        ({"delay_level": 3, "deliver_at": NOW}, "delay_level=3 and deliver_at are two delays for one message"),
        ({"delay": 10, "deliver_at": NOW}, "delay and deliver_at are two delays for one message"),
        ({"delay": -1}, "delay must not be negative, got -1"),
        ({"delay": -0.0000001}, "delay must not be negative"),
        ({"delay": timedelta(seconds=-1)}, "delay must not be negative"),
        ({"delay": float("nan")}, "or a number of seconds; got nan"),
        ({"delay": float("inf")}, "or a number of seconds; got inf"),
        (
            {"delay": "soon"},
            "delay must be a duration: '3h', '1h 30m', '250ms' (units: d h m s ms) or a timedelta",
        ),
        ({"delay": True}, "or a number of seconds; got True"),
        ({"deliver_at": NAIVE}, "deliver_at=2026-01-01T10:00:00 is a naive datetime"),
        ({"deliver_at": "tomorrow"}, "got str 'tomorrow'; datetime.fromisoformat(...) parses text"),
        ({"deliver_at": NOW_MS / 1_000}, "for time.time() pass int(seconds * 1000)"),
        ({"deliver_at": NOW_MS // 1_000}, f"looks like seconds; it takes epoch milliseconds: {NOW_MS}"),
        ({"deliver_at": -1}, "must not be before 1970, got -1"),
        ({"headers": {"DELAY": "soon"}}, "header DELAY must be a whole number (a level), got 'soon'"),
        ({"headers": {"DELAY": -1}}, "delay_level must be 0 (no delay) or a position in the level table"),
        ({"headers": {"TIMER_DELAY_SEC": "1.5"}}, "header TIMER_DELAY_SEC must be a whole number (seconds), got '1.5'"),
        ({"headers": {"TIMER_DELAY_MS": -5}}, "header TIMER_DELAY_MS must not be negative, got -5"),
        (
            {"headers": {"TIMER_DELIVER_MS": "tomorrow"}},
            "header TIMER_DELIVER_MS must be a whole number (milliseconds)",
        ),
        ({"headers": {"__STARTDELIVERTIME": "1767225600"}}, "looks like seconds"),
        ({"headers": {"DELAY": 3, "TIMER_DELAY_SEC": 10}}, "DELAY and TIMER_DELAY_SEC are 2 delays for one message"),
        ({"headers": {"DELAY": 3}, "delay": 10}, "TIMER_DELAY_MS and DELAY are 2 delays for one message"),
    ],
)
def test_an_invalid_delay_is_refused(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(DelayError) as refusal:
        mqtemplate_template.sync_send("orders", b"body", **options)

    assert error in str(refusal.value)
    assert messages_in(mqtemplate_broker, "orders") == []


def test_two_equal_delay_levels_do_not_contradict_each_other(
    mqtemplate_template: RecordingTemplate,
) -> None:
    mqtemplate_template.sync_send("orders", b"body", delay_level=3, headers={"DELAY": 3})

    with pytest.raises(MessageError, match="DELAY is given twice: '3' and '4'"):
        mqtemplate_template.sync_send("orders", b"body", delay_level=3, headers={"DELAY": 4})


@pytest.mark.feature("A3")
def test_a_delay_above_the_brokers_limit_is_refused(mqtemplate_template: RecordingTemplate) -> None:
    """Forty days are accepted."""
    mqtemplate_template.sync_send("orders", b"body", delay=timedelta(days=40))

    with pytest.raises(DelayError):
        mqtemplate_template.sync_send("orders", b"body", delay=timedelta(days=41))
