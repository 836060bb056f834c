"""The files of docs/spark/pipelines.md, run twice by ``spark-pipelines`` over a server of Spark Connect."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message
from mqtemplate.server import LocalCluster
from mqtemplate.testing import messages_in
from tests.docs.fences import DOCS, fences
from tests.programs import end_group, environment, run
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(900)]
STORAGE = "file:///srv/orders"
CONNECT_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
VARIABLES = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.master": "local[2]",
    "spark.python.authenticate.socketTimeout": "5m",  # its 15 s are short for a process that starts under load
    "spark.sql.shuffle.partitions": "1",
}


def test_a_second_run_continues_after_the_first(tmp_path: Path, serve: Callable[..., LocalCluster]) -> None:
    """A streaming table has each message once, and the topic of the sink has one invoice for each."""
    for block in fences(DOCS / "spark" / "pipelines.md"):
        if block.title is not None:
            path = tmp_path / block.title
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text.replace(STORAGE, tmp_path.as_uri()), "utf-8")
    server = serve()
    address = str(server.name_server_address)
    with connect_server(tmp_path) as remote, RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        broker.create_topic("orders", 1)
        broker.create_topic("invoices", 1)
        for items in (["tea", "milk"], ["salt"]):
            for item in items:
                broker.sends.send(Message("orders", item.encode(), {"KEYS": item}))
            run_pipeline(tmp_path, remote, address)
        bodies = [message.body for message in messages_in(broker, "invoices")]

    assert sorted(bodies) == [b"invoice for milk", b"invoice for salt", b"invoice for tea"]


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Run a server of Spark Connect, which keeps the catalog from one run to the next, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    conf = [text for key, value in LOCAL.items() for text in ("--conf", f"{key}={value}")]
    conf += ["--conf", f"spark.connect.grpc.binding.port={port}"]
    command = [str(program("spark-submit")), *conf, "--class", CONNECT_SERVER, "spark-internal"]
    with (folder / "connect.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=environment(**VARIABLES), start_new_session=True
        )
    try:
        eventually(lambda: server.poll() is not None or is_open(port), "the server of Spark Connect runs")
        assert server.poll() is None, (folder / "connect.log").read_text()
        yield f"sc://127.0.0.1:{port}"
    finally:
        end_group(server)
        server.wait()


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def run_pipeline(folder: Path, remote: str, address: str) -> None:
    command = [str(program("spark-pipelines")), "--remote", remote, "run"]

    done = run(command, folder, environment(NAME_SERVER=address, **VARIABLES))

    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str) -> Path:
    """Return a command of the installed PySpark."""
    return Path(sys.executable).with_name(name)
