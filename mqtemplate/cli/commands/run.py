"""``init``, ``run`` and ``spark``: a new project, an application, and the package for Spark's executors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer

from mqtemplate.cli.commands.broker import observed
from mqtemplate.cli.invocation import TOP, CommandCall, cluster_of, command, command_group, refuse_dangling_link
from mqtemplate.cli.output import ExitCode, print_line
from mqtemplate.converters.readable import size_text
from mqtemplate.durations import duration_ms, is_bare_number
from mqtemplate.errors import ConfigurationError

if TYPE_CHECKING:
    from mqtemplate.broker import Broker
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.http.exchange import HttpHandler
    from mqtemplate.server.acl.access import AccessControl
    from mqtemplate.server.broker_server import LocalCluster

_FILES = {
    # file of the project -> its template beside this package
    "app.py": "app.py.txt",
    "listeners.py": "listeners.py.txt",
    "test_listeners.py": "test_listeners.py.txt",
    "application.yml": "application.yml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
_NAME = re.compile(r"[A-Za-z][\w-]{0,62}")


@command(
    TOP,
    "init",
    "init shop",
    "init shop --directory ./services/shop",
    without=("name_server", "config", "profile", "as_json"),
)
def init(
    _call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the project and of its consumer group")],
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="directory to write to (default: NAME in the current one)")
    ] = None,
) -> None:
    """Write a small project: an application, a listener, a test, and a configuration.

    It runs and passes its test at once. Existing files are never changed.
    """
    if _NAME.fullmatch(name) is None:
        raise typer.BadParameter(
            f"must begin with a letter and have only letters, digits, '-' and '_', 63 at most, got {name!r}",
            param_hint="NAME",
        )
    folder = Path(name) if directory is None else directory
    # Links count as existing: what is written stays in the folder, even if another user prepared it.
    existing = [file for file in _FILES if os.path.lexists(folder / file)]
    if existing:
        raise _refused(f"{folder} has {', '.join(existing)} already")
    if folder.is_symlink():
        raise _refused(f"{folder} is a symbolic link")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _refused(f"the folder {folder} cannot be created: {exc.strerror}") from exc
    templates = files("mqtemplate.cli") / "new_project"
    for file, template in _FILES.items():
        text = (templates / template).read_text(encoding="utf-8")
        try:
            with (folder / file).open("x", encoding="utf-8") as new:  # it follows no link, and replaces no file
                new.write(Template(text).substitute(name=name))
        except OSError as exc:
            raise ConfigurationError(
                f"{folder / file} cannot be written: {exc.strerror}; make that possible, or give another --directory"
            ) from exc
    print_line(f"{folder}: wrote {', '.join(_FILES)}")
    print_line(f"next: cd {folder}; mqtemplate run app; in another terminal, or after Ctrl-C: pytest")


def _refused(reason: str) -> typer.BadParameter:
    return typer.BadParameter(f"{reason}; nothing was written. Give another name, or --directory", param_hint="NAME")


@command(
    TOP,
    "run",
    "run shop.main:app",
    "run shop.main:app --workers 4 --profile prod --env-file prod.env",
    "run shop.main:app --reload",
    "run shop.main:app --check",
    without=("config", "as_json"),
)
def run(
    call: CommandCall,
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
        Path | None, typer.Option(metavar="FILE", help="file with environment variables; variables of the shell win")
    ] = None,
    stop_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="kill a process that stops for longer than this")
    ] = "60s",
    check: Annotated[bool, typer.Option("--check", help="build everything, start nothing, and report errors")] = False,
) -> None:
    """Run an application, in this process or in several.

    With --workers and a broker in a local folder, this process serves the folder and the workers share it.
    Workers that end are started again. SIGTERM and Ctrl-C let handlers finish; SIGHUP replaces the workers
    one after the other.
    """
    from mqtemplate.context.failure_report import reported_failures
    from mqtemplate.running.supervisor import check as check_application
    from mqtemplate.running.supervisor import run as run_application
    from mqtemplate.running.target import RunOptions

    options = RunOptions(
        target=target,
        profiles=tuple(call.profile),
        env_file=None if env_file is None else str(env_file),
        listeners=tuple(name.strip() for name in (listeners or "").split(",") if name.strip()),
        name_server=call.name_server,
    )
    stop_timeout_ms = _stop_timeout_ms(stop_timeout)
    watched = [folder.absolute() for folder in reload_dir or [Path()]] if reload else []
    with reported_failures():
        if check:
            print_line(check_application(options))
            return
        code = run_application(
            options,
            lambda text: print_line(text, sys.stderr),
            _management,
            workers=workers,
            watched=watched,
            stop_timeout_s=stop_timeout_ms / 1_000,
        )
    if code:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _management(
    settings: AppSettings,
    cluster: LocalCluster[EmbeddedBroker] | None,
    workers: Callable[[], Mapping[str, int | None]],
) -> Iterator[Path | None]:
    """Serve the management address of all workers, and yield the folder in which they make themselves known.

    A single worker serves the address itself.
    """
    management = settings.mqtemplate.management
    if not management.enabled or management.port is None or len(workers()) == 1:
        yield None
        return
    from mqtemplate.console.actuator import ActuatorSources, managed_actuator
    from mqtemplate.console.group import joined_group
    from mqtemplate.console.server import ManagementAddress
    from mqtemplate.observability.health import HealthChecks

    with ExitStack() as closing:
        broker: Broker | None = None if cluster is None else cluster.engine
        if broker is None and management.dashboard.enabled and (remote := cluster_of(settings)) is not None:
            broker = closing.enter_context(remote)
        mounted: Mapping[str, HttpHandler] = {}
        if broker is None:
            actuator = managed_actuator(ActuatorSources(health=HealthChecks({}), name=management.name), management)
        else:
            accounts = closing.enter_context(_accounts(settings, cluster))
            actuator, mounted = closing.enter_context(observed(broker, settings, accounts))
        group = joined_group(actuator, management, _group_folder(settings), "parent", workers, is_several=True)
        if group is None:
            raise _no_folder()
        address = ManagementAddress(actuator, management, mounted, group)
        address.start()
        closing.callback(address.stop)
        if address.is_served_here:
            print_line(f"management of all workers: http://{address.address}/actuator", sys.stderr)
        yield group.folder


@contextmanager
def _accounts(settings: AppSettings, cluster: LocalCluster[EmbeddedBroker] | None) -> Iterator[AccessControl | None]:
    """Yield the accounts of the server for the workers, which reloads them; those of the settings without it."""
    if cluster is not None:
        yield cluster.broker.core.access
        return
    from mqtemplate.context.settings.broker import acl_settings
    from mqtemplate.context.settings.source import read_again
    from mqtemplate.running.reload import ConfigReload, accounts_part
    from mqtemplate.server.acl.access import AccessControl

    acl = acl_settings(settings.mqtemplate.server.acl)
    if acl is None:
        yield None
        return
    accounts = AccessControl(acl)
    part = accounts_part(lambda: accounts)
    with ConfigReload(settings, lambda: read_again(settings), [part], sections=part.keys).running():
        yield accounts


def _group_folder(settings: AppSettings) -> Path:
    """Return the folder of the processes with the same address; with a free port they are the workers only."""
    from mqtemplate.console.group import group_folder, private_folder

    base = private_folder()
    folder = group_folder(settings) if settings.mqtemplate.management.port else base and base / f"run-{os.getpid()}"
    if folder is None:
        raise _no_folder()
    return folder


def _no_folder() -> ConfigurationError:
    return ConfigurationError(
        "mqtemplate.management: the workers need a folder to find each other, and neither XDG_RUNTIME_DIR nor the "
        "temporary folder can be used; set TMPDIR to a folder that this user can write"
    )


def _stop_timeout_ms(text: str) -> int:
    try:
        milliseconds = duration_ms(text, 1_000)
    except ValueError as exc:
        raise typer.BadParameter(f"it must be {exc}", param_hint="--stop-timeout") from None
    if is_bare_number(text):
        print_line(
            f"--stop-timeout {text} has no unit and is read as {text} seconds; write --stop-timeout {text}s",
            sys.stderr,
        )
    return milliseconds


_SPARK = command_group("spark", "Prepare a Spark cluster.")


@command(
    _SPARK,
    "package",
    "spark package",
    "spark package job.zip && spark-submit --py-files job.zip job.py",
    without=("name_server", "config", "profile"),
)
def package(
    call: CommandCall,
    file: Annotated[Path, typer.Argument(help="the zip to write")] = Path("mqtemplate-spark.zip"),
) -> None:
    """Write the package for Spark's executors, for the option --py-files of spark-submit.

    The executors need numpy and pyarrow, and the Python version of the driver. A session of mqtemplate.spark.session
    sends the package by itself.
    """
    from mqtemplate.spark.driver.package import write_package

    refuse_dangling_link(file, "FILE")
    try:
        path = write_package(file)
    except OSError as exc:
        raise typer.BadParameter(f"{file} cannot be written: {exc.strerror}", param_hint="FILE") from exc
    record = {"file": str(path), "bytes": path.stat().st_size}
    call.output.document(record)
    call.output.line(f"{path}: {size_text(path.stat().st_size)}; give it to spark-submit as --py-files {path}")
