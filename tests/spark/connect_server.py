"""Server of Spark Connect in a process of its own, on a port that the system chose."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.programs import end_group, environment
from tests.waiting import eventually

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_ADDRESS = re.compile(r"Spark Connect server started at: \S*:(\d+)")
VARIABLES = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
_LOCAL = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.master": "local[2]",
    "spark.python.authenticate.socketTimeout": "5m",  # its 15 s are short for a process that starts under load
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.port": "0",
}


def program(name: str) -> Path:
    """Return a command of the installed PySpark."""
    return Path(sys.executable).with_name(name)


@contextmanager
def connect_server(folder: Path, conf: dict[str, str] | None = None, **variables: str) -> Iterator[str]:
    """Run a server, which keeps the catalog from one client to the next, and yield its address.

    Args:
        folder: Its working directory, with its log ``connect.log``.
        conf: Further settings of Spark.
        variables: Its environment, beside the variables of this process.
    """
    settings = {**_LOCAL, **(conf or {})}
    options = [text for key, value in settings.items() for text in ("--conf", f"{key}={value}")]
    command = [str(program("spark-submit")), *options, "--class", _CLASS, "spark-internal"]
    log = folder / "connect.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            cwd=folder,
            env=environment(**VARIABLES, **variables),
            start_new_session=True,
        )
    try:
        found = eventually(
            lambda: _ADDRESS.search(text := log.read_text()) or (server.poll() is not None and text),
            "the server of Spark Connect runs",
        )
        assert isinstance(found, re.Match), found
        yield f"sc://127.0.0.1:{found[1]}"
    finally:
        end_group(server)
        server.wait()
