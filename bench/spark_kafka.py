"""The same messages read by Spark from our folder, and by Spark's own connector from Kafka 3.9, in one session.

    python -m bench.spark_kafka [COUNT]       1,000,000 messages of 200 bytes in 4 queues by default

Kafka runs in its own process on loopback, in KRaft mode; Maven fetches it and the connector once. Both sides read six
columns, the stream of Kafka all seven that it has. A stream reads 100,000 messages a trigger.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import report, run, scratch_folder
from bench.peer.kafka import Kafka, connector_jars, fetch_kafka
from bench.spark_read import measured_in_turn, source, write_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_QUEUES, _BODY_SIZE, _A_TRIGGER, _ROUNDS = 4, 200, 100_000, 5
_OURS = "queueId int, queueOffset bigint, tags string, keys string, body binary, storeTimestamp timestamp"
_KAFKAS = ("partition", "offset", "topic", "key", "value", "timestamp")


def fill_kafka(spark: SparkSession, address: str, count: int) -> None:
    """Write the messages with Spark's sink for Kafka."""
    rows = spark.range(0, count, 1, _QUEUES).selectExpr(
        "cast(concat('k', id) AS binary) AS key",
        f"cast(repeat('x', {_BODY_SIZE}) AS binary) AS value",
        f"cast(id % {_QUEUES} AS int) AS partition",
    )
    rows.write.format("kafka").option("kafka.bootstrap.servers", address).option("topic", "orders").save()


def kafka_table(spark: SparkSession, address: str) -> DataFrame:
    """Return the topic of Kafka as a table."""
    options = {"kafka.bootstrap.servers": address, "subscribe": "orders", "startingOffsets": "earliest"}
    return spark.read.format("kafka").options(**options).load().select(*_KAFKAS)


def batch_ms(messages: DataFrame, checkpoint: Path) -> float:
    """Return the median time of the micro-batches of a stream, without the first two."""
    query = (
        messages.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [each for each in query.recentProgress if each["numInputRows"]]
    return median(each["durationMs"]["triggerExecution"] for each in batches[2:] or batches)


def limit_s(table: Callable[[], DataFrame]) -> float:
    """Return the median time of ``limit(10)``."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        table().limit(10).collect()
        times.append(time.perf_counter() - start)
    return median(times)


def compare(spark: SparkSession, store: str, address: str, folder: Path, count: int) -> None:
    """Print batches, streams and ``limit`` of both."""
    tables: dict[str, Callable[[], DataFrame]] = {
        "Kafka 3.9, Spark's connector": lambda: kafka_table(spark, address),
        "our folder": lambda: source(spark, _OURS, store=store),
    }
    peer, ours = measured_in_turn(list(tables.values()))
    report("batch, Kafka 3.9, Spark's connector", count / peer.wall, "/s", "the peer")
    report("batch, our folder", count / ours.wall, "/s", "faster")
    report("  of the connector", peer.wall / ours.wall, "x", "> 1")
    report("  processor time a million, connector, with Kafka's server", peer.cpu / count * 1e6, "s", "the peer")
    report("  processor time a million, our folder", ours.cpu / count * 1e6, "s", "less")
    streams: dict[str, Any] = {
        "Kafka 3.9": spark.readStream.format("kafka")
        .options(**{"kafka.bootstrap.servers": address, "subscribe": "orders", "startingOffsets": "earliest"})
        .option("maxOffsetsPerTrigger", _A_TRIGGER)
        .load(),
        "our folder": spark.readStream.format("mqtemplate")
        .schema(_OURS)
        .options(store=store, topic="orders", maxOffsetsPerTrigger=str(_A_TRIGGER))
        .load(),
    }
    for number, (name, stream) in enumerate(streams.items()):
        took = batch_ms(stream, folder / f"checkpoint-{number}")
        report(f"micro-batch of 100,000, {name}", took, "ms", "the peer" if not number else "<= 350")
    for name, table in tables.items():
        report(f"limit(10), {name}", limit_s(table), "s", "the peer" if "Kafka" in name else "0.2")


def main() -> None:
    """Run the comparison."""
    from mqtemplate.spark import session

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    if (reason := fetch_kafka()) is not None:
        print(f"not measured: {reason}")
        return
    with scratch_folder() as folder:
        store = write_folder(folder / "store", count, _BODY_SIZE)
        with Kafka(folder / "kafka", _QUEUES) as kafka:
            spark = session(master="local[2]", **{"spark.jars": ",".join(connector_jars())})
            fill_kafka(spark, kafka.address, count)
            compare(spark, store, kafka.address, folder, count)
            spark.stop()


if __name__ == "__main__":
    run(main)
