"""Command that runs a broker and its name server: ``mqtemplate broker``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mqtemplate.cli import exit_codes
from mqtemplate.cli.invocation import Invocation, command
from mqtemplate.cli.output import print_line
from mqtemplate.errors import MQTemplateError

_KEYS = {
    # option -> key
    "store": "mqtemplate.broker.store-path",
    "listen": "mqtemplate.server.listen",
    "name_server": "mqtemplate.server.name-server",
    "advertise": "mqtemplate.server.advertise",
    "cluster_name": "mqtemplate.server.cluster-name",
    "broker_name": "mqtemplate.broker.broker-name",
}


def add_commands(app: typer.Typer) -> None:
    """Add the command to the program."""
    examples = (
        "broker --store ./data",
        "broker --listen 127.0.0.1:10911 --name-server 127.0.0.1:9876",
        "broker -c broker.conf",
    )
    command(app, "broker", *examples, without=("name_server", "as_json"))(broker)


def broker(
    call: Invocation,
    store: Annotated[str | None, typer.Option(metavar="DIR", help="the store directory; one process owns it")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="IP:PORT", help="address of the broker (default 127.0.0.1:10911)")
    ] = None,
    name_server: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT",
            help="address of the name server (default 127.0.0.1:9876); 'none': the broker's address",
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="IP:PORT", help="address that clients connect to (default: --listen)")
    ] = None,
    cluster_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="the cluster's name (default DefaultCluster)")
    ] = None,
    broker_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="the broker's name (default broker-a)")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config-file", "-c", metavar="FILE", help="property file of RocketMQ's broker")
    ] = None,
) -> None:
    """Run a broker and its name server.

    Both run in this process, for RocketMQ's clients of every language and for applications of mqtemplate
    (rocketmq.name-server: 127.0.0.1:9876).

    All other settings are read from application.yml (keys mqtemplate.server.* and mqtemplate.broker.*)
    and from the environment; or, with -c, from a file of RocketMQ's mqbroker. Ctrl-C or SIGTERM stops
    the broker cleanly.
    """
    from mqtemplate.cli.broker_process import run
    from mqtemplate.context.failure_report import failure_report, is_debug

    given = (store, listen, name_server, advertise, cluster_name, broker_name)
    arguments = {key: value for key, value in zip(_KEYS.values(), given, strict=True) if value is not None}
    try:
        run(call.config, call.profile, arguments, config_file)
    except MQTemplateError as exc:
        if call.debug or is_debug():
            raise
        print_line(failure_report(exc), sys.stderr)
        raise typer.Exit(exit_codes.FAILED) from exc
