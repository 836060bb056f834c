"""Durations as people write them, and named delay levels."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers
from pydantic import BaseModel

from mqtemplate import DelayLevel, MQApplication, Section, Value, load_settings, message_listener, service
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.durations import duration_ms, format_ms, is_duration_text
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.listener.declaration.attributes import duration
from mqtemplate.testing import Harness, Inbox
from mqtemplate.testing.recording import RecordingTemplate


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("3h", 10_800_000),
        ("250ms", 250),
        ("1h 30m", 5_400_000),
        ("1h30m", 5_400_000),
        (" 1.5 S ", 1_500),
        ("2d", 172_800_000),
        ("0s", 0),
        ("0.1ms", 1),
        ("10", 10),
    ],
)
def test_a_text_is_a_duration(text: str, milliseconds: int) -> None:
    assert duration_ms(text) == milliseconds


def test_a_number_has_the_documented_unit_and_is_never_early() -> None:
    assert duration_ms(15, 60_000) == duration_ms("15", 60_000) == duration_ms("15m", 60_000) == 900_000
    assert duration_ms(0.1 + 0.2, 1_000) == 300
    assert duration_ms(0.0001, 1_000) == 1
    assert duration_ms(timedelta(microseconds=1)) == 1


@pytest.mark.parametrize("value", ["soon", "", "h", "3 apples", "1h30", "-3s", "3mins", True, None, float("nan"), [1]])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as raised:
        duration_ms(value, 1_000)
    assert str(raised.value) == (
        "a duration: '3h', '1h 30m', '250ms' (units: d h m s ms) or a timedelta; got " + repr(value)
    )


@pytest.mark.parametrize("value", [-1, timedelta(microseconds=-1)])
def test_a_negative_duration_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="0 or longer, got"):
        duration_ms(value)


@given(integers(min_value=0, max_value=10**15))
def test_a_shown_duration_can_be_read_again(milliseconds: int) -> None:
    assert duration_ms(format_ms(milliseconds)) == milliseconds


def test_durations_are_shown_as_people_write_them() -> None:
    assert [format_ms(each) for each in (0, 250, 90_000, 5_400_000, 3_456_000_001, -5)] == [
        "0s",
        "250ms",
        "1m 30s",
        "1h 30m",
        "40d 1ms",
        "-5ms",
    ]
    assert is_duration_text("90s")
    assert not is_duration_text("90")


# --- options and attributes ----------------------------------------------------------------------


@pytest.mark.parametrize("delay", ["3h", "2h 60m", "10800s", timedelta(hours=3)])
def test_a_delay_has_any_of_the_forms(
    mqtemplate_template: RecordingTemplate, mqtemplate_harness: Harness, mqtemplate_app: Any, delay: Any
) -> None:
    inbox = Inbox()
    mqtemplate_app(inbox.listener("orders", "audit"))

    mqtemplate_template.sync_send("orders", "x", delay=delay, timeout="3s")

    mqtemplate_harness.advance("2h 59m 59s 999ms")
    assert inbox.bodies == []
    mqtemplate_harness.advance("1ms")
    assert inbox.bodies == [b"x"]


def test_a_timeout_has_any_of_the_forms(mqtemplate_template: RecordingTemplate) -> None:
    for timeout in ("3s", timedelta(seconds=3), 3_000):
        mqtemplate_template.sync_send("orders", "x", timeout=timeout)
    assert mqtemplate_template.receive(str, timeout="10ms") == []


def test_attributes_of_a_listener_take_durations() -> None:
    minutes = duration(15, 1, 60, unit_ms=60_000)

    assert [minutes.read(each) for each in ("90s", "2m", 2, "2", timedelta(minutes=3))] == [1.5, 2, 2, 2, 3]
    assert minutes.allowed == "a duration from 1m to 1h ('90s', a timedelta, or minutes)"


def test_an_attribute_out_of_range_names_the_range(mqtemplate_app: Any) -> None:
    @message_listener("orders", "billing", suspend_current_queue_time_millis="1h")
    def bill(order: str) -> None: ...

    with pytest.raises(ListenerError, match="suspend_current_queue_time_millis must be a duration from 10ms to 30s"):
        mqtemplate_app(bill)


# --- settings ------------------------------------------------------------------------------------


def duration_keys() -> list[str]:
    """Return the keys of the reference whose names end with a unit, or mean a span of time."""
    keys, section = [], ""
    reference = Path(__file__).parents[1].joinpath("docs", "configuration.md").read_text(encoding="utf-8")
    for line in reference[reference.index("## All keys") :].splitlines():
        if found := re.match(r"### `(.+)`", line):
            section = found[1]
        elif (found := re.match(r"\| `([\w-]+)` \|", line)) and re.search(r"-ms$|millis|timeout|-sec$", found[1]):
            keys.append(f"{section}.{found[1]}")
    return keys


@pytest.mark.parametrize("key", duration_keys())
def test_each_key_of_a_span_of_time_takes_a_text_with_a_unit(key: str) -> None:
    value = "500ms" if key.endswith("timer-precision-ms") else "20m"

    # The keys of the 5.x starter for a proxy need one.
    proxy = {"rocketmq.endpoints": "127.0.0.1:8081"} if key == "rocketmq.producer.request-timeout" else {}
    load_settings(environment={}, arguments={key: value, **proxy})


def test_every_setting_takes_durations() -> None:
    settings = load_settings(
        environment={"MQTEMPLATE_BROKER_TRANSACTION_TIMEOUT_MS": "1m 30s"},
        arguments={
            "rocketmq.producer.send-message-timeout": "3s",
            "rocketmq.consumer.await-termination-millis-when-shutdown": "5s",
            "mqtemplate.broker.timer-max-delay-sec": timedelta(days=3),
            "mqtemplate.broker.file-reserved-time": "3d",
            "mqtemplate.broker.checkpoint-interval-ms": "2s",
            "mqtemplate.cluster.heartbeat-broker-interval-ms": "10s",
        },
    )

    broker = settings.mqtemplate.broker
    assert settings.rocketmq.producer.send_message_timeout == 3_000
    assert settings.rocketmq.consumer.await_termination_millis_when_shutdown == 5_000
    assert (broker.timer_max_delay_sec, broker.file_reserved_time) == (259_200, 72)
    assert (broker.checkpoint_interval_ms, broker.transaction_timeout_ms) == (2_000, 90_000)
    assert settings.mqtemplate.cluster.heartbeat_broker_interval_ms == 10_000


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rocketmq.producer.send-message-timeout", "soon", "must be a duration: '3h', '1h 30m', '250ms'"),
        ("mqtemplate.broker.file-reserved-time", "90m", "must be a whole number of units of 1h"),
    ],
)
def test_a_setting_that_is_no_duration_is_refused(key: str, value: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}: {error}"):
        load_settings(environment={}, arguments={key: value})


class Shop(BaseModel):
    grace: timedelta
    steps: list[timedelta] = []
    by_kind: dict[str, timedelta] = {}
    iso: timedelta | None = None
    seconds: timedelta | None = None


def test_timedelta_fields_of_own_sections_take_durations(tmp_path: Path) -> None:
    """pydantic's own forms go on to work."""
    (tmp_path / "application.yml").write_text(
        "shop: {grace: 1h 30m, steps: [5s, 1m], by-kind: {gold: 3d}, iso: PT3H, seconds: 90}\n"
    )

    shop = load_settings(tmp_path, environment={}).bind("shop", Shop)

    assert shop.grace == timedelta(hours=1, minutes=30)
    assert shop.steps == [timedelta(seconds=5), timedelta(minutes=1)]
    assert shop.by_kind == {"gold": timedelta(days=3)}
    assert (shop.iso, shop.seconds) == (timedelta(hours=3), timedelta(seconds=90))


