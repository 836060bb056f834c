"""Daemon of Python workers: what it imports before the first fork, and workers whose reader went away."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

PRELOAD = """
import sys, threading
from mqtemplate.spark.reader.daemon import preload
preload("pyspark.sql.worker.plan_data_source_read")
names = ("mqtemplate.spark.reader.source", "pandas", "mqtemplate.remoting.client")
loaded = [name in sys.modules for name in names]
print(threading.active_count(), *loaded)
"""

TASK = """
import gc
from mqtemplate.spark.reader.daemon import preload
preload(None)
gc.collect()
visited = gc.get_objects()
is_visited = any(getattr(each, "__name__", "") == "MqTemplateSource" for each in visited)
print(is_visited, gc.get_freeze_count() > 10 * len(visited))
"""

WORKER = """
import sys
from mqtemplate.spark.reader.daemon import without_broken_pipes

def work(error):
    raise error

without_broken_pipes(work)({})
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_modules_of_the_source_are_imported_before_the_first_fork() -> None:
    """They start no thread of Python: a fork copies only one. The network loads only where a cluster is read.

    Spark's worker imports pandas for each kind of function.
    """
    done = run(PRELOAD)

    assert done.stdout.split() == ["1", "True", "True", "False"], done.stderr


def test_the_collection_after_each_task_does_not_visit_the_modules() -> None:
    """Spark collects all garbage then: with the modules, that took a fifth of the time of a task."""
    done = run(TASK)

    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_worker_whose_reader_went_away_ends_without_a_stack() -> None:
    """``first()`` and ``limit(10)`` close the connection before all rows are written."""
    done = run(WORKER.format("BrokenPipeError(32, 'Broken pipe')"))

    assert (done.returncode, done.stderr) == (0, "")


def test_another_error_of_a_worker_is_shown() -> None:
    done = run(WORKER.format("ValueError('wrong')"))

    assert done.returncode == 1
    assert "ValueError: wrong" in done.stderr
