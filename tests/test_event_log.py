"""Events of the library in whatever logging the program has configured: once, readable, with their fields."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import structlog
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.context import event_formatter
from mqtemplate.event_log import EventLogger, LimitedLog, get_logger

ROOT = Path(__file__).parents[1]

log = get_logger("mqtemplate.shop")


class Written:
    """A handler on the root logger, with a formatter of the program."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(formatter)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def plain() -> Iterator[Written]:
    yield from attached(logging.Formatter("%(levelname)s:%(name)s:%(filename)s:%(message)s"))


@pytest.fixture
def as_json() -> Iterator[Written]:
    yield from attached(event_formatter("json"))


def attached(formatter: logging.Formatter) -> Iterator[Written]:
    written = Written(formatter)
    logging.getLogger().addHandler(written.handler)
    yield written
    logging.getLogger().removeHandler(written.handler)


# --- formats -------------------------------------------------------------------------------------


def test_an_ordinary_formatter_shows_the_event_and_its_fields_in_one_line(plain: Written) -> None:
    log.warning("order.paid", order="4466", note="two words", amount=3, tags=["a"], empty="", nothing=None)

    [line] = plain.lines
    assert line == (
        "WARNING:mqtemplate.shop:test_event_log.py:"
        "order.paid order=4466 note='two words' amount=3 tags=['a'] empty='' nothing=None"
    )


def test_a_value_cannot_break_the_line(plain: Written) -> None:
    log.error("order.failed", error="first\nsecond 100%s", quote="it's")

    [line] = plain.lines
    assert line.endswith("error='first\\nsecond 100%s' quote=\"it's\"")


def test_an_exception_is_shown_once_with_its_stack(plain: Written) -> None:
    try:
        raise LookupError("no such order")
    except LookupError as error:
        log.exception("order.failed")
        log.error("order.failed", exc_info=error)

    text = plain.stream.getvalue()
    assert text.count("Traceback (most recent call last)") == 2
    assert text.count("LookupError: no such order") == 2
    assert "exc_info" not in text


def test_structlogs_formatter_gets_the_fields(as_json: Written) -> None:
    log.bind(group="billing").info("order.paid", amount=3)

    [line] = map(json.loads, as_json.lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {
        "event": "order.paid",
        "group": "billing",
        "amount": 3,
        "level": "info",
        "logger": "mqtemplate.shop",
    }


def test_a_formatter_of_the_program_with_structlog_gets_the_fields() -> None:
    """As structlog's documentation shows it, without anything of ours."""
    processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()]
    [written] = attached_list(structlog.stdlib.ProcessorFormatter(processors=processors))

    log.info("order.paid", amount=3)
    logging.getLogger().removeHandler(written.handler)

    [line] = map(json.loads, written.lines)
    assert (line["event"], line["amount"], line["level"]) == ("order.paid", 3, "info")


def attached_list(formatter: logging.Formatter) -> list[Written]:
    written = Written(formatter)
    logging.getLogger().addHandler(written.handler)
    return [written]


def test_the_console_format_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    [written] = attached_list(event_formatter("console"))
    log.info("order.paid", amount=3)
    logging.getLogger().removeHandler(written.handler)

    [line] = written.lines
    assert re.search(r"\[info +\] order\.paid +\[mqtemplate\.shop\] amount=3", line)
    assert capsys.readouterr().out == ""


def test_a_context_variable_of_structlog_is_a_field(plain: Written) -> None:
    with structlog.contextvars.bound_contextvars(request="r1"):
        log.info("order.paid")

    assert plain.lines == ["INFO:mqtemplate.shop:test_event_log.py:order.paid request=r1"]


# --- levels, tests -------------------------------------------------------------------------------


