"""Durations without a unit: the warning, its text, and the line that it points at."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import (
    Backoff,
    CircuitBreaker,
    Deduplication,
    PauseListener,
    RateLimit,
    RetryLater,
    Send,
    TimeLimit,
    Timing,
    load_settings,
    message_listener,
    publishes,
    scheduled,
    spark_listener,
)
from mqtemplate.asyncapi import documents_send
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.durations import with_unit
from mqtemplate.errors import DelayError, MQTemplateError, UnitWarning
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import messages_in
from mqtemplate.testing.recording import RecordingTemplate
from tests.kit import Kit, application


def _warned(call: Callable[..., object], *args: object) -> str:
    """Return the text of the only warning of a call. It must point at the lines of this function."""
    with pytest.warns(UnitWarning) as caught:
        call(*args)

    [warning] = caught
    lines, first = inspect.getsourcelines(call)
    assert Path(warning.filename) == Path(__file__)
    assert first <= warning.lineno < first + len(lines)
    return str(warning.message)


def _seconds(option: str, value: str = "3") -> str:
    name, _, code = option.rpartition(": ")
    start = f"{name}: " if name else ""
    return (
        f"{start}{code}={value} has no unit and is read as {value} seconds; "
        f'write {code}="{value}s" or timedelta(seconds={value})'
    )


def _handle(message: str) -> None: ...


# --- the sending verbs ----------------------------------------------------------------------------


DELAYS: dict[str, Callable[[RocketMQTemplate], object]] = {
    "sync_send": lambda template: template.sync_send("orders", "x", delay=3),
    "async_send": lambda template: template.async_send("orders", "x", delay=3),
    "send_one_way": lambda template: template.send_one_way("orders", "x", delay=3),
    "a batch": lambda template: template.sync_send("orders", ["x", "y"], delay=3),
    "async_send_and_receive": lambda template: template.async_send_and_receive("orders", "x", str, delay=3),
    "reschedule": lambda template: template.reschedule(key="k", delay=3),
    "async_reschedule": lambda template: template.async_reschedule(key="k", delay=3),
    "a name of Spring's v5 template": lambda template: template.syncSendDelayMessage("orders", "x", 3),
}


@pytest.mark.parametrize("verb", DELAYS)
def test_a_delay_without_a_unit_is_seconds_and_draws_a_warning(kit: Kit, verb: str) -> None:
    assert _warned(DELAYS[verb], kit.template) == _seconds("delay")


def test_the_warning_points_at_the_line_of_a_call_that_runs_in_another_thread() -> None:
    """Its thread has no frame of the application."""
    with EmbeddedBroker() as broker, RocketMQTemplate(broker) as template:
        text = _warned(lambda: template.async_reschedule(key="k", delay=3).result(30))

    assert text == _seconds("delay")


def test_the_warning_points_at_the_coroutine_that_awaits(kit: Kit) -> None:
    async def send() -> None:
        await kit.template.async_send("orders", "x", delay=3)

    with pytest.warns(UnitWarning, match="delay=3 has no unit") as caught:
        asyncio.run(send())

    assert caught[0].filename == __file__
    assert caught[0].lineno == send.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("delay", "text"),
    [
        (1, 'delay=1 has no unit and is read as 1 second; write delay="1s" or timedelta(seconds=1)'),
        (3.0, 'delay=3 has no unit and is read as 3 seconds; write delay="3s" or timedelta(seconds=3)'),
        (0.25, 'delay=0.25 has no unit and is read as 0.25 seconds; write delay="0.25s" or timedelta(seconds=0.25)'),
        (1e-7, 'write delay="0.0000001s" or timedelta(seconds=0.0000001)'),
        (" 90 ", 'delay="90" has no unit and is read as 90 seconds; write delay="90s" or timedelta(seconds=90)'),
    ],
)
def test_the_text_says_how_the_number_is_read_and_what_to_write(kit: Kit, delay: Any, text: str) -> None:
    assert _warned(lambda: kit.template.sync_send("orders", "x", delay=delay)).endswith(text)


def test_the_number_keeps_its_meaning(kit: Kit) -> None:
    _warned(lambda: kit.template.sync_send("orders", "x", delay=10))

    kit.harness.advance("9999ms")
    assert messages_in(kit.broker, "orders") == []
    kit.harness.advance("1ms")
    assert len(messages_in(kit.broker, "orders")) == 1


@pytest.mark.parametrize("delay", ["3s", "1h 30m", timedelta(seconds=3), 0, 0.0, "0", "0s", None])
def test_a_unit_and_zero_draw_no_warning(kit: Kit, delay: Any) -> None:
    kit.template.sync_send("orders", "x", delay=delay)


@pytest.mark.parametrize("delay", [-1, "soon", float("nan"), True, 10**400])
def test_a_value_that_is_refused_draws_no_warning(kit: Kit, delay: Any) -> None:
    with pytest.raises(DelayError):
        kit.template.sync_send("orders", "x", delay=delay)


def test_names_of_spring_that_have_the_unit_draw_no_warning(kit: Kit) -> None:
    kit.template.syncSendDelayTimeSeconds("orders", "x", 3)
    kit.template.syncSendDelayTimeMills("orders", "x", 3)


# --- timeouts -------------------------------------------------------------------------------------


TIMEOUTS: dict[str, Callable[[RocketMQTemplate], object]] = {
    "sync_send": lambda template: template.sync_send("orders", "x", timeout=3),
    "Spring's order": lambda template: template.syncSend("orders", "x", 3),
    "async_send": lambda template: template.async_send("orders", "x", timeout=3),
    "request": lambda template: template.async_send_and_receive("orders", "x", str, timeout=3),
    "receive": lambda template: template.receive(str, timeout=3),
}


@pytest.mark.parametrize("verb", TIMEOUTS)
def test_a_timeout_so_short_that_it_is_rather_seconds_draws_a_warning(
    mqtemplate_template: RecordingTemplate, verb: str
) -> None:
    text = _warned(TIMEOUTS[verb], mqtemplate_template)

    assert text == 'timeout=3 is 3 milliseconds; write timeout="3s" for seconds, or timeout="3ms"'


@pytest.mark.parametrize("timeout", [100, 3_000, "100", "3ms", "3s", timedelta(milliseconds=3)])
def test_milliseconds_of_rocketmqs_api_draw_no_warning(kit: Kit, timeout: Any) -> None:
    kit.template.sync_send("orders", "x", timeout=timeout)


@pytest.mark.parametrize(("timeout", "shown"), [(99, "99"), ("3", '"3"'), (0.5, "0.5")])
def test_a_text_and_a_fraction_count_as_numbers(kit: Kit, timeout: Any, shown: str) -> None:
    assert _warned(lambda: kit.template.sync_send("orders", "x", timeout=timeout)).startswith(f"timeout={shown} is ")


def test_the_timeout_of_a_template_is_checked_by_its_own_name(kit: Kit) -> None:
    text = _warned(lambda: RocketMQTemplate(kit.broker, send_message_timeout=5))

    assert text == (
        'send_message_timeout=5 is 5 milliseconds; write send_message_timeout="5s" for seconds, or '
        'send_message_timeout="5ms"'
    )


# --- other options of the code --------------------------------------------------------------------


OPTIONS: dict[str, Callable[[], object]] = {
    "delay": lambda: Send("orders", "x", delay=3),
    "every": lambda: scheduled(every=3),
    "grace": lambda: scheduled(cron="@daily", grace=3),
    "PauseListener: duration": lambda: PauseListener(3),
    "RateLimit: per": lambda: RateLimit(10, per=3),
    "CircuitBreaker: pause": lambda: CircuitBreaker(pause=3),
    "Deduplication: keep": lambda: Deduplication(keep=3),
    "TimeLimit: limit": lambda: TimeLimit(3),
    "Timing: slow": lambda: Timing(slow=3),
    "RetryLater: delay": lambda: RetryLater(3),
    "Backoff: first": lambda: Backoff(3),
    "Backoff: maximum": lambda: Backoff("1s", maximum=3),
    "retry_delay": lambda: spark_listener("orders", "billing", retry_delay=3),
    "restart_delay": lambda: spark_listener("orders", "billing", restart_delay=3),
    "redelivery_delay": lambda: spark_listener("orders", "billing", redelivery_delay=3),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_other_option_draws_a_warning_where_it_is_written(option: str) -> None:
    assert _warned(OPTIONS[option]) == _seconds(option)


def test_publishes_and_documents_send_warn_at_the_decorator() -> None:
    assert _warned(lambda: publishes("orders", delay=3)) == _seconds("delay")
    assert _warned(lambda: documents_send("orders", delay=3)) == _seconds("delay")


def test_a_number_for_later_use_gets_its_unit_and_draws_no_second_warning(kit: Kit) -> None:
    with pytest.warns(UnitWarning):
        sent = Send("orders", "x", delay=3)

    assert sent.options["delay"] == "3s"
    kit.template.sync_send(sent.destination, sent.payload, **sent.options)


@pytest.mark.parametrize(("retry", "shown"), [([5, "1m"], "5"), (["5"], '"5"'), ("5, 1m", '"5"')])
def test_a_delay_in_a_list_of_retries_is_named(retry: Any, shown: str) -> None:
    assert _warned(lambda: message_listener("orders", "billing", retry=retry)(_handle)) == (
        f'retry: {shown} has no unit and is read as 5 seconds; write "5s" or timedelta(seconds=5)'
    )


def test_a_listener_with_rocketmqs_names_draws_no_warning() -> None:
    """Their units are RocketMQ's: minutes and milliseconds."""
    message_listener("orders", "billing", consume_timeout=15, pull_interval=10, reply_timeout=10)(_handle)
    message_listener("orders", "billing", suspend_current_queue_time_millis=10, retry="${retry:5}")(_handle)


