"""Runs one Spark listener: a streaming query whose batches go to the listener's function."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from mqtemplate.errors import ListenerError, SparkError
from mqtemplate.listener.resolution import default_resolve
from mqtemplate.message import MessageQueue
from mqtemplate.spark.checkpoint import QueryCheckpoint
from mqtemplate.spark.listener import AVAILABLE_NOW, SparkBatch, SparkListenerSpec, spark_listener_specs
from mqtemplate.spark.offsets import OffsetTable, QueueRange, to_spark
from mqtemplate.spark.options import SourceOptions
from mqtemplate.spark.session import register, require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

_log = structlog.stdlib.get_logger("mqtemplate.spark")
_COMMIT_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.01


class _StoppingError(Exception):
    """Ends the query's thread when a batch would begin while the container stops."""


class SparkListenerContainer:
    """Connects one ``@spark_listener`` to the folder of an embedded broker.

    - The checkpoint is the truth about progress. The group's offset on the broker follows it, never the other way
      round, except that a query without a checkpoint begins where the group is, else at the beginning.
    - A batch whose function returned is reported to the group; a crash before Spark notes the batch repeats it.
    - One batch at a time, in the driver's process: the function shares the application's objects.

    Args:
        endpoint: A decorated function, or an object of a decorated class.
        spark: A session, or what makes one when the container starts.
        store_path: The broker's folder; None for a broker in memory, which is refused.
        checkpoint_root: Where the listener's checkpoint folder is made, unless it names its own.
        report_offsets: Takes (topic, queue id, queue offset) when everything before the offset is done; ascending.
        committed_offset: Tells how far the group is, by (topic, queue id); None reads what the broker last wrote to
            its folder, which may be some seconds old.
        broker_name: What stands in the column ``brokerName``.
        resolve: Fills placeholders in; without it their defaults stand.
        spec: Which of the endpoint's decorations to run, if it has several.

    Raises:
        SparkError: PySpark is missing, or the broker has no folder.
        ListenerError: The endpoint is not decorated, or wrongly.
    """

    def __init__(
        self,
        endpoint: object,
        spark: SparkSession | Callable[[], SparkSession],
        store_path: Path | str | None,
        checkpoint_root: Path | str,
        report_offsets: Callable[[str, int, int], None],
        *,
        committed_offset: Callable[[str, int], int | None] | None = None,
        broker_name: str = "broker-a",
        resolve: Callable[[str], str] = default_resolve,
        spec: SparkListenerSpec | None = None,
    ) -> None:
        self.name = _name_of(endpoint)
        self.spec = (spec or _only_spec(endpoint, self.name)).resolved(self.name, resolve)
        require_pyspark()
        if store_path is None:
            raise SparkError(
                f"Spark listener {self.name}: a broker in memory has no files that Spark could read; "
                "keep the broker in a folder, such as rocketmq.name-server: embedded:./data"
            )
        self._function: Callable[[DataFrame, SparkBatch], object] = getattr(endpoint, "on_batch", endpoint)  # type: ignore[arg-type]
        self._spark = spark
        self._store_path, self._broker_name = Path(store_path), broker_name
        self._checkpoint = QueryCheckpoint(_checkpoint_folder(Path(checkpoint_root), self.spec))
        self._report_offsets, self._committed_offset = report_offsets, committed_offset
        self._query: StreamingQuery | None = None
        self._lock = threading.Lock()
        self._stopping, self._no_batch_runs, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._last_batch = self._replayed = -1
        self._error: Exception | None = None
        self._reported: OffsetTable = {}

    @classmethod
    def on_broker(
        cls,
        endpoint: object,
        spark: SparkSession | Callable[[], SparkSession],
        broker: EmbeddedBroker,
        checkpoint_root: Path | str,
        *,
        resolve: Callable[[str], str] = default_resolve,
        spec: SparkListenerSpec | None = None,
    ) -> SparkListenerContainer:
        """A container over a broker of this process: it begins where the group is, and moves the group along."""
        group = resolve((spec or _only_spec(endpoint, _name_of(endpoint))).consumer_group).strip()

        def committed(topic: str, queue_id: int) -> int | None:
            return broker.committed_offset(group, MessageQueue(topic, broker.name, queue_id))

        def report(topic: str, queue_id: int, queue_offset: int) -> None:
            if queue_offset > (committed(topic, queue_id) or 0):
                broker.commit_offset(group, MessageQueue(topic, broker.name, queue_id), queue_offset)

        return cls(
            endpoint,
            spark,
            broker.path,
            checkpoint_root,
            report,
            committed_offset=committed,
            broker_name=broker.name,
            resolve=resolve,
            spec=spec,
        )

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the query; it goes on where its checkpoint says. Starting a running one is harmless.

        Raises:
            SparkError: No Java, or the folder is not a store.
        """
        if self.is_running:
            return
        spark = self._spark() if callable(self._spark) else self._spark
        register(spark)
        self._stopping.clear()
        self._ended.clear()
        self._no_batch_runs.set()
        self._error, self._last_batch = None, -1
        first = self._first_offsets()
        planned, committed = self._checkpoint.planned(), self._checkpoint.committed()
        self._replayed = planned if planned > committed else -1
        self._report(self._checkpoint.end_of(committed) or {})
        self._query = self._start_query(spark, first)
        threading.Thread(target=self._watch, args=(self._query,), name=f"watch-{self.name}", daemon=True).start()
        _log.info("spark.started", listener=self.name, topic=self._topic, group=self.spec.consumer_group)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Let the batch that runs end, for at most *timeout_s*, then end the query. Stopping twice is harmless."""
        query, self._query = self._query, None
        if query is None:
            return
        with self._lock:
            self._stopping.set()
        if self._no_batch_runs.wait(timeout_s):
            self._await_commit()
        else:
            _log.warning("spark.batch_cut_off", listener=self.name, topic=self._topic, group=self.spec.consumer_group)
        if not self._ended.is_set():
            query.stop()
            self._ended.wait(timeout_s)
        _log.info("spark.stopped", listener=self.name, topic=self._topic, group=self.spec.consumer_group)

    @property
    def is_running(self) -> bool:
        return self._query is not None and not self._ended.is_set()

    @property
    def exception(self) -> SparkError | None:
        """Why the query ended by itself; None while it runs, and after it was stopped or had done all it should."""
        if self._error is None:
            return None
        error = SparkError(f"Spark listener {self.name}: {_first_words(self._error)}")
        error.__cause__ = self._error
        return error

    def await_idle(self) -> None:
        """Return when everything that was in the topic at the call has been handled.

        Raises:
            SparkError: The query ended with an error, or does not run.
        """
        query = self._query
        if query is None:
            raise SparkError(f"Spark listener {self.name} does not run; start it first")
        if self.spec.trigger == AVAILABLE_NOW:
            self._ended.wait()
        else:
            try:
                query.processAllAvailable()
            except Exception:  # the query's own error, or that of a JVM that is gone: `_watch` gets it too
                if not self._ended.wait(_COMMIT_WITHIN_S):
                    raise
        if self.exception is not None:
            raise self.exception

    # --- the query -----------------------------------------------------------------------------

    @property
    def _topic(self) -> str:
        return ",".join(self.spec.topics)

    def _options(self, first: OffsetTable | None) -> dict[str, str]:
        options = {
            "store": str(self._store_path),
            "topic": self._topic,
            "tags": self.spec.selector_expression,
            "group": self.spec.consumer_group,
            "brokerName": self._broker_name,
            "maxOffsetsPerTrigger": str(self.spec.max_offsets_per_trigger),
            "includeProperties": str(self.spec.include_properties).lower(),
            "failOnDataLoss": str(self.spec.fail_on_data_loss).lower(),
        }
        if self.spec.min_partitions is not None:
            options["minPartitions"] = str(self.spec.min_partitions)
        if first is not None:
            options["startingOffsets"] = json.dumps(to_spark(first))
        return options

    def _first_offsets(self) -> OffsetTable:
        """Where the first batch begins, or began: what the checkpoint keeps, else where the group is."""
        kept = self._checkpoint.first_offsets()
        if kept is not None:
            return kept
        from mqtemplate.spark.store_reading import StoreReading

        reading = StoreReading(SourceOptions.parse(self._options(None), streaming=True))
        first = reading.beginning() if self._committed_offset is None else reading.beginning_at(self._committed_offset)
        self._checkpoint.keep_first_offsets(first)
        return first

    def _start_query(self, spark: SparkSession, first: OffsetTable) -> StreamingQuery:
        messages = spark.readStream.format("mqtemplate").options(**self._options(first)).load()
        writer = (
            self._with_payload(messages)
            .writeStream.foreachBatch(partial(self._on_batch, first))
            .option("checkpointLocation", str(self._checkpoint.folder.absolute()))
            .queryName(f"{self.spec.consumer_group}@{self._topic}")
        )
        trigger = self.spec.trigger
        if trigger == AVAILABLE_NOW:
            return writer.trigger(availableNow=True).start()
        span = f"{trigger // timedelta(milliseconds=1)} milliseconds" if isinstance(trigger, timedelta) else trigger
        return writer.trigger(processingTime=span).start()

    def _with_payload(self, messages: DataFrame) -> DataFrame:
        if self.spec.payload is None:
            return messages
        from pyspark.sql import functions as f

        from mqtemplate.spark.schema import payload_schema

        mode = {"null": "PERMISSIVE", "fail": "FAILFAST"}[self.spec.bad_records]
        body = f.col("body").cast("string")
        return messages.withColumn("payload", f.from_json(body, payload_schema(self.spec.payload), {"mode": mode}))

    def _watch(self, query: StreamingQuery) -> None:
        """Tell when the query ends by itself: it does so in a thread of Spark's, unseen."""
        from pyspark.errors import StreamingQueryException

        try:
            query.awaitTermination()
        except Exception as exc:
            if not self._stopping.is_set():
                told = exc if isinstance(exc, StreamingQueryException) else SparkError(f"Spark's JVM is gone ({exc})")
                self._error = self._error or told
                fields = {"topic": self._topic, "group": self.spec.consumer_group}
                _log.error("spark.failed", listener=self.name, exc_info=self._error, **fields)
        finally:
            self._ended.set()

    def _await_commit(self) -> None:
        """Give Spark the moment it needs to note the last batch as done, else a restart would repeat it."""
        wake_event = threading.Event()  # nobody rings it: a file cannot
        for _ in range(int(_COMMIT_WITHIN_S / _LOOK_EVERY_S)):
            if self._last_batch < 0 or self._checkpoint.is_committed(self._last_batch) or self._ended.is_set():
                return
            wake_event.wait(_LOOK_EVERY_S)

    # --- a batch -------------------------------------------------------------------------------

    def _on_batch(self, first: OffsetTable, messages: DataFrame, batch_id: int) -> None:
        with self._lock:
            if self._stopping.is_set():
                raise _StoppingError(f"Spark listener {self.name} is being stopped")
            self._no_batch_runs.clear()
        try:
            end = self._checkpoint.end_of(batch_id) or {}
            make = partial(
                SparkBatch,
                query_id=self._checkpoint.query_id(),
                batch_id=batch_id,
                ranges=self._ranges(first, end, batch_id),
                is_replay=batch_id == self._replayed,
                topic=self._topic,
                consumer_group=self.spec.consumer_group,
            )
            self._handle(messages, make)
            self._report(end)
            self._last_batch = batch_id
        finally:
            self._no_batch_runs.set()

    def _handle(self, messages: DataFrame, make: Callable[..., SparkBatch]) -> None:
        """Call the function until it returns, at most *max_attempts* times."""
        attempts = int(self.spec.max_attempts)
        for attempt in range(1, attempts + 1):
            batch = make(attempt=attempt)
            fields: dict[str, Any] = {"topic": batch.topic, "group": batch.consumer_group, "batch": batch.batch_id}
            begun = time.monotonic()
            try:
                self._function(messages, batch)
            except Exception as exc:
                _log.error("spark.batch_failed", listener=self.name, attempt=attempt, exc_info=exc, **fields)
                delay_s = self.spec.retry_delay * 2 ** (attempt - 1)
                if attempt == attempts:
                    self._error = exc
                    raise
                if self._stopping.wait(delay_s):
                    raise
            else:
                took_ms = int((time.monotonic() - begun) * 1_000)
                fields |= {"messages": batch.message_count, "attempt": attempt, "replay": batch.is_replay}
                _log.info("spark.batch", listener=self.name, took_ms=took_ms, **fields)
                return

    def _ranges(self, first: OffsetTable, end: OffsetTable, batch_id: int) -> tuple[QueueRange, ...]:
        """What a batch covers. A queue that came with this batch begins at its beginning."""
        before = self._checkpoint.end_of(batch_id - 1) if batch_id else first
        start = {**dict.fromkeys(end, 0), **(before or {})}
        ranges = (QueueRange(*queue, start[queue], stop) for queue, stop in sorted(end.items()))
        return tuple(found for found in ranges if len(found))

    def _report(self, end: OffsetTable) -> None:
        """Tell the group; never a lower offset than before, as a repeated batch would."""
        for queue, offset in sorted(end.items()):
            if offset > self._reported.get(queue, 0):
                self._reported[queue] = offset
                self._report_offsets(*queue, offset)


def _name_of(endpoint: object) -> str:
    return str(getattr(endpoint, "__qualname__", type(endpoint).__qualname__))


def _only_spec(endpoint: object, name: str) -> SparkListenerSpec:
    specs = spark_listener_specs(endpoint)
    if isinstance(endpoint, type):
        raise ListenerError(f"Spark listener {name} is a class; give an object of it")
    if len(specs) != 1:
        what = (
            "is not decorated with @spark_listener"
            if not specs
            else "is decorated more than once; say which 'spec' to run"
        )
        raise ListenerError(f"Spark listener {name} {what}")
    return specs[0]


def _checkpoint_folder(root: Path, spec: SparkListenerSpec) -> Path:
    """A folder of its own for each group and topics; names hold characters that a path may not."""
    if spec.checkpoint is not None:
        return Path(spec.checkpoint)
    name = f"{spec.consumer_group}@{','.join(spec.topics)}"
    return root / "".join(char if char.isalnum() or char in "@,_-" else f"+{ord(char):02x}" for char in name)


def _first_words(error: object) -> str:
    """What a Spark error says, without the stacks it carries along; the library's own sentence, where it holds one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("mqtemplate.errors.")]
    return ours[-1].partition(": ")[2] if ours else lines[0]
