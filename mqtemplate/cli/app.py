"""The program with all its commands."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer

from mqtemplate.cli.commands import application, bench, broker, dead_letters, delayed, folder, messages, topics
from mqtemplate.cli.output import print_line

_EPILOG = "docs/cli.md has all commands and exit codes."


def command() -> Any:
    """Return the program as a command of typer."""
    # Plain help: with rich each call for help would cost another tenth of a second.
    app = typer.Typer(
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    for module in (broker, messages, topics, delayed, dead_letters, application, bench, folder):
        module.add_commands(app)
    return typer.main.get_command(app)


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
