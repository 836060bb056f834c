"""Data source ``mqtemplate``: the classes that Spark calls. `store_reader` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.offsets import OffsetTable, distribute, from_spark, limited, to_spark
from mqtemplate.spark.options import SourceOptions
from mqtemplate.spark.pending.view import is_pending_view
from mqtemplate.spark.record_batches import ARROW_SCHEMA
from mqtemplate.spark.schema import source_schema
from mqtemplate.spark.store_reader import StoreReader


class MqTemplateSource(DataSource):
    """Data source for ``spark.read.format("mqtemplate")`` and ``spark.readStream.format("mqtemplate")``.

    The options are those of `SourceOptions`. A schema given with ``.schema(...)`` selects columns: no other one is
    built.
    """

    @classmethod
    def name(cls) -> str:
        return "mqtemplate"

    def schema(self) -> StructType:
        if is_pending_view(self.options):
            schema: StructType = _load("pending.options").pending_schema()
            return schema
        return source_schema(include_properties=SourceOptions.wants_properties(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_pending_view(self.options):
            pending: DataSourceReader = _load("pending.reader").create_reader(self.options)
            return pending
        return BatchReader(SourceOptions.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        if is_pending_view(self.options):
            raise ConfigurationError("option view='pending' is for batches; read it with spark.read")
        return StreamReader(SourceOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        writer: DataSourceWriter = _load("sink.writer").create_batch_writer(self.options, schema, overwrite=overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        create = _load("sink.writer").create_stream_writer
        writer: DataSourceStreamArrowWriter = create(self.options, schema, overwrite=overwrite)
        return writer


class _FolderReader:
    """Common part of both readers."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = _arrow_schema(schema)
        self._reader = StoreReader(options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one task, whose partition has its ranges."""
        # If there are no partitions, Spark creates one of None.
        return self._reader.batches(partition.value or (), self._schema)

    def _partitions(self, start: OffsetTable, end: OffsetTable) -> list[InputPartition]:
        ranges = self._reader.ranges(start, end)
        return [InputPartition(share) for share in distribute(ranges, self._options.min_partitions)]


class BatchReader(_FolderReader, DataSourceReader):
    """Reader of a batch. Its start and end are fixed when Spark calls ``partitions``."""

    def partitions(self) -> Sequence[InputPartition]:
        self._reader.require_topics()
        start, end = self._reader.start_offsets(), self._reader.end_offsets()
        for (topic, queue_id), offset in start.items():
            if offset > end[topic, queue_id]:
                raise ConfigurationError(
                    f"{topic}, queue {queue_id}: the read would start at offset {offset} and end at "
                    f"{end[topic, queue_id]}; check the starting and ending options"
                )
        return self._partitions(start, end)


class StreamReader(_FolderReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream, which plans micro-batches. It lives as long as the query, in a Python process of Spark.

    - Offsets never decrease, and a range contains the same messages each time it is read.
    - The first offset is determined once: Spark calls ``initialOffset`` twice, and must get equal offsets.
    - With ``Trigger.AvailableNow`` no message is read that was stored after the start.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._first: OffsetTable | None = None
        self._target: OffsetTable | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        if self._first is None:
            self._first = self._reader.start_offsets()
        return to_spark(self._first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._reader.latest_offsets()

    def reportLatestOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        return to_spark(self._reader.latest_offsets())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802
        known = from_spark(start)
        latest = self._reader.latest_offsets()
        self._reader.check_not_shrunk(known, latest)
        known = self._reader.with_new_queues(known)
        end = self._target if self._target is not None else latest
        return to_spark(limited(known, end, limit.max_rows if isinstance(limit, ReadMaxRows) else None))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._partitions(from_spark(start), from_spark(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Show the progress as that of the group, if the owner of the folder runs a `LocalServer`.

        The checkpoint has the progress. Spark calls this for a batch together with the next one.
        """
        if self._options.group is not None:
            offsets = _load("broker_access.group_offsets")
            offsets.commit_group_offsets(self._options.store, self._options.group, from_spark(end))

    def stop(self) -> None:
        """Do nothing: no file is open."""


def _load(module: str) -> ModuleType:
    """Return a module that only writes or the pending view need: a plain read must not load it."""
    return import_module(f"mqtemplate.spark.{module}")


def _arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow types of the selected columns.

    Raises:
        ConfigurationError: A column does not exist, or has another type.
    """
    ours = source_schema()
    fields = []
    for field in schema:
        if field.name not in ours.names:
            raise ConfigurationError(f"schema: there is no column {field.name!r}; there are {', '.join(ours.names)}")
        kind = ours[field.name].dataType
        if field.dataType != kind:
            raise ConfigurationError(
                f"schema: column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}; "
                "cast it after reading"
            )
        fields.append(pa.field(field.name, ARROW_SCHEMA.field(field.name).type, field.nullable))
    return pa.schema(fields)
