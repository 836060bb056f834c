"""``python -m mqtemplate.spark``: create the archive of Spark's classes, with which sessions start faster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message
from mqtemplate.spark.driver.jvm import QUIET, archive_path, find_java
from mqtemplate.spark.driver.sessions import session
from mqtemplate.spark.listening.container import SparkListenerContainer
from mqtemplate.spark.listening.listener import AVAILABLE_NOW, SparkBatch, spark_listener

_log = get_logger("mqtemplate.spark")


def make_archive() -> Path:
    """Create the archive from the classes that a small stream and a small job load. It takes about half a minute.

    Raises:
        SparkError: The training run failed, or left no archive.
    """
    java = find_java()
    path = archive_path(java)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    # A process of its own, since the JVM writes the archive when it ends.
    program = "import sys; from mqtemplate.spark.__main__ import _train; _train(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, str(fresh), str(java.executable.parents[1])], check=False)
    if done.returncode or not fresh.is_file():
        raise SparkError(f"no archive of Spark's classes was created: the training run ended with {done.returncode}")
    fresh.replace(path)
    _log.info("spark.class_archive_created", path=str(path), megabytes=path.stat().st_size >> 20)
    return path


def _train(archive: str, java_home: str) -> None:
    """Load the classes that listeners and reads need."""

    @spark_listener("training", "training", trigger=AVAILABLE_NOW)
    def count_by_tag(messages: object, batch: SparkBatch) -> None:
        messages.groupBy("tags").count().collect()  # type: ignore[attr-defined]

    java_options = f"-XX:ArchiveClassesAtExit={archive} {QUIET}"
    spark = session(java_home=java_home, short_lived=True, **{"spark.driver.extraJavaOptions": java_options})
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder, "store"), clock=VirtualClock()) as broker:
        broker.sends.send(Message("training", b"{}", {"TAGS": "one"}))
        container = SparkListenerContainer(count_by_tag, spark, broker, Path(folder, "checkpoints"))
        container.start()
        container.await_idle()
        container.stop()
        read = spark.read.format("mqtemplate").options(store=f"{folder}/store", topic="training").load()
        read.groupBy("tags").count().write.parquet(f"{folder}/out")


if __name__ == "__main__":
    make_archive()
