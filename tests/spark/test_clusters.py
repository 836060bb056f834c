"""Clusters of Spark on loopback: executors in processes of their own, with the package that the session sends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.spark.jvm.gateway import class_path
from mqtemplate.spark.jvm.java import find_java, jvm_flags
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

ANY_PORT = HostAddress("127.0.0.1", 0)
COUNT = 400
PROGRAM = """
import sys
from mqtemplate.spark import session

spark = session(master=sys.argv[1], short_lived=True, **{"spark.executor.memory": "512m"})
for options in ({"nameServer": sys.argv[2]}, {"store": sys.argv[3]}):
    reader = spark.read.format("mqtemplate").options(topic="orders", minPartitions="4", **options)
    print("rows", reader.load().selectExpr("count(*)", "sum(queueOffset)").first())
spark.stop()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[LocalCluster]:
    engine = EmbeddedBroker(tmp_path / "store", EmbeddedSettings(listen_host=ANY_PORT), SystemClock())
    with LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT), ANY_PORT) as cluster:
        for number in range(COUNT):
            engine.send(Message("orders", b"%d" % number), MessageQueue("orders", engine.name, number % 4))
        yield cluster


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """Master of a cluster with two workers."""
    java, port = find_java(None), free_port()
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    base = [str(java.executable), *jvm_flags(java, "256m", short_lived=True), "-cp", os.pathsep.join(class_path())]
    address = ["--host", "127.0.0.1", "--webui-port", "0"]
    master = ["org.apache.spark.deploy.master.Master", *address, "--port", str(port)]
    worker = ["org.apache.spark.deploy.worker.Worker", *address, "--cores", "1", "--memory", "1g"]
    log = tmp_path / "master.log"
    with ExitStack() as running, log.open("w") as output:
        for number, command in enumerate((master, worker, worker)):
            folder = ["--work-dir", str(tmp_path / f"work-{number}"), f"spark://127.0.0.1:{port}"] if number else []
            process = subprocess.Popen(
                [*base, *command, *folder], env=environment, stdout=output, stderr=output, cwd=tmp_path
            )
            running.callback(process.wait)
            running.callback(process.terminate)
            if not number:
                eventually(lambda: _listens(port), "the master listens", 300)
        yield f"spark://127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def rows(master: str, served: LocalCluster, tmp_path: Path) -> list[str]:
    """Return the lines that the job prints, which reads over the network and then from the folder."""
    arguments = [master, str(served.name_server_address), str(served.engine.path)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return [line for line in done.stdout.splitlines() if line.startswith("rows")]


EXPECTED = [f"rows Row(count(1)={COUNT}, sum(queueOffset)={4 * sum(range(COUNT // 4))})"] * 2


def test_executors_in_their_own_processes_read_a_topic(served: LocalCluster, tmp_path: Path) -> None:
    assert rows("local-cluster[2,1,512]", served, tmp_path) == EXPECTED


def test_a_standalone_cluster_with_two_workers_reads_a_topic(
    standalone: str, served: LocalCluster, tmp_path: Path
) -> None:
    assert rows(standalone, served, tmp_path) == EXPECTED
