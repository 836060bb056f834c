"""Package by which Spark finds ``format("mqtemplate")`` without a call of ``register``.

Each session of Spark imports the installed packages ``pyspark_*`` before it uses a source in Python, and takes their
``DefaultSource``. It does so also where nothing reads our topics, so this package loads the library when it is used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from zipimport import zipimporter

from pyspark.sql.datasource import DataSource

_SHIPPED = "MQTEMPLATE_SPARK_SHIPPED"


def _is_shipped() -> bool:
    """Return True if the tasks get the library from the driver, as a zip.

    Then the session registers the source: Spark does not send the zip with a source that it has found by itself.
    """
    spec = importlib.util.find_spec("mqtemplate")
    return _SHIPPED in os.environ or (spec is not None and isinstance(spec.loader, zipimporter))


class _InstalledSource(DataSource):
    """Name of the data source; an object of it is a `mqtemplate.spark.MqTemplateSource`."""

    @classmethod
    def name(cls) -> str:
        return "mqtemplate"

    def __new__(cls, options: dict[str, str]) -> DataSource:  # type: ignore[misc]  # the source itself
        try:
            from mqtemplate.spark import MqTemplateSource
        except ModuleNotFoundError as exc:
            raise ModuleNotFoundError(
                f"{exc} in {sys.executable}, with which Spark runs Python; install the library there with its extra "
                "spark, or let PYSPARK_PYTHON name the Python that has it",
                name=exc.name,
            ) from exc
        return MqTemplateSource(options)


if not _is_shipped():
    DefaultSource = _InstalledSource
