"""A stream of Spark over a folder: micro-batches of a backlog, and the latency of single messages.

The peer of the micro-batches is `spark_reference`, a source in Python that reads nothing: the rest is Spark's own.

python -m bench.spark_stream [COUNT] [SECONDS]      1,000,000 messages, and 20 s of sends, by default
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import percentile, report, run, scratch_folder
from bench.spark_read import cpu_seconds, write_folder
from bench.spark_reference import ReferenceSource
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNT = 1_000_000
_A_TRIGGER = 100_000
_PER_SECOND = 200
_SECONDS = 20
_ROUNDS = 3


def read_backlog(spark: SparkSession, folder: Path, count: int) -> None:
    """Print a micro-batch of 100,000 messages of 200 bytes, over all 14 columns, beside a source that reads nothing."""
    store = write_folder(folder / "store", count, 200)
    spark.dataSource.register(ReferenceSource)
    sources: dict[str, Callable[[], DataFrame]] = {
        "reference": lambda: (
            spark.readStream.format("reference").options(rows=str(count), rowsPerTrigger=str(_A_TRIGGER)).load()
        ),
        "the source": lambda: (
            spark.readStream.format("mqtemplate")
            .options(store=store, topic="orders", maxOffsetsPerTrigger=str(_A_TRIGGER))
            .load()
        ),
    }
    walls: dict[str, list[float]] = {name: [] for name in sources}
    cpus: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(_ROUNDS + 1):
        for name, stream in sources.items():  # in turn, since other work may run on the machine
            wall, cpu = _batch_ms(stream(), folder / f"backlog-{name.split()[-1]}-{number}")
            if number:  # the JVM warms up
                walls[name].append(wall)
                cpus[name].append(cpu)
    (peer_wall, wall), (peer_cpu, cpu) = (map(median, each.values()) for each in (walls, cpus))
    report("micro-batch of 100,000, 200 B, a source that reads nothing", peer_wall, "ms", "the peer")
    report("  its CPU", peer_cpu, "ms", "")
    report("micro-batch of 100,000, 200 B, the source", wall, "ms", "<= 350 (Spark's Kafka connector: 430)")
    report("  its CPU", cpu, "ms", "")
    report("  messages per second", _A_TRIGGER * 1_000 / wall, "/s", ">= 220,000")


def _batch_ms(messages: DataFrame, checkpoint: Path) -> tuple[float, float]:
    """Return the median time of a micro-batch, and the average CPU time of the JVM and Python for one, in ms."""
    before = cpu_seconds()
    query = (
        messages.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    used = cpu_seconds() - before
    times = [each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]]
    return median(times[1:] or times), used * 1_000 / len(times)


def measure_latency(spark: SparkSession, folder: Path, seconds: int) -> None:
    """Print the time from a send to the batch that contains the message, at 200 messages a second."""
    late_ms: list[float] = []

    def on_batch(messages: DataFrame, batch_id: int) -> None:
        sent = messages.select("body").toArrow()["body"].to_pylist()
        now = time.time() * 1_000
        late_ms.extend(now - float(body) for body in sent)

    with EmbeddedBroker(folder / "live") as broker:
        broker.sends.send(Message("orders", _now()))
        stream = spark.readStream.format("mqtemplate").options(store=str(broker.path), topic="orders").load()
        query = (
            stream.writeStream.foreachBatch(on_batch)
            .option("checkpointLocation", str(folder / "latency"))
            .trigger(processingTime="0 seconds")
            .start()
        )
        query.processAllAvailable()
        _send_steadily(broker, seconds)
        query.processAllAvailable()
        query.stop()
    measured = late_ms[_PER_SECOND * 3 :]  # the first seconds warm the JVM up
    report("from send to batch at 200/s, trigger 0, median", percentile(measured, 0.5), "ms", "<= 250")
    report("  99th percentile", percentile(measured, 0.99), "ms", "<= 500")


def _send_steadily(broker: Any, seconds: int) -> None:
    pause = threading.Event()
    start = time.monotonic()
    for number in range(_PER_SECOND * seconds):
        pause.wait(max(0.0, start + number / _PER_SECOND - time.monotonic()))
        broker.sends.send(Message("orders", _now()))


def _now() -> bytes:
    return b"%f" % (time.time() * 1_000)


def main() -> None:
    from mqtemplate.spark import session

    count, seconds = (int(text) for text in [*sys.argv[1:], *(str(_COUNT), str(_SECONDS))[len(sys.argv) - 1 :]])
    with scratch_folder() as folder:
        spark = session(master="local[2]")
        read_backlog(spark, folder, count)
        measure_latency(spark, folder, seconds)
        spark.stop()


if __name__ == "__main__":
    run(main)
