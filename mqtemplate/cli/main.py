"""Entry point of the command line: runs a command, reports errors, returns the exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any

from mqtemplate.cli.output import ExitCode, print_line
from mqtemplate.errors import MQTemplateError, StoreLockedError, UnknownNameError, UnsupportedError

PROGRAM = "mqtemplate"

_MODULE_OBJECTS = 10_000
"""New objects between two collections of garbage; Python's default is 700."""

_COMMANDS = {
    # command -> its module in `mqtemplate.cli.commands`, in the order of the help
    "init": "run",
    "run": "run",
    "broker": "broker",
    "reload": "broker",
    "capabilities": "bench",
    "send": "messages",
    "tail": "messages",
    "messages": "messages",
    "status": "topics",
    "why": "console",
    "topics": "topics",
    "groups": "topics",
    "offsets": "topics",
    "delayed": "delayed",
    "dlq": "dead_letters",
    "beans": "application",
    "conditions": "application",
    "docs": "application",
    "config": "application",
    "changes": "console",
    "undo": "console",
    "listeners": "console",
    "schedules": "console",
    "dashboard": "dashboard",
    "bench": "bench",
    "backup": "copies",
    "promote": "copies",
    "restore": "copies",
    "copy": "copies",
    "hand-over": "hand_over",
    "doctor": "folder",
    "simulate": "folder",
    "spark": "run",
}

_CODES: dict[type[MQTemplateError], int] = {
    UnknownNameError: ExitCode.UNKNOWN_NAME,
    UnsupportedError: ExitCode.UNSUPPORTED,
    StoreLockedError: ExitCode.IN_USE,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code; see `ExitCode`.

    Args:
        arguments: Words of the command; None: those of this process, which ends after the command.
    """
    if arguments is not None:
        return _exit_code(list(arguments))
    # Nearly all objects of a short command are those of modules, which stay until its end. To look for garbage among
    # them took a quarter of its processor time, most of it when the interpreter ended.
    gc.set_threshold(_MODULE_OBJECTS)
    try:
        return _exit_code(sys.argv[1:])
    finally:
        gc.freeze()


def _exit_code(words: list[str]) -> int:
    """Run a command, and return its exit code."""
    if words == ["--version"]:  # needs none of the imports below
        from importlib.metadata import version

        print_line(f"{PROGRAM} {version(PROGRAM)}")
        return ExitCode.SUCCESS
    from mqtemplate.context.failure_report import is_debug

    try:
        names = (words[0],) if words and words[0] in _COMMANDS else tuple(_COMMANDS)
        _program(names).main(words, prog_name=PROGRAM)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else ExitCode.SUCCESS
    except MQTemplateError as exc:
        if is_debug() or "--debug" in words:
            raise
        print_line(f"error: {exc}", sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(exc, kind)), ExitCode.FAILED)
    return ExitCode.SUCCESS


@cache
def _program(names: tuple[str, ...]) -> Any:
    """Return the program as typer's command, with these commands. To build all of them takes 0.1 s."""
    from typer.main import get_command

    from mqtemplate.cli.invocation import TOP

    for module in dict.fromkeys(_COMMANDS[name] for name in names):
        import_module(f"mqtemplate.cli.commands.{module}")
    wanted = copy(TOP)
    wanted.registered_commands = [each for each in TOP.registered_commands if each.name in names]
    wanted.registered_groups = [each for each in TOP.registered_groups if each.name in names]
    program: Any = get_command(wanted)
    program.commands = {name: program.commands[name] for name in names}
    return program
