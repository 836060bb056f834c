"""Which command was meant, and how a mistake is told: one line, and a code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mqtemplate.cli.broker_command import add_broker_command
from mqtemplate.cli.capabilities_command import add_capabilities_command
from mqtemplate.cli.say import say
from mqtemplate.errors import ConfigurationError, MQTemplateError

EXIT_CANNOT_START = 1
EXIT_USAGE = 2
"""Also of a configuration that cannot be used; `argparse` says the same of wrong arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0 when it ended as it should, or one of those above."""
    parser = argparse.ArgumentParser(
        prog="python -m mqtemplate",
        description="Delayed messages for Python, with RocketMQ's protocol.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_broker_command(commands)
    add_capabilities_command(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ConfigurationError as exc:
        return _told(exc, EXIT_USAGE)
    except MQTemplateError as exc:
        return _told(exc, EXIT_CANNOT_START)
    return 0


def _told(error: MQTemplateError, code: int) -> int:
    say(f"error: {error}", sys.stderr)
    return code
