"""The data source "mqtemplate": what Spark calls. The work is in `store_reading`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.offsets import OffsetTable, QueueRange, cut, from_spark, limited, to_spark
from mqtemplate.spark.options import SourceOptions
from mqtemplate.spark.record_batches import ARROW_SCHEMA
from mqtemplate.spark.schema import source_schema
from mqtemplate.spark.store_reading import StoreReading


class MqTemplateSource(DataSource):
    """``spark.read.format("mqtemplate")`` and ``spark.readStream.format("mqtemplate")``.

    The options are those of `SourceOptions`. A schema given with ``.schema(...)`` chooses columns: what is not
    asked for is not built.
    """

    @classmethod
    def name(cls) -> str:
        return "mqtemplate"

    def schema(self) -> StructType:
        return source_schema(include_properties=SourceOptions.wants_properties(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(SourceOptions.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return StreamReader(SourceOptions.parse(self.options, streaming=True), schema)


class RangesPartition(InputPartition):
    """What one task reads, in this order."""

    def __init__(self, ranges: Sequence[QueueRange]) -> None:
        super().__init__(tuple(ranges))


class BatchReader(DataSourceReader):
    """Reads once, from a beginning to an end that are fixed when Spark asks for the partitions."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = _arrow_schema(schema)
        self._reading = StoreReading(options)

    def partitions(self) -> Sequence[InputPartition]:
        self._reading.require_topics()
        start, end = self._reading.beginning(), self._reading.ending()
        for (topic, queue_id), offset in start.items():
            if offset > end[topic, queue_id]:
                raise ConfigurationError(
                    f"{topic}, queue {queue_id}: the read would begin at offset {offset} and end at "
                    f"{end[topic, queue_id]}; check the starting and ending options"
                )
        return [RangesPartition(share) for share in cut(self._reading.ranges(start, end), self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Where there are no partitions Spark makes one, of None.
        return self._reading.batches(partition.value or (), self._schema)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches. Lives as long as the query, in a process of Spark's.

    - Offsets never go back, and a range gives the same messages each time it is read.
    - The first offset is found once: Spark asks for it twice, and the answers must be one.
    - With ``Trigger.AvailableNow`` nothing that came after the start is read.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = _arrow_schema(schema)
        self._reading = StoreReading(options)
        self._first: OffsetTable | None = None
        self._target: OffsetTable | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        if self._first is None:
            self._first = self._reading.beginning()
        return to_spark(self._first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._reading.latest()

    def reportLatestOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        return to_spark(self._reading.latest())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, dict[str, int]]:  # noqa: N802
        begin = from_spark(start)
        latest = self._reading.latest()
        self._reading.check_not_shrunk(begin, latest)
        begin = self._reading.with_new_queues(begin)
        end = self._target if self._target is not None else latest
        return to_spark(limited(begin, end, limit.max_rows if isinstance(limit, ReadMaxRows) else None))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = self._reading.ranges(from_spark(start), from_spark(end))
        return [RangesPartition(share) for share in cut(ranges, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reading.batches(partition.value or (), self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint knows, and the folder belongs to another process."""

    def stop(self) -> None:
        """Nothing is kept open."""


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow form of the columns asked for.

    Raises:
        ConfigurationError: One does not exist, or has another type.
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
