"""Log lines of structlog and the standard library, with the message that is being handled."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from mqtemplate.clock import VirtualClock
from mqtemplate.context import (
    ApplicationContext,
    AppSettings,
    AutoConfiguration,
    MQApplication,
    configure_logging,
    event_formatter,
)
from mqtemplate.context.settings.features import LoggingSettings
from mqtemplate.context.settings.source import PROCESS, CommandLine
from mqtemplate.event_log import get_logger
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
    """JSON lines with level INFO and above, of the library, of structlog and of `logging`."""
    yield from written_lines("INFO")


@pytest.fixture
def all_lines() -> Iterator[Lines]:
    """The same with level DEBUG and above."""
    yield from written_lines("DEBUG")


def written_lines(level: str) -> Iterator[Lines]:
    written, library = Lines(), logging.getLogger("mqtemplate")
    undo = configure_logging(LoggingSettings(level=level, format="json"), written)  # type: ignore[arg-type]
    before = library.level
    library.setLevel(logging.NOTSET)
    yield written
    library.setLevel(before)
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


def test_the_start_logs_what_was_read_and_what_was_ignored(all_lines: Lines) -> None:
    environment = {"ROCKETMQ_PRODUCER_GRUOP": "x", "ROCKETMQ_NAME_SERVER": "embedded:memory"}
    keys = {"rocketmq.producer.retry-times-when-send-failed": 5}
    options = {"environment": environment, "settings": keys, "profiles": ["dvv"], "clock": VirtualClock()}

    with MQApplication(starters=[EmbeddedAutoConfiguration], **options):  # type: ignore[arg-type]
        pass

    by_event = {line["event"]: line for line in all_lines.parsed()}
    assert by_event["config.loaded"]["profiles"] == ["dvv"]
    assert by_event["config.profile_unmatched"]["profile"] == "dvv"
    assert by_event["config.variable_unused"]["variable"] == "ROCKETMQ_PRODUCER_GRUOP"
    assert by_event["config.variable_unused"]["hint"] == "did you mean ROCKETMQ_PRODUCER_GROUP?"
    assert by_event["config.key_unneeded"]["key"] == "rocketmq.producer.retry-times-when-send-failed"
    assert by_event["starter.applied"]["starter"] == "embedded"
    assert {"application.ready", "application.stopping"} <= by_event.keys()


class IdleAutoConfiguration(AutoConfiguration):
    def contribute(self, context: ApplicationContext) -> None:
        context.note_nothing_to_do("nothing in this application is for it")


def test_the_ready_line_names_the_starters_that_had_something_to_do(lines: Lines, tmp_path: Path) -> None:
    """Others are installed in every environment, and say nothing about this application."""
    starters = [EmbeddedAutoConfiguration, IdleAutoConfiguration]

    with MQApplication(
        config_folder=tmp_path, environment={}, settings={"rocketmq.name-server": "embedded:memory"}, starters=starters
    ):
        pass

    [ready] = lines.parsed()
    assert ready["starters"] == "embedded"


@pytest.mark.feature("C8")
def test_a_normal_start_writes_one_line_and_a_normal_stop_none(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("rocketmq.name-server: embedded:memory\n")

    with MQApplication(config_folder=tmp_path, environment={}, profiles=[], starters=[EmbeddedAutoConfiguration]):
        pass

    [ready] = lines.parsed()
    assert ready["event"] == "application.ready"
    assert ready["level"] == "info"
    assert (ready["files"], ready["listeners"], ready["starters"]) == ("memory", 0, "embedded")
    assert (ready["profiles"], ready["config"]) == ("none", str(tmp_path / "application.yml"))
    assert isinstance(ready["took_ms"], int)


def test_the_ready_line_says_where_the_files_are_and_where_configuration_was_looked_for(
    lines: Lines, tmp_path: Path
) -> None:
    settings = {"rocketmq.name-server": f"embedded:{tmp_path / 'data'}"}
    starters = [EmbeddedAutoConfiguration]

    with MQApplication(config_folder=tmp_path, environment={}, settings=settings, starters=starters):
        pass

    [ready] = lines.parsed()
    assert ready["files"] == str(tmp_path / "data")
    assert ready["config"] == f"no application.yml in {tmp_path}"


# --- the starter ---------------------------------------------------------------------------------


def start(**keys: object) -> MQApplication:
    settings = {"rocketmq.name-server": "embedded:memory", **keys}
    starters = [EmbeddedAutoConfiguration, LoggingAutoConfiguration]
    return MQApplication(settings=settings, environment={}, clock=VirtualClock(), starters=starters)


def reason_of(app: MQApplication) -> str:
    [reason] = [each.reason for each in app.context.conditions if each.starter == "logging"]
    return reason


def configuration() -> tuple[object, ...]:
    library, root = logging.getLogger("mqtemplate"), logging.getLogger()
    return [*root.handlers], root.level, [*library.handlers], library.level, structlog.is_configured()


@contextmanager
def unconfigured() -> Iterator[None]:
    """Take pytest's own handlers away: a program that has configured nothing."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_an_application_without_run_configures_nothing() -> None:
    with unconfigured():
        before = configuration()

        with start() as app:
            assert configuration() == before
            assert reason_of(app) == "nothing to do: only run() owns the process and its standard error"


