"""``manage.py mqtemplate run``: the listeners of the project, in this process or in several."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from mqtemplate.cli import main

_TARGET = "mqtemplate_starter_django:new_application"


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """The command ``mqtemplate``. It has the options of ``mqtemplate run``, which does the work."""

    help = "Run the listeners of this project."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="run")
        running = actions.add_parser("run", help="run the listeners until Ctrl-C or SIGTERM")
        running.add_argument("--workers", metavar="N", help="run N processes (default: this one)")
        running.add_argument("--listeners", metavar="NAME,NAME", help="run only these listeners")
        running.add_argument(
            "--stop-timeout", metavar="DURATION", help="kill a process that stops for longer than this"
        )
        running.add_argument("--reload", action="store_true", help="start again when source files change")
        running.add_argument("--check", action="store_true", help="build everything, start nothing, and report errors")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command.

        Raises:
            CommandError: The application cannot start; standard error has the report.
        """
        words = ["run", _TARGET]
        for name in ("workers", "listeners", "stop_timeout"):
            if options[name] is not None:
                words += [f"--{name.replace('_', '-')}", options[name]]
        words += [f"--{name}" for name in ("reload", "check") if options[name]]
        code = main(words)
        if code:
            raise CommandError("the listeners cannot run", returncode=code)
