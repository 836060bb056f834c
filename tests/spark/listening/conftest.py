"""Containers of Spark listeners, in the session of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.spark import SparkListenerContainer
from tests.spark.listening.listeners import started

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqtemplate.brokers import EmbeddedBroker

Start = Callable[..., SparkListenerContainer]


@pytest.fixture
def start(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a listener on the broker. The listener is stopped at the end of the test."""
    running: list[SparkListenerContainer] = []

    def start(endpoint: object, **options: Any) -> SparkListenerContainer:
        started(spark, broker, tmp_path / "checkpoints", endpoint, created=running.append, **options)
        return running[-1]

    yield start
    for container in running:
        container.stop()
