"""Data source ``mqtemplate``: the classes that Spark calls. `store_reader` does the work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructField, StructType

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.location.location import refuse_secrets
from mqtemplate.spark.location.option_values import is_pending_view
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.reader.task import Share, TaskReader
from mqtemplate.spark.records.offsets import (
    OffsetTable,
    initial_to_spark,
    is_initial,
    limited,
    next_to_spark,
    selection_in,
    start_of_batch,
    to_spark,
)
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA
from mqtemplate.spark.records.schema import source_schema
from mqtemplate.spark.records.versions import (
    DataSourceStreamArrowWriter,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    from mqtemplate.spark.reader.planner import StoreReader

_PROVIDER = "provider"  # only a table of the catalog has it
_TABLE_OPTIONS = "mqtemplate.options"


class MqTemplateSource(DataSource):
    """Data source for ``spark.read.format("mqtemplate")`` and ``spark.readStream.format("mqtemplate")``.

    See `SourceOptions` for the options. A schema given with ``.schema(...)`` selects columns: no other one is built.
    """

    @classmethod
    def name(cls) -> str:
        return "mqtemplate"

    def schema(self) -> StructType:
        if _PROVIDER in self.options:
            refuse_secrets(self.options)
        if is_pending_view(self.options):
            pending: StructType = _load("pending.reader").pending_schema()
            return pending
        columns = SourceOptions.columns(self.options)
        if columns:
            ours = source_schema()
            schema = StructType([_column(ours, name) for name in columns])
        else:
            schema = source_schema(include_properties=SourceOptions.wants_properties(self.options))
        if _PROVIDER in self.options:
            schema.fields[0].metadata = {_TABLE_OPTIONS: json.dumps(dict(self.options))}
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        if is_pending_view(self.options):
            pending: DataSourceReader = _load("pending.reader").create_reader(self.options)
            return pending
        return BatchReader(SourceOptions.parse(_with_table_options(self.options, schema), streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        if is_pending_view(self.options):
            raise ConfigurationError("option view='pending' is for batches; read it with spark.read")
        return StreamReader(SourceOptions.parse(_with_table_options(self.options, schema), streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        columns = _of_a_write(self.options, schema)
        writer: DataSourceWriter = _load("sink.writer").create_batch_writer(self.options, columns, overwrite=overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        create = _load("sink.writer").create_stream_writer
        writer: DataSourceStreamArrowWriter = create(self.options, schema, overwrite=overwrite)
        return writer


def _column(ours: StructType, name: str) -> StructField:
    """Return a column of messages, of all that there are.

    Raises:
        ConfigurationError: It does not exist.
    """
    if name not in ours.names:
        raise ConfigurationError(f"schema: there is no column {name!r}; name one of {', '.join(ours.names)}")
    found: StructField = ours[name]
    return found


def _table_options(schema: StructType) -> dict[str, str]:
    """Return the options of a table of the catalog; empty for another schema.

    Spark passes them when the table is created, with a key ``provider`` of its own, and not when it is used. It keeps
    the schema with the metadata of its columns, so they are there. A table that was created with columns has no such
    metadata: Spark does not request a schema then, and its options are lost.
    """
    stored = next((field.metadata[_TABLE_OPTIONS] for field in schema if _TABLE_OPTIONS in field.metadata), "{}")
    found: dict[str, str] = json.loads(stored)
    return found


def _with_table_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a table of the catalog, which the options of the query override."""
    found = {**_table_options(schema), **options}
    if not found:
        raise ConfigurationError(
            "there are no options. Spark drops those of a table that is created with columns: create it without them, "
            "as in CREATE TABLE orders USING mqtemplate OPTIONS (store './data', topic 'orders', columns 'keys, body')"
        )
    return found


def _of_a_write(options: Mapping[str, str], schema: StructType) -> StructType:
    """Return the columns of a write, without those that a table of the catalog has for reads only.

    The options in *schema* are of the table that is written, or of the one that is read: Spark does not say which.
    """
    if not options:
        raise ConfigurationError(
            "there are no options. Spark does not pass those of a table to an INSERT: name them, as in INSERT INTO "
            "orders WITH ('store' = './data', 'topic' = 'orders') SELECT keys, body FROM …"
        )
    if not _table_options(schema):
        return schema
    only_read = set(source_schema().names) - set(_load("sink.options").COLUMNS)
    return StructType([field for field in schema if field.name not in only_read])


