"""``listeners`` and ``schedules`` of a running application; and the management port of ``broker``."""

from __future__ import annotations

import io
import json
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from mqtemplate import MQApplication, message_listener
from mqtemplate.cli.commands import console as _commands  # noqa: F401 - it adds its commands to the program
from mqtemplate.cli.invocation import TOP
from mqtemplate.message import MessageQueue
from mqtemplate.scheduling import scheduled
from tests.cli.operator import Operator
from tests.cli.running import CommandLine, Result
from tests.golden import check_script, scripts_in
from tests.server.process import BrokerProcess
from tests.waiting import PATIENCE_S, eventually

TOKEN = "t-0123456789abcde"
SCRIPTS = scripts_in(Path(__file__).parent / "application_scripts")
runs: list[str] = []


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


@scheduled(every="1h", name="report")
def report() -> None:
    runs.append("report")


class Running(Operator):
    """A running application, and the command line for it."""

    def __init__(self, app: MQApplication, url: str, config: Path, line: CommandLine) -> None:
        super().__init__(self._of_application)
        self.app = app
        self.url = url
        self._config = config
        self._line = line
        self._names: dict[str, str] = {}

    def __call__(self, *arguments: str, url: str | None = None, token: str | None = TOKEN) -> Result:
        return self._of_application("listeners", *arguments, url=url, token=token)

    def _of_application(self, *arguments: str, url: str | None = None, token: str | None = TOKEN) -> Result:
        words = [*arguments, "--config", str(self._config), "--url", url or self.url]
        if token:
            file = self._config / "token"
            file.write_text(f"{token}\n", "utf-8")
            words += ["--token-file", str(file)]
        return self._line.plain(*words)

    def _named(self, word: str) -> str:
        return self._names.get(word) or super()._named(word)

    def send(self, count: str) -> None:
        """Send messages to one queue of the listener, ``@queue``, and wait until they are handled."""
        for _ in range(int(count)):
            self.app.template.sync_send("orders", "x", hash_key="same")
        eventually(lambda: sum(at or 0 for at in self._positions().values()) == int(count), "all are committed")
        self._names["@queue"] = next(str(queue.queue_id) for queue, at in self._positions().items() if at)

    def _positions(self) -> Mapping[MessageQueue, int | None]:
        return next(each for each in self.app.containers if each.endpoint.id == "bill").positions()

    def wait_for_run(self) -> None:
        """Wait until the schedule has run."""
        eventually(lambda: runs == ["report"], "the schedule has run")


@pytest.fixture
def running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Running]:
    runs.clear()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    keys = {"enabled": True, "port": port, "token": TOKEN}
    settings = {"rocketmq.name-server": "embedded:memory"}
    settings |= {f"mqtemplate.management.{key}": value for key, value in keys.items()}
    (tmp_path / "config").mkdir()
    with MQApplication(bill, report, settings=settings) as app:
        line = CommandLine("", tmp_path / "config", capsys)
        yield Running(app, f"http://127.0.0.1:{port}", tmp_path / "config", line)


@pytest.mark.feature("14.1")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_commands_write_what_the_script_says(running: Running, script: Path) -> None:
    check_script(script, running)


def test_the_address_and_the_token_are_those_of_the_configuration(running: Running, tmp_path: Path) -> None:
    port = running.url.rpartition(":")[2]
    text = f"mqtemplate: {{management: {{enabled: true, port: {port}, token: {TOKEN}}}}}"
    (tmp_path / "config" / "application.yml").write_text(text)

    result = running._line.plain("listeners", "pause", "bill", "--config", str(tmp_path / "config"))

    assert (result.code, result.output) == (0, "bill is paused; lag 0, in flight 0\n")


