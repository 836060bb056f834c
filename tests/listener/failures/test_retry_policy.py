"""Retry policy of a listener: which messages are retried, when, and which ones are dead letters at once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, field_validator
from structlog.testing import capture_logs

from mqtemplate import Backoff, DeadLetter, RetryLater, VirtualClock
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import SendError
from mqtemplate.listener import BatchFailure, ConsumeMode, ConsumeStatus, message_listener
from mqtemplate.message import MessageExt
from tests.listener.conftest import App as ListenerApp

if TYPE_CHECKING:
    from tests.listener.conftest import App

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
MODES = pytest.mark.parametrize("mode", list(ConsumeMode), ids=lambda mode: mode.value)


class Order(BaseModel):
    """Order whose amount must be positive."""

    amount: int

    @field_validator("amount")
    @classmethod
    def _positive(cls, amount: int) -> int:
        if amount <= 0:
            raise ValueError("must be positive")
        return amount


class Tries:
    """Handler that fails, and the times of its calls in ms since it was created."""

    def __init__(self, app: App, error: BaseException, fails: int = 1_000) -> None:
        self._clock = app.broker.clock
        self._start_ms = self._clock.now_ms()
        self._error = error
        self._fails = fails
        self.at: list[int] = []

    def __call__(self) -> None:
        self.at.append(self._clock.now_ms() - self._start_ms)
        if len(self.at) <= self._fails:
            raise self._error


def listen(app: App, tries: Tries, **attributes: Any) -> None:
    """Start a listener of ``orders`` that calls *tries*, and send one message."""

    @message_listener(topic="orders", consumer_group="billing", id="bill", **attributes)
    def bill(message: str) -> None:
        tries()

    app.listen(bill)
    app.send("orders", "bad")


def failed_events(logs: list[Any]) -> list[Any]:
    return [event for event in logs if event["event"] == "listener.failed"]


# --- bodies that no retry can help -------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("body", ["no json", '{"amount": "many"}', '{"amount": -1}'])
def test_an_invalid_body_is_a_dead_letter_at_once_and_blocks_no_queue(app: App, mode: ConsumeMode, body: str) -> None:
    received: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode, id="bill")
    def bill(order: Order) -> None:
        received.append(order.amount)

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", body, '{"amount": 7}')
        app.run_until_idle()

    assert received == [7]
    assert app.bodies("%DLQ%billing") == [body]
    assert app.committed("billing") == 2
    [event] = failed_events(logs)
    assert event["error"].startswith("ConversionError: the body is no Order: ")
    assert event["next_step"] == "dead_letter"
    assert "exc_info" not in event


@MODES
def test_an_invalid_body_in_a_batch_is_a_dead_letter_alone(app: App, mode: ConsumeMode) -> None:
    received: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode)
    def bill(orders: list[Order]) -> None:
        received.extend(order.amount for order in orders)

    app.listen(bill)
    app.send("orders", '{"amount": 1}', "no json", '{"amount": 2}')
    app.run_until_idle()

    assert received == [1, 2]
    assert app.bodies("%DLQ%billing") == ["no json"]


def test_a_value_error_of_the_handler_itself_is_retried(app: App) -> None:
    """Only an error of the conversion says that the body is invalid."""
    tries = Tries(app, ValueError("no such customer"), fails=1)
    listen(app, tries)

    app.advance(10 * SECOND)

    assert tries.at == [0, 10 * SECOND]


# --- schedules ---------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(
    "retry",
    [["5s", "1m", "1h 30m"], "5s, 1m, 90m", (5, timedelta(minutes=1), "1.5h"), "${billing.retry:5s,1m,90m}"],
    ids=str,
)
def test_the_delays_of_the_retries_are_those_of_the_listener(app: App, mode: ConsumeMode, retry: Any) -> None:
    """To the millisecond, also where the broker has no such level. Then the message is a dead letter."""
    tries = Tries(app, RuntimeError("no"))
    listen(app, tries, retry=retry, consume_mode=mode)

    app.advance(24 * HOUR)

    assert tries.at == [0, 5 * SECOND, 65 * SECOND, 65 * SECOND + 90 * MINUTE]
    assert app.bodies("%DLQ%billing") == ["bad"]


def test_with_more_retries_than_delays_the_last_delay_repeats(app: App) -> None:
    tries = Tries(app, RuntimeError("no"))
    listen(app, tries, retry=["1s", "250ms"], max_reconsume_times=4)

    app.advance(HOUR)

    assert tries.at == [0, 1_000, 1_250, 1_500, 1_750]
    assert app.bodies("%DLQ%billing") == ["bad"]


@MODES
def test_a_backoff_multiplies_the_delay_up_to_its_maximum(app: App, mode: ConsumeMode) -> None:
    tries = Tries(app, RuntimeError("no"))
    listen(app, tries, retry=Backoff("1s", factor=3, maximum="10s", jitter=0, attempts=5), consume_mode=mode)

    app.advance(HOUR)

    assert tries.at == [0, 1_000, 4_000, 13_000, 23_000]
    assert app.bodies("%DLQ%billing") == ["bad"]


def test_jitter_spreads_the_delays_and_exceeds_no_maximum(app: App) -> None:
    tries = Tries(app, RuntimeError("no"))
    listen(app, tries, retry=Backoff("10s", factor=1, maximum="10500ms", jitter=0.1, attempts=50))

    app.advance(HOUR)

    delays = [later - at for at, later in zip(tries.at, tries.at[1:], strict=False)]
    assert len(delays) == 49
    assert all(9_000 <= delay <= 10_500 for delay in delays)
    assert len(set(delays)) > 10


@pytest.fixture
def other_levels() -> Iterator[ListenerApp]:
    """Broker with a level table for other delays."""
    with EmbeddedBroker(None, EmbeddedSettings(message_delay_level="7s 9h"), VirtualClock()) as broker:
        app = ListenerApp(broker)
        yield app
        app.registry.stop()


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({"retry": ["5s", "1m"]}, [0, 5 * SECOND, 65 * SECOND]), ({}, [0, 10 * SECOND, 40 * SECOND, 100 * SECOND])],
    ids=["schedule", "default"],
)
def test_the_level_table_does_not_change_the_retries(
    other_levels: ListenerApp, attributes: Any, expected: list[int]
) -> None:
    tries = Tries(other_levels, RuntimeError("no"))
    listen(other_levels, tries, **attributes)

    other_levels.advance(2 * MINUTE)

    assert tries.at == expected


def test_a_broker_without_timers_uses_the_nearest_longer_levels_and_says_so_once() -> None:
    settings = EmbeddedSettings(timer_wheel_enable=False)
    with EmbeddedBroker(None, settings, VirtualClock()) as broker, capture_logs() as logs:
        app = ListenerApp(broker)
        tries = Tries(app, RuntimeError("no"))
        listen(app, tries, retry=["3s", "1m", "50m"])
        app.advance(3 * HOUR)
        app.registry.stop()

    assert tries.at == [0, 5 * SECOND, 65 * SECOND, 65 * SECOND + HOUR]
    [event] = [event for event in logs if event["event"] == "listener.retries_by_level"]
    assert (event["log_level"], event["retry"], event["used"]) == ("info", "3s, 1m, 50m", "5s, 1m, 1h")
    assert "no exact retry delays" in event["reason"]


def test_a_broker_that_refuses_an_exact_delay_gets_the_nearest_longer_level(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RocketMQ 5 cluster may have its timers switched off, or limited to three days."""
    tries = Tries(app, RuntimeError("no"), fails=1)

    @message_listener(topic="orders", consumer_group="billing", retry=["20s"])
    def bill(message: str) -> None:
        tries()

    container = app.listen(bill)
    send_back = container.member.consumer.send_back

    def without_timers(message: MessageExt, delay_level: int = 0, **options: Any) -> None:
        if "delay_ms" in options:
            raise SendError("timer message is not supported, the timer is disabled")
        send_back(message, delay_level, **options)

    monkeypatch.setattr(container.member.consumer, "send_back", without_timers)
    with capture_logs() as logs:
        app.send("orders", "bad")
        app.advance(MINUTE)

    assert tries.at == [0, 30 * SECOND]
    [event] = [event for event in logs if event["event"] == "listener.retry_delay_refused"]
    assert (event["delay_ms"], event["delay_level"]) == (20 * SECOND, 4)
    assert "the timer is disabled" in event["reason"]


