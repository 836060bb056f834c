"""TLS with RocketMQ's own: our client asks its name server, and its clients send to our server, which enforces TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.peer.rocketmq import JavaClient, free_port, why_not
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
from mqtemplate.server.settings import BrokerServerSettings
from tests.remoting.certificates import Certificates, has_openssl

pytestmark = pytest.mark.conformance


class Address(NamedTuple):
    address: str


@pytest.fixture
def enforcing_server(tmp_path: Path) -> Iterator[LocalCluster]:
    if why_not() or not has_openssl():
        pytest.skip(why_not() or "there is no openssl command to make certificates with")
    cert, key = Certificates(tmp_path / "certificates").issue("server", "IP:127.0.0.1")
    tls = ServerTls(cert_path=str(cert), key_path=str(key), mode=TlsMode.ENFORCING)
    listen = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(tmp_path / "store", EmbeddedSettings(listen_host=listen))
    settings = BrokerServerSettings(listen=listen)
    names = HostAddress("127.0.0.1", 0)
    with LocalCluster(engine, settings, names, remoting=RemotingServerSettings(tls=tls)) as cluster:
        yield cluster


@pytest.mark.parametrize("version", ["4.9.8", "5.5.0"])
def test_rocketmqs_clients_send_under_tls(
    enforcing_server: LocalCluster, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their test mode, which trusts anybody; one body is larger than a record of TLS."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dtls.enable=true")
    bodies = [b"small", b"x" * 300_000]

    with JavaClient(Address(str(enforcing_server.name_server_address)), version) as java:
        java.connect()
        results = java.send(*({"topic": "under-tls", "body": body} for body in bodies))

    assert [result["status"] for result in results] == ["SEND_OK", "SEND_OK"]


def test_our_client_asks_rocketmqs_name_server_under_tls() -> None:
    """It shows a certificate that it signed itself: refused, unless told to trust anybody."""
    question = RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO)
    trusting = RemotingClient(RemotingClientSettings(tls=ClientTls(insecure=True)), SystemClock())
    careful = RemotingClient(RemotingClientSettings(tls=ClientTls()), SystemClock())

    answer = trusting.invoke(name_server.address, question, 10_000)
    with pytest.raises(RemoteConnectError, match=r"is refused \(self-signed certificate\); set trust_cert_path"):
        careful.invoke(name_server.address, question, 10_000)
    trusting.close()
    careful.close()

    assert answer.code == ResponseCode.SUCCESS
