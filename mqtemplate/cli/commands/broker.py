"""``broker`` and ``reload``: a broker and its name server in this process, and the reload of its configuration."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqtemplate.cli.invocation import FROM_CONFIGURATION, TOP, ActuatorOptions, CommandCall, command
from mqtemplate.cli.output import ExitCode, print_line
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import BrokerError, ConfigurationError, MQTemplateError, UnsupportedError

if TYPE_CHECKING:
    from mqtemplate.broker import Broker
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.console.actuator import Actuator
    from mqtemplate.console.client import ActuatorClient
    from mqtemplate.context.config.tree import ConfigNode
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.context.settings.broker import ServerSettings
    from mqtemplate.context.signals import StopRequests
    from mqtemplate.http.exchange import HttpHandler
    from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
    from mqtemplate.server.acl.access import AccessControl
    from mqtemplate.server.broker_server import LocalCluster


_KEYS = {
    # option -> key
    "store": "mqtemplate.broker.store-path",
    "listen": "mqtemplate.server.listen",
    "name_server": "mqtemplate.server.name-server",
    "grpc": "mqtemplate.server.grpc-listen",
    "advertise": "mqtemplate.server.advertise",
    "cluster_name": "mqtemplate.server.cluster-name",
    "broker_name": "mqtemplate.broker.broker-name",
    "follow": "mqtemplate.copy.to",
}


@command(
    TOP,
    "broker",
    "broker --store ./data",
    "broker --listen 127.0.0.1:10911 --name-server 127.0.0.1:9876",
    "broker --store ./data --grpc 127.0.0.1:8081",
    "broker -c broker.conf",
    "broker --follow s3://bucket/shop --store ./standby",
    without=("name_server", "as_json"),
)
def broker(
    call: CommandCall,
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
    grpc: Annotated[
        str | None,
        typer.Option(metavar="IP:PORT", help="address for clients of RocketMQ's gRPC protocol (default: none)"),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="address that clients connect to, also by name (default: --listen)"),
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
    follow: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="keep the store current from a copy, until 'mqtemplate promote DIR'"),
    ] = None,
) -> None:
    """Run a broker and its name server.

    Both run in this process, for RocketMQ's clients of every language and for applications of mqtemplate
    (rocketmq.name-server: 127.0.0.1:9876). With --grpc, the gRPC clients of RocketMQ 5 are served too.

    All other settings are read from application.yml (keys mqtemplate.server.* and mqtemplate.broker.*)
    and from the environment; or, with -c, from a file of RocketMQ's mqbroker. Ctrl-C or SIGTERM stops
    the broker cleanly. SIGHUP, a change of a file and "mqtemplate reload" read certificates, accounts,
    the log level and the delay levels again.

    With --follow it serves no client at first: it keeps the store current from the copy that another broker
    writes (mqtemplate.copy.to). After "mqtemplate promote DIR" it is the broker, and goes on with the copy.
    """
    from mqtemplate.context.failure_report import failure_report, is_debug

    given = (store, listen, name_server, grpc, advertise, cluster_name, broker_name, follow)
    arguments = {key: value for key, value in zip(_KEYS.values(), given, strict=True) if value is not None}
    try:
        _run(call, arguments, config_file, follow)
    except MQTemplateError as exc:
        if call.debug or is_debug():
            raise
        print_line(failure_report(exc), sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from exc


def _run(call: CommandCall, given: Mapping[str, object], broker_conf: Path | None, follow: str | None) -> None:
    """Start the cluster, print its addresses, and stop it after a signal.

    Args:
        given: Keys that win over the configuration.
        broker_conf: Property file of RocketMQ's broker; it wins over the configuration too.
        follow: Place of the copy to follow first.

    Raises:
        MQTemplateError: It cannot start.
    """
    from mqtemplate.context.logging import show_events
    from mqtemplate.context.signals import StopRequests
    from mqtemplate.event_log import has_handlers
    from mqtemplate.processes import prompt_threads
    from mqtemplate.running.reload import ConfigReload
    from mqtemplate.running.server import READ_BY_SERVER, local_cluster, reloadable_parts

    settings = _settings(call, given, broker_conf, says_ignored=True)
    logging = settings.mqtemplate.logging
    with ExitStack() as closing:
        if logging.enabled and not has_handlers():
            closing.callback(show_events(logging))
        stop_requests = StopRequests()
        closing.enter_context(stop_requests.from_signals())
        if follow is not None and not _follow(settings, follow, stop_requests):
            return
        cluster = local_cluster(settings)
        config = ConfigReload(
            settings,
            lambda: _settings(call, given, broker_conf),
            reloadable_parts(cluster),
            sections=READ_BY_SERVER,
            further_files=() if broker_conf is None else (broker_conf.absolute(),),
        )
        cluster.broker.on_reload(config.reload)
        closing.enter_context(config.running())
        _start(cluster, settings.mqtemplate.server)
        try:
            with _management(cluster, settings), prompt_threads():
                _print_addresses(cluster, settings)
                reason = stop_requests.wait()
            print_line(f"stopping ({reason}) ...")
        finally:
            cluster.stop()
        print_line("stopped; all acknowledged messages are on disk")


def _follow(settings: AppSettings, source: str, stop_requests: StopRequests) -> bool:
    """Keep the store directory current from a copy. Return True once it is promoted, False if this process is to end.

    Raises:
        MQTemplateError: The directory cannot follow the copy.
    """
    from mqtemplate.copy.follower import Follower, FollowLoop

    path, copy = settings.store_path, settings.mqtemplate.copy_
    if path is None:
        raise ConfigurationError("a store in memory follows no copy; name a folder with --store DIR")
    with Follower(source, path, copy.options, settings.mqtemplate.broker) as follower:
        print_line(f"{path} follows {source}; let it take over with: mqtemplate promote {path}; press Ctrl-C to stop")
        promotion = FollowLoop(follower, copy.interval, print_line).run(stop_requests.wait_up_to)
    if promotion is None:
        print_line(f"stopped; {path} can follow on")
        return False
    print_line(f"{path} has taken over, with everything that was copied until {time_text(promotion.moment_ms)}")
    return True


def _settings(
    call: CommandCall, given: Mapping[str, object], broker_conf: Path | None, *, says_ignored: bool = False
) -> AppSettings:
    """Read the configuration.

    Args:
        says_ignored: Print the keys of the property file that mean nothing here.
    """
    from mqtemplate.context.config.tree import ConfigNode, insert_mapping
    from mqtemplate.context.settings.source import load_settings

    arguments = ConfigNode() if broker_conf is None else _keys_of(broker_conf, says_ignored=says_ignored)
    # The name server of the applications in the same file is not the one of this broker.
    insert_mapping(arguments, {**given, "rocketmq.name-server": "embedded"}, "argument settings")
    return load_settings(call.config, call.profile, arguments=arguments, for_server=True)


def _keys_of(file: Path, *, says_ignored: bool) -> ConfigNode:
    """Return the keys of a property file, and print the keys that mean nothing here."""
    from mqtemplate.running.broker_conf import read_broker_conf

    conf = read_broker_conf(file)
    if conf.without_meaning and says_ignored:
        count = len(conf.without_meaning)
        print_line(f"{file}: {count} {'key has' if count == 1 else 'keys have'} no meaning here", sys.stderr)
        for key, reason in conf.without_meaning.items():
            print_line(f"  {key}: {reason}", sys.stderr)
    return conf.root


@contextmanager
def _management(cluster: LocalCluster[EmbeddedBroker], settings: AppSettings) -> Iterator[None]:
    """Serve health, metrics and configuration on the management port, if ``mqtemplate.management`` is on."""
    management = settings.mqtemplate.management
    if not management.enabled:
        yield
        return
    from mqtemplate.console.server import management_address

    observing = observed(cluster.engine, settings, cluster.broker.core.access)
    with observing as (actuator, mounted), ExitStack() as closing:
        if management.port is not None:
            address = management_address(settings, actuator, mounted, "broker")
            closing.callback(address.stop)
            address.start()
        yield


@contextmanager
def observed(
    broker: Broker, settings: AppSettings, accounts: AccessControl | None = None
) -> Iterator[tuple[Actuator, Mapping[str, HttpHandler]]]:
    """Yield the actuator of a process that has a broker and no listeners, and what the settings mount beside it.

    Args:
        accounts: The accounts of the server of the broker, which may sign in to the dashboard.
    """
    from mqtemplate.console.actuator import ActuatorSources, managed_actuator
    from mqtemplate.context.settings.source import explain_settings
    from mqtemplate.observability.health import HealthChecks, broker_checks
    from mqtemplate.observability.observability import Observability

    management = settings.mqtemplate.management
    observability = Observability(broker, management.observability)
    health = HealthChecks(broker_checks(broker, management.health), management.health.timeout_ms)
    name = management.name or broker.name
    actuator = managed_actuator(
        ActuatorSources(
            health=health, metrics=observability.metrics, settings=lambda: explain_settings(settings), name=name
        ),
        management,
    )
    if management.metrics.opentelemetry:
        observability.export_to_opentelemetry()
    with ExitStack() as closing:
        closing.callback(health.close)
        mounted: dict[str, HttpHandler] = {}
        if management.port is not None and management.dashboard.enabled:
            from mqtemplate.console.server import MOUNT, check_installed

            check_installed()
            from mqtemplate.console.dashboard import managed_dashboard

            dashboard = managed_dashboard(broker, actuator, management, name, accounts)
            closing.callback(dashboard.close)
            mounted[MOUNT] = dashboard.handle
        yield actuator, mounted


def _start(cluster: LocalCluster[EmbeddedBroker], server: ServerSettings) -> None:
    """Start the cluster. An error names the processes that use the server's ports."""
    try:
        cluster.start()
    except BrokerError as exc:
        owners = [
            f"{address} is used by {owner}: stop it, or choose another address with {option}"
            for option, address in (
                ("--listen", server.listen),
                ("--name-server", server.name_server),
                ("--grpc", server.grpc_listen),
            )
            if address is not None and address.port and (owner := port_owner(address.port))
        ]
        if not owners:
            raise
        raise BrokerError("; ".join([str(exc), *owners])) from exc


def _print_addresses(cluster: LocalCluster[EmbeddedBroker], settings: AppSettings) -> None:
    server = settings.mqtemplate.server
    listening = (server.listen, server.name_server, server.grpc_listen)
    addresses = [address for address in listening if address is not None]
    exposed = [str(address) for address in addresses if not ipaddress.ip_address(address.ip).is_loopback]
    if exposed and not server.acl.enabled:
        print_line(
            f"warning: other machines can connect to {' and '.join(exposed)}, and access control is off: every client "
            "can read and write everything; set mqtemplate.server.acl, or listen on 127.0.0.1",
            sys.stderr,
        )
    store, grpc = settings.store_path or "memory", cluster.broker.grpc
    for_grpc = "" if grpc is None else f"gRPC clients on {grpc.server.address}, "
    print_line(
        f"{cluster.engine.name} listens on {cluster.address}, its name server on {cluster.name_server_address}, "
        f"{for_grpc}store {store}; press Ctrl-C to stop"
    )


@command(
    TOP,
    "reload",
    "reload --name-server 127.0.0.1:9876",
    "reload --config /etc/mqtemplate --json",
    "reload --url http://127.0.0.1:9090",
)
def reload(call: CommandCall, actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
    """Let a running server, or with --url an application, read its configuration again; show what has changed.

    Certificates, accounts, the log level and the delay levels change without a closed connection. The exit
    code is 1 if something stays as it was because a file has an error. With access control the account
    needs admin: true; an application needs the token.
    """
    if actuator.url is not None:
        results = _reloaded_application(actuator.client(call))
    else:
        from mqtemplate.brokers.remote.broker import reload_configuration

        with _serving(call) as cluster:
            results = reload_configuration(cluster.client_context)
    output = call.output
    output.document(
        {
            address: {"changed": each.changed, "needs_restart": each.needs_restart, "problems": each.problems}
            for address, each in results.items()
        }
    )
    for address, each in results.items():
        output.line(f"{address}: changed: {', '.join(each.changed) or 'nothing'}")
        for key in each.needs_restart:
            output.line(f"{address}: {key} has changed, and needs a restart")
        for problem in each.problems:
            output.note(f"{address}: not changed: {problem}")
    if any(each.problems for each in results.values()):
        raise typer.Exit(ExitCode.FAILED)


def _reloaded_application(client: ActuatorClient) -> dict[str, ReloadedConfig]:
    """Let the processes of an application read their configuration again; return the result by its address."""
    from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig

    found = client.post("configprops/reload", {})
    reloaded = ReloadedConfig(changed=found["changed"], needs_restart=found["needsRestart"], problems=found["problems"])
    return {client.address: reloaded}


def _serving(call: CommandCall) -> RemoteBroker:
    """Return the client of the server that the options name, or that serves the folder of the configuration."""
    from dataclasses import replace

    from mqtemplate.cli.invocation import cluster_of
    from mqtemplate.server.local_address import LocalServerAddress

    settings = call.settings()
    if (cluster := cluster_of(settings)) is not None:
        return cluster
    local = None if settings.store_path is None else LocalServerAddress.read(settings.store_path)
    found = None if local is None else cluster_of(replace(call, name_server=local.address).settings())
    if found is None:
        raise UnsupportedError(
            f"no server of {settings.store_path or 'the store in memory'} is known here; name its address "
            "(--name-server host:port), or the actuator of an application (--url), or send SIGHUP to its process"
        )
    return found


_LISTENING = "0A"


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """Return the process that listens on a TCP port, as ``process 4711 (java)``. None if it cannot be found.

    Args:
        proc: Process information of Linux.
    """
    inodes = {f"socket:[{inode}]" for inode in _listener_inodes(port, proc)}
    for folder in proc.glob("[0-9]*/fd") if inodes else ():
        try:
            if any(str(link.readlink()) in inodes for link in folder.iterdir()):
                name = (folder.parent / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {folder.parent.name} ({name})"
        except OSError:
            continue  # The process belongs to another user, or has ended.
    return None


def _listener_inodes(port: int, proc: Path) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on *port*. Format: ``proc_net_tcp`` in the kernel's documentation."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
