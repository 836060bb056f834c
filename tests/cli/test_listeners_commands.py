"""``listeners``: the listeners of a running application; and the management port of ``broker``."""

from __future__ import annotations

import io
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate import MQApplication, message_listener
from tests.cli.running import CommandLine, Result
from tests.server.process import BrokerProcess
from tests.waiting import eventually

TOKEN = "t-0123456789abcde"


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


class Running:
    """A running application, and the command line for it."""

    def __init__(self, app: MQApplication, url: str, config: Path, line: CommandLine) -> None:
        self.app = app
        self.url = url
        self._config = config
        self._line = line

    def __call__(self, *arguments: str, url: str | None = None, token: str | None = TOKEN) -> Result:
        words = ["listeners", *arguments, "--config", str(self._config)]
        words += [] if arguments[0] == "--help" else ["--url", url or self.url]
        if token:
            file = self._config / "token"
            file.write_text(f"{token}\n", "utf-8")
            words += [] if arguments[0] == "--help" else ["--token-file", str(file)]
        return self._line.plain(*words)


@pytest.fixture
def running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    keys = {"enabled": True, "port": port, "token": TOKEN}
    settings = {"rocketmq.name-server": "embedded:memory"}
    settings |= {f"mqtemplate.management.{key}": value for key, value in keys.items()}
    (tmp_path / "config").mkdir()
    with MQApplication(bill, settings=settings) as app:
        line = CommandLine("", tmp_path / "config", capsys)
        yield Running(app, f"http://127.0.0.1:{port}", tmp_path / "config", line)


@pytest.mark.feature("14.1")
def test_listeners_are_listed_paused_and_resumed(running: Running) -> None:
    listed = running("ls")
    paused = running("pause", "bill")
    as_json = running("ls", "--json")
    resumed = running("resume", "bill")

    assert listed.output.splitlines()[0].split() == [
        "LISTENER",
        "GROUP",
        "TOPICS",
        "STATE",
        "THREADS",
        "IN",
        "FLIGHT",
        "HANGING",
        "LAG",
    ]
    assert listed.output.splitlines()[1].split() == ["bill", "billing", "orders", "running", "20", "0", "0", "0"]
    assert (paused.code, paused.output) == (0, "bill is paused; lag 0, in flight 0\n")
    assert [(each["id"], each["state"]) for each in json.loads(as_json.output)] == [("bill", "paused")]
    assert (resumed.code, resumed.output) == (0, "bill is running; lag 0, in flight 0\n")


@pytest.mark.feature("14.1")
def test_a_listener_is_repositioned(running: Running) -> None:
    for _ in range(3):
        running.app.template.sync_send("orders", "x", hash_key="same")
    [container] = running.app.containers
    eventually(lambda: sum(offset or 0 for offset in container.positions().values()) == 3, "all are committed")
    queue = next(str(queue.queue_id) for queue, offset in container.positions().items() if offset)
    running("pause", "bill")

    first = running("seek", "bill", "--to", "first")
    back = running("seek", "bill", "--back", "1h")
    one = running("seek", "bill", "--topic", "orders", "--queue", queue, "--offset", "2")
    latest = running("seek", "bill", "--to", "latest")

    lags = [re.findall(r"lag (\d+)", each.output) for each in (first, back, one, latest)]
    assert lags == [["3"], ["3"], ["1"], ["0"]]


@pytest.mark.feature("14.1")
def test_the_concurrency_of_a_listener_is_changed(running: Running) -> None:
    fewer = running("concurrency", "bill", "2")
    listed = json.loads(running("ls", "--json").output)
    too_many = running("concurrency", "bill", "65")
    none = running("concurrency", "bill", "0")
    no_number = running("concurrency", "bill", "many")

    assert (fewer.code, fewer.output) == (0, "bill is running; lag 0, in flight 0, 2 handlers at a time\n")
    assert [(each["threads"], each["maxThreads"]) for each in listed] == [(2, 64)]
    assert (too_many.code, none.code, no_number.code) == (1, 1, 2)
    assert "the concurrency of listener bill must be 1..64, its consume_thread_max, got 65" in too_many.errors


def test_the_address_and_the_token_are_those_of_the_configuration(running: Running, tmp_path: Path) -> None:
    port = running.url.rpartition(":")[2]
    text = f"mqtemplate: {{management: {{enabled: true, port: {port}, token: {TOKEN}}}}}"
    (tmp_path / "config" / "application.yml").write_text(text)

    result = running._line.plain("listeners", "pause", "bill", "--config", str(tmp_path / "config"))

    assert (result.code, result.output) == (0, "bill is paused; lag 0, in flight 0\n")


def test_errors_name_the_cause(running: Running) -> None:
    unknown = running("pause", "mail")
    no_token = running("pause", "bill", token=None)
    wrong = running("pause", "bill", token="t-other-0123456789")
    no_place = running("seek", "bill")
    not_there = running("ls", url="http://127.0.0.1:1")
    no_url = running("ls", url="shop:9090")

    assert (unknown.code, unknown.errors) == (3, "error: there is no listener 'mail'; there is: bill\n")
    assert (no_token.code, wrong.code) == (1, 1)
    assert "Authorization: Bearer" in wrong.errors
    assert (no_place.code, "seek needs one of" in no_place.errors) == (1, True)
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
def test_a_server_has_health_and_metrics_on_its_management_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = f"mqtemplate: {{management: {{enabled: true, port: {port}}}}}"
    (tmp_path / "application.yml").write_text(text)
    with BrokerProcess(tmp_path, "--config", str(tmp_path)):

        def get(path: str) -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/actuator/{path}", timeout=30) as answer:
                return bytes(answer.read())

        health, metrics = json.loads(get("health")), get("prometheus")

    assert health["status"] == "UP"
    assert {"broker", "flush", "diskSpace"} == health["components"].keys()
    assert b"mqtemplate_server_connections" in metrics
    assert b"mqtemplate_server_requests_total" in metrics
