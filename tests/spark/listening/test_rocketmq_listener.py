"""A Spark listener over Apache RocketMQ, in a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import SparkListenerContainer
from mqtemplate.testing import messages_in
from tests.contract.test_remote_rocketmq import cluster
from tests.spark.listening.listeners import BODIES, HANDLED, OrderListener
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.conformance,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),
]


def test_a_listener_reads_from_rocketmq_sends_rows_back_and_resumes(spark: SparkSession, tmp_path: Path) -> None:
    """RocketMQ's brokers make the retry and the dead letters. The group has the offsets of the query."""
    work = OrderListener()

    def run_until_handled(client: RemoteBroker, expected: list[tuple[int, int]]) -> None:
        container = SparkListenerContainer(work, spark, client, tmp_path / "checkpoints")
        container.start()
        eventually(lambda: sorted(work.handled) == expected, f"handled {expected}", timeout_s=240)
        container.await_idle()
        container.stop()

    with cluster(tmp_path, "5.5.0") as address, RemoteBroker(RemoteSettings(name_servers=(address,))) as client:
        client.create_topic("orders", 2)
        queues = [MessageQueue("orders", client.name, queue_id) for queue_id in (0, 1)]
        for number, body in enumerate(BODIES):
            client.sends.send(Message("orders", body), queues[number % 2])

        run_until_handled(client, HANDLED)

        dead = eventually(
            lambda: len(found := messages_in(client, "%DLQ%billing")) == 2 and found, "2 are dead", timeout_s=240
        )
        assert {message.body for message in dead or ()} == {b"not json", b'{"id": 2}'}

        client.sends.send(Message("orders", b'{"id": 4}'), queues[0])
        run_until_handled(client, [*HANDLED, (4, 0)])
        assert [client.groups.committed_offset("billing", queue) for queue in queues] == [3, 2]
