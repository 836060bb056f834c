"""Entry point of the command line: runs a command, reports errors, returns the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from mqtemplate.cli import exit_codes
from mqtemplate.cli.output import print_line
from mqtemplate.errors import MQTemplateError, StoreLockedError, UnknownNameError, UnsupportedError

PROGRAM = "mqtemplate"

_COMMANDS = {
    # command -> its module in `mqtemplate.cli.commands`, in the order of the help
    "init": "init",
    "run": "run",
    "broker": "broker",
    "capabilities": "capabilities",
    "send": "messages",
    "tail": "messages",
    "messages": "messages",
    "topics": "topics",
    "groups": "topics",
    "offsets": "topics",
    "delayed": "delayed",
    "dlq": "dead_letters",
    "beans": "application",
    "conditions": "application",
    "docs": "docs",
    "config": "application",
    "listeners": "listeners",
    "schedules": "schedules",
    "dashboard": "dashboard",
    "bench": "bench",
    "doctor": "folder",
    "simulate": "folder",
    "spark": "spark",
}

_CODES: dict[type[MQTemplateError], int] = {
    UnknownNameError: exit_codes.UNKNOWN_NAME,
    UnsupportedError: exit_codes.UNSUPPORTED,
    StoreLockedError: exit_codes.IN_USE,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code; see `mqtemplate.cli.exit_codes`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:  # needs none of the imports below
        print_line(f"{PROGRAM} {version(PROGRAM)}")
        return exit_codes.SUCCESS
    from mqtemplate.context.failure_report import is_debug

    try:
        _program(words).main(words, prog_name=PROGRAM)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else exit_codes.SUCCESS
    except MQTemplateError as exc:
        if is_debug() or "--debug" in words:
            raise
        print_line(f"error: {exc}", sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(exc, kind)), exit_codes.FAILED)
    return exit_codes.SUCCESS


def _program(words: Sequence[str]) -> Any:
    """Return the program as typer's command: with the command that *words* begin with, or with all commands.

    To build all of them takes 0.1 s.
    """
    from typer.main import get_command

    from mqtemplate.cli.program import new_program

    names = [_COMMANDS[words[0]]] if words and words[0] in _COMMANDS else dict.fromkeys(_COMMANDS.values())
    program = new_program()
    for name in names:
        import_module(f"mqtemplate.cli.commands.{name}").add_commands(program)
    return get_command(program)