# --- exceptions that are retried, and that are not ---------------------------------------------------


@MODES
@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"not_retry_for": (ValueError, KeyError)}, UnicodeError("no")),
        ({"not_retry_for": ValueError}, ValueError("no")),
        ({"not_retry_for": "ValueError, json.JSONDecodeError"}, ValueError("no")),
        ({"retry_for": (OSError,)}, ValueError("no")),
        ({"retry_for": (OSError,), "not_retry_for": (FileNotFoundError,)}, FileNotFoundError("no")),
    ],
)
def test_an_exception_that_no_retry_can_help_is_a_dead_letter_at_once(
    app: App, mode: ConsumeMode, attributes: Any, error: Exception
) -> None:
    tries = Tries(app, error)
    listen(app, tries, consume_mode=mode, **attributes)

    app.advance(24 * HOUR)

    assert tries.at == [0]
    assert app.bodies("%DLQ%billing") == ["bad"]


@MODES
def test_other_exceptions_are_retried(app: App, mode: ConsumeMode) -> None:
    attributes: Any = {"retry_for": (OSError,), "not_retry_for": (FileNotFoundError,), "retry": ["5s"]}
    tries = Tries(app, ConnectionError("no"), fails=1)
    listen(app, tries, consume_mode=mode, **attributes)

    app.advance(HOUR)

    assert tries.at == [0, 5 * SECOND]