def test_an_event_below_the_level_costs_no_more_than_a_question() -> None:
    """Neither the fields are copied, nor structlog is asked."""
    asked: list[int] = []

    class Quiet(logging.Logger):
        def isEnabledFor(self, level: int) -> bool:
            asked.append(level)
            return False

        def log(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise AssertionError("nothing may be written")

    quiet = EventLogger(Quiet("quiet"), {})
    for write in (quiet.debug, quiet.info, quiet.warning, quiet.error, quiet.exception, quiet.critical):
        write("order.paid")

    assert asked == [10, 20, 30, 40, 40, 50]
    assert not quiet.is_enabled_for(logging.INFO)


def test_caplog_has_each_event_once(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("order.paid", amount=3)

    assert caplog.messages == ["order.paid amount=3"]
    assert caplog.record_tuples == [("mqtemplate.shop", logging.WARNING, "order.paid amount=3")]


def test_structlogs_capture_logs_gets_the_events_instead_of_the_handlers(plain: Written) -> None:
    with capture_logs() as events:
        log.warning("order.paid", amount=3)

    assert events == [{"event": "order.paid", "amount": 3, "log_level": "warning"}]
    assert plain.lines == []


# --- whole programs ------------------------------------------------------------------------------

PROGRAM = """
    from mqtemplate import MQApplication, message_listener
    from mqtemplate_starter_embedded import EmbeddedAutoConfiguration
    from mqtemplate_starter_logging import LoggingAutoConfiguration
    from mqtemplate.event_log import get_logger

    STARTERS = [EmbeddedAutoConfiguration] + ([LoggingAutoConfiguration] if WITH_STARTER else [])
    with MQApplication(settings={"rocketmq.name-server": "embedded:memory"}, starters=STARTERS, environment={}):
        get_logger("mqtemplate.shop").warning("shop.full", left=0)
    """

UVICORN = {  # uvicorn.config.LOGGING_CONFIG in short: loggers of its own, nothing on the root logger
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"default": {"class": "logging.StreamHandler"}},
    "loggers": {"uvicorn": {"handlers": ["default"], "level": "INFO", "propagate": False}},
}
DJANGO = {  # django.utils.log.DEFAULT_LOGGING in short, and the root handler that Django's documentation adds
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {"django": {"handlers": ["console"], "level": "INFO"}},
}
CONFIGURATIONS = {
    # name -> what the program does first, and the line that it shows
    "nothing": ("", "shop.full left=0"),
    "basicConfig": (
        "import logging; logging.basicConfig(level=logging.INFO)",
        "WARNING:mqtemplate.shop:shop.full left=0",
    ),
    "uvicorn": (f"import logging.config; logging.config.dictConfig({UVICORN})", "shop.full left=0"),
    "Django": (f"import logging.config; logging.config.dictConfig({DJANGO})", "shop.full left=0"),
}


@pytest.mark.parametrize(
    ("configured", "with_starter"), [*((each, True) for each in CONFIGURATIONS), ("nothing", False)]
)
def test_an_event_appears_once_and_never_on_standard_output(configured: str, with_starter: bool) -> None:
    """With and without the logging starter, in a process of its own."""
    code, expected = CONFIGURATIONS[configured]
    program = f"{code}\n{dedent(PROGRAM).replace('WITH_STARTER', str(with_starter))}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "starters")])

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )

    assert ended.stdout == ""
    shown = [line for line in ended.stderr.splitlines() if "shop.full" in line]
    assert shown == [expected]
    ready = [line for line in ended.stderr.splitlines() if "application.ready" in line]
    assert len(ready) == (1 if configured == "basicConfig" else 0), "INFO is shown where the program asks for it"
    assert len(ended.stderr.splitlines()) == len(shown) + len(ready)


# --- events that peers cause ------------------------------------------------------------------------


def test_an_event_that_a_peer_repeats_is_written_some_times_and_then_counted() -> None:
    """A hostile client would fill the disk with lines: 20,000 half messages wrote 120,191."""
    clock = VirtualClock()
    log = LimitedLog(get_logger("mqtemplate.test"), clock.now_ms, burst=2, period_ms=1_000)

    with capture_logs() as events:
        for number in range(1_000):
            log.warning("client.refused", number=number)
        log.log(logging.INFO, "client.other", number=0)
        clock.move_ms(1_000)
        log.warning("client.refused", number=1_000)

    assert [(event["event"], event["number"], event.get("suppressed")) for event in events] == [
        ("client.refused", 0, None),
        ("client.refused", 1, None),
        ("client.other", 0, None),
        ("client.refused", 1_000, 998),
    ]


def test_the_number_of_suppressed_events_is_written_though_no_other_follows() -> None:
    clock = VirtualClock()
    log = LimitedLog(get_logger("mqtemplate.test"), clock.now_ms, burst=1, period_ms=1_000)

    with capture_logs() as events:
        for _ in range(3):
            log.warning("client.refused")
        log.log(logging.INFO, "client.other")
        log.summarize()
        clock.move_ms(1_000)
        log.summarize()
        log.summarize()

    assert [(event["event"], event["log_level"], event.get("suppressed")) for event in events] == [
        ("client.refused", "warning", None),
        ("client.other", "info", None),
        ("client.refused", "warning", 2),
    ]
