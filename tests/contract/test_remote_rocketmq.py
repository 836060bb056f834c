"""The remote broker keeps the promises of the port on a real Apache RocketMQ, of 5.x and of 4.x."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from bench.peer.jvm import why_not
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.broker import Broker, Capability
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Property
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.testing.contract import BrokerContract, BrokerUnderTest

pytestmark = pytest.mark.conformance

LONGEST_DELAY_MS = 3 * 86_400_000
OPTIONS = {
    "timerMaxDelaySec": LONGEST_DELAY_MS // 1_000,
    "transactionTimeOut": 1_000,
    "transactionCheckInterval": 1_000,
    "transactionOpBatchInterval": 100,
}
EARLY_MS = 1_000
"""RocketMQ's wheel has slots of a second, and rounds down."""


@contextmanager
def cluster(folder: Path, version: str) -> Iterator[str]:
    """A cluster of one broker; gives the address of its name server."""
    if reason := why_not():
        pytest.skip(reason)
    options = OPTIONS | {"haListenPort": free_port()}  # 4.x has a fixed one
    with NameServer(version) as names, RocketMQ(folder, names, options):
        until_registered(names.address)
        yield names.address


def until_registered(address: str) -> None:
    """A broker tells its name server some time after it serves."""
    for _ in range(600):
        with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
            if broker.name == "broker-a":
                return
        try:
            SimpleQueue[None]().get(timeout=0.05)
        except Empty:
            continue
    pytest.fail("the broker did not register")


@contextmanager
def connected(address: str, folder: Path) -> Iterator[BrokerUnderTest]:
    def connect() -> Broker:
        broker = RemoteBroker(RemoteSettings(name_servers=(address,), offset_path=folder))
        broker.start()
        return broker

    def restart() -> Broker:
        """The application's end; the cluster goes on."""
        under_test.broker.close()
        return connect()

    under_test = BrokerUnderTest.on_real_clock(
        connect(), restart=restart, early_ms=EARLY_MS, longest_delay_ms=LONGEST_DELAY_MS, checks_within_ms=5_000
    )
    try:
        yield under_test
    finally:
        under_test.broker.close()


@pytest.fixture(scope="module")
def rocketmq_5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("rocketmq-5"), "5.5.0") as address:
        yield address


@pytest.fixture(scope="module")
def rocketmq_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("rocketmq-4"), "4.9.7") as address:
        yield address


class TestRocketMQ5(BrokerContract):
    @pytest.fixture
    def under_test(self, rocketmq_5: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        with connected(rocketmq_5, tmp_path) as under_test:
            yield under_test


class TestRocketMQ4(BrokerContract):
    @pytest.fixture
    def under_test(self, rocketmq_4: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        with connected(rocketmq_4, tmp_path) as under_test:
            yield under_test


_BOTH = {
    Capability.DELAY_LEVEL,
    Capability.QUERY,
    Capability.TRANSACTION,
    Capability.REQUEST_REPLY,
    Capability.SQL92,
}


def test_a_cluster_of_5_says_what_it_can(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH | {Capability.TIMER}


def test_rocketmq_does_not_deliver_a_timer_that_was_cancelled(rocketmq_5: str, tmp_path: Path) -> None:
    """It cancels by handle, and nothing else; so it has not the whole capability."""
    with connected(rocketmq_5, tmp_path) as under_test:
        topic = under_test.topic(queue_count=1)
        member = under_test.join("billing", topic)
        gone = under_test.send(topic, "gone", properties={Property.TIMER_DELAY_SEC: "3"})
        under_test.send(topic, "kept", properties={Property.TIMER_DELAY_SEC: "3"})

        result = under_test.broker.cancel(gone.handle)
        under_test.pass_time(4_000)

        assert result.status is ScheduleChangeStatus.CANCELLED
        assert under_test.take_one(member).body == b"kept"
        assert under_test.takes_nothing(member)
        assert under_test.broker.cancel(gone.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED


def test_a_cluster_of_4_says_that_it_keeps_no_timers(rocketmq_4: str, tmp_path: Path) -> None:
    with connected(rocketmq_4, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH
