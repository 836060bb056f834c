"""Writers of the data source ``mqtemplate``: the classes that Spark calls for ``df.write`` and ``df.writeStream``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.message import SendSequence
from mqtemplate.spark.location.connection import open_broker
from mqtemplate.spark.sink.columns import ColumnEncoder
from mqtemplate.spark.sink.options import SinkOptions
from mqtemplate.spark.sink.publisher import EncodedPublisher, QueueChooser, create_publisher
from mqtemplate.spark.sink.rows import RowReader

_log = get_logger("mqtemplate.spark")

# Local properties that Spark sets for the jobs of a micro-batch. Source: ``StreamExecution``, ``MicroBatchExecution``.
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class Published(WriterCommitMessage):
    """Result of a task: number of rows that it stored, and of those that were stored before."""

    stored: int
    repeated: int


def publish(batches: Iterator[pa.RecordBatch], options: SinkOptions, sequence: SendSequence) -> Published:
    """Send the rows of one task.

    Raises:
        MessageError: A row is not a message.
        SendError: The broker did not store a message.
    """
    rows, reader, columns = 0, RowReader(options, sequence.partition), ColumnEncoder(options)
    with open_broker(options.location) as broker:
        queues = QueueChooser(broker, sequence.partition)
        with closing(create_publisher(broker, options, sequence)) as publisher:
            for batch in batches:
                if isinstance(publisher, EncodedPublisher) and (encoded := columns.encode(batch)) is not None:
                    publisher.publish_encoded(encoded, queues.choose_one(encoded.topic))
                else:
                    publisher.publish(queues.choose(reader.read(batch, rows)))
                rows += batch.num_rows
            result = publisher.finish()
    return Published(result.stored, result.repeated)


class BatchWriter(DataSourceArrowWriter):
    """Writer of ``df.write``. The rows are in their topics as soon as their task has sent them, as with Kafka's sink.

    The tasks of one write share its id, so a task that is repeated stores its rows once. A write that is started again
    is another one, unless ``txnAppId`` and ``txnVersion`` identify it.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._app_id = options.txn_app_id or f"write-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task."""
        sequence = SendSequence(self._app_id, self._options.txn_version or 0, _task().partitionId())
        return publish(iterator, self._options, sequence)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the result."""
        _log_result(messages, self._app_id, self._options.txn_version)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log that rows may be in their topics: a message cannot be taken back."""
        _log.warning("spark.write_failed", app_id=self._app_id, finished_tasks=len(list(filter(None, messages))))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of ``df.writeStream``. The id of the query and of the micro-batch identify the rows."""

    def __init__(self, options: SinkOptions) -> None:
        if options.txn_app_id is not None:
            raise ConfigurationError(
                "options 'txnAppId' and 'txnVersion' do not apply: a stream has an id and batch ids"
            )
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task of a micro-batch."""
        task = _task()
        query_id, batch_id = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if query_id is None or batch_id is None:
            raise SparkError(
                "this version of Spark does not tell tasks their query and batch id; use foreachBatch, and write with "
                "options 'txnAppId' and 'txnVersion'"
            )
        return publish(iterator, self._options, SendSequence(query_id, int(batch_id), task.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Log the result."""
        _log_result(messages, "", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log that rows of the batch may be in their topics; the repeated batch sends the others."""
        _log.warning("spark.write_failed", batch=batchId, finished_tasks=len(list(filter(None, messages))))


def create_batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchWriter:
    """Return the writer of ``df.write``.

    Raises:
        ConfigurationError: An option or a column is wrong, or the mode is ``overwrite``.
    """
    return BatchWriter(_checked(options, schema, "mode('append')", overwrite=overwrite))


def create_stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamWriter:
    """Return the writer of ``df.writeStream``; errors as in `create_batch_writer`."""
    return StreamWriter(_checked(options, schema, "outputMode('append') or 'update'", overwrite=overwrite))


def _checked(options: Mapping[str, str], schema: StructType, mode: str, *, overwrite: bool) -> SinkOptions:
    if overwrite:
        raise ConfigurationError(f"messages of a topic cannot be overwritten; write with {mode}")
    parsed = SinkOptions.parse(options)
    parsed.check_columns(schema)
    return parsed


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise SparkError("the writer runs outside a Spark task; call df.write or df.writeStream")
    return task


def _log_result(messages: list[WriterCommitMessage | None], app_id: str, version: int | None) -> None:
    published = [each for each in messages if isinstance(each, Published)]
    stored, repeated = sum(each.stored for each in published), sum(each.repeated for each in published)
    _log.debug("spark.written", app_id=app_id, version=version, stored=stored, repeated=repeated)
