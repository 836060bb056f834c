"""Program of `test_avro`: a listener with Avro bodies. The function is in a jar of the session.

Run it as ``python -m tests.spark.listening.avro_program <folder> <jar,jar>``. It prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import Column
from pyspark.sql.avro.functions import from_avro

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer, session, spark_listener
from mqtemplate.testing import messages_in

SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "region", "type": "string"}],
    }
)
BODIES = (b"\x0e\x04eu", b"\xff", b"\x10\x04us")  # 7 and "eu"; none; 8 and "us"


def avro(body: Column) -> Column:
    return from_avro(body, SCHEMA, {"mode": "PERMISSIVE"})


def main(folder: Path, jars: str) -> None:
    """Run a listener over three bodies."""
    rows: list[tuple[int, str]] = []

    @spark_listener("orders", "billing", payload=avro, bad_records="dlq", trigger=AVAILABLE_NOW)
    def collect(messages: Any, batch: SparkBatch) -> None:
        rows.extend(tuple(row) for row in messages.select("payload.id", "payload.region").collect())

    spark = session(master="local[2]", short_lived=True, **{"spark.jars": jars})
    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker:
        for body in BODIES:
            broker.sends.send(Message("orders", body), MessageQueue("orders", broker.name, 0))
        container = SparkListenerContainer(collect, spark, broker, folder / "checkpoints")
        container.start()
        container.await_idle()
        container.stop()
        dead = [message.body.hex() for message in messages_in(broker, "%DLQ%billing")]
    print(json.dumps({"rows": sorted(rows), "dead": dead}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
