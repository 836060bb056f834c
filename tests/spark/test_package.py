"""Package for executors: it has what a task imports, and needs numpy, pyarrow and PySpark only."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from mqtemplate.cli import main
from mqtemplate.spark.package import write_package

PROGRAM = """
import importlib.abc, sys, time

class Refuse(importlib.abc.MetaPathFinder):
    refused = {"annotated_types", "dependency_injector", "lark", "orjson", "pandas", "pydantic", "structlog", "zlib_ng"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.refused:
            raise ImportError(f"an executor does not have {name}")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import numpy, pyarrow, pyarrow.compute, pyspark.sql.datasource, pyspark.sql.streaming.datasource, pyspark.sql.types
before = set(sys.modules)
import mqtemplate.spark.source
loaded = sorted(name for name in set(sys.modules) - before if name.startswith("mqtemplate"))
import mqtemplate.spark.reader.remote_cluster
from mqtemplate.event_log import get_logger
get_logger("mqtemplate.spark").warning("spark.tried")
print(mqtemplate.__file__)
print(*loaded)
"""


def test_a_task_needs_nothing_but_the_package(tmp_path: Path) -> None:
    """Also with a cluster, and for its log. A read of a folder loads neither the engine nor the network."""
    package = write_package(tmp_path / "package.zip")

    command = [sys.executable, "-c", PROGRAM, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

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
    assert "mqtemplate/spark/source.py" in zipfile.ZipFile(path).namelist()
