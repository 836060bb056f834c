"""Program of `test_connect`: listeners over Spark Connect. A process with a session of Spark Connect can have no other.

Run it as ``python -m tests.spark.listening.connect_program <folder>``. It prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import SparkListenerContainer, register
from mqtemplate.testing import Harness, messages_in
from tests.spark.listening.listeners import Collect, fail

if TYPE_CHECKING:
    pass


def main(folder: Path) -> None:
    """Run all steps in one session: its start takes most of the time."""
    spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    register(spark)
    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker:
        found = {"listener": run_listener(spark, broker, folder), "failure": run_failure(spark, broker, folder)}
        rows = spark.read.format("mqtemplate").options(store=str(broker.path), topic="orders").load()
        found["read"] = rows.where("queueOffset >= 2").count()
    print(json.dumps(found))
    spark.stop()


def send(broker: EmbeddedBroker, *bodies: bytes) -> None:
    for body in bodies:
        broker.sends.send(Message("orders", body), MessageQueue("orders", broker.name, 0))


def run_listener(spark: Any, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """Handle messages, a bad record, and a row that comes back once."""
    send(broker, b'{"id": 1}', b'{"id": 2}', b"not json", b'{"id": 3}')
    container = SparkListenerContainer(Collect(), spark, broker, folder / "checkpoints")
    container.start()
    container.await_idle()
    Harness(broker).advance("10s")
    container.await_idle()
    lag = sum(container.monitor.lag().values())
    container.stop()
    lines = Path(os.environ["SEEN"]).read_text().splitlines()
    metrics = broker.metrics.snapshot()
    return {
        "seen": sorted(json.loads(line) for line in lines),
        "lag": lag,
        "dead": sorted(message.body.decode() for message in messages_in(broker, "%DLQ%collecting")),
        "messages": metrics["spark.collecting.messages"],
        "exception": None if container.exception is None else str(container.exception),
    }


def run_failure(spark: Any, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """End a query with the error of its listener."""
    container = SparkListenerContainer(fail, spark, broker, folder / "checkpoints")
    container.start()
    try:
        container.await_idle()
        text = ""
    except Exception as exc:
        text = str(exc)
    failures = broker.metrics.snapshot()["spark.failing.failures"]
    container.stop()
    return {"error": text, "failures": failures}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
