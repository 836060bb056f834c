"""Commands in this process, and brokers for them: a store directory, and a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker
from mqtemplate.cli import main
from tests.operations.brokers import create_dead_letters, fill, server


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    output: str
    errors: str

    @property
    def json(self) -> Any:
        """The output as JSON."""
        return json.loads(self.output)

    @property
    def json_lines(self) -> list[Any]:
        """Each line of the output as JSON."""
        return [json.loads(line) for line in self.output.splitlines()]


class CommandLine:
    """Runs commands on one broker.

    Attributes:
        name_server: Value of ``--name-server``.
        config: Value of ``--config``.
    """

    def __init__(self, name_server: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.name_server = name_server
        self.config = config
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        return self.plain(*arguments, "--name-server", self.name_server, "--config", str(self.config))

    def plain(self, *arguments: str) -> Result:
        """Run a command without the common options."""
        self._capsys.readouterr()
        code = main(arguments)
        output, errors = self._capsys.readouterr()
        return Result(code, output, errors)

    def ok(self, *arguments: str) -> Result:
        """Run a command that succeeds."""
        result = self(*arguments)
        assert result.code == 0, result
        return result

    def json(self, *arguments: str) -> Any:
        """Run a command that succeeds with ``--json``, and return its document."""
        return self.ok(*arguments, "--json").json


@contextmanager
def place(kind: str, folder: Path, prepare: Callable[[Broker], None]) -> Iterator[str]:
    """Prepare a broker, and yield the value of ``--name-server`` for it."""
    if kind == "folder":
        with EmbeddedBroker(folder / "store") as owner:
            prepare(owner)
        yield f"embedded:{folder / 'store'}"
        return
    with server(folder) as settings:
        with RemoteBroker(settings) as client:
            prepare(client)
        yield settings.name_servers[0]


PATIENT = """
rocketmq: {producer: {send-message-timeout: 10m}}
mqtemplate: {cluster: {request-timeout-ms: 10m}}
"""
"""Configuration of commands that do not fail because the machine or its disk is slow: the default is 3 s."""


def prepare(broker: Broker) -> None:
    """Fill a broker for the tests of this folder."""
    fill(broker)
    create_dead_letters(broker)
