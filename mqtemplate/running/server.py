"""The server for the broker that settings describe, and the one that the workers of a supervisor share."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import ServerSettings, ServerTlsSettings, acl_settings
from mqtemplate.context.settings.rocketmq import EmbeddedStore
from mqtemplate.context.settings.source import read_again
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.processes import prompt_threads
from mqtemplate.remoting.settings import ClientAuth, RemotingServerSettings, ServerTls, TlsMode
from mqtemplate.remoting.sockets import reason_of
from mqtemplate.running.reload import LOG_LEVEL, ConfigReload, ReloadablePart, delay_levels
from mqtemplate.server.acl.settings import Account
from mqtemplate.server.broker_server import LocalCluster
from mqtemplate.server.local_address import LocalServerAddress
from mqtemplate.server.state.settings import BrokerServerSettings, ServerOptions
from mqtemplate.store.settings import FlushDiskType

_log = get_logger("mqtemplate.server")


def local_cluster(
    settings: AppSettings, server: ServerSettings | None = None, own: Account | None = None
) -> LocalCluster[EmbeddedBroker]:
    """Return the broker and the name server that the settings describe. They are not started.

    Args:
        server: Instead of ``mqtemplate.server.*`` of the settings.
        own: A further account, for processes that this one starts. With it access control is on in any case.

    Raises:
        ConfigurationError: The settings contradict each other.
    """
    server = server or settings.mqtemplate.server
    server = dataclasses.replace(server, listen=_with_port(server.listen))
    flushes_each = settings.mqtemplate.broker.flush_disk_type is FlushDiskType.SYNC_FLUSH
    options = {each.name: getattr(server, each.name) for each in dataclasses.fields(ServerOptions)}
    return LocalCluster(
        _engine(settings, server),
        BrokerServerSettings(**options),
        server.name_server,
        remoting=RemotingServerSettings(
            tls=_tls(server.tls),
            max_connections=server.max_connections,
            max_connections_per_address=server.max_connections_per_address,
            # With SYNC_FLUSH a response waits for the disk, and a poll would take the interpreter lock from the flush.
            busy_poll_us=0 if flushes_each else server.busy_poll_us,
        ),
        acl=acl_settings(server.acl, own),
    )


READ_BY_SERVER = tuple(
    f"mqtemplate.{name}." for name in ("broker", "copy", "server", "logging", "management", "profiles")
)
"""Beginnings of the keys that a server reads."""


def reloadable_parts(cluster: LocalCluster[EmbeddedBroker], own: Account | None = None) -> list[ReloadablePart]:
    """Return the parts of a cluster that take new settings while it runs.

    Args:
        own: As for `local_cluster`.
    """

    def use_accounts(settings: AppSettings) -> None:
        acl = acl_settings(settings.mqtemplate.server.acl, own)
        if acl is None:
            raise ConfigurationError(
                "mqtemplate.server.acl.enabled is false now, which a restart only can do; the accounts stay as they are"
            )
        cluster.broker.use_accounts(acl)

    parts = [
        LOG_LEVEL,
        delay_levels(cluster.engine.engine.configure_delay_levels),
        ReloadablePart(
            ("mqtemplate.server.tls",),
            lambda settings: cluster.use_tls(_tls(settings.mqtemplate.server.tls)),
            lambda settings: _tls_files(settings.mqtemplate.server.tls),
        ),
    ]
    if cluster.broker.guard is not None:
        parts.append(ReloadablePart(("mqtemplate.server.acl.accounts",), use_accounts))
    return parts


def _tls_files(tls: ServerTlsSettings) -> tuple[str | None, ...]:
    return () if tls.mode == "DISABLED" else (tls.cert_path, tls.key_path, tls.trust_cert_path)


def _with_port(listen: HostAddress) -> HostAddress:
    """Replace port 0 by a free port: the engine stores the port in messages before the server listens."""
    if listen.port:
        return listen
    with socket.create_server((listen.ip, 0), family=socket.AF_INET6 if ":" in listen.ip else socket.AF_INET) as probe:
        return HostAddress(listen.ip, probe.getsockname()[1])


def _engine(settings: AppSettings, server: ServerSettings) -> EmbeddedBroker:
    broker = dataclasses.replace(settings.mqtemplate.broker, listen_host=_recorded_host(server))
    if (path := settings.copied_path) is not None:
        from mqtemplate.copy.copier import CopiedBroker  # few have a copy

        return CopiedBroker(path, broker, None, copy=settings.mqtemplate.copy_)
    return EmbeddedBroker(settings.store_path, broker)


def _recorded_host(server: ServerSettings) -> HostAddress:
    """Return the address in records and message ids, which is numeric: that of the host name that clients get."""
    advertised = server.advertise
    if advertised is None:
        return server.listen
    port = advertised.port or server.listen.port
    try:
        infos = socket.getaddrinfo(advertised.ip, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        ip = "127.0.0.1" if ipaddress.ip_address(server.listen.ip).is_unspecified else server.listen.ip
        _log.warning("server.name_not_resolved", advertise=str(advertised), reason=reason_of(exc), in_message_ids=ip)
        return HostAddress(ip, port)
    return HostAddress(str(min(infos, key=lambda info: info[0] != socket.AF_INET)[4][0]).partition("%")[0], port)


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


_ANY_PORT = HostAddress("127.0.0.1", 0)


@contextmanager
def shared_server(
    settings: AppSettings, workers: int, report: Callable[[str], None]
) -> Iterator[tuple[LocalServerAddress | None, LocalCluster[EmbeddedBroker] | None]]:
    """Serve the store directory of the settings inside the context, if several workers are to share it.

    A directory belongs to one user, and a port of 127.0.0.1 is open to all users of the machine. So a client needs an
    account: the server creates one for the workers at each start, and commands of the same user find it in the
    directory.

    Returns:
        Address and account for the workers, and the server; None if they use the broker and the account of
        the configuration.

    Raises:
        ConfigurationError: The store is in memory, which other processes cannot use.
        MQTemplateError: The server cannot start.
    """
    choice = settings.broker_choice
    if workers == 1 or not isinstance(choice, EmbeddedStore):
        yield None, None
        return
    if settings.store_path is None:
        raise ConfigurationError(
            f"rocketmq.name-server is {settings.rocketmq.name_server!r}, and {workers} worker processes cannot share "
            "the memory of one; name a folder (embedded:<folder>) or a server (host:port), or run one worker"
        )
    with ExitStack() as running:
        access_key, secret_key = f"run-{secrets.token_hex(8)}", secrets.token_hex()
        account = Account(access_key=access_key, secret_key=secret_key, admin=True, is_owner=True)
        is_open = _is_open_to_all(settings)
        own = None if is_open else account
        cluster = local_cluster(settings, _settings_of_server(settings), own)
        cluster.start()
        running.callback(cluster.stop)
        reload = ConfigReload(
            settings, lambda: read_again(settings), reloadable_parts(cluster, own), sections=READ_BY_SERVER
        )
        cluster.broker.on_reload(reload.reload)
        running.enter_context(reload.running())
        running.enter_context(prompt_threads())
        report(
            f"broker {cluster.engine.name} for the workers on {cluster.address}, its name server on "
            f"{cluster.name_server_address}, store {settings.store_path}"
        )
        if is_open:
            report("warning: mqtemplate.server.acl.enabled is false: every user of this machine can read and write all")
        address = LocalServerAddress(
            str(cluster.name_server_address), account.access_key, os.getpid(), account.secret_key
        )
        address.write(settings.store_path)
        running.callback(LocalServerAddress.remove, settings.store_path)
        yield address, cluster


def _is_open_to_all(settings: AppSettings) -> bool:
    """Return True if the configuration itself says that no account is needed."""
    key = "mqtemplate.server.acl.enabled"
    return settings.origins.of(key) != "default" and not settings.mqtemplate.server.acl.enabled


def _settings_of_server(settings: AppSettings) -> ServerSettings:
    """Return the settings of the server: addresses on loopback with free ports, unless the configuration has others."""
    server = settings.mqtemplate.server
    changed = {
        field: _ANY_PORT
        for field, key in (("listen", "mqtemplate.server.listen"), ("name_server", "mqtemplate.server.name-server"))
        if settings.origins.of(key) == "default"
    }
    return dataclasses.replace(server, **changed)  # type: ignore[arg-type]  # the two fields are addresses
