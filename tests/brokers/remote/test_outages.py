"""A client survives failures of its cluster: restarts, silent brokers, and features that are switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker
from mqtemplate.errors import MQTemplateError, SendError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import bodies, client, join, take
from tests.contract.test_remote_server import free_address
from tests.waiting import eventually


class Restartable:
    """A server that keeps its store directory and its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = free_address()
        self.start()

    def start(self) -> None:
        settings = EmbeddedSettings(listen_host=self.address, mapped_file_size_commit_log=8 << 20)
        self._cluster = LocalCluster(
            EmbeddedBroker(self._folder / "store", settings), BrokerServerSettings(listen=self.address)
        )
        self._cluster.start()

    def stop(self) -> None:
        self._cluster.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def broker(server: Restartable, tmp_path: Path) -> Iterator[RemoteBroker]:
    with client(server.address, tmp_path, retry_after_error_ms=50) as broker:
        yield broker


def sends(broker: RemoteBroker, body: bytes) -> bool:
    try:
        broker.send(Message("orders", body), timeout_ms=1_000)
    except SendError:
        return False
    return True


def test_members_and_producers_continue_after_a_server_restart(server: Restartable, broker: RemoteBroker) -> None:
    broker.send(Message("orders", b"before"))
    member = join(broker, "orders")
    assert bodies(take(member, 1)) == [b"before"]
    for queue in member.assignment():
        member.commit(queue, member.position(queue))

    server.stop()
    assert not sends(broker, b"lost")
    server.start()

    eventually(lambda: sends(broker, b"after"), "a send succeeds")
    assert set(bodies(take(member, 1))) == {b"after"}


def test_a_broker_can_be_closed_when_its_cluster_is_down(server: Restartable, broker: RemoteBroker) -> None:
    broker.send(Message("orders", b"x"))
    member = join(broker, "orders")
    take(member, 1)
    server.stop()

    broker.close()

    with pytest.raises(MQTemplateError, match="was closed"):
        member.poll(1)
    server.start()  # the fixture stops it


def test_the_error_for_unsupported_sql92_names_the_setting(tmp_path: Path) -> None:
    address = free_address()
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=address))
    without = BrokerServerSettings(listen=address, enable_property_filter=False)
    with LocalCluster(engine, without), client(address, tmp_path) as broker:
        queue = broker.send(Message("orders", b"x", {"price": "7"})).message_queue

        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            join(broker, "orders", selector=Sql92Selector("price > 6"))
        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            broker.pull(queue, 0, selector=Sql92Selector("price > 6"))
        assert bodies(take(join(broker, "orders"), 1)) == [b"x"]