class _ReaderBase:
    """Common part of both readers.

    It has two halves: `StoreReader` plans in the process of the query, and `TaskReader` reads on the executors. Only
    the second half is sent to them.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._task = TaskReader(options, _arrow_schema(schema))

    @cached_property
    def _plan(self) -> StoreReader:
        from mqtemplate.spark.reader.planner import StoreReader

        return StoreReader(self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_task": self._task}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of one task, whose partition has its share."""
        # If there are no partitions, Spark creates one of None.
        return self._task.batches(partition.value or Share(()))

    def _partitions(self, start: OffsetTable, end: OffsetTable) -> list[InputPartition]:
        return [InputPartition(share) for share in self._plan.shares(start, end)]


class BatchReader(_ReaderBase, DataSourceReader):
    """Reader of a batch. Its start and end are fixed when Spark calls ``partitions``."""

    def partitions(self) -> Sequence[InputPartition]:
        self._plan.require_topics()
        start, end = self._plan.start_offsets(), self._plan.end_offsets()
        for queue, offset in start.items():
            if offset > end[queue]:
                raise ConfigurationError(
                    f"{queue.topic}, queue {queue.queue_id}: the read would start at offset {offset} and end at "
                    f"{end[queue]}; check the starting and ending options"
                )
        return self._partitions(start, end)


class StreamReader(_ReaderBase, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream, which plans micro-batches. It lives as long as the query, in a Python process of Spark.

    - Offsets never decrease, and a range contains the same messages each time it is read.
    - The first offset is determined once: Spark calls ``initialOffset`` twice, and must get equal offsets. The end of
      the first batch contains it, so that a restart repeats the same batch.
    - With ``Trigger.AvailableNow`` no message is read that was stored after the start.
    - Spark 4.0 and 4.1 call ``latestOffset`` without arguments. Then the batch starts at the end of the last one that
      was planned: of this object, or of the checkpoint, which Spark reports after a restart by ``partitions(end, end)``
      before any other call. A query without either is new.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._first: OffsetTable | None = None
        self._target: OffsetTable | None = None
        self._planned: dict[str, Any] | None = None
        self._last_batch_s = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        fresh = dict.fromkeys(("_first", "_target", "_planned"))
        return {**super().__getstate__(), **fresh, "_last_batch_s": self._last_batch_s}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._first is None:
            self._first = self._plan.start_offsets()
        return initial_to_spark(self._first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limits = self._options.limits
        if limits.max_messages is not None:
            return ReadMaxRows(limits.max_messages)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadAllAvailable() if limits.min_messages is None else ReadMinRows(limits.min_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._plan.latest_offsets()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return to_spark(self._plan.latest_offsets())

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is None:
            start = self.initialOffset() if self._planned is None else self._planned
        known = self._plan.from_checkpoint(start)
        latest = self._plan.latest_offsets()
        if not latest:
            self._plan.warn_of_missing_topics()
        self._plan.check_not_shrunk(known, latest)
        self._plan.check_selection(selection_in(start))
        if self._target is not None and not is_initial(start):
            # Spark plans the next batch after the one before, and commits that one with it. The last one has no next.
            self._plan.commit(known)
        end = self._end_of_batch(self._plan.with_new_queues(known), latest, limit)
        return next_to_spark(start, known, end, self._plan.selection)

    def _end_of_batch(self, known: OffsetTable, latest: OffsetTable, limit: ReadLimit | None) -> OffsetTable:
        end = latest if self._target is None else self._target
        if isinstance(limit, ReadAllAvailable):
            return limited(known, end, None)
        if self._target is None and self._should_wait(known, end):
            return known
        return self._plan.limited(known, end)

    def _should_wait(self, start: OffsetTable, end: OffsetTable) -> bool:
        """Return True if there are fewer messages than the minimum of a batch, and the longest wait is not over."""
        limits = self._options.limits
        if limits.min_messages is None:
            return False
        unread = sum(max(0, offset - start.get(queue, 0)) for queue, offset in end.items())
        now_s = time.monotonic()
        if unread < limits.min_messages and (now_s - self._last_batch_s) * 1_000 < limits.max_delay_ms:
            return True
        self._last_batch_s = now_s
        return False

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._planned = end
        if start == end:
            return []
        first = start_of_batch(start, end)
        return self._partitions(self._plan.from_checkpoint(first), self._plan.from_checkpoint(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the offsets of the group, for tools: the checkpoint has the progress.

        Spark calls this for a batch together with the next one. A folder belongs to another process, so its group is
        committed only while the owner runs a `LocalServer`.
        """
        self._plan.commit(self._plan.from_checkpoint(end))

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
    ours, fields = source_schema(), []
    for field in schema:
        kind = _column(ours, field.name).dataType
        if field.dataType != kind:
            raise ConfigurationError(
                f"schema: column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}; "
                "cast it after reading"
            )
        fields.append(pa.field(field.name, ARROW_SCHEMA.field(field.name).type, field.nullable))
    return pa.schema(fields)
