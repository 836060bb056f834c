"""``schedules``: the schedules of a running application."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate import MQApplication
from mqtemplate.scheduling import scheduled
from tests.cli.running import CommandLine, Result
from tests.waiting import eventually

runs: list[str] = []


@scheduled(every="1h", name="report")
def report() -> None:
    runs.append("report")


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    management = f"{{enabled: true, port: {port}, token: t-0123456789abcde}}"
    (tmp_path / "application.yml").write_text(f"mqtemplate: {{management: {management}}}")
    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.management.enabled": True}
    settings |= {"mqtemplate.management.port": port, "mqtemplate.management.token": "t-0123456789abcde"}
    line = CommandLine("", tmp_path, capsys)
    with MQApplication(report, settings=settings):
        yield lambda *words: line.plain("schedules", *words, "--config", str(tmp_path))


@pytest.mark.feature("14.1")
def test_schedules_are_listed_paused_and_resumed(run: Run) -> None:
    listed = run("ls")
    paused = run("pause", "report")
    until = run("pause", "report", "--until", "2999-01-01T00:00:00+00:00")
    resumed = run("resume", "report", "--json")

    assert listed.output.splitlines()[0].split() == ["SCHEDULE", "TRIGGER", "NEXT", "RUN", "STATE"]
    assert listed.output.splitlines()[1].startswith("report    every 1h")
    assert "active" in listed.output
    assert paused.output.startswith("report is paused; next run 20")
    assert until.output.startswith("report is paused until 2999-01-01T00:00:00+00:00; next run 20")
    assert (resumed.json["name"], resumed.json["paused"]) == ("report", False)


@pytest.mark.feature("14.1")
def test_a_schedule_is_run_now(run: Run) -> None:
    runs.clear()

    result = run("trigger", "report")

    assert result.code == 0
    eventually(lambda: runs == ["report"], "the schedule has run")


def test_an_unknown_schedule_is_named(run: Run) -> None:
    result = run("pause", "reports")

    assert (result.code, result.errors) == (1, "error: there is no schedule 'reports'; did you mean 'report'?\n")
