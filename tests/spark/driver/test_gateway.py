"""The JVM of a session: its settings are not on its command line, which every user of the machine can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import SECRET_KEY, SECRET_VALUE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="command lines are read from /proc")
def test_settings_are_not_on_the_command_line_of_the_jvm(spark: SparkSession) -> None:
    """The value has each character that a file of settings has to escape."""
    jvm = spark._jvm
    assert jvm is not None
    command_line = Path(f"/proc/{jvm.java.lang.ProcessHandle.current().pid()}/cmdline").read_bytes()

    assert spark.conf.get(SECRET_KEY) == SECRET_VALUE
    assert jvm.org.apache.spark.SparkContext.getOrCreate().conf().get(SECRET_KEY) == SECRET_VALUE
    assert b"SparkSubmit" in command_line
    assert b"s3cret" not in command_line
    assert jvm.java.lang.System.getProperty("test.password") == 's3cret "\\ #'


def test_workers_import_the_installed_package_of_pyspark(spark: SparkSession) -> None:
    """Its modules are compiled. Those of ``pyspark.zip`` would be compiled at the start of each worker."""
    import pyspark

    path = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("pyspark").__file__).first()

    assert path == pyspark.__file__
