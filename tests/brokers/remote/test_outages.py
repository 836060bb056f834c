"""A client outlives what happens to its cluster: restarts, silence, and brokers that have features switched off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.errors import MQTemplateError, SendError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.contract.test_remote_server import free_address


class Restartable:
    """A server over one folder and at one address."""

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
    settings = RemoteSettings(name_servers=(str(server.address),), offset_path=tmp_path, retry_after_error_ms=50)
    with RemoteBroker(settings) as broker:
        yield broker


def join(broker: RemoteBroker, topic: str, selector: Selector | None = None) -> Consumer:
    spec = ConsumerSpec(
        group="billing",
        subscriptions={topic: selector or TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    return broker.subscribe(spec)


def until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, f"still not: {what}"
        try:
            SimpleQueue[None]().get(timeout=0.01)
        except Empty:
            continue


def sends(broker: RemoteBroker, body: bytes) -> bool:
    try:
        broker.send(Message("orders", body), timeout_ms=1_000)
    except SendError:
        return False
    return True


def test_members_and_senders_go_on_after_the_server_was_restarted(server: Restartable, broker: RemoteBroker) -> None:
    broker.send(Message("orders", b"before"))
    member = join(broker, "orders")
    assert [message.body for message in member.poll(8, 10_000)] == [b"before"]
    for queue in member.assignment():
        member.commit(queue, member.position(queue))

    server.stop()
    assert not sends(broker, b"into the void")
    server.start()

    until(lambda: sends(broker, b"after"), "a send goes through")
    taken: list[bytes] = []
    until(lambda: taken.extend(m.body for m in member.poll(8, 50)) or b"after" in taken, "the message came")
    assert b"before" not in taken


def test_a_broker_ends_in_order_when_its_cluster_is_gone(server: Restartable, broker: RemoteBroker) -> None:
    broker.send(Message("orders", b"x"))
    member = join(broker, "orders")
    assert member.poll(8, 10_000)
    server.stop()

    broker.close()

    with pytest.raises(MQTemplateError, match="was closed"):
        member.poll(1)
    server.start()  # for the fixture


def test_sql92_that_the_broker_does_not_evaluate_names_the_setting(tmp_path: Path) -> None:
    address = free_address()
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=address))
    without = BrokerServerSettings(listen=address, enable_property_filter=False)
    settings = RemoteSettings(name_servers=(str(address),), offset_path=tmp_path)
    with LocalCluster(engine, without), RemoteBroker(settings) as broker:
        queue = broker.send(Message("orders", b"x", {"price": "7"})).message_queue

        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            join(broker, "orders", Sql92Selector("price > 6"))
        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            broker.pull(queue, 0, selector=Sql92Selector("price > 6"))
        assert [message.body for message in join(broker, "orders").poll(8, 10_000)] == [b"x"]
