"""The broker contract on the remote broker with Apache RocketMQ 5.5.0 and 4.9.7."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.broker import Broker, Capability
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Property
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.testing.contract import BrokerContract, BrokerUnderTest
from tests.waiting import eventually

pytestmark = pytest.mark.conformance

LONGEST_DELAY_MS = 3 * 86_400_000
OPTIONS = {
    "timerMaxDelaySec": LONGEST_DELAY_MS // 1_000,
    # A flush copies the whole wheel of 38 MB byte by byte, each second by default. No test here kills the broker.
    "timerFlushIntervalMs": 10_000,
    "transactionTimeOut": 1_000,
    "transactionCheckInterval": 1_000,
    "transactionOpBatchInterval": 100,
}
EARLY_MS = 1_000
"""RocketMQ's timer wheel has slots of one second, and rounds down."""


@contextmanager
def cluster(folder: Path, version: str) -> Iterator[str]:
    """A cluster of one broker; gives the address of its name server."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    options = OPTIONS | {"haListenPort": free_port()}  # 4.x has a fixed default
    with NameServer(version) as names, RocketMQ(folder, names, options):
        until_registered(names.address)
        yield names.address


def until_registered(address: str) -> None:
    """Wait until the broker has registered at its name server, some time after its start."""

    def is_registered() -> bool:
        with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
            return broker.name == "broker-a"

    eventually(is_registered, "the broker has registered", timeout_s=90)


@contextmanager
def connected(address: str, folder: Path) -> Iterator[BrokerUnderTest]:
    def connect() -> Broker:
        broker = RemoteBroker(RemoteSettings(name_servers=(address,), offset_path=folder))
        broker.start()
        return broker

    def restart() -> Broker:
        """Restart the application; the cluster keeps running."""
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


def test_a_cluster_of_5_has_timers(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH | {Capability.TIMER}


def test_rocketmq_does_not_deliver_a_cancelled_timer(rocketmq_5: str, tmp_path: Path) -> None:
    """It cancels by handle only, so it does not have the capability."""
    with connected(rocketmq_5, tmp_path) as under_test:
        topic = under_test.topic(queue_count=1)
        member = under_test.join("billing", topic)
        cancelled = under_test.send(topic, "cancelled", properties={Property.TIMER_DELAY_SEC: "3"})
        under_test.send(topic, "kept", properties={Property.TIMER_DELAY_SEC: "3"})

        result = under_test.broker.cancel(cancelled.handle)
        under_test.pass_time(4_000)

        assert result.status is ScheduleChangeStatus.CANCELLED
        assert under_test.take_one(member).body == b"kept"
        assert under_test.takes_nothing(member)
        assert under_test.broker.cancel(cancelled.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED


def test_a_cluster_of_4_has_no_timers(rocketmq_4: str, tmp_path: Path) -> None:
    with connected(rocketmq_4, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH
