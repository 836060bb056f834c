"""Requirements of Spark support: PySpark and the packages that it needs."""

from __future__ import annotations

import importlib
import importlib.util

from mqtemplate.errors import SparkError

OLDEST_PYSPARK = (4, 2)
"""First version with rate limits and ``Trigger.AvailableNow`` for data sources in Python."""


def require_pyspark() -> None:
    """Check that the packages of the extra ``spark`` are installed.

    Raises:
        SparkError: One is missing or too old.
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
