"""Entry point of the command line: options, commands and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from mqtemplate.cli import broker_command, capabilities_command, spark_command
from mqtemplate.cli.output import print_line
from mqtemplate.context.failure_report import failure_report, is_debug
from mqtemplate.errors import MQTemplateError

_COMMANDS = {"broker": broker_command, "capabilities": capabilities_command, "spark": spark_command}

EXIT_CANNOT_START = 1
"""Exit code after a failure. `argparse` uses 2 for wrong arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code: 0 after success, or one of the codes above."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except MQTemplateError as exc:
        if options.debug or is_debug():
            raise
        print_line(failure_report(exc), sys.stderr)
        return EXIT_CANNOT_START
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mqtemplate",
        description="Delayed messages for Python, with RocketMQ's protocol.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mqtemplate {version('mqtemplate')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FOLDER", help="folder of application.yml (default: the current folder)")
    common.add_argument("--profile", metavar="NAME", action="append", default=[], help="a profile; may be repeated")
    common.add_argument("--debug", action="store_true", help="show the traceback of a failed start")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[common],
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
