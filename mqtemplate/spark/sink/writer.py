"""Writers of the data source ``mqtemplate``: the classes that Spark calls for ``df.write`` and ``df.writeStream``."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, cast, runtime_checkable

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mqtemplate.broker import Broker, Capability, MessageSends
from mqtemplate.errors import ConfigurationError, MessageError, SparkError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import queue_number
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageQueue, Property, SendSequence
from mqtemplate.remoting.protocol.messages import EncodedBatch
from mqtemplate.results import SendResult, SequencedResult
from mqtemplate.spark.location.connection import open_broker
from mqtemplate.spark.records.versions import DataSourceStreamArrowWriter
from mqtemplate.spark.sink.options import SinkOptions
from mqtemplate.spark.sink.rows import ColumnEncoder, OutgoingRow, RowReader

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
        keyed = PendingKeyPublisher(broker, options.send_timeout_ms)
        with closing(create_publisher(broker, options, sequence)) as publisher, closing(keyed):
            for batch in batches:
                if isinstance(publisher, EncodedPublisher) and (encoded := columns.encode(batch)) is not None:
                    publisher.publish_encoded(encoded, queues.choose_one(encoded.topic))
                else:
                    without_key = keyed.publish(reader.read(batch, rows), queues)
                    publisher.publish(queues.choose(without_key))
                rows += batch.num_rows
            result = publisher.finish()
            stored = result.stored + keyed.finish()
    return Published(stored, result.repeated)


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


_MAX_IN_FLIGHT = 16
_MAX_BATCH_BYTES = 1 << 20
_MAX_BATCH = 1_000

_Numbered = tuple[Message, MessageQueue]


@dataclass(slots=True)
class SequencedPublisher:
    """Sends to a broker that drops repeats: each broker of a cluster gets its own numbers.

    One send is under way while the caller creates the next messages. The next one starts after its answer: the broker
    refuses a gap in the numbers.
    """

    broker: Broker
    sequence: SendSequence
    timeout_ms: int
    _sent: dict[str, int] = field(default_factory=dict)
    _stored: int = 0
    _repeated: int = 0
    _sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "mqtemplate-spark-sink"))
    _under_way: Future[None] | None = None

    def publish(self, messages: Sequence[_Numbered]) -> None:
        """Send the next messages of the task with their queues, in order."""
        self._await_answer()
        self._under_way = self._sender.submit(self._send, messages)

    def finish(self) -> SequencedResult:
        """Wait for all sends. Return the numbers of messages stored and dropped."""
        self._await_answer()
        return SequencedResult(self._stored, self._repeated)

    def close(self) -> None:
        """Wait until nothing is being sent, also after an error."""
        self._sender.shutdown()

    def _await_answer(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _send(self, messages: Sequence[_Numbered]) -> None:
        for name, part in _by_broker(messages):
            self._count(name, len(part), self.broker.sends.send_sequenced(part, self._next(name), self.timeout_ms))

    def _next(self, broker_name: str) -> SendSequence:
        return self.sequence.after(self._sent.get(broker_name, 0))

    def _count(self, broker_name: str, sent: int, result: SequencedResult) -> None:
        self._sent[broker_name] = self._sent.get(broker_name, 0) + sent
        self._stored += result.stored
        self._repeated += result.repeated


@runtime_checkable
class EncodedSends(MessageSends, Protocol):
    """Sending methods of a client of a cluster, whose servers of this library take encoded messages as well."""

    def send_encoded(
        self, batch: EncodedBatch, queue: MessageQueue, sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """Do `send_sequenced` with encoded messages, to one queue."""


class EncodedPublisher(SequencedPublisher):
    """Sends encoded messages as well; its broker has `EncodedSends`."""

    def publish_encoded(self, batch: EncodedBatch, queue: MessageQueue) -> None:
        """Send the next messages of the task to one queue."""
        self._await_answer()
        self._under_way = self._sender.submit(self._send_encoded, batch, queue)

    def _send_encoded(self, batch: EncodedBatch, queue: MessageQueue) -> None:
        name, sends = queue.broker_name, cast(EncodedSends, self.broker.sends)
        self._count(name, len(batch.ends), sends.send_encoded(batch, queue, self._next(name), self.timeout_ms))


@dataclass(slots=True)
class PlainPublisher:
    """Sends to a broker of RocketMQ, in batches where it allows them. A task that is repeated sends its rows again."""

    broker: Broker
    timeout_ms: int
    _futures: deque[Future[SendResult]] = field(default_factory=deque)
    _count: int = 0

    def publish(self, messages: Sequence[_Numbered]) -> None:
        """Send the next messages of the task with their queues, in order."""
        batches_delays = Capability.BATCH_DELAY in self.broker.capabilities
        for queue, part in _batches(messages, single_delays=not batches_delays):
            if len(self._futures) >= _MAX_IN_FLIGHT:
                self._futures.popleft().result()
            self._futures.append(self.broker.sends.send_async(part, queue, self.timeout_ms))
            self._count += len(part)

    def finish(self) -> SequencedResult:
        """Wait for all sends."""
        while self._futures:
            self._futures.popleft().result()
        return SequencedResult(self._count, 0)

    def close(self) -> None:
        """Wait until nothing is being sent, also after an error."""
        wait(self._futures)


@dataclass(slots=True)
class PendingKeyPublisher:
    """Sends the rows that have a pending key, one by one and in their order.

    They are not numbered: a task that is repeated sends them again, and still at most one is pending under a key.
    """

    broker: Broker
    timeout_ms: int
    _futures: deque[Future[SendResult]] = field(default_factory=deque)
    _topics: set[str] = field(default_factory=set)
    _count: int = 0

    def publish(self, rows: Sequence[OutgoingRow], queues: QueueChooser) -> Sequence[OutgoingRow]:
        """Send the rows with a pending key, and return the others."""
        others = [row for row in rows if Property.PENDING_KEY not in row.message.properties]
        if len(others) == len(rows):
            return rows
        for row in rows:
            if Property.PENDING_KEY in row.message.properties:
                self._send(row.message, queues.choose_named(row))
        return others

    def _send(self, message: Message, queue: MessageQueue | None) -> None:
        if len(self._futures) >= _MAX_IN_FLIGHT:
            self._futures.popleft().result()
        self._futures.append(self.broker.sends.send_async([message], queue, self.timeout_ms))
        self._count += 1
        if message.topic not in self._topics:  # a send that creates its topic may be overtaken
            self._topics.add(message.topic)
            self._futures.pop().result()

    def finish(self) -> int:
        """Wait for all sends, and return their number."""
        while self._futures:
            self._futures.popleft().result()
        return self._count

    def close(self) -> None:
        """Wait until nothing is being sent, also after an error."""
        wait(self._futures)


def create_publisher(
    broker: Broker, options: SinkOptions, sequence: SendSequence
) -> SequencedPublisher | PlainPublisher:
    """Return the publisher for a broker.

    Raises:
        UnsupportedError: Repeats must be dropped, and the broker does not drop them.
    """
    drops_repeats = Capability.SEQUENCED_SEND in broker.capabilities
    if options.idempotent and not drops_repeats:
        raise UnsupportedError(
            "option idempotent=true: the brokers of RocketMQ do not drop repeats, so a repeated task sends its rows "
            "again; leave the option out, and let consumers skip repeats by key"
        )
    if drops_repeats and options.idempotent is not False:
        publisher = EncodedPublisher if isinstance(broker.sends, EncodedSends) else SequencedPublisher
        return publisher(broker, sequence, options.send_timeout_ms)
    return PlainPublisher(broker, options.send_timeout_ms)


class QueueChooser:
    """Chooses the queue of each row. A repeated task chooses the same ones, as long as the topic keeps its queues."""

    def __init__(self, broker: Broker, partition: int) -> None:
        self._broker = broker
        self._turn = partition
        self._queues: dict[str, Sequence[MessageQueue]] = {}

    def choose(self, rows: Iterable[OutgoingRow]) -> list[_Numbered]:
        """Return the messages of the next rows with their queues. Rows that name none share one queue of the topic."""
        chosen, shared = [], self._next_turn()
        for message, queue_id, sharding_key in rows:
            queues = self._queues.get(message.topic) or self._find(message.topic)
            if queue_id is not None:
                queue = _with_id(queues, message.topic, queue_id)
            elif sharding_key is not None:
                queue = queues[queue_number(sharding_key, len(queues))]
            else:
                queue = queues[shared % len(queues)]
            chosen.append((message, queue))
        return chosen

    def choose_named(self, row: OutgoingRow) -> MessageQueue | None:
        """Return the queue that a row names by its id or its sharding key; None if it names none."""
        if row.queue_id is None and row.sharding_key is None:
            return None
        [(_, queue)] = self.choose([row])
        return queue

    def choose_one(self, topic: str) -> MessageQueue:
        """Return the queue of all next rows, which `choose` would take for rows that name none."""
        queues = self._queues.get(topic) or self._find(topic)
        return queues[self._next_turn() % len(queues)]

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _find(self, topic: str) -> Sequence[MessageQueue]:
        queues = self._queues[topic] = self._broker.queues(topic)
        return queues


def _with_id(queues: Sequence[MessageQueue], topic: str, queue_id: int) -> MessageQueue:
    if not 0 <= queue_id < len(queues):
        raise MessageError(f"queueId must be 0..{len(queues) - 1} for topic {topic!r}, got {queue_id}")
    return queues[queue_id]


def _by_broker(messages: Sequence[_Numbered]) -> Iterator[tuple[str, Sequence[_Numbered]]]:
    names = {queue.broker_name for _, queue in messages}
    for name in sorted(names):
        yield name, messages if len(names) == 1 else [each for each in messages if each[1].broker_name == name]


def _batches(messages: Sequence[_Numbered], *, single_delays: bool) -> Iterator[tuple[MessageQueue, list[Message]]]:
    """Yield the messages in batches for one queue; delayed ones singly if a batch may not have them."""
    for queue, run in groupby(messages, lambda each: each[1]):
        part: list[Message] = []
        size = 0
        for message, _ in run:
            is_single = single_delays and not message.properties.keys().isdisjoint(DELAY_PROPERTIES)
            size += len(message.body)
            if part and (is_single or size > _MAX_BATCH_BYTES or len(part) >= _MAX_BATCH):
                yield queue, part
                part, size = [], len(message.body)
            if is_single:
                yield queue, [message]
            else:
                part.append(message)
        if part:
            yield queue, part
