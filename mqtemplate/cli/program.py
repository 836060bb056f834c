"""The program: its name, its help, and its options without a command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from mqtemplate.cli.output import print_line

_EPILOG = "docs/cli.md has all commands and exit codes."


def new_program() -> typer.Typer:
    """Return the program without commands."""
    # Plain help: with rich each call for help would take another tenth of a second.
    program = typer.Typer(
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.callback()(_program)
    return program


def _show_version(is_given: bool) -> None:
    if is_given:
        print_line(f"mqtemplate {version('mqtemplate')}")
        raise typer.Exit


def _program(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """Delayed messages for Python, with RocketMQ's protocol: commands for operators."""
