"""Events of the library in whatever logging the program has configured: once, readable, with their fields."""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any, NoReturn

import pytest
import structlog
from structlog.testing import capture_logs

from mqtemplate import event_log
from mqtemplate.clock import VirtualClock
from mqtemplate.context import event_formatter
from mqtemplate.event_log import STRUCTLOG_KEY_PREFIX, EventLogger, LimitedLog, get_logger, lost_events
from mqtemplate.user_code import error_text
from tests.programs import environment

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


@contextmanager
def attached(formatter: logging.Formatter) -> Iterator[Written]:
    written = Written(formatter)
    logging.getLogger().addHandler(written.handler)
    yield written
    logging.getLogger().removeHandler(written.handler)


@pytest.fixture
def plain() -> Iterator[Written]:
    with attached(logging.Formatter("%(levelname)s:%(name)s:%(filename)s:%(message)s")) as written:
        yield written


@pytest.fixture
def as_json() -> Iterator[Written]:
    with attached(event_formatter("json")) as written:
        yield written


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

    with attached(structlog.stdlib.ProcessorFormatter(processors=processors)) as written:
        log.info("order.paid", amount=3)

    [line] = map(json.loads, written.lines)
    assert (line["event"], line["amount"], line["level"]) == ("order.paid", 3, "info")


def test_the_console_format_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with attached(event_formatter("console")) as written:
        log.info("order.paid", amount=3)

    [line] = written.lines
    assert re.search(r"\[info +\] order\.paid +\[mqtemplate\.shop\] amount=3", line)
    assert capsys.readouterr().out == ""


def test_a_context_variable_of_structlog_is_a_field(plain: Written) -> None:
    with structlog.contextvars.bound_contextvars(request="r1"):
        log.info("order.paid")

    assert plain.lines == ["INFO:mqtemplate.shop:test_event_log.py:order.paid request=r1"]


def test_the_prefix_of_structlogs_variables_is_structlogs_own() -> None:
    """The library does not import structlog for it; see `STRUCTLOG_KEY_PREFIX`."""
    assert STRUCTLOG_KEY_PREFIX == structlog.contextvars.STRUCTLOG_KEY_PREFIX


def test_a_context_variable_that_structlog_has_unbound_is_no_field(plain: Written) -> None:
    structlog.contextvars.bind_contextvars(request="r1")
    structlog.contextvars.unbind_contextvars("request")

    log.info("order.paid")

    assert plain.lines == ["INFO:mqtemplate.shop:test_event_log.py:order.paid"]


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


# --- what the program's logging does with records ---------------------------------------------------


