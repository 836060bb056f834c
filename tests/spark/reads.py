"""Readers of the data source without Spark: the rows that its tasks would read."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from pyspark.sql.datasource import InputPartition

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.server import LocalCluster
from mqtemplate.spark.reader.source import BatchReader, MqTemplateSource, StreamReader
from mqtemplate.spark.records.schema import source_schema


def place_of(location: EmbeddedBroker | LocalCluster) -> dict[str, str]:
    """Return the option that names a folder or a cluster."""
    if isinstance(location, EmbeddedBroker):
        return {"store": str(location.path)}
    return {"nameServer": str(location.name_server_address)}


def source(location: EmbeddedBroker | LocalCluster, **options: str) -> MqTemplateSource:
    """Return a source over the topic ``orders``, unless the options name others."""
    topic = {} if {"topicPattern", "assign"} & options.keys() else {"topic": "orders"}
    given = {**place_of(location), **topic, **options}
    return MqTemplateSource({name.lower(): value for name, value in given.items()})


def batch_reader(location: EmbeddedBroker | LocalCluster, **options: str) -> BatchReader:
    reader = source(location, **options).reader(source_schema())
    assert isinstance(reader, BatchReader)
    return reader


def stream_reader(location: EmbeddedBroker | LocalCluster, **options: str) -> StreamReader:
    reader = source(location, **options).streamReader(source_schema())
    assert isinstance(reader, StreamReader)
    return reader


def rows_of(reader: Any, partitions: Iterable[InputPartition]) -> list[dict[str, Any]]:
    """Return the rows of tasks. Reader and partitions are pickled, as by Spark."""
    reader, copies = pickle.loads(pickle.dumps((reader, list(partitions))))
    return [row for partition in copies for batch in reader.read(partition) for row in batch.to_pylist()]


def read(location: EmbeddedBroker | LocalCluster, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a batch."""
    reader = batch_reader(location, **options)
    return rows_of(reader, reader.partitions())
