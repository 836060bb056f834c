"""A client survives failures of its cluster: restarts, silent brokers, and features that are switched off."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker
from mqtemplate.errors import (
    BrokerError,
    MQTemplateError,
    RemoteConnectError,
    SendConnectError,
    SendError,
    UnsupportedError,
)
from mqtemplate.message import Message
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import bodies, client, join, remote, take
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.contract.test_remote_server import free_address
from tests.server.process import BrokerProcess
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
        broker.sends.send(Message("orders", body), timeout_ms=1_000)
    except SendError:
        return False
    return True


def test_members_and_producers_continue_after_a_server_restart(server: Restartable, broker: RemoteBroker) -> None:
    broker.sends.send(Message("orders", b"before"))
    member = join(broker, "orders")
    assert bodies(take(member, 1)) == [b"before"]
    for queue in member.assignment():
        member.commit(queue, member.position(queue))

    server.stop()
    assert not sends(broker, b"lost")
    server.start()

    eventually(lambda: sends(broker, b"after"), "a send succeeds")
    assert set(bodies(take(member, 1))) == {b"after"}


def test_a_send_in_an_outage_is_a_send_error_and_a_connect_error(server: Restartable, broker: RemoteBroker) -> None:
    """So the classes in the documentation catch it, whether a broker or the name server is missing."""
    message = Message("orders", b"x")
    broker.sends.send(message)
    server.stop()

    for send in (
        lambda: broker.sends.send(message, timeout_ms=100),
        lambda: broker.sends.send_batch([message, message], timeout_ms=100),
        lambda: broker.sends.send(Message("new", b"x"), timeout_ms=100),
        lambda: broker.sends.send_async([message], timeout_ms=100).result(30),
        lambda: broker.sends.send_one_way(message),
    ):
        with pytest.raises(SendConnectError, match="cannot connect to") as caught:
            send()
        assert isinstance(caught.value, SendError)
        assert isinstance(caught.value, RemoteConnectError)
        assert not caught.value.was_sent
    server.start()  # the fixture stops it


def test_a_broker_can_be_closed_when_its_cluster_is_down(server: Restartable, broker: RemoteBroker) -> None:
    broker.sends.send(Message("orders", b"x"))
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
        queue = broker.sends.send(Message("orders", b"x", {"price": "7"})).message_queue

        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            join(broker, "orders", selector=Sql92Selector("price > 6"))
        with pytest.raises(UnsupportedError, match="enablePropertyFilter=true on the broker, or select by tags"):
            broker.reader.pull(queue, 0, selector=Sql92Selector("price > 6"))
        assert bodies(take(join(broker, "orders"), 1)) == [b"x"]


# --- a server process that is killed ----------------------------------------------------------------


class Producing:
    """Threads that send messages one after the other, until the block ends.

    Attributes:
        sent: Bodies of the messages that were acknowledged.
    """

    def __init__(self, broker: RemoteBroker, timeout_ms: int) -> None:
        self._broker = broker
        self._timeout_ms = timeout_ms
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor()
        self.sent: list[bytes] = []

    def _produce(self, kind: str) -> None:
        for number in itertools.count():
            if self._stop.wait(0.005):
                return
            message = Message("orders", f"{kind}-{number}".encode())
            if kind == "async":
                self._broker.sends.send_async([message], None, self._timeout_ms).result(120)
            else:
                self._broker.sends.send(message, None, self._timeout_ms)
            self.sent.append(message.body)

    def __enter__(self) -> Self:
        self._results = [self._threads.submit(self._produce, kind) for kind in ("sync", "async")]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._threads.shutdown()
        for result in self._results:
            result.result()  # raises the error of a send


def test_no_send_fails_while_a_server_is_killed_and_started_again(tmp_path: Path) -> None:
    """As long as the server is back within the timeout of the sends. It is long here: the machine may be busy."""
    listen, name_server = (str(free_address()) for _ in range(2))
    server = BrokerProcess(tmp_path, "--name-server", name_server, listen=listen)
    with server, client(name_server, tmp_path) as broker:
        member = join(broker, "orders")
        with capture_logs() as logs, Producing(broker, timeout_ms=60_000) as producing:
            eventually(lambda: len(producing.sent) > 50, "messages are sent")
            server.kill()
            before = len(producing.sent)
            server.__enter__()
            eventually(lambda: len(producing.sent) > before + 50, "messages are sent again")
            eventually(lambda: [log for log in logs if log["event"] == "remote.reconnected"], "it is logged")

        received: set[bytes] = set()
        eventually(
            lambda: received.update(bodies(member.poll(32, 50))) or received >= set(producing.sent), "all arrive"
        )

    assert [log["event"] for log in logs if log["log_level"] in ("warning", "error")] == ["remote.outage_started"]
    assert [log["event"] for log in logs].count("remote.reconnected") == 1


def test_a_group_that_a_restarted_broker_does_not_know_is_no_warning(tmp_path: Path) -> None:
    """The broker refuses to list its members until the next heartbeat has registered them."""
    with ScriptedBroker() as scripted:
        groups = ScriptedGroups(scripted)
        scripted.topic("orders")
        with client(scripted.address, tmp_path) as broker, capture_logs() as logs:
            scripted.refuse(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ResponseCode.SYSTEM_ERROR, "no consumer")
            member = join(broker, "orders")
            eventually(lambda: [log for log in logs if log["event"] == "remote.group_unknown"], "it is logged")
            scripted.script(RequestCode.GET_CONSUMER_LIST_BY_GROUP, groups.list_members)
            eventually(lambda: len(member.assignment()) == 4, "the member has its queues")

    assert [log for log in logs if log["log_level"] in ("warning", "error")] == []


# --- no broker is registered ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda broker: broker.create_topic("orders"),
        lambda broker: broker.delayed.cancel(key="cart-17"),
        lambda broker: broker.delayed.reschedule(None, 4_000_000_000_000, key="cart-17"),
        lambda broker: broker.delayed.pending(PendingQuery()),
        lambda broker: broker.delayed.count_pending(PendingQuery()),
        lambda broker: broker.admin().groups(),
        lambda broker: broker.reader.message_by_id("7F00000100002A9F0000000000000000"),
    ],
    ids=["create_topic", "cancel", "reschedule", "pending", "count_pending", "groups", "message_by_id"],
)
def test_a_cluster_without_a_broker_has_no_answer_instead_of_an_empty_one(
    ask: Callable[[RemoteBroker], object],
) -> None:
    with ScriptedBroker() as cluster:
        nobody = ClusterInfo().encode()
        cluster.script(RequestCode.GET_BROKER_CLUSTER_INFO, lambda request: request.response(body=nobody))
        no_broker = r"no broker is registered at the name servers .*; start one, or wait"
        with remote(cluster) as broker, pytest.raises(BrokerError, match=no_broker):
            ask(broker)
