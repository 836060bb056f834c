"""Spark sessions on this machine, with the data source and with settings for batches of messages."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.jvm.gateway import Gateway, archive_flags, launch
from mqtemplate.spark.jvm.java import find_java, jvm_flags
from mqtemplate.spark.requirements import require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TUNED = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",  # a micro-batch is small; 200 tasks cost more than they save
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
_MEMORY, _JAVA_OPTIONS = "spark.driver.memory", "spark.driver.extraJavaOptions"


def session(
    *,
    app_name: str = "mqtemplate",
    master: str = "local[*]",
    java_home: str | None = None,
    short_lived: bool = False,
    **conf: str,
) -> SparkSession:
    """Return a session with the data source ``mqtemplate``; the running session, if this process has one.

    It finds a Java (see `find_java`) and starts the driver's JVM, which ends with this process.

    Args:
        master: A ``local`` master, since the source reads a folder of this machine.
        java_home: Java to use; by default it is searched.
        short_lived: True to start faster and compute slower: for tests, and for jobs of a minute.
        conf: Keys of Spark, ``session(**{"spark.sql.shuffle.partitions": "8"})``; they override the settings here.

    Raises:
        SparkError: PySpark or Java is missing or too old; the text says what to install.
        ConfigurationError: A key is not one of Spark, or the master is not on this machine.
    """
    require_pyspark()
    _check(master, conf)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = {**_TUNED, "spark.app.name": app_name, "spark.master": master, **conf}
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
        with _gateway_environment(gateway.port, gateway.secret):
            spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register ``format("mqtemplate")`` with a session of your own.

    Raises:
        SparkError: PySpark is missing or too old, or pyarrow is missing.
    """
    require_pyspark()
    from mqtemplate.spark.source import MqTemplateSource

    spark.dataSource.register(MqTemplateSource)


def _check(master: str, conf: dict[str, str]) -> None:
    if not master.startswith("local"):
        raise ConfigurationError(
            f"master {master!r}: the source reads a store folder of this machine, so Spark must run here too; "
            "give 'local[*]', or 'local[2]' for two threads"
        )
    for key in conf:
        if not key.startswith("spark."):
            raise ConfigurationError(
                f"{key!r} is not a key of Spark; these start with 'spark.', such as 'spark.sql.ansi.enabled'"
            )


def _end(gateway: Gateway) -> None:
    """Stop the context, so that it deletes its files, and then its JVM. It runs when this process ends."""
    from pyspark import SparkContext

    if gateway.process.poll() is None:
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        if SparkContext._gateway is not None:
            SparkContext._gateway.shutdown()  # so that objects that are deleted later do not call a JVM that has ended
    gateway.close()


@contextmanager
def _gateway_environment(port: int, secret: str) -> Iterator[None]:
    """Set PySpark's variables for the running JVM. They are removed again: child processes start their own JVM."""
    variables = {
        "PYSPARK_GATEWAY_PORT": str(port),
        "PYSPARK_GATEWAY_SECRET": secret,
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
