"""``manage.py mqtemplate run``: the listeners of the project, in this process or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from mqtemplate.errors import MQTemplateError
from mqtemplate.running import RunOptions, check, run

_TARGET = "mqtemplate_starter_django:new_application"


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """The command ``mqtemplate``."""

    help = "Run the listeners of this project."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options, which are those of ``mqtemplate run``."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="run")
        running = actions.add_parser("run", help="run the listeners until Ctrl-C or SIGTERM")
        running.add_argument("--workers", type=int, metavar="N", help="run N processes (default: this one)")
        running.add_argument("--reload", action="store_true", help="start again when source files change")
        running.add_argument("--listeners", default="", metavar="NAME,NAME", help="run only these listeners")
        running.add_argument("--check", action="store_true", help="build everything, start nothing, and report errors")
        running.add_argument(
            "--stop-timeout", type=float, default=60.0, metavar="SECONDS", help="then processes are killed"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command.

        Raises:
            CommandError: The application is invalid, or a worker cannot start.
        """
        names = [name.strip() for name in options["listeners"].split(",")]
        run_options = RunOptions(target=_TARGET, listeners=tuple(filter(None, names)))
        try:
            if options["check"]:
                self.stdout.write(check(run_options))
                return
            code = run(
                run_options,
                self._report,
                workers=options["workers"],
                watched=[Path.cwd()] if options["reload"] else [],
                stop_timeout_s=options["stop_timeout"],
            )
        except MQTemplateError as exc:
            raise CommandError(str(exc)) from exc
        if code:
            raise CommandError("a worker cannot start", returncode=code)

    def _report(self, text: str) -> None:
        self.stderr.write(text)
        self.stderr.flush()
