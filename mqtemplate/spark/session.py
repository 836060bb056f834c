"""A Spark session that knows the data source, on this machine, with settings for batches of messages."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.spark.jvm.class_archive import archive_flags
from mqtemplate.spark.jvm.gateway import Gateway, launch
from mqtemplate.spark.jvm.java import find_java, jvm_flags

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_PYSPARK = (4, 2)
"""Rate limits and ``Trigger.AvailableNow`` for sources in Python are there from this version on."""

_TUNED = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",  # a micro-batch is small; 200 tasks cost more than they share out
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_TUNED_ON_THIS_MACHINE = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_MEMORY, _JAVA_OPTIONS = "spark.driver.memory", "spark.driver.extraJavaOptions"


def session(
    *,
    app_name: str = "mqtemplate",
    master: str = "local[*]",
    java_home: str | None = None,
    short_lived: bool = False,
    **conf: str,
) -> SparkSession:
    """A session with the data source ``mqtemplate`` registered; the running one, if this process has one.

    Finds a Java (see `java.find_java`) and starts the driver's JVM, which ends with this process.

    Args:
        master: Where Spark runs. The source reads a folder of this machine, so this must be a ``local`` one.
        java_home: The Java to use; found by itself if not given.
        short_lived: Start faster and compute slower: for tests, and for jobs of a minute.
        conf: Spark's own keys, ``session(**{"spark.sql.shuffle.partitions": "8"})``; they go over the settings here.

    Raises:
        SparkError: PySpark or Java is missing or too old; the text says what to install.
        ConfigurationError: A key is not Spark's, or the master is not on this machine.
    """
    require_pyspark()
    _check(master, conf)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = {**_TUNED, **_TUNED_ON_THIS_MACHINE, "spark.app.name": app_name, "spark.master": master, **conf}
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    if SparkContext._gateway is not None:
        spark = builder.getOrCreate()
    else:
        java = find_java(java_home)
        flags = jvm_flags(java, settings.get(_MEMORY, "1g"), short_lived=short_lived)
        flags += shlex.split(settings[_JAVA_OPTIONS]) if _JAVA_OPTIONS in settings else archive_flags(java)
        gateway = launch(java, flags, settings)
        atexit.register(_end, gateway)
        with _reaching(gateway.port, gateway.secret):
            spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make ``format("mqtemplate")`` known to a session of your own.

    Raises:
        SparkError: PySpark is missing or too old, or pyarrow is missing.
    """
    require_pyspark()
    from mqtemplate.spark.source import MqTemplateSource

    spark.dataSource.register(MqTemplateSource)


def require_pyspark() -> None:
    """Check that what the extra ``spark`` installs is there.

    Raises:
        SparkError: It is not.
    """
    install = "pip install 'mqtemplate[spark]'"
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        raise SparkError(f"Spark support needs {', '.join(missing)}, not installed here: {install}")
    version = importlib.import_module("pyspark").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYSPARK:
        raise SparkError(
            f"Spark support needs pyspark {'.'.join(map(str, OLDEST_PYSPARK))} or newer, got {version}: {install}"
        )


def _check(master: str, conf: dict[str, str]) -> None:
    if not master.startswith("local"):
        raise ConfigurationError(
            f"master {master!r}: the source reads a store folder of this machine, so Spark must run here too; "
            "give 'local[*]', or 'local[2]' for two threads"
        )
    for key in conf:
        if not key.startswith("spark."):
            raise ConfigurationError(
                f"{key!r} is not a key of Spark's; they begin with 'spark.', such as 'spark.sql.ansi.enabled'"
            )


def _end(gateway: Gateway) -> None:
    """At the end of this process: end the context, so that it leaves no files behind, and then its JVM."""
    from pyspark import SparkContext

    if gateway.process.poll() is None:
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        if SparkContext._gateway is not None:
            SparkContext._gateway.shutdown()  # so that objects that are cleared later do not talk to a JVM that is gone
    gateway.close()


@contextmanager
def _reaching(port: int, secret: str) -> Iterator[None]:
    """Tell PySpark about the JVM that is there already, and nobody else: child processes shall start their own."""
    given = {
        "PYSPARK_GATEWAY_PORT": str(port),
        "PYSPARK_GATEWAY_SECRET": secret,
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
