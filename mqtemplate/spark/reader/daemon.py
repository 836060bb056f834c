"""Daemon that forks Spark's Python workers, with the modules of the source imported before the first fork.

Spark's own daemon imports them after each fork, which takes most of the time of a small query. It also prints a stack
whenever a query needs only the first rows: the JVM then closes the connection on a worker that still writes. That is
no failure, and this daemon is silent about it.

`session` sets it as ``spark.python.daemon.module``. It runs as ``python -m``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from pyspark import daemon

_MODULES = (
    *("numpy", "pandas", "pyarrow", "pyarrow.compute", "pyspark.worker", "pyspark.sql.worker.plan_data_source_read"),
    "mqtemplate.spark.reader.source",
)


def preload(worker_module: str | None) -> None:
    """Import the modules of the source, and the one that the workers of this daemon run.

    Spark collects garbage after each task, and the modules have some hundred thousand objects: no collection visits
    them any more. Tests count the threads afterwards: a fork copies only one of them.
    """
    for name in (*_MODULES, *((worker_module,) if worker_module else ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def without_broken_pipes(worker: Callable[..., int]) -> Callable[..., int]:
    """Return the function of a worker process that ends it silently if the JVM has closed the connection."""

    def run(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    return run


if __name__ == "__main__":
    preload(sys.argv[1] if len(sys.argv) > 1 else None)
    daemon.worker = without_broken_pipes(daemon.worker)
    daemon.manager()
