"""Package for executors: it has what a task imports, and needs numpy, pyarrow and PySpark only."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyspark

from mqtemplate.cli import main
from mqtemplate.spark.driver.package import write_package
from tests.spark.bare_python import bare_python

PROGRAM = """
import sys
import numpy, pyarrow, pyarrow.compute, pyspark.sql.datasource, pyspark.sql.types
before = set(sys.modules)
import mqtemplate.spark.reader.source
loaded = sorted(name for name in set(sys.modules) - before if name.startswith("mqtemplate"))
import mqtemplate.spark.location.connection
import mqtemplate.spark.listening.connect
import mqtemplate.spark.pending.reader
import mqtemplate.spark.location.cluster
import mqtemplate.spark.sink.writer
from mqtemplate.event_log import get_logger
get_logger("mqtemplate.spark").warning("spark.tried")
print(mqtemplate.__file__)
print(*loaded)
"""


def test_a_task_needs_nothing_but_the_package(tmp_path: Path) -> None:
    """Reads, writes and the pending view, also with a cluster. A read of a folder loads neither engine nor network."""
    package = write_package(tmp_path / "package.zip")
    spark = Path(pyspark.__file__).parent
    only_spark = tmp_path / "only-spark"
    only_spark.mkdir()
    for name in ("pyspark", "py4j"):
        (only_spark / name).symlink_to(spark.parent / name)

    done = subprocess.run(
        [bare_python(tmp_path), "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, only_spark)))},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    where, loaded = done.stdout.splitlines()
    assert where.startswith(str(package))
    assert not [name for name in loaded.split() if name.startswith(("mqtemplate.remoting", "mqtemplate.listener"))]
    assert "mqtemplate.store.message_store" not in loaded.split()


def test_equal_modules_are_an_equal_package(tmp_path: Path) -> None:
    """So a file system that compares contents stores it once."""
    one, other = write_package(tmp_path / "one.zip"), write_package(tmp_path / "other.zip")

    assert one.read_bytes() == other.read_bytes()


def test_the_command_line_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "package.zip"

    assert main(["spark", "package", str(path)]) == 0

    assert f"--py-files {path}" in capsys.readouterr().out
    assert "mqtemplate/spark/reader/source.py" in zipfile.ZipFile(path).namelist()
