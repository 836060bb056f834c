"""A cluster in one process: start, stop and failed starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import BrokerError, ConfigurationError, RemoteConnectError, StoreLockedError
from mqtemplate.message import HostAddress, MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.identity import ClientTls
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.settings import RemotingClientSettings, RemotingServerSettings, ServerTls, TlsMode
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.remoting.certificates import Certificates, has_openssl
from tests.server.tool import ANY_PORT, Tool, make_engine

SETTINGS = BrokerServerSettings(listen=ANY_PORT)


@pytest.fixture
def taken() -> Iterator[HostAddress]:
    """A port that is in use."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield HostAddress(*listening.getsockname())


def test_messages_and_offsets_survive_a_restart(tmp_path: Path) -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    with LocalCluster(make_engine(VirtualClock(), tmp_path), SETTINGS, ANY_PORT) as cluster:
        with Tool(cluster.address) as tool:
            tool.send("orders")
        cluster.engine.groups.commit_offset("billing", queue, 1)

    with make_engine(VirtualClock(), tmp_path) as engine:
        assert engine.reader.max_offset(queue) == 1
        assert engine.groups.committed_offset("billing", queue) == 1


def test_a_cluster_can_be_stopped_twice_and_closes_both_ports() -> None:
    cluster = LocalCluster(make_engine(VirtualClock()), SETTINGS, ANY_PORT)
    cluster.start()
    addresses = [cluster.address, cluster.name_server_address]
    assert addresses[0] != addresses[1]

    cluster.stop()
    cluster.stop()

    for address in addresses:
        with Tool(address) as tool, pytest.raises(RemoteConnectError):
            tool.request(RequestCode.GET_BROKER_CLUSTER_INFO)


@pytest.mark.parametrize("which", ["broker", "name server"])
def test_if_one_port_is_in_use_everything_is_closed_again(tmp_path: Path, taken: HostAddress, which: str) -> None:
    listen, name_server = (taken, ANY_PORT) if which == "broker" else (ANY_PORT, taken)
    cluster = LocalCluster(make_engine(VirtualClock(), tmp_path), BrokerServerSettings(listen=listen), name_server)

    with pytest.raises(BrokerError, match=f"{taken}"):
        cluster.start()

    with make_engine(VirtualClock(), tmp_path) as engine:  # raises if the cluster still owned the store
        assert engine.topics.names()
    if which == "name server":
        with Tool(cluster.address) as tool, pytest.raises(RemoteConnectError):
            tool.request(RequestCode.GET_BROKER_CLUSTER_INFO)


def test_a_store_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with make_engine(VirtualClock(), tmp_path):
        cluster = LocalCluster(make_engine(VirtualClock(), tmp_path), SETTINGS, ANY_PORT)

        with pytest.raises(StoreLockedError, match="is in use by process"):
            cluster.start()


def test_after_a_malformed_table_everything_is_closed_again(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "kvConfig.json").write_text('{"configTable": [1]}')
    cluster = LocalCluster(make_engine(VirtualClock(), tmp_path), SETTINGS, ANY_PORT)

    with pytest.raises(Exception, match="config/kvConfig.json has unexpected content"):
        cluster.start()

    with make_engine(VirtualClock(), tmp_path) as engine:
        assert engine.topics.names()


@pytest.mark.skipif(not has_openssl(), reason="openssl is missing: it creates the certificates")
def test_tls_applies_to_broker_and_name_server(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.issue("server")
    remoting = RemotingServerSettings(tls=ServerTls(cert_path=str(cert), key_path=str(key), mode=TlsMode.ENFORCING))
    trusting = RemotingClientSettings(tls=ClientTls(trust_cert_path=str(certificates.authority), check_host_name=False))
    with LocalCluster(make_engine(VirtualClock()), SETTINGS, ANY_PORT, remoting=remoting) as cluster:
        for address in map(str, (cluster.address, cluster.name_server_address)):
            request = RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO)
            client = RemotingClient(trusting, SystemClock())
            response = client.invoke(address, request, 10_000)
            client.close()
            plain = RemotingClient(RemotingClientSettings(), SystemClock())
            with pytest.raises(RemoteConnectError):
                plain.invoke(address, RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO), 10_000)
            plain.close()

            assert response.code == ResponseCode.SUCCESS


def test_a_missing_certificate_is_reported_before_anything_is_created(tmp_path: Path) -> None:
    tls = ServerTls(cert_path=str(tmp_path / "none.pem"), key_path=str(tmp_path / "none.pem"))
    remoting = RemotingServerSettings(tls=tls)

    with pytest.raises(ConfigurationError, match="none.pem"):
        LocalCluster(make_engine(VirtualClock(), tmp_path / "store"), SETTINGS, ANY_PORT, remoting=remoting)

    assert list(tmp_path.iterdir()) == []
