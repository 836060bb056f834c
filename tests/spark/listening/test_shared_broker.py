"""Places that a Spark listener reads from: a folder, or a cluster. Without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.server.local_address import LocalServerAddress
from mqtemplate.spark import SparkListenerContainer, spark_listener
from mqtemplate.spark.listening.redelivery import FailedRow, Redelivery
from mqtemplate.spark.listening.shared_broker import (
    ListenerMonitor,
    SharedFolder,
    share_broker,
)
from mqtemplate.spark.location.cluster_connection import client_settings
from mqtemplate.testing import messages_in
from tests.server.tool import ANY_PORT, make_engine
from tests.spark.listening.listeners import resolved
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRY, DLQ = "%RETRY%billing", "%DLQ%billing"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(make_engine(SystemClock()), BrokerServerSettings(listen=ANY_PORT)) as cluster:
        cluster.engine.create_topic("orders", 2)
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[RemoteBroker]:
    with RemoteBroker(RemoteSettings(name_servers=(str(cluster.address),))) as client:
        yield client


def test_rows_of_a_cluster_come_back_through_its_broker(
    cluster: LocalCluster, client: RemoteBroker, tmp_path: Path
) -> None:
    """One row is retried after its delay, one goes to the dead-letter topic with its reason."""
    queue = MessageQueue("orders", cluster.engine.name, 1)
    for number in range(10):
        cluster.engine.sends.send(Message("orders", b"%d" % number), queue)
    shared = share_broker(client, "by_region")
    redelivery = Redelivery(shared.broker, shared.send_back, shared.metrics, "by_region", resolved(), tmp_path)
    rows = [
        FailedRow("orders", 1, 7, "no such customer", delay_ms=1, broker_name=queue.broker_name),
        FailedRow("orders", 1, 3, "not JSON", is_dead=True, broker_name=queue.broker_name),
    ]

    assert redelivery.send("a-query", 0, rows) == 2

    [retry] = eventually(lambda: messages_in(cluster.engine, RETRY), "the row is retried")
    assert (retry.body, retry.reconsume_times, retry.properties["RETRY_TOPIC"]) == (b"7", 1, "orders")
    [dead] = eventually(lambda: messages_in(cluster.engine, DLQ), "the row is dead")
    assert (dead.body, dead.properties["dead_letter_message"]) == (b"3", "not JSON")
    assert shared.metrics.snapshot() == {"spark.billing.dead_letters": 1, "spark.billing.redelivered": 1}


def test_the_lag_of_a_cluster_counts_the_queues_that_it_has(cluster: LocalCluster, client: RemoteBroker) -> None:
    """The retry topic is missing until the first row comes back. A repeated commit sets no offset back."""
    for queue_id in range(2):
        for _ in range(5):
            cluster.engine.sends.send(Message("orders", b""), MessageQueue("orders", cluster.engine.name, queue_id))
    shared = share_broker(client, "by_region")
    monitor = ListenerMonitor(shared, "billing", ("orders", RETRY))
    first, second = (MessageQueue("orders", cluster.engine.name, queue_id) for queue_id in range(2))

    for end in (4, 2):
        shared.commit("billing", {first: end})

    assert monitor.lag() == {first: 1, second: 5}
    assert cluster.engine.groups.committed_offset("billing", first) == 4


def test_access_key_and_tls_of_the_client_reach_sparks_processes_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this user can read it, and it is removed at the end. What the environment has is used instead."""
    credentials, tls = Credentials(access_key="k", secret_key="s", security_token="t"), ClientTls(check_host_name=False)
    settings = RemoteSettings(name_servers=("a:1", "b:2"), credentials=credentials, tls=tls)
    shared = share_broker(RemoteBroker(settings), "by_region")
    assert shared.options() == {"nameServer": "a:1;b:2"}

    shared.start(RETRY)
    path = Path(shared.options()["clientFile"])
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_text())["access-key"] == "k"
    assert shared.location().client_file == str(path)
    read = client_settings(str(path))
    assert (read.credentials, read.tls) == (credentials, tls)
    shared.stop()
    assert not path.exists()

    monkeypatch.setenv("MQTEMPLATE_CLIENT_FILE", "/etc/client.json")
    shared.start(RETRY)
    assert "clientFile" not in shared.options()


def test_a_listener_that_cannot_start_leaves_no_server_of_its_folder(broker: EmbeddedBroker, tmp_path: Path) -> None:
    @spark_listener("orders", "billing")
    def bill(orders: object) -> None: ...

    def no_java() -> SparkSession:
        raise SparkError("no Java found")

    container = SparkListenerContainer(bill, no_java, broker, tmp_path / "checkpoints")

    with pytest.raises(SparkError, match="no Java found"):
        container.start()

    assert LocalServerAddress.read(broker.path or "") is None


def test_a_broker_that_spark_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SparkError, match=r"^work: a broker in memory has no files .* embedded:./data"):
        share_broker(EmbeddedBroker(None), "work")
    with pytest.raises(SparkError, match="^work: the data source has no namespaces; use a client without one"):
        share_broker(RemoteBroker(RemoteSettings(name_servers=("a:1",), namespace="shop")), "work")
    assert isinstance(share_broker(EmbeddedBroker(tmp_path, clock=VirtualClock()), "work"), SharedFolder)
