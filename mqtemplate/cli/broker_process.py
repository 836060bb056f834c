"""A broker and its name server in this process, from the settings to the end by a signal."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.cli.output import print_line
from mqtemplate.cli.port_owner import port_owner
from mqtemplate.context.config.source import load_settings
from mqtemplate.context.logging import has_handlers, show_events
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.server import AccountSettings, AclSection, ServerSettings, ServerTlsSettings
from mqtemplate.context.signals import StopRequests
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.tls import ClientAuth, ServerTls, TlsMode
from mqtemplate.server.acl.settings import Account, AclSettings, Right
from mqtemplate.server.broker_server import LocalCluster
from mqtemplate.server.settings import BrokerServerSettings, ServerOptions

_SWITCH_INTERVAL_S = 0.0005
"""Time after which a busy thread lets another one run. With Python's 5 ms, the I/O thread would wait so long after each
system call while a worker thread parses a large request, and a response needs several system calls."""


def run(config: str | None, profiles: Sequence[str], given: Mapping[str, object]) -> None:
    """Start the cluster, print its addresses, and stop it after a signal.

    Args:
        config: Folder of ``application.yml``; None for the current folder.
        given: Keys that win over the configuration.

    Raises:
        MQTemplateError: It cannot start.
    """
    # The name server of the applications in the same file is not the one of this broker.
    arguments = {**given, "rocketmq.name-server": "embedded"}
    settings = load_settings(config, profiles, arguments=arguments)
    logging = settings.mqtemplate.logging
    restore_logging = show_events(logging) if logging.enabled and not has_handlers() else lambda: None
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        stop_requests = StopRequests()
        with stop_requests.from_signals():
            cluster = _cluster(settings)
            _start(cluster, settings.mqtemplate.server)
            try:
                with _management(cluster, settings):
                    _print_addresses(cluster, settings)
                    reason = stop_requests.wait()
                print_line(f"stopping ({reason}) ...")
            finally:
                cluster.stop()
            print_line("stopped; all acknowledged messages are on disk")
    finally:
        sys.setswitchinterval(switch_interval)
        restore_logging()


@contextmanager
def _management(cluster: LocalCluster, settings: AppSettings) -> Iterator[None]:
    """Serve health, metrics and configuration on the management port, if ``mqtemplate.management`` is on."""
    management = settings.mqtemplate.management
    if not management.enabled:
        yield
        return
    from mqtemplate.actuator.actuator import Actuator, ActuatorSources
    from mqtemplate.actuator.http_server import ManagementServer
    from mqtemplate.context.config.explain import explain_settings
    from mqtemplate.observability.health import HealthChecks, broker_checks
    from mqtemplate.observability.observability import Observability

    observed = Observability(cluster.engine, management.observability)
    health = HealthChecks(broker_checks(cluster.engine, management.health), management.health.timeout_ms)
    name = management.name or cluster.engine.name
    sources = ActuatorSources(
        health=health, metrics=observed.metrics, settings=lambda: explain_settings(settings), name=name
    )
    if management.metrics.opentelemetry:
        observed.export_to_opentelemetry()
    with ExitStack() as closing:
        closing.callback(health.close)
        if management.port is not None:
            server = ManagementServer(
                Actuator(sources, endpoints=management.endpoints), management.port, management.address
            )
            server.start()
            closing.callback(server.stop)
        yield


def _start(cluster: LocalCluster, server: ServerSettings) -> None:
    """Start the cluster. An error names the processes that use the server's ports."""
    try:
        cluster.start()
    except BrokerError as exc:
        owners = [
            f"{address} is used by {owner}: stop it, or choose another address with {option}"
            for option, address in (("--listen", server.listen), ("--name-server", server.name_server))
            if address is not None and address.port and (owner := port_owner(address.port))
        ]
        if not owners:
            raise
        raise BrokerError("; ".join([str(exc), *owners])) from exc


def _print_addresses(cluster: LocalCluster, settings: AppSettings) -> None:
    server = settings.mqtemplate.server
    addresses = [address for address in (server.listen, server.name_server) if address is not None]
    exposed = [str(address) for address in addresses if not ipaddress.ip_address(address.ip).is_loopback]
    if exposed and not server.acl.enabled:
        print_line(
            f"warning: other machines can connect to {' and '.join(exposed)}, and access control is off: every client "
            "can read and write everything; set mqtemplate.server.acl, or listen on 127.0.0.1",
            sys.stderr,
        )
    store = "memory" if settings.store_path is None else Path(settings.store_path).absolute()
    print_line(
        f"{cluster.engine.name} listens on {cluster.address}, its name server on {cluster.name_server_address}, "
        f"store {store}; press Ctrl-C to stop"
    )


# --- from the settings to the cluster ---------------------------------------------------------------


def _cluster(settings: AppSettings) -> LocalCluster:
    """Return the cluster that the settings describe. It is not started.

    Raises:
        ConfigurationError: The settings contradict each other.
    """
    server = settings.mqtemplate.server
    server = dataclasses.replace(server, listen=_with_port(server.listen))
    options = {each.name: getattr(server, each.name) for each in dataclasses.fields(ServerOptions)}
    return LocalCluster(
        _engine(settings, server),
        BrokerServerSettings(**options),
        server.name_server,
        remoting=RemotingServerSettings(
            tls=_tls(server.tls),
            max_connections=server.max_connections,
            max_connections_per_address=server.max_connections_per_address,
        ),
        acl=_acl(server.acl),
    )


def _with_port(listen: HostAddress) -> HostAddress:
    """Replace port 0 by a free port: the engine stores the port in messages before the server listens."""
    if listen.port:
        return listen
    with socket.create_server((listen.ip, 0), family=socket.AF_INET6 if ":" in listen.ip else socket.AF_INET) as probe:
        return HostAddress(listen.ip, probe.getsockname()[1])


def _engine(settings: AppSettings, server: ServerSettings) -> EmbeddedBroker:
    listen_host = server.listen
    if server.advertise is not None:
        listen_host = HostAddress(server.advertise.ip, server.advertise.port or server.listen.port)
    return EmbeddedBroker(settings.store_path, dataclasses.replace(settings.mqtemplate.broker, listen_host=listen_host))


def _tls(tls: ServerTlsSettings) -> ServerTls | None:
    if tls.mode == "DISABLED":
        return None
    return ServerTls(
        cert_path=tls.cert_path or "",
        key_path=tls.key_path or "",
        key_password=tls.key_password.get_secret_value() if tls.key_password else None,
        mode=TlsMode[tls.mode],
        client_auth=ClientAuth[tls.client_auth],
        trust_cert_path=tls.trust_cert_path,
    )


def _acl(acl: AclSection) -> AclSettings | None:
    if not acl.enabled:
        return None
    return AclSettings(accounts=tuple(map(_account, acl.accounts)), replay_window_ms=acl.replay_window_ms)


def _account(account: AccountSettings) -> Account:
    return Account(
        access_key=account.access_key,
        secret_key=account.secret_key.get_secret_value(),
        admin=account.admin,
        default_topic_perm=Right.parse(account.default_topic_perm),
        default_group_perm=Right.parse(account.default_group_perm),
        topic_perms={topic: Right.parse(right) for topic, right in account.topic_perms.items()},
        group_perms={group: Right.parse(right) for group, right in account.group_perms.items()},
    )