# --- decisions of the handler ------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("delay", ["10m", 600, timedelta(minutes=10)], ids=str)
def test_a_handler_can_say_when_its_message_is_retried(app: App, mode: ConsumeMode, delay: Any) -> None:
    tries = Tries(app, RetryLater(delay, "the bank is closed"), fails=1)

    with capture_logs() as logs:
        listen(app, tries, consume_mode=mode, retry=["1s", "1s"])
        app.advance(HOUR)

    assert tries.at == [0, 10 * MINUTE]
    assert failed_events(logs) == []
    [event] = [event for event in logs if event["event"] == "listener.reconsume_later"]
    assert (event["log_level"], event["reason"], event["retry_in_ms"]) == ("info", "the bank is closed", 10 * MINUTE)


@MODES
def test_retry_later_without_a_delay_uses_the_schedule_and_counts_as_a_retry(app: App, mode: ConsumeMode) -> None:
    tries = Tries(app, RetryLater())
    listen(app, tries, consume_mode=mode, retry=["5s", "1m"])

    app.advance(HOUR)

    assert tries.at == [0, 5 * SECOND, 65 * SECOND]
    assert app.bodies("%DLQ%billing") == ["bad"]


@MODES
def test_a_handler_can_send_its_message_to_the_dead_letter_topic(app: App, mode: ConsumeMode) -> None:
    tries = Tries(app, DeadLetter("customer 7 was deleted"))

    with capture_logs() as logs:
        listen(app, tries, consume_mode=mode)
        app.advance(HOUR)

    assert tries.at == [0]
    assert app.bodies("%DLQ%billing") == ["bad"]
    [event] = [event for event in logs if event["event"] == "listener.dead_letter"]
    assert (event["log_level"], event["reason"]) == ("warning", "customer 7 was deleted")
    assert "exc_info" not in event


def test_a_batch_keeps_the_schedule_for_its_failed_messages(app: App) -> None:
    received: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing", retry=["5s"])
    def bill(messages: list[str]) -> None:
        received.append(messages)
        if "bad" in messages:
            raise BatchFailure([messages.index("bad")])

    app.listen(bill)
    app.send("orders", "good", "bad")
    app.advance(5 * SECOND)

    assert received == [["good", "bad"], ["bad"]]
    assert app.bodies("%DLQ%billing") == ["bad"]


@pytest.mark.parametrize("delay", ["soon", "-1s", -1, "41d", float("nan"), True, ""])
def test_a_delay_that_is_none_is_refused_with_the_allowed_forms(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"delay must be (a duration: '3h', .*|0 or longer|40d or shorter)[;,] got "):
        RetryLater(delay)


# --- the order of a queue ----------------------------------------------------------------------------


def test_an_ordered_queue_continues_after_the_last_retry(app: App) -> None:
    received: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ConsumeMode.ORDERLY, retry=["1m", "2m"])
    def bill(body: str, message: MessageExt) -> None:
        received.append((body, message.reconsume_times))
        if body == "bad":
            raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "first", "bad", "last")
    app.advance(HOUR)

    assert received == [("first", 0), ("bad", 0), ("bad", 1), ("bad", 2), ("last", 0)]
    assert app.bodies("%DLQ%billing") == ["bad"]


def test_reconsume_later_follows_the_schedule(app: App) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", retry=["5s", "1m"])
    def bill(message: str) -> ConsumeStatus:
        tries.append(app.broker.clock.now_ms())
        return ConsumeStatus.RECONSUME_LATER

    app.listen(bill)
    app.send("orders", "bad")
    app.advance(HOUR)

    assert [at - tries[0] for at in tries] == [0, 5 * SECOND, 65 * SECOND]
    assert app.bodies("%DLQ%billing") == ["bad"]
