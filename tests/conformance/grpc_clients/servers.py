"""Servers for RocketMQ's gRPC clients: this project's server, and RocketMQ's broker with its proxy in either mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.proxy import Certificate, LocalProxy, Proxy, fetch_proxy
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.remoting import Credentials, RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.server.name_server import MASTER_ID
from tests.conformance.grpc_clients.accounts import RIGHTS_CASE, USERS, User, own_accounts, rocketmq_acl, rocketmq_user
from tests.conformance.servers import ACCOUNT, ADMINISTRATOR, BrokerProcess, accounts, is_registered
from tests.remoting.certificates import Certificates, has_openssl
from tests.waiting import eventually

_TIMEOUT_MS = 20_000
_OPTIONS = {"transactionTimeOut": 1_000, "transactionCheckInterval": 1_000, "enableMixedMessageType": "true"}
_RETRY_MS = 1_000
OWN = "mqtemplate"
"""Name of this project's server."""
CLIENT_NAMES = ("java", "go", "node", "python", "rust")
DENIED_TOPICS = [f"{client}-{RIGHTS_CASE}" for client in (*CLIENT_NAMES, "raw")]
"""Topics to which one of `USERS` has no right."""


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A running server.

    Attributes:
        endpoint: ``host:port`` of its gRPC service.
        address: ``host:port`` of its name server.
        authority: PEM file of the authority that issued its certificate, None without TLS.
        account: Account that may create topics, None without access control.
    """

    endpoint: str
    address: str
    authority: Path | None = None
    account: Credentials | None = None


@contextmanager
def local_proxy(folder: Path) -> Iterator[GrpcServer]:
    """Run RocketMQ's broker with its proxy in one process, its LOCAL mode. It accepts TLS, too."""
    _require_proxy()
    certificates = _certificates(folder)
    with (
        NameServer() as names,
        LocalProxy(folder / "store", names, _OPTIONS, certificate=_issued(certificates)) as proxy,
    ):
        server = GrpcServer(proxy.endpoint, names.address, authority=certificates.authority)
        wait_until_registered(server, folder)
        yield server


@contextmanager
def cluster_proxy(folder: Path) -> Iterator[GrpcServer]:
    """Run RocketMQ's broker, and its proxy in a process of its own, its CLUSTER mode. It accepts TLS, too."""
    _require_proxy()
    certificates = _certificates(folder)
    with NameServer() as names, RocketMQ(folder / "store", names, _OPTIONS):
        wait_until_registered(GrpcServer("", names.address), folder)
        # It reports the producers of a topic to the broker, which checks transactions with them, every 20 s by default.
        with Proxy(names, {"transactionHeartbeatPeriodSecond": 1}, certificate=_issued(certificates)) as proxy:
            yield GrpcServer(proxy.address, names.address, authority=certificates.authority)


@contextmanager
def guarded_proxy(folder: Path) -> Iterator[GrpcServer]:
    """Run RocketMQ's broker with its proxy in LOCAL mode, which check signatures and rights.

    `ACCOUNT` may do everything, and `USERS` what their rights permit.
    """
    _require_proxy()
    options, proxy_options = _access_control(folder)
    with (
        NameServer() as names,
        LocalProxy(folder / "store", names, _OPTIONS | options, proxy_options=proxy_options) as proxy,
    ):
        server = GrpcServer(proxy.endpoint, names.address, account=ACCOUNT)
        wait_until_registered(server, folder)
        _create_users(server)
        yield server


@contextmanager
def guarded_cluster_proxy(folder: Path) -> Iterator[GrpcServer]:
    """Run the same with the proxy in CLUSTER mode."""
    _require_proxy()
    options, proxy_options = _access_control(folder)
    with NameServer() as names, RocketMQ(folder / "store", names, _OPTIONS | options):
        wait_until_registered(GrpcServer("", names.address, account=ACCOUNT), folder)
        # It also signs what it sends to the broker itself.
        with Proxy(names, proxy_options | {"enableAclRpcHookForClusterMode": True}) as proxy:
            server = GrpcServer(proxy.address, names.address, account=ACCOUNT)
            _create_users(server)
            yield server


