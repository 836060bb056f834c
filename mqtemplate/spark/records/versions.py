"""Names of PySpark that older versions lack, with stand-ins for them.

- 4.0 has no class for writers of streams that take Arrow batches. Its worker passes Arrow batches to each
  ``DataSourceArrowWriter``.
- 4.0 and 4.1 have no limits of micro-batches for sources in Python. They call ``latestOffset()`` without the start of
  the batch, and run ``availableNow`` as one batch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import datasource

HAS_READ_LIMITS = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""True if Spark passes the start and the limit of a micro-batch to a source, and prepares it for ``availableNow``."""

if TYPE_CHECKING or hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(datasource.DataSourceArrowWriter, datasource.DataSourceStreamWriter):
        """Stand-in: a writer of streams that the worker of 4.0 takes for one of Arrow batches."""


if TYPE_CHECKING or HAS_READ_LIMITS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:

    class SupportsTriggerAvailableNow:
        """Stand-in: Spark does not call its method."""

    @dataclass(frozen=True)
    class ReadLimit:
        """Stand-in: Spark passes no limit."""

    @dataclass(frozen=True)
    class ReadAllAvailable(ReadLimit):
        """No limit."""

    @dataclass(frozen=True)
    class ReadMaxRows(ReadLimit):
        """Limit of the rows of a batch."""

        max_rows: int

    @dataclass(frozen=True)
    class ReadMinRows(ReadLimit):
        """Rows that a batch waits for."""

        min_rows: int

    @dataclass(frozen=True)
    class ReadMaxBytes(ReadLimit):
        """Limit of the bytes of a batch."""

        max_bytes: int


__all__ = [
    "HAS_READ_LIMITS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]
