"""The program ``mqtemplate run``: an application in this process or in several, or only its check."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mqtemplate.context.application import MQApplication
from mqtemplate.errors import ConfigurationError
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.running.supervisor import Report, Serve, Supervisor
from mqtemplate.running.target import RunOptions, load_application


def run(
    options: RunOptions,
    report: Report,
    serve: Serve,
    *,
    workers: int | None = None,
    watched: Sequence[Path] = (),
    stop_timeout_s: float = 60.0,
) -> int:
    """Run an application until a signal arrives. Return the exit code of the program.

    Args:
        serve: Serves a store directory to several workers.
        workers: Number of processes; None: this process runs the application, unless files are watched.
        watched: Folders whose changes start new processes.
        stop_timeout_s: Time after which a process that stops is killed.

    Raises:
        SystemExit: The application in this process cannot start.
        MQTemplateError: The application is invalid.
    """
    if workers is not None and workers < 1:
        raise ConfigurationError(f"--workers must be 1 or more, got {workers}")
    app = load_application(options)
    if workers is None and not watched:
        _run_here(app, options.target, report)
        return 0
    supervisor = Supervisor(
        options, app.settings, workers or 1, report, serve, watched=watched, stop_timeout_s=stop_timeout_s
    )
    return supervisor.run()


def _run_here(app: MQApplication, target: str, report: Report) -> None:
    def report_ready() -> None:
        app.is_ready.wait()
        report(f"{target} is running (process {os.getpid()}); press Ctrl-C to stop")

    threading.Thread(target=report_ready, name="mqtemplate-ready", daemon=True).start()
    app.run()
    report("stopped")


def check(options: RunOptions) -> str:
    """Build everything and start nothing. Return a line about the application.

    Raises:
        MQTemplateError: The application could not start.
    """
    app = load_application(options)
    app.check()
    names = [container.endpoint.id for container in app.context.get(ListenerRegistry).containers]
    objects = sum(1 for _ in app.context.in_order())
    listeners = "no listeners" if not names else f"{'listener' if len(names) == 1 else 'listeners'} {', '.join(names)}"
    return (
        f"{options.target} is valid: {listeners}; objects: {objects}; broker: {app.settings.rocketmq.name_server}; "
        "nothing was started"
    )
