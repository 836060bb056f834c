"""The report of a failed start: what, where, what to do, exit code 1, and no traceback."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from mqtemplate.context import MQApplication, service
from mqtemplate.context.failure_report import failure_report, without_library_frames
from mqtemplate.errors import ConfigurationError, DependencyError, StoreFullError
from tests.programs import run_python


def run_program(folder: Path, text: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user does: a file in a folder with its application.yml."""
    (folder / "app.py").write_text(dedent(text))
    return run_python(folder, "app.py", *options, **variables)


def test_run_reports_a_wrong_configuration_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_text("rocketmq:\n  name-server: embedded:memory\n  name-servre: x\n")

    ended = run_program(tmp_path, "from mqtemplate import MQApplication\nMQApplication().run()\n")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.strip().splitlines() == [
        "***************************",
        "APPLICATION FAILED TO START",
        "***************************",
        "",
        "What        ConfigurationError: configuration is not usable: 1 problem",
        "              application.yml:3: rocketmq.name-servre: no such key; did you mean 'rocketmq.name-server'?",
        f"Where       {tmp_path / 'application.yml'}, line 3",
        "What to do  correct it there; docs/configuration.md lists every key",
        "",
        "MQTEMPLATE_DEBUG=1 or --debug shows the traceback.",
    ]


LISTENER = """
    from mqtemplate import MQApplication, message_listener

    @message_listener("orders", "billing")
    def on_order(order):
        pass

    MQApplication(on_order, settings={"rocketmq.name-server": "embedded:memory"}).run()
    """


def test_run_reports_a_wrong_listener_with_the_place_of_its_definition(tmp_path: Path) -> None:
    ended = run_program(tmp_path, LISTENER)

    assert ended.returncode == 1
    assert "on_order: parameter 'order' has no type\nWhere" in ended.stderr
    assert f"Where       {tmp_path / 'app.py'}, line 4\n" in ended.stderr
    assert "What to do  annotate it with the type to convert the body to" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("options", "variables"), [(["--debug"], {}), ([], {"MQTEMPLATE_DEBUG": "1"})])
def test_the_traceback_is_shown_on_request(tmp_path: Path, options: list[str], variables: dict[str, str]) -> None:
    ended = run_program(tmp_path, LISTENER, *options, **variables)

    assert ended.returncode == 1
    assert "Traceback (most recent call last)" in ended.stderr
    assert "APPLICATION FAILED TO START" not in ended.stderr


def test_the_exception_of_a_service_is_reported_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Service:
        def on_start(self) -> None:
            raise LookupError("no stock")

    with pytest.raises(SystemExit) as ended:
        MQApplication(Service, settings={"rocketmq.name-server": "embedded:memory"}, environment={}).run()

    assert ended.value.code == 1
    line = Service.on_start.__code__.co_firstlineno + 1
    report = capsys.readouterr().err
    assert f"What        LookupError: no stock\nWhere       {__file__}, line {line}\n" in report


def test_a_program_with_an_async_main_gets_the_same_report(tmp_path: Path) -> None:
    """The start runs on the event loop there; its error ends the process as quietly."""
    wrong = """
        from mqtemplate import MQApplication, service

        @service
        class Bank:
            async def on_start(self):
                raise ConnectionError("the bank does not answer")

        async def main() -> None: ...

        MQApplication(Bank, settings={"rocketmq.name-server": "embedded:memory"}).run(main)
        """
    ended = run_program(tmp_path, wrong)

    assert ended.returncode == 1
    assert "APPLICATION FAILED TO START" in ended.stderr
    assert "What        ConnectionError: the bank does not answer\n" in ended.stderr
    assert f"Where       {tmp_path / 'app.py'}, line 7\n" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "never retrieved" not in ended.stderr


def test_an_invalid_application_can_be_stopped() -> None:
    """As one that was never started: a program may stop it in a finally clause."""
    app = MQApplication("no_such_module", settings={"rocketmq.name-server": "embedded:memory"})

    app.stop()
    asyncio.run(app.stop_async())

    with pytest.raises(DependencyError, match="there is no module of that name"):
        app.start()


def test_a_failure_of_main_is_no_failed_start() -> None:
    def main() -> None:
        raise LookupError("no stock")

    with pytest.raises(LookupError):
        MQApplication(settings={"rocketmq.name-server": "embedded:memory"}, environment={}).run(main)


def test_a_programmatic_start_raises_the_error_itself() -> None:
    app = MQApplication(settings={"rocketmq.nmae": "x"}, environment={})

    assert "invalid: configuration is not usable" in repr(app)
    for use in (app.start, app.__enter__, lambda: app.settings, lambda: app.context):
        with pytest.raises(ConfigurationError, match="rocketmq.nmae: no such key"):
            use()
    with pytest.raises(AttributeError, match="'MQApplication' object has no attribute 'setings'"):
        _ = app.setings  # type: ignore[attr-defined]


FAILING = """
    from mqtemplate import MQApplication, message_listener, service

    @service
    class Stock:
        def __init__(self):
            self.count = read()

    def read():
        raise ValueError("no stock")

    app = MQApplication(Stock, settings={"rocketmq.name-server": "embedded:memory"})
    with app:
        pass
    """


def test_a_start_outside_of_run_shows_the_reason_first_and_the_application_s_own_lines(tmp_path: Path) -> None:
    """The traceback has no line of this library but those that the application calls."""
    done = run_program(tmp_path, FAILING)

    first, *others = done.stderr.splitlines()
    files = [line for line in others if line.startswith('  File "')]
    assert first.startswith("application.start_failed error=DependencyError reason='Stock could not be built: ")
    assert "ValueError: no stock" in others
    assert [line.rpartition(" in ")[2] for line in files] == ["__init__", "read", "<module>", "__enter__", "start"]
    assert others[-1] == "mqtemplate.errors.DependencyError: Stock could not be built: ValueError: no stock"


def test_the_whole_traceback_of_a_start_is_shown_on_request(tmp_path: Path) -> None:
    done = run_program(tmp_path, FAILING, MQTEMPLATE_DEBUG="1")

    assert "in configure_and_link" in done.stderr or "in open_all" in done.stderr


def test_exceptions_that_are_linked_in_a_circle_are_shortened() -> None:
    first, second = DependencyError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    assert without_library_frames(first) is first


@service
class Needy:
    def __init__(self, audit: Path) -> None: ...


def test_a_missing_dependency_points_to_the_class_that_needs_it() -> None:
    with pytest.raises(DependencyError) as raised:
        MQApplication(Needy, settings={"rocketmq.name-server": "embedded:memory"}, environment={}).start()

    assert raised.value.source is not None
    assert raised.value.source.startswith(f"{__file__}, line ")
    assert raised.value.source in failure_report(raised.value)


def test_the_advice_of_an_error_is_its_end() -> None:
    report = failure_report(StoreFullError("no room on the disk; free space there"))

    assert "What        StoreFullError: no room on the disk\n" in report
    assert "What to do  free space there\n" in report
