"""TLS with RocketMQ: the remoting client calls RocketMQ's name server, and Java clients send to this server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import (
    ClientTls,
    RemotingClient,
    RemotingClientSettings,
    RemotingServerSettings,
    ServerTls,
    TlsMode,
)
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.server import LocalCluster
from mqtemplate.server.state.settings import BrokerServerSettings
from tests.remoting.certificates import Certificates, has_openssl

pytestmark = pytest.mark.conformance


class Address(NamedTuple):
    address: str


@pytest.fixture
def enforcing_server(rocketmq: None, tmp_path: Path) -> Iterator[LocalCluster]:
    if not has_openssl():
        pytest.skip("the openssl command is missing; it creates the certificates")
    cert, key = Certificates(tmp_path / "certificates").issue("server", "IP:127.0.0.1")
    tls = ServerTls(cert_path=str(cert), key_path=str(key), mode=TlsMode.ENFORCING)
    listen = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(tmp_path / "store", EmbeddedSettings(listen_host=listen))
    settings = BrokerServerSettings(listen=listen)
    name_server = HostAddress("127.0.0.1", 0)
    with LocalCluster(engine, settings, name_server, remoting=RemotingServerSettings(tls=tls)) as cluster:
        yield cluster


@pytest.mark.parametrize("version", ["4.9.8", "5.5.0"])
def test_rocketmqs_clients_send_under_tls(
    enforcing_server: LocalCluster, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their test mode trusts every certificate. One body is larger than a TLS record."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dtls.enable=true")
    bodies = [b"small", b"x" * 300_000]

    with JavaClient(Address(str(enforcing_server.name_server_address)), version) as java:
        java.connect()
        results = java.send(*({"topic": "under-tls", "body": body} for body in bodies))

    assert [result["status"] for result in results] == ["SEND_OK", "SEND_OK"]


def test_the_remoting_client_calls_rocketmqs_name_server_under_tls(rocketmq: None) -> None:
    """Its self-signed certificate is refused, unless the settings allow an unverified connection."""
    request = RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO)
    insecure = RemotingClient(RemotingClientSettings(tls=ClientTls(insecure=True)), SystemClock())
    verifying = RemotingClient(RemotingClientSettings(tls=ClientTls()), SystemClock())

    with NameServer(tls=True) as name_server:
        response = insecure.invoke(name_server.address, request, 10_000)
        with pytest.raises(RemoteConnectError, match=r"is refused \(self-signed certificate\); set trust_cert_path"):
            verifying.invoke(name_server.address, request, 10_000)
    insecure.close()
    verifying.close()

    assert response.code == ResponseCode.SUCCESS
