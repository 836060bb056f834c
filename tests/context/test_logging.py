"""Log lines of structlog and the standard library, with the message that is being handled."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from mqtemplate.clock import VirtualClock
from mqtemplate.context import AppSettings, MQApplication, configure_logging
from mqtemplate.context.settings.starters import LoggingSettings
from mqtemplate.listener import message_listener
from mqtemplate.testing.harness import Harness
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration
from mqtemplate_starter_logging import LoggingAutoConfiguration

log = structlog.stdlib.get_logger("shop")


class Lines(io.StringIO):
    """Stream that collects the log lines."""

    def parsed(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """JSON lines with level INFO and above."""
    written = Lines()
    undo = configure_logging(LoggingSettings(level="INFO", format="json"), written)  # type: ignore[arg-type]
    yield written
    undo()


def test_events_of_structlog_and_the_standard_library_have_one_format(lines: Lines) -> None:
    with structlog.contextvars.bound_contextvars(request="r1"):
        log.info("order.paid", amount=3)
        logging.getLogger("library").warning("%d left", 2, extra={"stock": 2})

    ours, theirs = lines.parsed()
    assert (ours["event"], ours["logger"], ours["level"], ours["amount"]) == ("order.paid", "shop", "info", 3)
    assert (theirs["event"], theirs["logger"], theirs["level"], theirs["stock"]) == ("2 left", "library", "warning", 2)
    assert ours["request"] == theirs["request"] == "r1"
    assert str(ours["timestamp"]).endswith("Z")


def test_lines_below_the_level_are_not_written(lines: Lines) -> None:
    log.debug("quiet")
    logging.getLogger("library").debug("quiet")
    logging.getLogger("py4j").info("logs each of its sockets")

    assert lines.getvalue() == ""


def test_a_traceback_shows_no_local_variables(lines: Lines) -> None:
    """Local variables may contain payloads and passwords."""

    def fail() -> None:
        password = "hunter" + "2"  # noqa: F841 (a local variable that the traceback must not show)
        raise ValueError("no luck")

    try:
        fail()
    except ValueError:
        log.exception("order.failed")

    assert "no luck" in lines.getvalue()
    assert "hunter2" not in lines.getvalue()


def test_the_console_format_has_no_colours_outside_a_terminal() -> None:
    written = io.StringIO()
    undo = configure_logging(LoggingSettings(), written)
    log.info("order.paid", amount=3)
    undo()

    assert "order.paid" in written.getvalue()
    assert "amount=3" in written.getvalue()
    assert "\x1b" not in written.getvalue(), "colours are for terminals only"


def test_the_previous_configuration_can_be_restored() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, structlog.is_configured())

    configure_logging(LoggingSettings(level="DEBUG"), io.StringIO())()  # type: ignore[arg-type]

    assert (list(root.handlers), root.level, structlog.is_configured()) == before


@pytest.mark.feature("C8")
def test_a_line_written_in_a_handler_contains_its_message(lines: Lines) -> None:
    """The lines of the handler, and of the libraries that it calls, contain message id, topic, tag and group."""

    @message_listener("orders", "billing")
    def on_order(text: str) -> None:
        log.info("order.seen")
        logging.getLogger("library").info("called")

    with MQApplication(
        on_order,
        settings={"rocketmq.name-server": "embedded:memory"},
        environment={},
        clock=VirtualClock(),
        starters=[EmbeddedAutoConfiguration],
    ) as app:
        sent = app.template.sync_send("orders:paid", "x")
        Harness(app).run_until_idle()
    log.info("order.none")

    by_event = {line["event"]: line for line in lines.parsed()}
    expected = {"topic": "orders", "tag": "paid", "group": "billing", "msg_id": sent.msg_id}
    assert expected.items() <= by_event["order.seen"].items()
    assert expected.items() <= by_event["called"].items()
    assert "topic" not in by_event["order.none"]


def test_the_start_logs_what_was_read_and_what_was_ignored(lines: Lines) -> None:
    environment = {"ROCKETMQ_PRODUCER_GRUOP": "x", "ROCKETMQ_NAME_SERVER": "embedded:memory"}
    keys = {"rocketmq.producer.retry-times-when-send-failed": 5}
    options = {"environment": environment, "settings": keys, "profiles": ["dvv"], "clock": VirtualClock()}

    with MQApplication(starters=[EmbeddedAutoConfiguration], **options):  # type: ignore[arg-type]
        pass

    by_event = {line["event"]: line for line in lines.parsed()}
    assert by_event["config.loaded"]["profiles"] == ["dvv"]
    assert by_event["config.profile_unmatched"]["profile"] == "dvv"
    assert by_event["config.variable_unused"]["variable"] == "ROCKETMQ_PRODUCER_GRUOP"
    assert by_event["config.variable_unused"]["hint"] == "did you mean ROCKETMQ_PRODUCER_GROUP?"
    assert by_event["config.key_unneeded"]["key"] == "rocketmq.producer.retry-times-when-send-failed"
    assert by_event["starter.applied"]["starter"] == "embedded"
    assert {"application.ready", "application.stopping"} <= by_event.keys()


# --- the starter ---------------------------------------------------------------------------------


def start(**keys: object) -> MQApplication:
    settings = {"rocketmq.name-server": "embedded:memory", **keys}
    starters = [EmbeddedAutoConfiguration, LoggingAutoConfiguration]
    return MQApplication(settings=settings, environment={}, clock=VirtualClock(), starters=starters)


def test_the_starter_configures_logging_while_the_application_runs() -> None:
    with start() as app:
        assert structlog.is_configured()
        assert [each.reason for each in app.context.conditions if each.starter == "logging"] == ["console from INFO on"]
    assert not structlog.is_configured()


def test_the_starter_does_not_act_in_a_program_that_has_configured_structlog(lines: Lines) -> None:
    with start() as app:
        reasons = [each.reason for each in app.context.conditions if each.starter == "logging"]
    assert reasons == ["the program has configured structlog itself"]
    assert structlog.is_configured()


def test_the_starter_can_be_switched_off() -> None:
    with start(**{"mqtemplate.logging.enabled": False}):
        assert not structlog.is_configured()


def test_the_library_itself_configures_nothing() -> None:
    AppSettings()

    assert not structlog.is_configured()
