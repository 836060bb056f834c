"""The server for the broker that settings describe: the server of ``mqtemplate broker`` and of ``mqtemplate run``."""

from __future__ import annotations

import dataclasses
import socket

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import AccountSettings, AclSection, ServerSettings, ServerTlsSettings
from mqtemplate.message import HostAddress
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.tls import ClientAuth, ServerTls, TlsMode
from mqtemplate.server.acl.settings import Account, AclSettings, Right
from mqtemplate.server.broker_server import LocalCluster
from mqtemplate.server.settings import BrokerServerSettings, ServerOptions
from mqtemplate.store.settings import FlushDiskType


def local_cluster(
    settings: AppSettings, server: ServerSettings | None = None, own: Account | None = None
) -> LocalCluster:
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
        acl=_acl(server.acl, own),
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


def _acl(acl: AclSection, own: Account | None) -> AclSettings | None:
    if not acl.enabled and own is None:
        return None
    accounts = [*map(_account, acl.accounts), *([] if own is None else [own])]
    return AclSettings(accounts=tuple(accounts), replay_window_ms=acl.replay_window_ms, is_private=not acl.enabled)


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
