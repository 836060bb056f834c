"""``mqtemplate run``: what it checks before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.cli.commands.run import _management
from mqtemplate.context.settings.source import PROCESS, CommandLine, load_settings
from mqtemplate.errors import ConfigurationError
from tests.cli.running import CommandLine as Cli
from tests.cli.running import Result
from tests.programs import run_python

OBSERVED = {"mqtemplate.management.enabled": True, "mqtemplate.management.port": 9090}

APP = """
from mqtemplate import MQApplication, message_listener, service

@service
class Database:
    started = False

    def on_start(self) -> None:
        raise OSError("started")

@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...

@message_listener(topic="orders", consumer_group="shipping")
def ship(order: str) -> None: ...

app = MQApplication(__name__)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the program ``shop``; its module and its options are forgotten at the end."""
    (tmp_path / "shop.py").write_text(APP, "utf-8")
    (tmp_path / "application.yml").write_text("rocketmq: {name-server: 'embedded:./store'}", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shop", None)
    PROCESS.given = CommandLine()


@pytest.fixture
def run(shop: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli("", shop, capsys)


def check(run: Cli, *arguments: str) -> Result:
    return run.plain("run", *arguments, "--check")


def test_check_builds_everything_and_starts_nothing(run: Cli, shop: Path) -> None:
    result = check(run, "shop:app")

    text = (
        "shop:app is valid: listeners shop.bill, shop.ship; objects: 2; broker: embedded:./store; nothing was started"
    )
    assert (result.code, result.output) == (0, f"{text}\n")
    assert not (shop / "store").exists()


def test_check_reports_an_invalid_listener_with_its_place(run: Cli, shop: Path) -> None:
    (shop / "shop.py").write_text(APP.replace("order: str", "order", 1), "utf-8")

    result = check(run, "shop:app")

    assert result.code == 1
    assert "ListenerError: listener shop.bill: parameter 'order' has no type" in result.errors
    assert f"{shop / 'shop.py'}, line" in result.errors


def test_workers_without_a_folder_to_find_each_other_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqtemplate.console.group.private_folder", lambda: None)
    settings = load_settings(tmp_path, environment={}, arguments=OBSERVED)

    with (
        pytest.raises(ConfigurationError, match="neither XDG_RUNTIME_DIR nor the temporary folder can be used; set TM"),
        _management(settings, None, lambda: {"1": None, "2": None}),
    ):
        pass


def test_a_single_worker_serves_its_management_itself(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, environment={}, arguments=OBSERVED)

    with _management(settings, None, lambda: {"1": None}) as folder:
        assert folder is None


def test_listeners_selects_by_the_last_parts_of_ids(run: Cli) -> None:
    assert "listener shop.ship;" in check(run, "shop", "--listeners", "ship").output


def test_an_unknown_listener_is_an_error_that_lists_the_others(run: Cli) -> None:
    result = check(run, "shop", "--listeners", "bill,pack")

    assert result.code == 1
    assert (
        "mqtemplate.listener.only selects 'pack', and no listener is called that (there is: shop.bill, shop.ship)"
        in result.errors
    )


def test_options_win_over_the_program(run: Cli, shop: Path) -> None:
    """Files for a profile and variables of a file are in force when the program is imported."""
    (shop / "application-prod.yml").write_text("rocketmq: {producer: {group: from-profile}}", "utf-8")
    (shop / "prod.env").write_text("ROCKETMQ_PRODUCER_RETRY_TIMES_WHEN_SEND_FAILED=7\n", "utf-8")
    text = APP.replace("(__name__)", "(__name__, settings={'rocketmq.name-server': 'embedded:./other'})")
    (shop / "shop.py").write_text(text, "utf-8")

    result = check(run, "shop:app", "--profile", "prod", "--env-file", "prod.env", "--name-server", "embedded:./given")

    settings = sys.modules["shop"].app.settings
    assert "broker: embedded:./given" in result.output, result
    assert settings.rocketmq.producer.group == "from-profile"
    assert settings.rocketmq.producer.retry_times_when_send_failed == 7


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("shoop:app", "there is no module 'shoop' in "),
        ("shoop:app", "did you mean 'shop'?"),
        ("shop:ap", "'shop:ap': shop has no attribute 'ap' (there is: app)\nWhere"),
        ("shop:ap", "did you mean 'shop:app'?"),
        ("shop:bill.x", "'shop:bill.x': shop has no attribute 'bill.x'"),
        ("shop:__name__", "shop:__name__ is a str, which has no messages"),
        ("shop:", "'shop:' names no application"),
        ("shop:Database.on_start", "shop:Database.on_start is a function that needs arguments"),
    ],
)
def test_a_target_that_is_no_application_is_an_error(run: Cli, target: str, text: str) -> None:
    result = check(run, target)

    assert result.code == 1
    assert text in result.errors


def test_a_module_with_two_applications_needs_a_name(run: Cli, shop: Path) -> None:
    (shop / "shop.py").write_text(APP + "other = MQApplication(__name__)\n", "utf-8")

    errors = check(run, "shop").errors

    assert "shop has several applications: app, other" in errors
    assert "What to do  name one, as shop:app" in errors


def test_the_messages_of_a_web_application_are_found_in_their_module(run: Cli, shop: Path) -> None:
    text = APP.replace(
        "app = MQApplication(__name__)",
        "from mqtemplate_starter_fastapi import MQTemplate\nmessages = MQTemplate(bill)",
    )
    (shop / "shop.py").write_text(text, "utf-8")

    assert "shop is valid: listener shop.bill;" in check(run, "shop").output
    assert "did you mean 'shop:messages'?" in check(run, "shop:mesages").errors


def test_a_function_may_return_the_application(run: Cli, shop: Path) -> None:
    (shop / "shop.py").write_text(APP + "def create(): return app\n", "utf-8")

    assert check(run, "shop:create").code == 0


def test_a_function_that_returns_something_else_is_an_error(run: Cli, shop: Path) -> None:
    """A web application without messages is recognised by being callable."""
    (shop / "shop.py").write_text(APP + "def create(): return print\n", "utf-8")

    errors = check(run, "shop:create").errors

    assert "shop:create() returned a builtin_function_or_method (a web application runs in its own server" in errors


def test_a_program_that_would_ignore_the_given_broker_is_an_error(run: Cli, shop: Path) -> None:
    """Finished settings read neither files nor options."""
    text = APP.replace("(__name__)", "(__name__, settings=AppSettings(rocketmq={'name_server': 'embedded:memory'}))")
    (shop / "shop.py").write_text(text.replace("import MQApplication", "import AppSettings, MQApplication"), "utf-8")

    errors = check(run, "shop:app", "--name-server", "127.0.0.1:9876").errors

    assert "it would use the broker 'embedded:memory' and not '127.0.0.1:9876'" in errors
    assert "What to do  create it with load_settings(...), or from application.yml" in errors


def test_reload_without_watchfiles_names_the_package(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)

    errors = run.plain("run", "shop:app", "--reload").errors

    assert "--reload needs watchfiles, which is not installed" in errors
    assert 'What to do  pip install "watchfiles>=0.21"' in errors


def test_workers_cannot_share_a_store_in_memory(run: Cli) -> None:
    result = run.plain("run", "shop:app", "--workers", "2", "--name-server", "embedded:memory")

    assert result.code == 1
    assert "2 worker processes cannot share the memory of one" in result.errors


def test_there_is_one_worker_at_least(run: Cli) -> None:
    assert "--workers must be 1 or more, got 0" in run.plain("run", "shop:app", "--workers", "0").errors


def test_the_stop_timeout_is_a_duration(run: Cli) -> None:
    result = check(run, "shop:app", "--stop-timeout", "soon")

    assert result.code == 2
    assert "it must be a duration: '3h', '1h 30m', '250ms'" in " ".join(result.errors.replace("│", " ").split())


def test_a_stop_timeout_without_a_unit_is_seconds_and_says_so(run: Cli) -> None:
    result = check(run, "shop:app", "--stop-timeout", "90")

    assert result.code == 0
    assert result.errors == "--stop-timeout 90 has no unit and is read as 90 seconds; write --stop-timeout 90s\n"


def test_a_folder_to_watch_must_exist(run: Cli) -> None:
    result = run.plain("run", "shop:app", "--reload", "--reload-dir", "nowhere")

    assert "nowhere is not a folder" in result.errors
    assert "What to do  give one with source files" in result.errors


def test_check_imports_neither_spark_nor_a_web_framework_nor_the_client_of_a_cluster(shop: Path) -> None:
    """dependency-injector's containers would import FastAPI and Flask where they are installed."""
    program = (
        "import sys; from mqtemplate.cli import main; main(['run', 'shop:app', '--check']); "
        "names = ('pyspark', 'pandas', 'pyarrow', 'django', 'fastapi', 'starlette', 'flask', 'werkzeug', 'watchfiles', "
        "'opentelemetry', 'mqtemplate.spark', 'mqtemplate.brokers.remote.broker', 'mqtemplate.console.actuator'); "
        "print([name for name in names if name in sys.modules])"
    )

    done = run_python(shop, "-c", program)

    assert done.stdout.splitlines()[-1] == "[]"