def test_an_attribute_that_is_refused_at_the_start_draws_no_warning() -> None:
    message_listener("orders", "billing", retry=5)(_handle)  # type: ignore[arg-type]


def test_a_span_of_virtual_time_is_milliseconds(kit: Kit) -> None:
    before_ms = kit.broker.clock.now_ms()

    text = _warned(lambda: kit.harness.advance(3))

    assert text == (
        'advance(3) has no unit and is read as 3 milliseconds; write advance("3ms") or timedelta(milliseconds=3)'
    )
    assert kit.broker.clock.now_ms() == before_ms + 3
    kit.harness.advance(0)


def test_count_pending_draws_a_warning(kit: Kit) -> None:
    assert _warned(lambda: kit.template.count_pending(by=3)) == _seconds("by")


def test_a_value_with_a_unit_or_of_another_kind_is_unchanged() -> None:
    for value in ("3s", "${delay}", "15m, then 1d", timedelta(1), None, 0, -1, True):
        assert with_unit("delay", value) is value


# --- data -----------------------------------------------------------------------------------------


def test_settings_draw_no_warning() -> None:
    """They are data, and their units are RocketMQ's or documented with the key."""
    settings = load_settings(
        environment={"MQTEMPLATE_LISTENER_BACKOFF_FIRST": "5"},
        arguments={
            "rocketmq.producer.send-message-timeout": 10,
            "mqtemplate.broker.transaction-timeout-ms": "10",
            "mqtemplate.listener.backoff.maximum": 10,
        },
    )
    assert str(settings.mqtemplate.listener.retry_defaults.retry).startswith("5s, then 2 times as long each, up to 10s")
    own = {"rocketmq.producer.send-message-timeout": 10, "mqtemplate.listener.retry": [5, "10"]}
    with application(settings=own) as app:
        assert app.template.send_message_timeout == 10


# --- the class ------------------------------------------------------------------------------------


def test_the_warning_is_an_ordinary_warning_of_the_user() -> None:
    assert issubclass(UnitWarning, UserWarning)
    assert not issubclass(UnitWarning, MQTemplateError)


def test_a_program_sees_one_warning_for_a_line(capsys: pytest.CaptureFixture[str], kit: Kit) -> None:
    """Python's default filter shows the first of a line, as for its own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UnitWarning)
        warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: print(lineno, message)
        for _ in range(3):
            kit.template.sync_send("orders", "x", delay=7)

    assert capsys.readouterr().out.count("delay=7 has no unit") == 1


def test_a_user_makes_it_an_error(kit: Kit) -> None:
    with pytest.raises(UnitWarning, match="delay=3 has no unit"):
        kit.template.sync_send("orders", "x", delay=3)
    assert kit.template.pending().messages == ()
