"""The program as a whole: help, completion, exit codes, signals, closed pipes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.cli import main
from mqtemplate.cli.invocation import TOP
from mqtemplate.cli.main import _COMMANDS
from mqtemplate.cli.output import ExitCode
from mqtemplate.message import Message
from tests.cli.running import CommandLine, prepare
from tests.programs import finish
from tests.waiting import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = [
    *("broker", "capabilities", "send", "tail", "messages", "groups", "beans", "conditions", "bench"),
    *("doctor", "simulate", "offsets show", "offsets reset", "offsets forget", "config show"),
    *(f"topics {verb}" for verb in ("ls", "create", "delete")),
    *(f"delayed {verb}" for verb in ("ls", "show", "cancel", "reschedule", "purge", "histogram")),
    *(f"dlq {verb}" for verb in ("ls", "show", "diff", "edit", "resend", "purge")),
]


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "mqtemplate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with EmbeddedBroker(tmp_path / "store") as owner:
        prepare(owner)
    return tmp_path / "store"


# --- help ---------------------------------------------------------------------------------------


def test_each_command_is_found_in_the_module_that_adds_it() -> None:
    for module in set(_COMMANDS.values()):
        import_module(f"mqtemplate.cli.commands.{module}")
    groups = {group.name: group.typer_instance.registered_commands[0] for group in TOP.registered_groups}
    added = groups | {each.name: each for each in TOP.registered_commands}

    assert {name: each.callback.__module__.rpartition(".")[2] for name, each in added.items()} == _COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*command.split(), "--help"])

    text = capsys.readouterr().out
    assert code == 0
    assert re.search(rf"Examples:\n +mqtemplate {command}", text), text
    if command != "broker":
        assert "--json" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_documented(command: str) -> None:
    first, _, verb = command.partition(" ")

    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"`{first}" in line and (verb in line))
    assert row


def test_exit_codes_are_documented() -> None:
    codes = {code.value for code in ExitCode}

    assert {int(found) for found in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes


def test_the_version_needs_no_library_of_the_command_line() -> None:
    program = (
        "import sys; from mqtemplate.cli.main import main; main(['--version']); "
        "print([name for name in ('typer', 'rich', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == f"mqtemplate {version('mqtemplate')}\n[]\n"


def test_completion_offers_commands() -> None:
    environment = {"_MQTEMPLATE_COMPLETE": "complete_bash", "COMP_WORDS": "mqtemplate de", "COMP_CWORD": "1"}

    with start(environment=environment) as process:
        output, errors = finish(process)

    assert "delayed" in output.split(), errors


# --- processes ----------------------------------------------------------------------------------


def test_a_command_reads_a_directory_that_another_process_has_open(store: Path) -> None:
    with EmbeddedBroker(store) as owner:
        owner.sends.send(Message("orders", b"new"))
        with start("topics", "orders", "--json", "--name-server", f"embedded:{store}") as process:
            output, errors = finish(process)
        with start(
            "offsets", "reset", "billing", "orders", "--to", "latest", "--yes", "-n", f"embedded:{store}"
        ) as other:
            _, refusal = finish(other)

    assert '"message_count": 11' in output, errors
    assert other.returncode == ExitCode.IN_USE
    assert f"is in use by process {os.getpid()}" in refusal


def test_tail_follows_a_directory_until_ctrl_c(store: Path) -> None:
    with EmbeddedBroker(store) as owner:
        process = start("tail", "orders", "--last", "1", "--json", "--name-server", f"embedded:{store}")
        assert process.stdout is not None
        first = process.stdout.readline()
        owner.sends.send(Message("orders", b"followed"))
        second = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = finish(process)

    assert '"body": "{\\"number\\": 9}"' in first
    assert '"body": "followed"' in second
    assert (process.returncode, errors) == (0, "")


def test_a_closed_pipe_ends_a_command_without_an_error(store: Path) -> None:
    process = start("tail", "orders", "--from", "earliest", "--json", "--name-server", f"embedded:{store}")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with EmbeddedBroker(store) as owner:
        for number in range(2):
            owner.sends.send(Message("orders", b"%d" % number))
        errors = process.stderr.read()
        process.wait(PATIENCE_S)
    process.stderr.close()

    assert (process.returncode, errors) == (0, "")


# --- errors -------------------------------------------------------------------------------------


def test_an_error_is_one_line_and_debug_shows_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["topics", "--name-server", f"embedded:{tmp_path / 'none'}", "--config", str(tmp_path)]

    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(Exception, match="does not exist"):
        main([*arguments, "--debug"])


@pytest.mark.parametrize(
    ("name_server", "code", "text"),
    [
        ("embedded:memory", 1, "the broker in memory ends with its process"),
        ("nonsense", 2, "allowed are 'embedded'"),
        ("127.0.0.1:1", 1, "127.0.0.1:1"),
    ],
)
def test_a_broker_that_cannot_be_opened_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name_server: str, code: int, text: str
) -> None:
    result = CommandLine(name_server, tmp_path, capsys)("topics")

    assert result.code == code
    assert text in " ".join(result.errors.split())
    assert "Traceback" not in result.errors
