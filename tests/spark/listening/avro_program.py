"""Programs of `test_avro`: listeners with Avro bodies. The functions are in a jar of the session.

Run it as ``python -m tests.spark.listening.avro_program <one-schema|registry> <folder> <jar,jar>``. It prints what it
found as JSON.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql.avro.functions import from_avro
from pyspark.sql.functions import struct

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
REGION = {"type": "record", "name": "Region", "fields": [{"name": "region", "type": "string"}]}
NO_BODIES = (b"\0\0\0\0\x01\xff", b"\0\0\0\0\x07\x0e\x04eu", b"\x0e\x04eu", b"\0\0\0", b"")
"""One that ends early, one with an unknown id, one without the five bytes, two that are shorter than these."""
USER, PASSWORD = "spark", "hidden-3c51"


def avro(body: Column) -> Column:
    return from_avro(body, SCHEMA, {"mode": "PERMISSIVE"})


def one_schema(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Run a listener over three bodies of one schema."""
    rows, dead = collected(spark, folder, avro, BODIES)
    return {"rows": rows, "dead": dead}


def registry(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Run a listener over bodies of two schemas, and of none; write its payloads with the newest schema."""
    from mqtemplate.spark import RegistryAvro

    older = json.loads(SCHEMA)
    newer = {**older, "fields": [*older["fields"], {"name": "cents", "type": "long", "default": 5}]}
    with Registry("orders-value", {1: older, 258: newer}) as server:
        orders = RegistryAvro("orders-value", {"url": server.url, "basic.auth.user.info": f"{USER}:{PASSWORD}"})
        bodies = (b"\0\0\0\0\x01\x0e\x04eu", b"\0\0\0\x01\x02\x10\x04us\x12", *NO_BODIES)
        rows, dead = collected(spark, folder, orders, bodies)
        payloads = spark.createDataFrame([(7, "eu", 5)], "id long, region string, cents long")
        body = payloads.select(orders.body(struct("*")).alias("body"))
        written = [bytes(row.body).hex() for row in body.collect()]
        read_again = [list(row) for row in orders(body).select("payload.*").collect()]
        given = RegistryAvro("regions", orders._registry, schema=json.dumps(REGION))
        regions = spark.createDataFrame([("eu",)], "region string").select(given.body(struct("*")).alias("body"))
        registered = [bytes(row.body).hex() for row in regions.collect()]
    return {
        "rows": rows,
        "dead": dead,
        "written": written,
        "read again": read_again,
        "registered": registered,
        "shown": PASSWORD in repr(orders),
    }


def collected(
    spark: SparkSession, folder: Path, payload: Any, bodies: Sequence[bytes]
) -> tuple[list[list[object]], list[str]]:
    """Return the payloads that a listener gets, and the bodies of the dead letters."""
    rows: list[list[object]] = []

    @spark_listener("orders", "billing", payload=payload, bad_records="dlq", trigger=AVAILABLE_NOW)
    def collect(messages: Any, batch: SparkBatch) -> None:
        rows.extend(list(row) for row in messages.select("payload.*").collect())

    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker:
        for body in bodies:
            broker.sends.send(Message("orders", body), MessageQueue("orders", broker.name, 0))
        container = SparkListenerContainer(collect, spark, broker, folder / "checkpoints")
        container.start()
        container.await_idle()
        container.stop()
        dead = [message.body.hex() for message in messages_in(broker, "%DLQ%billing")]
    return sorted(rows), dead


class Registry(ThreadingHTTPServer):
    """Schema registry on loopback, with the requests that the client sends, and one account.

    Args:
        schemas: Schemas of the subject, by their ids; the last one is the newest.
    """

    def __init__(self, subject: str, schemas: dict[int, dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.subject, self.schemas = subject, schemas

    def __enter__(self) -> Registry:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and content. Source: Confluent's "Schema Registry API Reference"."""
        texts = {number: json.dumps(schema) for number, schema in self.schemas.items()}
        newest = max(texts)
        answers = {f"/schemas/ids/{number}": {"schema": text} for number, text in texts.items()}
        latest = {"subject": self.subject, "id": newest, "version": len(texts), "schema": texts[newest]}
        answers[f"/subjects/{self.subject}/versions/latest"] = latest
        if body:
            self.schemas[newest + 1] = json.loads(json.loads(body)["schema"])
            return 200, {"id": newest + 1}
        return (200, answers[path]) if path in answers else (404, {"error_code": 40_403, "message": "not found"})


class _Request(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        is_known = self.headers.get("Authorization") == wanted
        refusal = 401, {"error_code": 40_101, "message": "who are you?"}
        status, content = self.server.answer(self.path.partition("?")[0], body) if is_known else refusal
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None: ...


def main(work: str, folder: Path, jars: str) -> None:
    """Run a part in a session of its own."""
    spark = session(master="local[2]", short_lived=True, **{"spark.jars": jars})
    print(json.dumps({"one-schema": one_schema, "registry": registry}[work](spark, folder)))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
