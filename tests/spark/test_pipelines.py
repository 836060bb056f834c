"""The files of docs/spark/pipelines.md, run twice by ``spark-pipelines`` over a server of Spark Connect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message
from mqtemplate.server import LocalCluster
from mqtemplate.testing import messages_in
from tests.docs.fences import DOCS, fences
from tests.programs import environment, run
from tests.spark.connect_server import VARIABLES, connect_server, program

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.timeout(900)]
STORAGE = "file:///srv/orders"


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


def run_pipeline(folder: Path, remote: str, address: str) -> None:
    command = [str(program("spark-pipelines")), "--remote", remote, "run"]

    done = run(command, folder, environment(NAME_SERVER=address, **VARIABLES))

    assert done.returncode == 0, done.stdout + done.stderr
