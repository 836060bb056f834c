"""The sink: DataFrames as messages of an embedded broker, in batches and streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, Property
from mqtemplate.spark import LocalServer, read_table
from mqtemplate.testing import Harness, messages_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def write(rows: DataFrame, broker: EmbeddedBroker, **options: str) -> None:
    rows.write.format("mqtemplate").mode("append").options(store=str(broker.path), **options).save()


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[int]:
    return sorted(int(message.body) for message in messages_in(broker, topic))


def test_a_batch_is_written_once_however_often_it_is_started(spark: SparkSession, served: EmbeddedBroker) -> None:
    """A write with the id and version of an earlier one is a repeat; without them it is another write."""
    rows = spark.range(1_000).selectExpr("cast(id as string) as body", "concat('k', id) as keys", "'paid' as tags")
    for _ in range(2):
        write(rows, served, topic="orders", txnAppId="import", txnVersion="7")

    assert bodies(served) == list(range(1_000))
    assert {(message.tags, message.keys) for message in messages_in(served, "orders")} >= {("paid", "k0")}

    write(rows.limit(1), served, topic="orders")
    assert len(bodies(served)) == 1_001


def test_a_table_has_the_rows_of_the_source(spark: SparkSession, served: EmbeddedBroker) -> None:
    """By ``mapInArrow``, with the same options and types. Messages that are sent later are not in it."""
    for number in range(20):
        served.sends.send(Message("orders", b"%d" % number, {"TAGS": ("paid", "sent")[number % 2]}))
    options = {"store": str(served.path), "topic": "orders", "tags": "paid", "minPartitions": "3"}
    table = read_table(spark, **options, columns="queueId, queueOffset, body, storeTimestamp")
    expected = spark.read.format("mqtemplate").options(**options).load().select(*table.columns).sort("body").collect()
    served.sends.send(Message("orders", b"21", {"TAGS": "paid"}))

    assert table.sort("body").collect() == expected
    assert len(expected) == 10
    assert table.rdd.getNumPartitions() == 3
    assert read_table(spark, store=options["store"], topic="orders", tags="none").count() == 0


@pytest.mark.thorough
def test_a_delayed_row_is_delivered_when_it_is_due(spark: SparkSession, served: EmbeddedBroker) -> None:
    rows = spark.sql("select 'body' as body, interval 3 hours as delay union all select 'now', null")
    write(rows, served, topic="later")

    assert [message.body for message in messages_in(served, "later")] == [b"now"]
    Harness(served).advance("3h")
    assert {message.body for message in messages_in(served, "later")} == {b"now", b"body"}


def test_a_stream_is_written_once_although_its_last_batch_is_repeated(
    spark: SparkSession, served: EmbeddedBroker, tmp_path: Path
) -> None:
    """The commit file of the last batch is deleted, as if the driver had been killed before Spark wrote it."""
    for number in range(500):
        served.sends.send(Message("source", b"%d" % number))

    def run() -> None:
        messages = spark.readStream.format("mqtemplate").options(store=str(served.path), topic="source").load()
        query = (
            messages.selectExpr("body", "tags", "properties")
            .writeStream.format("mqtemplate")
            .options(store=str(served.path), topic="orders", checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    (tmp_path / "checkpoint" / "commits" / "0").unlink()
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink()
    run()

    assert bodies(served) == list(range(500))
    query_ids = {message.properties[Property.SEQUENCE].split(" ")[0] for message in messages_in(served, "orders")}
    assert len(query_ids) == 1
    assert served.metrics.snapshot()["sequence.repeated"] == 500


@pytest.mark.thorough
def test_a_folder_that_no_process_owns_is_opened_by_the_tasks(spark: SparkSession, tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.create_topic("orders", 2)

    rows = spark.range(0, 100, 1, 3).selectExpr("cast(id as string) as body")
    rows.write.format("mqtemplate").mode("append").options(topic="orders").save(str(tmp_path / "store"))

    with EmbeddedBroker(tmp_path / "store") as broker:
        assert bodies(broker) == list(range(100))


@pytest.mark.thorough
def test_a_write_that_cannot_work_says_what_to_do(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """A folder whose owner runs no server; a mode that would overwrite; a wrong column."""
    rows: Any = spark.range(1).selectExpr("cast(id as string) as body")

    with pytest.raises(Exception, match=r"runs mqtemplate.spark.LocalServer\(broker\)"):
        write(rows, broker, topic="orders")
    with pytest.raises(Exception, match=r"messages of a topic cannot be overwritten; write with mode\('append'\)"):
        rows.write.format("mqtemplate").mode("overwrite").options(store=str(broker.path), topic="orders").save()
    with pytest.raises(Exception, match="column 'id' is unknown"):
        write(spark.range(1), broker, topic="orders")


def test_a_broker_in_memory_has_no_local_server() -> None:
    with pytest.raises(SparkError, match="a broker in memory has no folder by which Spark's processes could find it"):
        LocalServer(EmbeddedBroker(None))