def test_listeners_and_groups_are_completed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that does not answer has no names, and there is no error."""
    monkeypatch.setattr("mqtemplate.cli.invocation._COMPLETION_S", PATIENCE_S)
    command = get_command(TOP).commands["listeners"].commands["pause"]  # type: ignore[attr-defined]
    by_name = {each.name: each for each in command.params}
    (running._config / "token").write_text(TOKEN, "utf-8")

    def complete(parameter: str, begin: str, url: str) -> list[str]:
        context = typer.Context(command)
        context.params = {"url": url, "token_file": running._config / "token", "config": str(running._config)}
        return [each.value for each in by_name[parameter].shell_complete(context, begin)]

    assert complete("listener", "b", running.url) == ["bill"]
    assert complete("group", "", running.url) == ["billing", "mqtemplate-schedules-report"]
    assert complete("group", "", "http://127.0.0.1:1") == []


def test_errors_name_the_cause(running: Running) -> None:
    no_token = running("pause", "bill", token=None)
    wrong = running("pause", "bill", token="t-other-0123456789")
    not_there = running("ls", url="http://127.0.0.1:1")
    no_url = running("ls", url="shop:9090")

    assert (no_token.code, wrong.code) == (1, 1)
    assert "Authorization: Bearer" in wrong.errors
    assert (not_there.code, "no actuator answers at http://127.0.0.1:1/actuator" in not_there.errors) == (1, True)
    assert (no_url.code, "must be http://host:port" in no_url.errors) == (2, True)


def test_the_token_comes_from_a_file_standard_input_or_the_environment(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ls(*arguments: str) -> Result:
        return running("ls", *arguments, token=None)

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
    piped = ls("--token-file", "-")
    missing = ls("--token-file", str(tmp_path / "nothing"))
    (tmp_path / "empty").write_text(" \n", "utf-8")
    empty = ls("--token-file", str(tmp_path / "empty"))
    without = ls()
    monkeypatch.setenv("MQTEMPLATE_MANAGEMENT_TOKEN", TOKEN)
    of_environment = ls()

    assert (piped.code, of_environment.code) == (0, 0)
    assert (missing.code, "the token cannot be read from" in missing.errors) == (1, True)
    assert (empty.code, "empty contains no token; write the value of" in empty.errors) == (1, True)
    assert (without.code, "reading listeners needs the header" in without.errors) == (1, True)


def test_a_token_among_the_arguments_is_refused(running: Running) -> None:
    """All users of the machine see them."""
    result = running("pause", "bill", "--token", TOKEN, token=None)

    assert result.code == 2
    assert "give --token-file FILE, or set MQTEMPLATE_MANAGEMENT_TOKEN" in " ".join(result.errors.split())
    assert TOKEN not in result.errors


def test_without_an_address_the_command_names_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = CommandLine("", tmp_path, capsys).plain("listeners", "ls", "--config", str(tmp_path))

    assert result.code == 1
    assert "give --url http://host:port, or set mqtemplate.management.port" in result.errors


@pytest.mark.feature("14.3")
def test_a_server_has_health_and_metrics_on_its_management_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An application with the same ``application.yml`` shares the port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = f"mqtemplate: {{management: {{enabled: true, port: {port}, token: {TOKEN}}}}}"
    (tmp_path / "application.yml").write_text(text)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with BrokerProcess(tmp_path, "--config", str(tmp_path)) as broker:

        def get(path: str) -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/actuator/{path}", timeout=30) as answer:
                return bytes(answer.read())

        health, metrics = json.loads(get("health")), get("prometheus")
        with MQApplication(bill, config_folder=tmp_path, settings={"rocketmq.name-server": str(broker.name_server)}):
            both = json.loads(get("health/workers"))
            paused = CommandLine("", tmp_path, capsys).plain("listeners", "pause", "bill", "--config", str(tmp_path))

    assert both["components"] == {"1": {"status": "UP"}, "broker": {"status": "UP"}}
    assert paused.output == "bill is paused in worker 1; lag 0, in flight 0\n"
    assert health["status"] == "UP"
    assert {"broker", "flush", "diskSpace", "retention"} == health["components"].keys()
    assert b"mqtemplate_server_connections" in metrics
    assert b"mqtemplate_server_requests_total" in metrics
