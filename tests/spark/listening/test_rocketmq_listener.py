"""A Spark listener over Apache RocketMQ, in a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

pytest.importorskip("pyspark")

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import SparkBatch, SparkListenerContainer, spark_listener
from mqtemplate.testing import messages_in
from tests.contract.test_remote_rocketmq import cluster
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.conformance,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning"),
]


class Order(BaseModel):
    id: int


def test_a_listener_reads_from_rocketmq_sends_rows_back_and_resumes(spark: SparkSession, tmp_path: Path) -> None:
    """RocketMQ's brokers make the retry and the dead letters. The group has the offsets of the query."""
    handled: list[tuple[int, int]] = []

    @spark_listener(
        "orders",
        "billing",
        payload=Order,
        bad_records="dlq",
        trigger="0 seconds",
        redelivery_delay="1s",
        max_redeliveries=1,
    )
    def work(messages: DataFrame, batch: SparkBatch) -> DataFrame:
        handled.extend(
            (row.id, row.reconsumeTimes) for row in messages.select("payload.id", "reconsumeTimes").collect()
        )
        return messages.where("payload.id = 2").selectExpr("*", "'no such customer' AS reason")

    def run_until_handled(client: RemoteBroker, expected: list[tuple[int, int]]) -> None:
        container = SparkListenerContainer(work, spark, client, tmp_path / "checkpoints")
        container.start()
        eventually(lambda: sorted(handled) == expected, f"handled {expected}", timeout_s=240)
        container.await_idle()
        container.stop()

    with cluster(tmp_path, "5.5.0") as address, RemoteBroker(RemoteSettings(name_servers=(address,))) as client:
        client.create_topic("orders", 2)
        queues = [MessageQueue("orders", client.name, queue_id) for queue_id in (0, 1)]
        for number, body in enumerate((b'{"id": 1}', b'{"id": 2}', b"not json", b'{"id": 3}')):
            client.send(Message("orders", body), queues[number % 2])

        run_until_handled(client, [(1, 0), (2, 0), (2, 1), (3, 0)])

        dead = eventually(
            lambda: len(found := messages_in(client, "%DLQ%billing")) == 2 and found, "2 are dead", timeout_s=240
        )
        assert {message.body for message in dead or ()} == {b"not json", b'{"id": 2}'}

        client.send(Message("orders", b'{"id": 4}'), queues[0])
        run_until_handled(client, [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0)])
        assert [client.committed_offset("billing", queue) for queue in queues] == [3, 2]
