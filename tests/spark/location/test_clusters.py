"""Real clusters of Spark on this machine, whose executors have numpy and pyarrow and nothing else of this library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyspark

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.spark.driver.jvm import find_java, scala_version
from mqtemplate.testing import messages_in
from tests.programs import end_group, run
from tests.spark.bare_python import bare_python
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(900)]

SPARK_HOME = Path(pyspark.__file__).parent
ANY_PORT = HostAddress("127.0.0.1", 0)
QUEUES, A_QUEUE = 4, 500

PROGRAM = """
import json, sys
from mqtemplate.spark import session

master, name_server, store, other_store = sys.argv[1:]
spark = session(master=master, **{"spark.executor.memory": "512m", "spark.cores.max": "2"})
places = {"nameServer": name_server}, {"store": store}

def read(**options):
    return spark.read.format("mqtemplate").options(topic="orders", minPartitions=4, **options).load()

counts = [read(**place).groupBy("queueId").count().sort("queueId").collect() for place in places]
rows = read(nameServer=name_server).select("body", "queueId")
rows.repartition(2).sortWithinPartitions("body").write.format("mqtemplate").mode("append").options(
    nameServer=name_server, topic="copies"
).save()
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1  # without the driver
modules = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("mqtemplate").__file__).first()
pending = spark.read.format("mqtemplate").options(view="pending", nameServer=name_server).load().count()
stream = spark.readStream.format("mqtemplate").options(nameServer=name_server, topic="orders").load()
query = stream.writeStream.format("memory").queryName("seen").trigger(availableNow=True).start()
query.awaitTermination()
seen = spark.sql("SELECT count(DISTINCT queueId, queueOffset) FROM seen").first()[0]

# The machine of a task has another store under the path that was planned.
from mqtemplate.spark.records.offsets import QueueRange
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.location.folder import FolderBlocks
from mqtemplate.spark.reader.task import Share
from mqtemplate.spark.reader.task import TaskReader
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA
found = QueueRange("orders", 0, 0, 10, "broker-a")
share = Share((found,), FolderBlocks(store, "broker-a").identity(found))
task = TaskReader(SourceOptions.parse({"store": other_store, "topic": "orders"}, streaming=False), ARROW_SCHEMA)
try:
    spark.sparkContext.parallelize([0], 1).map(lambda _: len(list(task.batches(share)))).collect()
    refused = ""
except Exception as exc:
    refused = str(exc)
print(json.dumps({
    "counts": counts, "executors": executors, "module": modules, "pending": pending, "seen": seen, "refused": refused,
}))
spark.stop()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Our server, with a topic and some delayed messages; its folder can be read by the executors, too."""
    settings = EmbeddedSettings(listen_host=ANY_PORT)
    engine = EmbeddedBroker(tmp_path / "store", settings, SystemClock())
    with LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT), ANY_PORT) as cluster:
        fill(cluster.engine)
        for _ in range(7):
            cluster.engine.sends.send(Message("later", b"", {"DELAY": "18"}))
        yield cluster


def fill(broker: EmbeddedBroker) -> None:
    for queue_id in range(QUEUES):
        messages = [Message("orders", b"%d" % (queue_id * A_QUEUE + n)) for n in range(A_QUEUE)]
        broker.sends.send_batch(messages, MessageQueue("orders", broker.name, queue_id))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of drivers, masters and workers. Executors run a Python without this library."""
    return {**os.environ, "PYSPARK_PYTHON": str(bare_python(tmp_path)), "SPARK_LOCAL_IP": "127.0.0.1"}


def run_job(master: str, cluster: LocalCluster, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the program on a cluster of Spark, and return what it found."""
    with EmbeddedBroker(folder / "other") as other:
        fill(other)
    arguments = [master, str(cluster.name_server_address), str(cluster.engine.path), str(other.path)]
    driver = {**environment, "PYSPARK_DRIVER_PYTHON": sys.executable}
    done = run([sys.executable, "-c", PROGRAM, *arguments], folder, driver)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], cluster: LocalCluster) -> None:
    assert found["counts"] == [[[queue_id, A_QUEUE] for queue_id in range(QUEUES)]] * 2
    assert found["executors"] == 2
    assert "mqtemplate-spark.zip" in found["module"]
    assert found["pending"] == 7
    assert found["seen"] == QUEUES * A_QUEUE
    assert "is another store than was planned: message 9 of orders, queue 0, differs or is missing" in found["refused"]
    copies = sorted(int(message.body) for message in messages_in(cluster.engine, "copies"))
    assert copies == list(range(QUEUES * A_QUEUE))


def test_a_local_cluster_reads_and_writes(cluster: LocalCluster, environment: dict[str, str], tmp_path: Path) -> None:
    """Two executors in processes of their own: over the network, and from the folder."""
    check(run_job("local-cluster[2,1,1024]", cluster, tmp_path, environment), cluster)


def test_a_standalone_cluster_with_two_workers_reads_and_writes(
    cluster: LocalCluster, environment: dict[str, str], tmp_path: Path
) -> None:
    with standalone(tmp_path, environment) as master:
        check(run_job(master, cluster, tmp_path, environment), cluster)


@contextmanager
def standalone(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run a master and two workers of Spark, and yield the address of the master."""
    with ExitStack() as processes:
        arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = processes.enter_context(spark_class("master.Master", folder / "master.log", environment, *arguments))
        master = eventually(lambda: re.search(r"Starting Spark master at (\S+)", log.read_text()), "the master runs")[1]
        for number in range(2):
            work = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work-{number}")]
            arguments = ["--host", "127.0.0.1", "--webui-port", "0", *work, master]
            name = folder / f"worker-{number}.log"
            log = processes.enter_context(spark_class("worker.Worker", name, environment, *arguments))
            eventually(lambda log=log: "Successfully registered" in log.read_text(), "the worker is registered")  # type: ignore[misc]
        yield master


@contextmanager
def spark_class(name: str, log: Path, environment: dict[str, str], *arguments: str) -> Iterator[Path]:
    """Run a daemon of Spark, and yield the file with its log."""
    command = [str(find_java().executable), "-Xmx256m", "-cp", str(SPARK_HOME / "jars" / "*")]
    variables = {**environment, "SPARK_HOME": str(SPARK_HOME), "SPARK_SCALA_VERSION": scala_version()}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, f"org.apache.spark.deploy.{name}", *arguments],
            stdout=file,
            stderr=file,
            env=variables,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        end_group(process)
