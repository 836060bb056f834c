"""Programs of `test_connect`: clients of Spark Connect. A process with such a session can have no other.

Run it as ``python -m tests.spark.listening.connect_program <listeners|secrets> <folder> <address>``. It prints what it
found as JSON.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.spark import SparkListenerContainer, register
from mqtemplate.testing import Harness, messages_in
from tests.spark.listening.listeners import Collect, fail
from tests.spark.versions_program import ANY_PORT, processes, web_interface


def listeners(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Run listeners, and read their topic."""
    register(spark)
    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker:
        found = {"listener": run_listener(spark, broker, folder), "failure": run_failure(spark, broker, folder)}
        rows = spark.read.format("mqtemplate").options(store=str(broker.path), topic="orders").load()
        found["read"] = rows.where("queueOffset >= 2").count()
    return found


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


# --- secrets ----------------------------------------------------------------------------------------

SECRETS = {"by-option": "hidden-option-5f1c", "by-variable": "hidden-variable-93ab"}
"""Accounts with their secret keys. The server has those of the second one in its environment."""


def secrets(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Read and write with the keys of both accounts; return the rows of each, and which texts show which key."""
    rights = {"orders": Right.SUB, **{f"copies-{name}": Right.SUB | Right.PUB for name in SECRETS}}
    accounts = [
        Account(access_key=name, secret_key=secret, topic_perms=rights, default_group_perm=Right.SUB)
        for name, secret in SECRETS.items()
    ]
    engine = EmbeddedBroker(folder / "secured", EmbeddedSettings(listen_host=ANY_PORT), SystemClock())
    server, acl = BrokerServerSettings(listen=ANY_PORT), AclSettings(accounts=tuple(accounts))
    with LocalCluster(engine, server, ANY_PORT, acl=acl) as cluster:
        engine.create_topic("orders", 1)
        send(engine, b"1", b"2", b"3")
        place = {"nameServer": str(cluster.name_server_address)}
        seen: dict[str, str] = {}
        counts = {}
        for name, secret in SECRETS.items():
            engine.create_topic(f"copies-{name}", 1)
            keys = {"accessKey": name, "secretKey": secret} if name == "by-option" else {}
            seen |= work_with_keys(spark, {**place, **keys}, f"copies-{name}", folder)
            counts[name] = len(messages_in(engine, f"copies-{name}"))
    (port,) = re.findall(r"started service 'SparkUI' on port (\d+)", (folder / "connect.log").read_text())
    seen |= web_interface(f"http://127.0.0.1:{port}", "/connect/", "/SQL/", "/StreamingQuery/", "/environment/")
    seen["command lines"] = processes()
    for path in (path for part in ("events", "checkpoint") for path in (folder / part).rglob("*") if path.is_file()):
        seen[str(path.relative_to(folder))] = path.read_text("utf-8", errors="replace")
    seen["log of the server"] = (folder / "connect.log").read_text()
    shown = {name: sorted(where for where, text in seen.items() if key in text) for name, key in SECRETS.items()}
    return {"copies": counts, "shown": shown, "searched": len(seen)}


def work_with_keys(spark: SparkSession, access: dict[str, str], target: str, folder: Path) -> dict[str, str]:
    """Copy a topic by a batch and by a stream; return texts in which a key could be seen."""
    rows = spark.read.format("mqtemplate").options(topic="orders", **access).load()
    plan = io.StringIO()
    with redirect_stdout(plan):
        rows.explain(extended=True)
    rows.select("body").write.format("mqtemplate").mode("append").options(topic=target, **access).save()
    stream = spark.readStream.format("mqtemplate").options(topic="orders", **access).load().select("body")
    writer = stream.writeStream.format("mqtemplate").options(topic=target, **access)
    query = writer.option("checkpointLocation", str(folder / "checkpoint" / target)).start()
    query.processAllAvailable()
    progress = json.dumps(query.recentProgress, default=str)
    query.stop()
    try:
        spark.read.format("mqtemplate").options(topic="unknown", **access).load().count()
        error = ""
    except Exception as exc:
        error = str(exc)
    return {f"plan to {target}": plan.getvalue(), f"progress to {target}": progress, f"error of {target}": error}


def main(work: str, folder: Path, address: str) -> None:
    """Run a part in one session."""
    spark = SparkSession.builder.remote(address).getOrCreate()
    print(json.dumps({"listeners": listeners, "secrets": secrets}[work](spark, folder)))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
