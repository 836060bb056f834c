"""A Spark listener whose broker is a client of a cluster, in a real Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.identity import Credentials
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.spark import SparkListenerContainer
from mqtemplate.testing import messages_in
from tests.server.tool import ANY_PORT, make_engine
from tests.spark.listening.listeners import BODIES, HANDLED, OrderListener
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),
]

KEYS = Credentials(access_key="spark-job", secret_key="never shown")
ACCOUNT = Account(
    access_key=KEYS.access_key,
    secret_key=KEYS.secret_key,
    topic_perms={"orders": Right.PUB | Right.SUB},
    group_perms={"billing": Right.PUB | Right.SUB, "TOOLS_CONSUMER": Right.SUB},
)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Our server, which checks access keys."""
    acl = AclSettings(accounts=(ACCOUNT,))
    with LocalCluster(make_engine(SystemClock()), BrokerServerSettings(listen=ANY_PORT), acl=acl) as cluster:
        cluster.engine.create_topic("orders", 2)
        yield cluster


def test_a_listener_reads_from_a_cluster_and_sends_rows_back(
    spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Spark's processes get the access key of the client. A bad body and a returned row cost only themselves."""
    work = OrderListener()

    for number, body in enumerate(BODIES):
        cluster.engine.sends.send(Message("orders", body), MessageQueue("orders", cluster.engine.name, number % 2))
    with RemoteBroker(RemoteSettings(name_servers=(str(cluster.address),), credentials=KEYS)) as client:
        container = SparkListenerContainer(work, spark, client, tmp_path / "checkpoints")
        container.start()
        container.await_idle()
        dead = eventually(
            lambda: len(found := messages_in(cluster.engine, "%DLQ%billing")) == 2 and found, "2 are dead"
        )
        container.await_idle()
        lag, metrics = container.monitor.lag(), container.monitor.metrics.snapshot()
        container.stop()

    assert sorted(work.handled) == HANDLED
    reasons = {message.body: message.properties["dead_letter_message"] for message in dead or ()}
    assert reasons == {b"not json": "the body is not JSON of Order: 'not json'", b'{"id": 2}': "no such customer"}
    assert {queue.topic for queue in lag} == {"orders", "%RETRY%billing"}
    assert sum(lag.values()) == 0
    assert (metrics["spark.billing.redelivered"], metrics["spark.billing.dead_letters"]) == (1, 2)
    assert metrics["spark.billing.messages"] == 5
