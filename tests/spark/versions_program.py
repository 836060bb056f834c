"""Program of `test_versions`: what the installed PySpark can do with the data source, in a plain session.

Run it as ``python -m tests.spark.versions_program <folder>``. It prints what it found as JSON. The session is created
as users create it, so Spark finds the source by itself.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.spark import AVAILABLE_NOW, LocalServer, SparkBatch, SparkListenerContainer, spark_listener
from mqtemplate.testing import Harness, messages_in
from tests.spark.listening.listeners import BODIES, OrderListener

SECRET, TOKEN = "hidden-5f1c7e", "hidden-token-93ab"
ANY_PORT = HostAddress("127.0.0.1", 0)
COUNT, LIMIT = 50, 20


def main(folder: Path) -> None:
    """Run all steps in one session: its start takes most of the time."""
    spark = plain_session(folder)
    found: dict[str, Any] = {"version": pyspark.__version__}
    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker, LocalServer(broker):
        for number in range(COUNT):
            broker.sends.send(Message("orders", b"%d" % number))
        broker.sends.send(Message("orders", b"later", {"DELAY": "18"}))
        found |= tables(spark, broker)
        found |= streams(spark, broker, folder)
    with EmbeddedBroker(folder / "listener", clock=VirtualClock()) as broker:
        found |= listener(spark, broker, folder)
    found["secrets"] = secrets(spark, folder)
    print(json.dumps(found))


def plain_session(folder: Path) -> SparkSession:
    """Create a session without this library. Its log of events and its web interface show what others can see."""
    (folder / "events").mkdir()
    conf = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(folder / "events"),
        "spark.eventLog.compress": "false",
        "spark.python.authenticate.socketTimeout": "5m",  # its 15 s are short for a process that starts under load
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def read(spark: SparkSession, **options: str) -> DataFrame:
    return spark.read.format("mqtemplate").options(**options).load()


def tables(spark: SparkSession, broker: EmbeddedBroker) -> dict[str, Any]:
    """Read and write batches and tables, and the pending view."""
    store = str(broker.path)
    spark.sql(f"CREATE TABLE orders USING mqtemplate OPTIONS (store '{store}', topic 'orders')")
    rows = spark.range(5).selectExpr("cast(id AS string) AS body")
    for _ in range(2):
        options = {"store": store, "topic": "copies", "txnAppId": "copy", "txnVersion": "1"}
        rows.write.format("mqtemplate").mode("append").options(**options).save()
    target = f"WITH ('store' = '{store}', 'topic' = 'inserted')"
    spark.sql(f"CREATE TABLE bodies USING mqtemplate OPTIONS (store '{store}', topic 'orders', columns 'body')")
    spark.sql(f"INSERT INTO bodies {target} VALUES (CAST('one' AS BINARY))")
    return {
        "insert_of_some_columns": succeeds(
            lambda: spark.sql(f"INSERT INTO orders {target} (body) VALUES (CAST('two' AS BINARY))")
        ),
        "batch": read(spark, store=store, topic="orders").count(),
        "table": spark.sql("SELECT count(*) FROM orders WHERE queueOffset >= 0").first()[0],  # type: ignore[index]
        "written": len(messages_in(broker, "copies")),
        "inserted": len(messages_in(broker, "inserted")),
        "pending": read(spark, store=store, view="pending").count(),
    }


def succeeds(work: Callable[[], object]) -> bool:
    """Return False if Spark refuses the statement."""
    try:
        work()
    except AnalysisException:
        return False
    return True


def streams(spark: SparkSession, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """Copy a topic by a stream with a limit, which is started again; one batch is repeated."""
    store, checkpoint = str(broker.path), folder / "checkpoint"

    def run(name: str, **trigger: Any) -> list[int]:
        options = {"store": store, "topic": "orders", "maxOffsetsPerTrigger": str(LIMIT)}
        rows = spark.readStream.format("mqtemplate").options(**options).load().select("body")
        writer = rows.writeStream.format("mqtemplate").options(store=store, topic=name)
        query = writer.option("checkpointLocation", str(folder / name)).trigger(**trigger).start()
        if trigger.get("availableNow"):
            query.awaitTermination()
        else:
            query.processAllAvailable()
            query.stop()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    checkpoint = folder / "streamed"
    found = {"available_now": run("streamed", availableNow=True)}
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    for name in (str(newest), f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    found["repeated"] = run("streamed", availableNow=True)
    found["continued"] = run("streamed", processingTime="0 seconds")
    found["limited"] = run("limited", processingTime="0 seconds")
    bodies = sorted(int(message.body) for message in messages_in(broker, "streamed"))
    return {**found, "streamed": [len(bodies), bodies == list(range(COUNT))]}  # type: ignore[dict-item]


def listener(spark: SparkSession, broker: EmbeddedBroker, folder: Path) -> dict[str, Any]:
    """Handle orders with a bad record, and a row that comes back once and then is a dead letter."""
    for body in BODIES:
        broker.sends.send(Message("orders", body))
    orders = OrderListener()
    container = SparkListenerContainer(orders, spark, broker, folder / "checkpoints")
    container.start()
    container.await_idle()
    Harness(broker).advance("1s")
    container.await_idle()
    container.stop()
    dead = sorted(message.body.decode() for message in messages_in(broker, "%DLQ%billing"))
    return {"handled": sorted(orders.handled), "dead": dead, "run_of_a_job": job(spark, broker, folder)}


def job(spark: SparkSession, broker: EmbeddedBroker, folder: Path) -> list[int]:
    """Handle all stored messages, in batches of one message of each queue, and end."""
    counts: list[int] = []

    @spark_listener("orders", "job", trigger=AVAILABLE_NOW, max_offsets_per_trigger=1)
    def count(messages: DataFrame, batch: SparkBatch) -> None:
        counts.append(messages.count())

    for number in range(8):
        queue = MessageQueue("orders", broker.name, 0)
        broker.sends.send(Message("orders", b'{"id": %d}' % number), queue)
    container = SparkListenerContainer(count, spark, broker, folder / "checkpoints")
    container.start()
    container.await_idle()
    container.stop()
    return [sum(counts), len(counts) > 1]


# --- secrets ----------------------------------------------------------------------------------------


def secrets(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Read and write with a secret key as an option; return where it is found, and the number of copies."""
    rights = {"orders": Right.SUB | Right.PUB, "copies": Right.SUB | Right.PUB}
    account = Account(
        access_key="spark-job",
        secret_key=SECRET,
        topic_perms=rights,
        default_group_perm=Right.SUB,
    )
    engine = EmbeddedBroker(folder / "secured", EmbeddedSettings(listen_host=ANY_PORT), SystemClock())
    server = BrokerServerSettings(listen=ANY_PORT)
    with LocalCluster(engine, server, ANY_PORT, acl=AclSettings(accounts=(account,))) as cluster:
        for number in range(3):
            engine.sends.send(Message("orders", b"%d" % number))
        engine.create_topic("copies", 1)
        access = {"nameServer": str(cluster.name_server_address), "accessKey": "spark-job", "secretKey": SECRET}
        seen = dict(secret_work(spark, access, folder))
        copies = len(messages_in(engine, "copies"))
        refused = refusal(spark, access)
    spark.stop()  # the last events are written
    # The folders of the brokers are theirs.
    for path in (path for name in ("events", "secret-checkpoint", "warehouse") for path in (folder / name).rglob("*")):
        if path.is_file():
            seen[str(path.relative_to(folder))] = path.read_text("utf-8", errors="replace")
    shown = sorted(name for name, text in seen.items() if SECRET in text or TOKEN in text)
    return {"shown": shown, "copies": copies, "refused": refused, "searched": len(seen)}