class Redact(logging.Filter):
    """As programs have them: it rewrites the text of each record that contains a secret."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = re.sub(r"token=\S+", "token=***", record.msg)
        return True


class JsonFormatter(logging.Formatter):
    """As python-json-logger does it: the message, and all attributes that `logging` does not know."""

    KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        extra = {k: v for k, v in vars(record).items() if k not in self.KNOWN and not k.startswith("_")}
        return json.dumps({"message": record.getMessage(), **extra})


def test_the_message_of_a_record_is_a_text_for_filters_of_the_program(plain: Written) -> None:
    """A filter for secrets runs `re.sub` on it; a mapping would raise, and end the start of the application."""
    plain.handler.addFilter(Redact())

    log.info("order.paid", amount=3, note="50%s of 100%")
    log.info("client.signed_in", token="s3cret")

    assert plain.lines == [
        "INFO:mqtemplate.shop:test_event_log.py:order.paid amount=3 note='50%s of 100%'",
        "INFO:mqtemplate.shop:test_event_log.py:client.signed_in token=***",
    ]


@pytest.mark.parametrize("formatter", [event_formatter("json"), JsonFormatter()], ids=["structlog", "json"])
def test_what_a_filter_removed_from_the_text_is_in_no_field(formatter: logging.Formatter) -> None:
    with attached(formatter) as written:
        written.handler.addFilter(Redact())
        log.info("client.signed_in", token="s3cret")
        log.info("order.paid", amount=3)

    signed_in, paid = map(json.loads, written.lines)
    assert "s3cret" not in written.lines[0]
    assert signed_in.get("message", signed_in.get("event")) == "client.signed_in token=***"
    assert paid["amount"] == 3, "the filter found nothing in it to replace"


def test_a_formatter_for_json_shows_the_text_and_the_fields() -> None:
    with attached(JsonFormatter()) as written:
        log.info("order.paid", amount=3, tags=["a"], when=Path("x"))

    assert json.loads(written.lines[0]) == {
        "message": "order.paid amount=3 tags=['a'] when=x",
        "amount": 3,
        "tags": ["a"],
        "when": "x",
    }


def test_a_record_goes_through_a_queue_to_another_process(plain: Written) -> None:
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = logging.handlers.QueueHandler(queue)  # type: ignore[arg-type]  # no queue.Queue, and as good
    logging.getLogger("mqtemplate.shop").addHandler(handler)
    try:
        raise LookupError("no such order")
    except LookupError:
        log.exception("order.failed", name="bill", amount=3)
    logging.getLogger("mqtemplate.shop").removeHandler(handler)

    record = pickle.loads(pickle.dumps(queue.get()))
    assert record.getMessage().startswith("order.failed name=bill amount=3")
    assert (record.amount, record.name) == (3, "mqtemplate.shop")
    assert event_formatter("console").format(record)


def test_a_record_factory_of_the_program_keeps_its_attributes(plain: Written) -> None:
    before = logging.getLogRecordFactory()

    def make(*args: Any, **options: Any) -> logging.LogRecord:
        record = before(*args, **options)
        record.amount = "of the program"
        return record

    logging.setLogRecordFactory(make)
    plain.handler.setFormatter(logging.Formatter("%(message)s|%(amount)s|%(shop)s"))
    log.info("order.paid", amount=3, shop="tea")
    logging.setLogRecordFactory(before)

    assert plain.lines == ["order.paid amount=3 shop=tea|of the program|tea"]


# --- hostile logging --------------------------------------------------------------------------------


class Panic(BaseException):
    pass


def panic(*_: object, **__: object) -> NoReturn:
    raise Panic("no")


class Hostile:
    __repr__ = __str__ = panic


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Iterator[Written]:
    """Logging whose handler, filter, formatter, record factory or stream raises."""
    factory, shop = logging.getLogRecordFactory(), logging.getLogger("mqtemplate.shop")
    with attached(logging.Formatter()) as written:
        match request.param:
            case "handler":
                written.handler.handle = panic  # type: ignore[method-assign]
            case "filter":
                shop.addFilter(panic)
            case "formatter":
                written.handler.setFormatter(type("F", (logging.Formatter,), {"format": panic})())
            case "factory":
                logging.setLogRecordFactory(panic)
            case "closed stream":
                written.stream.close()
            case "handle error":
                written.stream.close()
                written.handler.handleError = panic  # type: ignore[method-assign]
        yield written
        logging.setLogRecordFactory(factory)
        shop.removeFilter(panic)


KINDS = ["handler", "filter", "formatter", "factory", "closed stream", "handle error"]


@pytest.mark.parametrize("hostile", KINDS, indirect=True)
def test_what_logging_raises_does_not_reach_the_code_that_logs(hostile: Written) -> None:
    for write in (log.info, log.warning, log.error, log.exception, log.critical):
        write("order.paid", amount=3)
    log.log(logging.INFO, "order.paid")
    LimitedLog(log, lambda: 0).warning("order.paid")


@pytest.fixture
def losing_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each event of the shop is lost; none was before."""
    monkeypatch.setattr("mqtemplate.event_log._LOST", type(event_log._LOST)())
    shop = logging.getLogger("mqtemplate.shop")
    shop.addFilter(panic)
    yield
    shop.removeFilter(panic)


@pytest.mark.usefixtures("losing_log")
def test_a_lost_event_is_counted_and_the_first_one_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        log.warning("order.paid")

    assert lost_events() == 3
    assert capsys.readouterr().err == (
        "mqtemplate: the event order.paid was not logged, since the logging of this program raised Panic: no; "
        "further ones are counted and not reported\n"
    )


@pytest.mark.usefixtures("losing_log")
@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_a_lost_event_needs_no_standard_error(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)

    log.warning("order.paid")

    assert lost_events() == 1


def test_a_field_without_text_is_named_by_its_class(plain: Written, as_json: Written) -> None:
    log.error("order.failed", order=Hostile(), orders=[Hostile()], amount=3)

    assert plain.lines[0].endswith("order.failed order='<unprintable Hostile>' orders='<unprintable list>' amount=3")
    assert json.loads(as_json.lines[0])["order"] == "<unprintable Hostile>"


def test_an_exception_that_cannot_be_formatted_is_logged_by_its_class(plain: Written) -> None:
    error_class = type("Failed", (Exception,), {"__str__": panic, "__notes__": property(panic)})
    try:
        raise error_class
    except error_class as error:
        log.exception("order.failed")
        log.error("order.failed", error=error_text(error))

    text = plain.stream.getvalue()
    assert "RuntimeError: Failed: <unprintable Failed>" in text
    assert "error='Failed: <unprintable Failed>'" in text


def test_ctrl_c_while_an_event_is_written_ends_the_program(plain: Written) -> None:
    plain.handler.addFilter(lambda _record: bool(signal.raise_signal(signal.SIGINT)) or True)

    with pytest.raises(KeyboardInterrupt):
        log.warning("order.paid")


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

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
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


def test_an_exception_whose_text_no_stream_can_write_is_logged_with_the_text_escaped(plain: Written) -> None:
    """A lone surrogate comes from JSON; with it in a traceback, a handler of `logging` would drop the event."""
    try:
        try:
            raise LookupError("no order \ud800")
        except LookupError as cause:
            raise ValueError("in vain") from cause
    except ValueError as error:
        log.error("order.failed", exc_info=error)

    written = plain.stream.getvalue()
    assert written.encode()
    assert "order.failed" in written
    assert "RuntimeError: ValueError: in vain" in written
