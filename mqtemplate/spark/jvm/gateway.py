"""Starts the driver's JVM, and ends it with this process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mqtemplate.errors import SparkError
from mqtemplate.spark.jvm.java import Java

_STARTS_WITHIN_S = 180.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Gateway:
    """A JVM that waits for Python to talk to it."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str

    def close(self, timeout_s: float = 120.0) -> None:
        """End the JVM: it ends by itself when its standard input does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(java: Java, flags: Sequence[str], conf: Mapping[str, str]) -> Gateway:
    """Start Spark's driver JVM without Spark's shell scripts; they add a flag that small Javas do not know.

    The JVM gets a pipe as its standard input and ends when the pipe does, so also when this process is killed.

    Raises:
        SparkError: It ended before it was ready.
    """
    with tempfile.TemporaryDirectory(prefix="mqtemplate-spark-") as folder:
        connection = Path(folder, "connection")
        command = [
            str(java.executable),
            *flags,
            f"-Dlog4j2.configurationFile={files('mqtemplate.spark') / 'log4j2.properties'}",
            "-cp",
            os.pathsep.join(class_path()),
            "org.apache.spark.deploy.SparkSubmit",
            *(part for key, value in conf.items() for part in ("--conf", f"{key}={value}")),
            "pyspark-shell",
        ]
        # A session of its own: Ctrl-C is for Python, which then stops the queries in order.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(connection), start_new_session=True)
        _await_file(connection, process, java)
        data = connection.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return Gateway(process, port, data[8 : 8 + length].decode())


def class_path() -> list[str]:
    """Spark's jars one by one, in a fixed order: an archive of classes is valid for one order only."""
    home = _spark_home()
    return [str(home / "conf"), *map(str, sorted((home / "jars").glob("*.jar")))]


def _spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def _environment(connection: Path) -> dict[str, str]:
    """What the JVM hands on to its Python workers: this interpreter, and the modules that can be imported here."""
    return {
        **os.environ,
        "SPARK_HOME": str(_spark_home()),
        "SPARK_CONNECT_MODE": "0",
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path)),
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection),
    }


def _await_file(path: Path, process: subprocess.Popen[bytes], java: Java) -> None:
    """Wait until the JVM has written how to reach it; it moves the finished file into place."""
    wake_event = threading.Event()  # nobody rings it: a file cannot
    for _ in range(int(_STARTS_WITHIN_S / _LOOK_EVERY_S)):
        if path.is_file():
            return
        if process.poll() is not None:
            raise SparkError(
                f"the Spark JVM ({java.executable}, Java {java.major}) ended with code {process.returncode} before "
                "it was ready; its own words stand above, on stderr"
            )
        wake_event.wait(_LOOK_EVERY_S)
    process.kill()
    raise SparkError(f"the Spark JVM ({java.executable}) was not ready after {_STARTS_WITHIN_S:.0f} s and was ended")