def secret_work(spark: SparkSession, access: dict[str, str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield texts that others can see while a batch and a stream with a secret run."""
    rows = read(spark, topic="orders", **access)
    yield "plan", rows._jdf.queryExecution().toString()
    yield "formatted plan", spark._jvm.PythonSQLUtils.explainString(rows._jdf.queryExecution(), "formatted")  # type: ignore[union-attr]
    rows.select("body").write.format("mqtemplate").mode("append").options(topic="copies", **access).save()
    stream = spark.readStream.format("mqtemplate").options(topic="orders", **access).load().select("body")
    writer = stream.writeStream.format("mqtemplate").options(topic="copies", **access)
    query = writer.option("checkpointLocation", str(folder / "secret-checkpoint")).start()
    query.processAllAvailable()
    yield "progress", json.dumps([json.loads(json.dumps(each, default=str)) for each in query.recentProgress])
    yield "plan of the stream", query._jsq.explainInternal(True)
    yield "processes", processes()
    query.stop()
    try:
        read(spark, topic="unknown", **access).count()
    except Exception as exc:
        yield "error of a batch", str(exc)
    failing = spark.readStream.format("mqtemplate").options(topic="orders", **access).load()
    broken = failing.selectExpr("raise_error('broken') AS body").writeStream.format("mqtemplate")
    query = broken.options(topic="copies", checkpointLocation=str(folder / "secret-checkpoint2"), **access).start()
    try:
        query.awaitTermination()
    except Exception as exc:
        yield "error of a stream", str(exc)
    yield from web_interface(str(spark.sparkContext.uiWebUrl), "/SQL/", "/StreamingQuery/", "/environment/")


def web_interface(base: str, *pages: str) -> Iterator[tuple[str, str]]:
    """Yield the answers of Spark's REST interface, and pages of its web interface."""
    with urllib.request.urlopen(f"{base}/api/v1/applications") as response:
        (application,) = json.loads(response.read())
    answers = ("sql?details=true&planDescription=true&length=1000", "environment", "jobs", "stages?details=true")
    for address in (*(f"/api/v1/applications/{application['id']}/{name}" for name in answers), *pages):
        with urllib.request.urlopen(base + address) as response:
            yield address, response.read().decode()


def processes() -> str:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return "\n".join(found)


def refusal(spark: SparkSession, access: dict[str, str]) -> str:
    """Create a table with a secret, and return the error."""
    options = ", ".join(f"{name} '{value}'" for name, value in {**access, "topic": "orders"}.items())
    try:
        spark.sql(f"CREATE TABLE secured USING mqtemplate OPTIONS ({options})")
    except Exception as exc:
        return str(exc)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
