"""Command that runs an application: ``mqtemplate run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mqtemplate.cli import exit_codes
from mqtemplate.cli.invocation import Invocation, command
from mqtemplate.cli.output import print_line


def add_commands(app: typer.Typer) -> None:
    """Add the command to the program."""
    examples = (
        "run shop.main:app",
        "run shop.main:app --workers 4 --profile prod --env-file prod.env",
        "run shop.main:app --reload",
        "run shop.main:app --check",
    )
    command(app, "run", *examples, without=("config", "as_json"))(run)


def run(
    call: Invocation,
    target: Annotated[
        str, typer.Argument(metavar="MODULE[:NAME]", help="an MQApplication, a function that returns one, or a module")
    ],
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", metavar="N", help="run N processes (default: this one)")
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="start again when source files change")] = False,
    reload_dir: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="folder to watch; may be repeated (default: this one)")
    ] = None,
    listeners: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="run only these listeners: ids, or their last parts")
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file with environment variables; those of the shell win")
    ] = None,
    stop_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="kill a process that stops for longer than this")
    ] = 60.0,
    check: Annotated[bool, typer.Option("--check", help="build everything, start nothing, and report errors")] = False,
) -> None:
    """Run an application, in this process or in several.

    With --workers and a broker in a local folder, this process serves the folder and the workers share it.
    Workers that end are started again. SIGTERM and Ctrl-C let handlers finish; SIGHUP replaces the workers
    one after the other.
    """
    from mqtemplate.context.failure_report import reported_failures
    from mqtemplate.running.program import check as check_application
    from mqtemplate.running.program import run as run_application
    from mqtemplate.running.server import shared_server
    from mqtemplate.running.target import RunOptions

    options = RunOptions(
        target=target,
        profiles=tuple(call.profile),
        env_file=None if env_file is None else str(env_file),
        listeners=tuple(name.strip() for name in (listeners or "").split(",") if name.strip()),
        name_server=call.name_server,
    )
    watched = [folder.absolute() for folder in reload_dir or [Path()]] if reload else []
    with reported_failures():
        if check:
            print_line(check_application(options))
            return
        code = run_application(
            options,
            lambda text: print_line(text, sys.stderr),
            shared_server,
            workers=workers,
            watched=watched,
            stop_timeout_s=stop_timeout,
        )
    if code:
        raise typer.Exit(exit_codes.FAILED)
