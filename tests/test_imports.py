"""Weight of a program: which modules the library imports before something needs them.

A process of its own imports or runs something and prints the names of its modules. No time is measured:
`bench/import_time.py` and `bench/first_message.py` do that.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from tests.programs import run_python

NEVER = (
    # for a terminal, and what it brings: structlog loads it if it is installed
    "attr",
    "pygments",
    "rich",
    "structlog",
    "typer",
    # the metadata of a distribution, with its whole README, which only the error of a starter needs
    "email.feedparser",
    # for features that few applications have
    "cronsim",
    "lark",
    "http.server",
    "jinja2",
    "pyspark",
    "sqlalchemy",
    "django",
    "fastapi",
    "flask",
    "celery",
    "prometheus_client",
    "opentelemetry",
    "mqtemplate.brokers.remote.broker",
    "mqtemplate.cli",
    "mqtemplate.console",
    "mqtemplate.http.exchange",
    "mqtemplate.outbox",
    "mqtemplate.remoting.protocol",
    "mqtemplate.remoting.sockets",
    "mqtemplate.server.broker_server",
    "mqtemplate.spark.driver",
    "mqtemplate.testing",
)
"""Modules that an embedded application without these features does not have."""

BEFORE_CREATION = (
    "dependency_injector",
    "numpy",
    "yaml",
    "mqtemplate.context.phases",
    "mqtemplate.engine.engine",
    "mqtemplate.listener.container.container",
    "mqtemplate.template",
)
"""Modules that only an `MQApplication` needs that exists."""

IMPORTS = {
    # program -> modules that it must not have, and the most modules of the library that it may have
    "import mqtemplate": (*NEVER, *BEFORE_CREATION, "asyncio", "pydantic", "mqtemplate.context"),
    "from mqtemplate import MQApplication": (*NEVER, *BEFORE_CREATION, "pydantic", "mqtemplate.context.settings"),
    "from mqtemplate import message_listener": (*NEVER, *BEFORE_CREATION, "asyncio", "pydantic"),
}
MOST_OF_THE_LIBRARY = {
    "import mqtemplate": 3,
    "from mqtemplate import MQApplication": 40,
    "from mqtemplate import message_listener": 40,
}
MOST_UNTIL_A_MESSAGE = 216

OF_AN_APPLICATION = ("dependency_injector", "mqtemplate.context.application", "mqtemplate.listener.container")
"""Modules of programs with listeners and injection."""
OF_CONNECTIONS = ("mqtemplate.brokers.remote.broker", "mqtemplate.remoting.protocol", "mqtemplate.server.broker_server")
"""Modules of programs that talk to others."""
WHEN_IT_RUNS = (
    "email.feedparser",
    "http.client",
    "importlib.metadata",
    "jinja2",
    "numpy",
    "pydantic",
    "rich",
    "structlog",
    "yaml",
    "mqtemplate.brokers",
    "mqtemplate.context.settings",
    "mqtemplate.listener",
    "mqtemplate.operations",
)
"""Modules that commands import when they run. The help imports the modules of all commands."""
COMMANDS = {
    "help": (("--help",), (*OF_AN_APPLICATION, *OF_CONNECTIONS, *WHEN_IT_RUNS), 50),
    "a command for a directory": (
        ("delayed", "ls", "--name-server", "embedded:{store}"),
        (*OF_AN_APPLICATION, *OF_CONNECTIONS, "rich", "structlog"),
        185,
    ),
    "a broker": (
        ("broker", "--store", "{store}", "--listen", "127.0.0.1:0", "--name-server", "none"),
        (*OF_AN_APPLICATION, "mqtemplate.brokers.remote.broker", "mqtemplate.grpc_protos", "mqtemplate.template"),
        242,
    ),
}
"""Words of a command, modules that it must not have, and the most modules of the library that it may have."""

_COMMAND = """
import contextlib, io, signal, sys
from mqtemplate.cli.main import main

class Output(io.StringIO):
    def write(self, text):
        if "press Ctrl-C to stop" in text:  # the broker listens
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)

with contextlib.redirect_stdout(Output()):
    code = main({words!r})
assert code == 0, code
"""

FIRST_MESSAGE = """
import threading
from mqtemplate import MQApplication, message_listener

handled = threading.Event()

@message_listener("orders", "billing")
def bill(body: str) -> None:
    handled.set()

with MQApplication(bill, settings={"rocketmq.name-server": "embedded:memory"}) as app:
    app.template.sync_send("orders", "o-1")
    assert handled.wait(30)
"""


@cache
def modules_after(program: str) -> frozenset[str]:
    """Return the names of the modules that a process has after a program."""
    result = run_python(Path("/"), "-c", f"{program}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")
    assert result.returncode == 0, result.stderr
    return frozenset(json.loads(result.stdout))


def of_the_library(modules: frozenset[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "mqtemplate")


@pytest.mark.parametrize("program", IMPORTS)
def test_an_import_loads_nothing_that_it_does_not_need(program: str) -> None:
    modules = modules_after(program)

    assert modules.isdisjoint(IMPORTS[program]), sorted(modules & set(IMPORTS[program]))
    assert len(of_the_library(modules)) <= MOST_OF_THE_LIBRARY[program], of_the_library(modules)


def test_an_embedded_application_delivers_a_message_without_the_parts_that_it_does_not_use() -> None:
    modules = modules_after(FIRST_MESSAGE)

    assert modules.isdisjoint(NEVER), sorted(modules & set(NEVER))
    assert len(of_the_library(modules)) <= MOST_UNTIL_A_MESSAGE, of_the_library(modules)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_nothing_that_it_does_not_need(name: str, tmp_path: Path) -> None:
    words, missing, most = COMMANDS[name]
    with EmbeddedBroker(tmp_path / "store"):
        pass

    modules = modules_after(_COMMAND.format(words=[word.format(store=tmp_path / "store") for word in words]))

    assert modules.isdisjoint(missing), sorted(modules & set(missing))
    assert len(of_the_library(modules)) <= most, of_the_library(modules)


def test_the_end_of_a_command_collects_no_garbage_among_its_modules() -> None:
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); from mqtemplate.cli import main"
    )

    of_a_process = run_python(Path("/"), "-c", f"{program}; main()", "--version")
    of_a_caller = run_python(Path("/"), "-c", f"{program}; main(['--version'])")

    assert int(of_a_process.stdout.split()[-1]) > 10_000, of_a_process
    assert int(of_a_caller.stdout.split()[-1]) == 0, of_a_caller


def test_the_names_in_the_lists_are_modules() -> None:
    """A module that was renamed would never be found among the loaded ones."""
    of_commands = [name for _, missing, _ in COMMANDS.values() for name in missing]
    names = {name for name in (*NEVER, *BEFORE_CREATION, *of_commands) if name.startswith("mqtemplate.")}
    root = Path(__file__).parents[1]

    for name in names:
        path = root.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_only_the_settings_as_a_whole_have_a_validator() -> None:
    """A validator for each section too would be built at each start, and used by nothing."""
    program = """
from mqtemplate import load_settings
from mqtemplate.context.settings import app, broker, rocketmq

settings = load_settings(environment={}, arguments={"rocketmq.producer.group": "shop"})
assert settings.rocketmq.producer.group == "shop"
sections = [app.MQTemplateSettings, broker.BrokerSettings, broker.ServerSettings, rocketmq.RocketMQSettings]
assert app.AppSettings.__pydantic_complete__
assert not any(each.__pydantic_complete__ for each in sections), sections
"""
    assert modules_after(program)
