"""An archive of Spark's loaded classes, which lets the JVM start in about half the time.

``python -m mqtemplate.spark`` makes it once, in half a minute, in the user's cache folder (some 160 MB);
`session` uses it from then on. It is valid for one Java and one set of jars, so its name is made of both.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog

from mqtemplate.errors import SparkError
from mqtemplate.spark.gateway import class_path
from mqtemplate.spark.java import Java, find_java

__all__ = ["archive_flags", "archive_path", "make_archive"]

_log = structlog.stdlib.get_logger("mqtemplate.spark")
_QUIET = "-Xlog:cds=off"  # it would name each class that cannot be archived


def archive_path(java: Java) -> Path:
    """Where the archive for this Java and this PySpark is, or would be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jars = [f"{jar} {jar.stat().st_size}" for jar in map(Path, class_path()) if jar.is_file()]
    release = (java.executable.resolve().parents[1] / "release", java.executable.resolve())
    told = next(path.read_bytes() if path.name == "release" else bytes(path) for path in release if path.is_file())
    key = hashlib.sha256("\n".join(jars).encode() + told).hexdigest()[:16]
    return cache / "mqtemplate" / f"spark-classes-{key}.jsa"


def archive_flags(java: Java) -> list[str]:
    """The JVM flags that use the archive; none if it was not made."""
    path = archive_path(java)
    return [f"-XX:SharedArchiveFile={path}", _QUIET] if path.is_file() else []


def make_archive(java_home: str | None = None) -> Path:
    """Make the archive from the classes that a small stream and a small job load. Takes about half a minute.

    Raises:
        SparkError: The training run failed, or left no archive.
    """
    java = find_java(java_home)
    path = archive_path(java)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    program = f"import sys; from {__name__} import _train; _train(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, str(fresh), str(java.executable.parents[1])], check=False)
    if done.returncode or not fresh.is_file():
        raise SparkError(f"no archive of Spark's classes was made: the training run ended with code {done.returncode}")
    fresh.replace(path)
    _log.info("spark.class_archive", path=str(path), megabytes=path.stat().st_size >> 20)
    return path


def _train(archive: str, java_home: str) -> None:
    """Load the classes that listeners and reads need; the JVM writes them down when it ends."""
    from mqtemplate.brokers import EmbeddedBroker
    from mqtemplate.clock import VirtualClock
    from mqtemplate.message import Message
    from mqtemplate.spark.container import SparkListenerContainer
    from mqtemplate.spark.listener import AVAILABLE_NOW, SparkBatch, spark_listener
    from mqtemplate.spark.session import session

    @spark_listener("training", "training", trigger=AVAILABLE_NOW)
    def count_by_tag(messages: object, batch: SparkBatch) -> None:
        messages.groupBy("tags").count().collect()  # type: ignore[attr-defined]

    java_options = f"-XX:ArchiveClassesAtExit={archive} {_QUIET}"
    spark = session(java_home=java_home, short_lived=True, **{"spark.driver.extraJavaOptions": java_options})
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder, "store"), clock=VirtualClock()) as broker:
        broker.send(Message("training", b"{}", {"TAGS": "one"}))
        container = SparkListenerContainer.on_broker(count_by_tag, spark, broker, Path(folder, "checkpoints"))
        container.start()
        container.await_idle()
        container.stop()
        read = spark.read.format("mqtemplate").options(store=f"{folder}/store", topic="training").load()
        read.groupBy("tags").count().write.parquet(f"{folder}/out")
