"""``python -m mqtemplate broker``: a broker and its name server in this process, until somebody stops it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mqtemplate.cli.broker_plan import cluster_of, open_doors
from mqtemplate.cli.port_owner import port_owner
from mqtemplate.cli.say import say
from mqtemplate.context import AppSettings, load_settings
from mqtemplate.context.logging import configure_logging
from mqtemplate.context.signals import StopRequests
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.server import LocalCluster

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Run a broker and its name server in one process, for RocketMQ's clients of every language and for
applications of mqtemplate (rocketmq.name-server: 127.0.0.1:9876).

What is not said here is taken from application.yml (keys mqtemplate.server.* and mqtemplate.broker.*)
and from the environment. It ends cleanly at Ctrl-C or SIGTERM.
"""
_OPTIONS = {
    # option -> key, what it takes, help
    "store": ("mqtemplate.broker.store-path", "DIR", "the folder for its files; one process owns it"),
    "listen": ("mqtemplate.server.listen", "IP:PORT", "where the broker listens (default 127.0.0.1:10911)"),
    "name-server": (
        "mqtemplate.server.name-server",
        "IP:PORT",
        "where its name server listens (default 127.0.0.1:9876); 'none' for no door of its own",
    ),
    "advertise": (
        "mqtemplate.server.advertise",
        "IP:PORT",
        "the address that clients are told, if it is not the one of --listen",
    ),
    "cluster-name": ("mqtemplate.server.cluster-name", "NAME", "the cluster's name (default DefaultCluster)"),
    "broker-name": ("mqtemplate.broker.broker-name", "NAME", "the broker's name (default broker-a)"),
}


def add_broker_command(commands: Subparsers) -> None:
    """Describe the command to the parser."""
    parser = commands.add_parser(
        "broker",
        help="run a broker and its name server",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option, (_, takes, text) in _OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=takes, help=text)
    parser.add_argument("--config", metavar="FOLDER", help="where application.yml is (default: this folder)")
    parser.add_argument("--profile", metavar="NAME", action="append", default=[], help="a profile; may be repeated")
    parser.set_defaults(run=_run_broker)


def _run_broker(options: argparse.Namespace) -> None:
    """Start, tell where it listens, wait for a signal, stop.

    Raises:
        MQTemplateError: It cannot start.
    """
    settings = _settings(options)
    restore_logging = configure_logging(settings.mqtemplate.logging) if settings.mqtemplate.logging.enabled else None
    try:
        stop_requests = StopRequests()
        with stop_requests.from_signals():
            cluster = cluster_of(settings)
            _start(cluster, settings)
            try:
                _tell(cluster, settings)
                reason = stop_requests.wait()
                say(f"stopping ({reason}) ...")
            finally:
                cluster.stop()
            say("stopped; all that was acknowledged is in the files")
    finally:
        if restore_logging is not None:
            restore_logging()


def _settings(options: argparse.Namespace) -> AppSettings:
    """The configuration with the options laid over it. Where the applications beside it send is not its business."""
    given = {key: getattr(options, option.replace("-", "_")) for option, (key, _, _) in _OPTIONS.items()}
    arguments: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    return load_settings(options.config, options.profile, arguments={"rocketmq.name-server": "embedded"} | arguments)


def _start(cluster: LocalCluster, settings: AppSettings) -> None:
    try:
        cluster.start()
    except BrokerError as exc:
        hint = _busy_ports(settings)
        if not hint:
            raise
        raise BrokerError(f"{exc}; {hint}") from exc


def _busy_ports(settings: AppSettings) -> str:
    """Who has the ports that this server was to have; empty if nobody, or nobody can tell."""
    server = settings.mqtemplate.server
    doors = [("--listen", server.listen), ("--name-server", server.name_server)]
    found = [
        f"{door} is taken by {owner}: stop that, or choose another address with {option}"
        for option, door in doors
        if door is not None and door.port and (owner := port_owner(door.port))
    ]
    return "; ".join(found)


def _tell(cluster: LocalCluster, settings: AppSettings) -> None:
    """One line on standard output that says where, and one on standard error where the door is open too wide."""
    doors: list[HostAddress] = open_doors(settings.mqtemplate.server)
    if doors:
        say(
            f"warning: {' and '.join(map(str, doors))} can be reached from other machines, and access control is off: "
            "whoever reaches it may read and write everything; set mqtemplate.server.acl, or listen at 127.0.0.1",
            sys.stderr,
        )
    store = settings.store_path
    where = "memory" if store is None else str(Path(store).absolute())
    say(
        f"{cluster.engine.name} listens at {cluster.address}, its name server at {cluster.name_server_address}, "
        f"store {where}; Ctrl-C stops it"
    )
