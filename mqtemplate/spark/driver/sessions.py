"""Spark sessions on this machine, with the data source and with settings for batches of messages."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.extras import install_command
from mqtemplate.spark.driver.jvm import Gateway, archive_flags, find_java, jvm_flags, launch, spark_home
from mqtemplate.spark.driver.package import write_package
from mqtemplate.spark.reader.task import CORES_VARIABLE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


SHIPPED_VARIABLE = "MQTEMPLATE_SPARK_SHIPPED"
"""Environment variable of a session whose tasks get the package; the package ``pyspark_mqtemplate`` reads it."""
OLDEST_PYSPARK = (4, 0)
"""First version with data sources in Python."""
_CHECKPOINTS_HAVE_A_PACKAGE = (4, 1)


def require_pyspark() -> None:
    """Check that the packages of the extra ``spark`` are installed.

    Raises:
        SparkError: One is missing or too old.
    """
    install = install_command("spark")
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        raise SparkError(f"Spark support needs {', '.join(missing)}, not installed here: {install}")
    if _pyspark_version() < OLDEST_PYSPARK:
        version = importlib.import_module("pyspark").__version__
        raise SparkError(
            f"Spark support needs pyspark {'.'.join(map(str, OLDEST_PYSPARK))} or newer, got {version}, which has no "
            f"data sources in Python: {install}"
        )


def _pyspark_version() -> tuple[int, ...]:
    """Return the first two numbers of the version."""
    return tuple(int(part) for part in importlib.import_module("pyspark").__version__.split(".")[:2])


_TUNED = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",  # a micro-batch is small; 200 tasks cost more than they save
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_THREADS_OF_THIS_MACHINE = {
    # The driver listens on ports of 127.0.0.1, which other users of the machine reach. Spark creates the secret itself.
    "spark.authenticate": "true",
    # Workers on other machines have the package for executors, and perhaps not this module.
    "spark.python.daemon.module": "mqtemplate.spark.reader.daemon",
}
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_ALREADY_FOUND = "DATA_SOURCE_ALREADY_EXISTS"
"""Spark's error for a source that it has found by itself. Source: ``DataSourceManager.registerDataSource``."""
_MASTERS = ("local", "local[", "local-cluster[", "spark://", "yarn", "k8s://")
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
        master: ``local[*]``, ``local-cluster[2,1,1024]``, ``spark://host:port``, ``yarn`` or ``k8s://…``. A cluster
            reads over the network (option ``nameServer``), or a folder that all its machines share. The executors get
            the package that `mqtemplate.spark.driver.package` writes.
        java_home: Java to use; by default it is searched.
        short_lived: True to start faster and compute slower: for tests, and for jobs of a minute.
        conf: Keys of Spark, ``session(**{"spark.sql.shuffle.partitions": "8"})``; they override the settings here.

    Raises:
        SparkError: PySpark or Java is missing or too old; the text says what to install.
        ConfigurationError: A key is not one of Spark, or the master is unknown.
    """
    require_pyspark()
    _check(master, conf)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    settings = {**_TUNED, **_of_master(master), "spark.app.name": app_name, "spark.master": master, **conf}
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    if SparkContext._gateway is not None:
        spark = builder.getOrCreate()
    else:
        java = find_java(java_home)
        flags = jvm_flags(java, settings.get(_MEMORY, "1g"), short_lived=short_lived)
        flags += shlex.split(settings[_JAVA_OPTIONS]) if _JAVA_OPTIONS in settings else archive_flags(java)
        gateway = launch(java, flags, settings, _environment(master))
        atexit.register(_end, gateway)
        with _gateway_environment(gateway.port, gateway.secret):
            spark = builder.getOrCreate()
    if not _is_one_process(master):
        _ship_package(spark)
    register(spark)  # after the package: the source gets the packages of this moment, for its tasks
    return spark


def register(spark: SparkSession) -> None:
    """Register ``format("mqtemplate")`` with a session of your own.

    Where the library is installed, Spark finds the source by itself, and the call has no effect. It is needed if tasks
    get the library as a package: `mqtemplate.spark.driver.package`.

    Raises:
        SparkError: PySpark is missing or too old, or pyarrow is missing.
    """
    require_pyspark()
    from pyspark.errors import AnalysisException

    from mqtemplate.spark.reader.source import MqTemplateSource

    try:
        spark.dataSource.register(MqTemplateSource)
    except AnalysisException as exc:
        if exc.getCondition() != _ALREADY_FOUND:
            raise


def read_table(spark: SparkSession, **options: str) -> DataFrame:
    """Return the DataFrame of a batch that ``spark.read.format("mqtemplate")`` reads, by ``mapInArrow``.

    Spark converts each row of a source in Python once more than the rows of a function, so this takes less processor
    time. The start and the end of the batch are fixed by the call: each use of the DataFrame reads the same messages.

    Args:
        options: Options of the source: ``read_table(spark, store="./data", topic="orders", columns="keys, body")``.

    Raises:
        SparkError: PySpark is missing or too old, or the topic does not exist.
        ConfigurationError: An option is unknown, malformed, missing, or contradicts another one.
    """
    require_pyspark()
    from mqtemplate.spark.reader.source import MqTemplateSource

    source = MqTemplateSource(options)
    schema = source.schema()
    reader = source.reader(schema)
    partitions = list(reader.partitions())

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from cast("Iterator[pa.RecordBatch]", reader.read(partitions[number]))

    return spark.range(0, len(partitions), 1, max(1, len(partitions))).mapInArrow(read, schema)


def _check(master: str, conf: dict[str, str]) -> None:
    if not master.startswith(_MASTERS) or (master.startswith("local") and not _is_one_process(master, cluster=True)):
        raise ConfigurationError(
            f"master {master!r} is unknown; give 'local[*]', 'local[2]' for two threads, 'spark://host:port', 'yarn' "
            "or 'k8s://https://host:port'"
        )
    for key in conf:
        if not key.startswith("spark."):
            raise ConfigurationError(
                f"{key!r} is not a key of Spark; these start with 'spark.', such as 'spark.sql.ansi.enabled'"
            )


def _is_one_process(master: str, *, cluster: bool = False) -> bool:
    """Return True if the tasks run in threads of the driver; with *cluster* also if Spark starts executors here."""
    return bool(re.fullmatch(r"local|local\[(\d+|\*)(,\d+)?\]", master)) or (
        cluster and re.fullmatch(r"local-cluster\[\d+,\d+,\d+\]", master) is not None
    )


def _of_master(master: str) -> dict[str, str]:
    """Return the settings that depend on where the executors are."""
    is_here = master.startswith(("local", "spark://127.0.0.1", "spark://localhost"))
    return {
        **(_LOOPBACK if is_here else {}),
        **({**_THREADS_OF_THIS_MACHINE, _FILE_MANAGER: _file_manager()} if _is_one_process(master) else {}),
    }


def _file_manager() -> str:
    """Return the class that writes checkpoints with the least work on a local disk.

    Spark's default one starts processes such as ``chmod`` for each file. Both write a file under another name and
    rename it. If two drivers use one checkpoint, the default one notices it in more cases.
    """
    package = "org.apache.spark.sql.execution.streaming"
    if _pyspark_version() >= _CHECKPOINTS_HAVE_A_PACKAGE:
        package += ".checkpointing"
    return f"{package}.FileSystemBasedCheckpointFileManager"


def _environment(master: str) -> dict[str, str]:
    """Return the variables of the JVM, for the planner of a read and for the search for sources.

    One is the number of tasks that run at once. If the tasks get the package, Spark must not find the source by itself:
    it would not send the package with such a source. Executors on this machine are started from the folder of Spark.
    """
    found = {} if _is_one_process(master) else {SHIPPED_VARIABLE: "1", "SPARK_HOME": str(spark_home())}
    counts = [int(number) for number in re.findall(r"\d+", master)] if master.startswith("local") else []
    if master.startswith("local-cluster"):
        found[CORES_VARIABLE] = str(counts[0] * counts[1])
    elif master == "local" or counts:
        found[CORES_VARIABLE] = str(counts[0] if counts else 1)
    return found


def _ship_package(spark: SparkSession) -> None:
    """Send the package for executors, once for a session."""
    folder = Path(tempfile.mkdtemp(prefix="mqtemplate-package-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    spark.sparkContext.addPyFile(str(write_package(folder / "mqtemplate-spark.zip")))


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