def test_a_timedelta_field_that_is_no_duration_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("shop:\n  grace: soon\n")

    with pytest.raises(ConfigurationError, match=r"application.yml:2: shop.grace: must be a duration: '3h', '1h 30m'"):
        load_settings(tmp_path, environment={}).bind("shop", Shop)


@service
class Patience:
    def __init__(
        self, limit: Annotated[timedelta, Value("${shop.limit:1h 30m}")], shop: Annotated[Shop, Section("shop")]
    ) -> None:
        self.limit, self.shop = limit, shop


def test_an_injected_timedelta_takes_durations(mqtemplate_app: Any) -> None:
    app: MQApplication = mqtemplate_app(Patience, environment={"SHOP_GRACE": "2d"})

    assert app.get(Patience).limit == timedelta(hours=1, minutes=30)
    assert app.get(Patience).shop.grace == timedelta(days=2)


# --- delay levels --------------------------------------------------------------------------------


def test_the_named_levels_are_those_of_rocketmqs_table() -> None:
    table = DelayLevels.parse()

    assert len(DelayLevel) == table.max_level
    assert all(table.delay_ms(level) == duration_ms(level.delay) for level in DelayLevel)


def test_a_named_level_delays_a_message_and_shows_its_delay(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.sync_send("orders", "x", delay_level=DelayLevel.M1)

    [pending] = mqtemplate_template.pending().messages
    assert pending.delay_level == DelayLevel.M1 == 5
    assert str(DelayLevel.M1) == f"{DelayLevel.M1}" == "5 (1m)"
    assert (f"{DelayLevel.M1:d}", f"{DelayLevel.M1:>7}") == ("5", " 5 (1m)")
    assert DelayLevels.parse("10s 2h").name(2) == "2 (2h)"