def _access_control(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Return the options of a broker and of its proxy with access control."""
    package = "org.apache.rocketmq.auth"
    keys = {"accessKey": ACCOUNT.access_key, "secretKey": ACCOUNT.secret_key}
    user = {"username": ACCOUNT.access_key, "password": ACCOUNT.secret_key, "userType": "Super"}
    options: dict[str, object] = {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{package}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{package}.authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationEnabled": "true",
        "authorizationProvider": f"{package}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{package}.authorization.provider.LocalAuthorizationMetadataProvider",
        "authConfigPath": str(folder / "auth"),
        "initAuthenticationUser": json.dumps(user),
        "innerClientAuthenticationCredentials": json.dumps(keys),
    }
    proxy_options = options | {  # The proxy asks its broker for accounts.
        "authenticationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthenticationMetadataProvider",
        "authorizationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthorizationMetadataProvider",
    }
    return options, proxy_options


def _create_users(server: GrpcServer) -> None:
    """Create the accounts of `USERS` in a broker of RocketMQ."""
    with Administrator(server) as administrator:
        for user in USERS.values():
            if user.topics:
                administrator.create_user(user)


@contextmanager
def own_server(folder: Path) -> Iterator[GrpcServer]:
    """Run this project's server. It accepts TLS, too."""
    certificates = _certificates(folder)
    certificate, key = _issued(certificates)
    options = {"tls": {"cert-path": str(certificate), "key-path": str(key), "mode": "PERMISSIVE"}}
    endpoint = f"127.0.0.1:{free_port()}"
    with BrokerProcess(folder / "store", options={"grpc-listen": endpoint} | options) as process:
        yield GrpcServer(endpoint, process.address, authority=certificates.authority)


@contextmanager
def own_guarded_server(folder: Path) -> Iterator[GrpcServer]:
    """Run this project's server with access control. `ACCOUNT` may send and receive, and `USERS` have their rights."""
    endpoint = f"127.0.0.1:{free_port()}"
    acl = dict(accounts())
    acl["accounts"] = [*cast(list[object], acl["accounts"]), *own_accounts(DENIED_TOPICS)]
    with BrokerProcess(folder / "store", acl=acl, options={"grpc-listen": endpoint}) as process:
        yield GrpcServer(endpoint, process.address, account=ADMINISTRATOR)


SERVERS = {
    OWN: (own_server, own_guarded_server),
    "local": (local_proxy, guarded_proxy),
    "cluster": (cluster_proxy, guarded_cluster_proxy),
}
"""Name -> how it is started without access control, and with it. The last two are the modes of RocketMQ's proxy."""


def _certificates(folder: Path) -> Certificates:
    """Create certificates, or skip the test."""
    if not has_openssl():
        pytest.skip("the openssl command is missing; it creates the certificates")
    return Certificates(folder / "certificates")


def _issued(certificates: Certificates) -> Certificate:
    return Certificate(*certificates.issue("server", "IP:127.0.0.1"))


def _require_proxy() -> None:
    """Skip the test if the proxy cannot run here."""
    if reason := unavailable_reason() or fetch_proxy():
        pytest.skip(reason)


def wait_until_registered(server: GrpcServer, folder: Path) -> None:
    """Return when the broker is known to its name server."""
    settings = RemoteSettings(
        name_servers=(server.address,), offset_path=folder / "offsets", credentials=server.account
    )
    eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)


class _UserHeader(CommandHeader):
    username: str


class _AclHeader(CommandHeader):
    subject: str


class Administrator:
    """Creates topics and groups of a server, by requests of the remoting protocol."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def __enter__(self) -> Self:
        self._client = RemotingClient(RemotingClientSettings(credentials=self._server.account), SystemClock())
        found = ClusterInfo.decode(self._call(self._server.address, RequestCode.GET_BROKER_CLUSTER_INFO).body)
        self._broker = found.broker_addr_table["broker-a"].broker_addrs[MASTER_ID]
        return self

    def create_topic(self, topic: str, message_type: str = "", queues: int = 2) -> None:
        """Create a topic for messages of a type: "FIFO", "DELAY", "TRANSACTION", ...; without one for normal ones."""
        header = CreateTopicRequestHeader(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
            attributes=f"+message.type={message_type}" if message_type else None,
        )
        self._call(self._broker, RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    def create_group(self, group: str, *, retries: int = 16, ordered: bool = False) -> None:
        """Create a group whose messages are delivered again after a second, *retries* times."""
        config = {
            "groupName": group,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeBroadcastEnable": True,
            "consumeMessageOrderly": ordered,
            "retryQueueNums": 1,
            "retryMaxTimes": retries,
            "groupRetryPolicy": {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [_RETRY_MS]}},
            "brokerId": 0,
            "whichBrokerWhenConsumeSlowly": 1,
            "notifyConsumerIdsChangedEnable": True,
            "groupSysFlag": 0,
            "consumeTimeoutMinute": 15,
            "attributes": {},
        }
        self._call(self._broker, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=json.dumps(config).encode())

    def create_user(self, user: User) -> None:
        """Create the account of a user in a broker of RocketMQ."""
        name = user.credentials.access_key
        body = json.dumps(rocketmq_user(user)).encode()
        self._call(self._broker, RequestCode.AUTH_CREATE_USER, _UserHeader(username=name), body)
        body = json.dumps(rocketmq_acl(user, DENIED_TOPICS)).encode()
        self._call(self._broker, RequestCode.AUTH_CREATE_ACL, _AclHeader(subject=f"User:{name}"), body)

    def _call(self, address: str, code: int, header: CommandHeader | None = None, body: bytes = b"") -> RemotingCommand:
        answer = self._client.invoke(address, RemotingCommand.request(code, header, body), _TIMEOUT_MS)
        assert answer.code == ResponseCode.SUCCESS, f"request {code}: {answer.code} {answer.remark}"
        return answer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()
