"""From the settings of ``mqtemplate.broker`` and ``mqtemplate.server`` to a cluster that can be started."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.context import AppSettings
from mqtemplate.context.settings.server import (
    AccountSettings,
    AclSection,
    ServerSettings,
    ServerTlsMode,
    ServerTlsSettings,
)
from mqtemplate.message import HostAddress
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.tls import ClientAuth, ServerTls, TlsMode
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.server.acl_settings import Account, AclSettings, Right
from mqtemplate.server.settings import ServerOptions


def cluster_of(settings: AppSettings) -> LocalCluster:
    """The cluster that the settings describe; nothing is opened yet.

    Raises:
        ConfigurationError: They contradict each other.
    """
    server = settings.mqtemplate.server
    server = dataclasses.replace(server, listen=_with_port(server.listen))
    return LocalCluster(
        _engine(settings, server),
        _server_settings(server),
        server.name_server,
        remoting=RemotingServerSettings(tls=_tls(server.tls), max_connections=server.max_connections),
        acl=_acl(server.acl),
    )


def _with_port(listen: HostAddress) -> HostAddress:
    """*listen*, with a free port in place of 0: the engine writes it into messages before the door is open."""
    if listen.port:
        return listen
    with socket.create_server((listen.ip, 0), family=socket.AF_INET6 if ":" in listen.ip else socket.AF_INET) as probe:
        return HostAddress(listen.ip, probe.getsockname()[1])


def open_doors(server: ServerSettings) -> list[HostAddress]:
    """The addresses that others than this machine may reach, while nobody is asked who he is."""
    doors = [server.listen] + ([] if server.name_server is None else [server.name_server])
    return [] if server.acl.enabled else [door for door in doors if not ipaddress.ip_address(door.ip).is_loopback]


def _engine(settings: AppSettings, server: ServerSettings) -> EmbeddedBroker:
    own = dataclasses.replace(settings.mqtemplate.broker, listen_host=_told(server))
    return EmbeddedBroker(settings.store_path, own)


def _told(server: ServerSettings) -> HostAddress:
    """The address that clients are told; a port of 0 in ``advertise`` is the one of ``listen``."""
    if server.advertise is None:
        return server.listen
    return HostAddress(server.advertise.ip, server.advertise.port or server.listen.port)


def _server_settings(server: ServerSettings) -> BrokerServerSettings:
    """Those that both have, under the same names."""
    return BrokerServerSettings(**{each.name: getattr(server, each.name) for each in dataclasses.fields(ServerOptions)})


def _tls(tls: ServerTlsSettings) -> ServerTls | None:
    if tls.mode is ServerTlsMode.DISABLED:
        return None
    return ServerTls(
        cert_path=tls.cert_path or "",
        key_path=tls.key_path or "",
        key_password=tls.key_password.get_secret_value() if tls.key_password else None,
        mode=TlsMode[tls.mode.name],
        client_auth=ClientAuth[tls.client_auth.name],
        trust_cert_path=tls.trust_cert_path,
    )


def _acl(acl: AclSection) -> AclSettings | None:
    return AclSettings(accounts=tuple(map(_account, acl.accounts))) if acl.enabled else None


def _account(account: AccountSettings) -> Account:
    return Account(
        access_key=account.access_key,
        secret_key=account.secret_key.get_secret_value(),
        admin=account.admin,
        default_topic_perm=Right.parse(account.default_topic_perm.value),
        default_group_perm=Right.parse(account.default_group_perm.value),
        topic_perms={topic: Right.parse(right.value) for topic, right in account.topic_perms.items()},
        group_perms={group: Right.parse(right.value) for group, right in account.group_perms.items()},
    )