def test_run_shows_the_events_of_the_library_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    before = configuration()

    with unconfigured():
        run_application(**{"mqtemplate.logging.format": "json"})

    out, err = capsys.readouterr()
    [ready] = [json.loads(line) for line in err.splitlines()]
    assert (ready["event"], ready["level"], ready["logger"]) == ("application.ready", "info", "mqtemplate.context")
    assert out == ""
    assert configuration() == before, "the stop restores everything"


def test_run_does_not_touch_the_programs_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither events of `logging`, nor of structlog."""

    def main() -> None:
        logging.getLogger("shop").info("not shown by Python's default")
        logging.getLogger("shop").warning("shown as it is")
        assert not structlog.is_configured()

    with unconfigured():
        run_application(main, **{"mqtemplate.logging.format": "json"})

    assert capsys.readouterr().err.splitlines()[1:] == ["shown as it is"]


def test_a_program_that_configures_logging_later_sees_each_event_once(capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()

    def main() -> None:
        logging.basicConfig(stream=written)
        get_logger("mqtemplate.shop").info("shop.opened")

    with unconfigured():
        run_application(main)

    assert "shop.opened" in written.getvalue()
    assert "shop.opened" not in capsys.readouterr().err


def test_run_leaves_a_program_alone_that_has_configured_logging(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(written := io.StringIO())
    logging.getLogger().addHandler(handler)

    run_application()
    logging.getLogger().removeHandler(handler)

    assert "application.ready" in written.getvalue()
    assert capsys.readouterr().err == ""


def test_mqtemplate_run_shows_the_lines_of_the_program_and_the_warnings_of_other_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under it the program has no line of its own that could configure them."""
    monkeypatch.setattr(PROCESS, "given", CommandLine(is_run=True))
    library = compile("log.info('a detail'); log.warning('a problem')", pytest.__file__, "exec")

    def main() -> None:
        logging.getLogger("shop").info("order paid")
        logging.getLogger("shop").debug("a detail")
        exec(library, {"log": logging.getLogger("of_a_package")})

    before = configuration()
    with unconfigured():
        run_application(main)

    shown = capsys.readouterr().err
    assert shown.count("order paid") == 1
    assert shown.count("application.ready") == 1
    assert "a problem" in shown
    assert "a detail" not in shown
    assert configuration() == before, "the stop restores everything"


def run_application(main: Callable[[], None] = lambda: None, **keys: object) -> None:
    """Run an application with the level of the library that a program has."""
    library = logging.getLogger("mqtemplate")
    before = library.level
    settings = {"rocketmq.name-server": "embedded:memory", **keys}
    starters = [EmbeddedAutoConfiguration, LoggingAutoConfiguration]
    library.setLevel(logging.INFO)
    try:
        MQApplication(settings=settings, environment={}, starters=starters).run(main)
    finally:
        library.setLevel(before)


def test_the_starter_does_not_act_in_a_program_that_has_configured_logging() -> None:
    with start() as app:  # pytest has
        assert reason_of(app) == "the program has configured logging itself"


def test_the_starter_can_be_switched_off() -> None:
    with start(**{"mqtemplate.logging.enabled": False}) as app:
        assert reason_of(app) == "mqtemplate.logging.enabled is false"


def test_the_library_itself_configures_nothing() -> None:
    before = configuration()

    AppSettings()

    assert configuration() == before


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="log_format must be 'console' or 'json', got 'xml'"):
        event_formatter("xml")
