"""Brokers whose registered address is not the one at which a client reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import BrokerError, MessageError
from mqtemplate.message import HostAddress, Message, offset_msg_id
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import ANYWHERE, bodies, client, join, take
from tests.contract.test_remote_server import free_address

IN_A_CONTAINER = HostAddress("172.18.0.3", 10_911)


@contextmanager
def server(advertise: HostAddress) -> Iterator[LocalCluster[EmbeddedBroker]]:
    """Start our own server, whose routes and message ids have other addresses than its sockets."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=IN_A_CONTAINER))
    settings = BrokerServerSettings(listen=ANYWHERE, advertise=advertise)
    with LocalCluster(engine, settings, ANYWHERE) as cluster:
        yield cluster


def reached_at(cluster: LocalCluster[EmbeddedBroker]) -> str:
    return str(cluster.broker.remoting.address)


@pytest.mark.parametrize("registered", ["172.18.*", "172.18.0.3:10911"])
def test_a_broker_in_another_network_is_reached_by_the_address_map(registered: str, tmp_path: Path) -> None:
    with (
        server(IN_A_CONTAINER) as cluster,
        client(cluster.name_server_address, tmp_path, address_map={registered: reached_at(cluster)}) as broker,
    ):
        sent = broker.sends.send(Message("orders", b"x"))
        member = join(broker, "orders")

        assert bodies(take(member, 1)) == [b"x"]
        assert str(IN_A_CONTAINER) not in broker._client._routes.addresses()
        found = broker.reader.message_by_id(sent.offset_msg_id)
        assert found is not None
        assert found.body == b"x"


def test_a_message_id_of_another_cluster_is_refused(tmp_path: Path) -> None:
    with (
        server(IN_A_CONTAINER) as cluster,
        client(cluster.name_server_address, tmp_path, address_map={"*": reached_at(cluster)}) as broker,
    ):
        broker.sends.send(Message("orders", b"x"))
        other = offset_msg_id(HostAddress("10.0.0.9", 10_911), 0)

        with pytest.raises(MessageError, match=r"was given by the broker at 10\.0\.0\.9:10911; this cluster has"):
            broker.reader.message_by_id(other)


def test_a_server_may_advertise_a_host_name(tmp_path: Path) -> None:
    with server(HostAddress("localhost", 0)) as cluster, client(cluster.name_server_address, tmp_path) as broker:
        broker.sends.send(Message("orders", b"x"))

        assert broker._client._routes.addresses() == [f"localhost:{cluster.broker.remoting.address.port}"]


def test_the_error_of_an_unreachable_broker_says_where_its_address_came_from(tmp_path: Path) -> None:
    closed = free_address()
    with (
        server(closed) as cluster,
        client(cluster.name_server_address, tmp_path) as broker,
        pytest.raises(BrokerError) as raised,
    ):
        broker.sends.send(Message("orders", b"x"), timeout_ms=100)

    assert f"cannot connect to {closed} (Connection refused)" in str(raised.value)
    assert (
        "broker 'broker-a' has registered this address at the name server; if it has another one here, as in Docker, "
        f"Kubernetes or behind NAT, set mqtemplate.cluster.address-map: {{'{closed}': 'HOST:PORT'}}, or at the broker "
        "brokerIP1 (--advertise of our server)"
    ) in str(raised.value)


def test_the_error_of_a_mapped_address_names_the_registered_one(tmp_path: Path) -> None:
    closed = free_address()
    with (
        server(IN_A_CONTAINER) as cluster,
        client(cluster.name_server_address, tmp_path, address_map={"172.18.*": str(closed)}) as broker,
        pytest.raises(BrokerError) as raised,
    ):
        broker.sends.send(Message("orders", b"x"), timeout_ms=100)

    assert (
        f"cannot connect to {closed} (Connection refused); is a broker or name server running there, and is the "
        "address right?; mqtemplate.cluster.address-map gives this address for 172.18.0.3:10911, which broker "
        "'broker-a' has registered"
    ) in str(raised.value)
