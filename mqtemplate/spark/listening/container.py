"""Container of a Spark listener: a streaming query whose batches are passed to the listener's function."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mqtemplate.errors import ListenerError, RemoteConnectError, RemoteTimeoutError, SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.attributes import ListenerSpec, Resolve
from mqtemplate.listener.declaration.resolution import default_resolve
from mqtemplate.message import MessageQueue
from mqtemplate.processes import absolute_path
from mqtemplate.spark.driver.sessions import register, require_pyspark
from mqtemplate.spark.listening.batches import BatchWork, ListenerFunction, summary_of
from mqtemplate.spark.listening.checkpoint import QueryCheckpoint
from mqtemplate.spark.listening.listener import (
    AVAILABLE_NOW,
    SparkBatch,
    SparkListenerSettings,
    resolve_spark_spec,
    spark_listener_specs,
)
from mqtemplate.spark.listening.payloads import with_payload
from mqtemplate.spark.listening.redelivery import Redelivery
from mqtemplate.spark.listening.shared_broker import ListenerMonitor, messages_of, share_broker
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.records.offsets import OffsetTable, to_spark
from mqtemplate.topics import RETRY_TOPIC_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from mqtemplate.broker import Broker
    from mqtemplate.spark.reader.planner import StoreReader

_log = get_logger("mqtemplate.spark")
_COMMIT_TIMEOUT_S = 10.0
_POLL_S = 0.01
_PROGRESS_S = 1
_MAX_RESTART_DELAY_MS, _MAX_DOUBLINGS = 300_000, 20


class _StoppingError(Exception):
    """Ends the query's thread when a batch would start while the container stops."""


class SparkListenerContainer:
    """Container of one ``@spark_listener``, which reads the folder of an embedded broker, or from a cluster.

    - The checkpoint holds the progress. The group's offsets on the broker follow it. The only exception: a query
      without a checkpoint starts at the group's offsets, or at the first offset of a queue without one.
    - The end of a batch is reported to the group when the function has returned. If the process ends before Spark
      commits the batch, the batch is repeated.
    - One batch at a time, in the driver's process: the function can use the application's objects.
    - The retry topic of the group is one more topic of the query. Rows that are sent back are stored once; in a cluster
      a row may come back twice, if a process is killed while rows are sent back.
    - Over Spark Connect the function runs in a process of the server, so it must be importable and have no state of the
      application. The server must see the checkpoint folder and the store. A stop interrupts a running batch, which is
      then repeated.
    - Spark's processes can write to an embedded broker while the container runs: see `LocalServer`.

    Args:
        endpoint: A decorated function, or an object of a decorated class.
        spark: A session, also one of Spark Connect, or a function that creates one when the container starts.
        broker: `EmbeddedBroker` whose folder is read, or `RemoteBroker` whose cluster is. The container starts at the
            offsets of its group, and commits them.
        checkpoint_root: Folder for the listener's checkpoint folder, unless the listener names its own. A relative one
            is resolved when the container is created.
        resolve: Function that replaces placeholders; by default, with their defaults.
        spec: Spec to run, if the endpoint has several.
        on_change: Called in another thread when the query ended with an error, and when it was started again.

    Attributes:
        monitor: Metrics, and the lag of the group.

    Raises:
        SparkError: PySpark is missing, or the broker has no folder or a namespace.
        ListenerError: The endpoint is not decorated, or wrongly.
    """

    def __init__(
        self,
        endpoint: object,
        spark: SparkSession | Callable[[], SparkSession],
        broker: Broker,
        checkpoint_root: Path | str,
        *,
        resolve: Resolve = default_resolve,
        spec: ListenerSpec | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = _name_of(endpoint)
        self.settings = resolve_spark_spec(spec or _only_spec(endpoint), self.name, resolve)
        require_pyspark()
        self._shared = share_broker(broker, f"Spark listener {self.name}")
        self._endpoint = endpoint
        self._function: Callable[[DataFrame, SparkBatch], object] = getattr(endpoint, "on_batch", endpoint)  # type: ignore[arg-type]
        self._spark = spark
        self._checkpoint = QueryCheckpoint(_checkpoint_folder(checkpoint_root, self.settings), broker.name)
        self._topic = ",".join(self.settings.topics)
        self._retry_topic = RETRY_TOPIC_PREFIX + self.settings.consumer_group
        self._topics = (*self.settings.topics, self._retry_topic)
        self.monitor = ListenerMonitor(self._shared, self.settings.consumer_group, self._topics)
        self._on_change = on_change
        self._log = _log.bind(listener=self.name, topic=self._topic, group=self.settings.consumer_group)
        self._query: StreamingQuery | None = None
        self._lock, self._lifecycle = threading.Lock(), threading.Lock()
        self._restarts = 0
        self._stopping, self._no_batch_runs, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._last_batch = self._replayed = -1
        self._error: Exception | None = None

    # --- start and stop ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the query; it continues after its checkpoint. Starting a running one is harmless.

        Raises:
            SparkError: Java is missing, or the folder is not a store.
        """
        if self.is_running:
            return
        self._stopping.clear()
        self._restarts = 0
        self._shared.start(self._retry_topic)
        try:
            with self._lifecycle:
                self._begin()
        except BaseException:
            self._shared.stop()
            raise

    def _begin(self) -> None:
        spark = self._spark() if callable(self._spark) else self._spark
        register(spark)
        self._ended.clear()
        self._no_batch_runs.set()
        self._error, self._last_batch = None, -1
        self._checkpoint.check()
        first = self._first_offsets()
        planned, committed = self._checkpoint.planned(), self._checkpoint.committed()
        self._replayed = planned if planned > committed else -1
        self._shared.commit(self.settings.consumer_group, self._checkpoint.end_of(committed) or {})
        runs = self._runs(spark, first)
        self._query = next(runs)
        self.monitor.is_running = True
        watch = partial(self._watch, self._query, runs)
        threading.Thread(target=watch, name=f"watch-{self.name}", daemon=True).start()
        self._log.debug("spark.started")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Wait for the running batch, at most *timeout_s*, and end the query. Stopping twice is harmless."""
        with self._lock:
            self._stopping.set()
        with self._lifecycle:
            query, self._query = self._query, None
        if query is None:
            return
        if self._no_batch_runs.wait(timeout_s):
            self._await_commit()
        else:
            self._log.warning("spark.batch_interrupted")
        if not self._ended.is_set():
            query.stop()
            self._ended.wait(timeout_s)
        self.monitor.is_running = False
        self._shared.stop()
        self._log.debug("spark.stopped")

    @property
    def is_running(self) -> bool:
        """True from the start until the query has ended."""
        return self._query is not None and not self._ended.is_set()

    @property
    def exception(self) -> SparkError | None:
        """Error that ended the query; None while it runs, and after a stop or a normal end."""
        if self._error is None:
            return None
        error = SparkError(f"Spark listener {self.name}: {summary_of(self._error)}")
        error.__cause__ = self._error
        return error

    def await_idle(self) -> None:
        """Return when all messages that were in the topic at the call are handled.

        Raises:
            SparkError: The query ended with an error, or does not run.
        """
        query = self._query
        if query is None:
            raise SparkError(f"Spark listener {self.name} does not run; start it first")
        if self.settings.trigger == AVAILABLE_NOW:
            self._ended.wait()
        else:
            try:
                query.processAllAvailable()
            except Exception:  # the query's own error, or one of a JVM that has ended: `_watch` gets it too
                if not self._ended.wait(_COMMIT_TIMEOUT_S):
                    raise
        if self.exception is not None:
            raise self.exception

    # --- the query -----------------------------------------------------------------------------

    def _options(self, first: OffsetTable | None) -> dict[str, str]:
        settings = self.settings
        options = {
            **self._shared.options(),
            "topic": ",".join(self._topics),
            "tags": settings.selector_expression,
            "group": settings.consumer_group,
            "maxOffsetsPerTrigger": str(settings.max_offsets_per_trigger),
            "includeProperties": str(settings.include_properties).lower(),
            "failOnDataLoss": str(settings.fail_on_data_loss).lower(),
        }
        if settings.min_partitions is not None:
            options["minPartitions"] = str(settings.min_partitions)
        if first is not None:
            options["startingOffsets"] = json.dumps(to_spark(first))
        return options

    def _first_offsets(self) -> OffsetTable:
        """Return the start of the first batch: from the checkpoint, else from the group."""
        known = self._checkpoint.first_offsets()
        if known is not None:
            return known
        reader = self._reader()
        reader.warn_of_missing_topics()
        first = reader.offsets_of(self._committed)
        self._checkpoint.write_first_offsets(first)
        return first

    def _start_query(self, spark: SparkSession, first: OffsetTable) -> StreamingQuery:
        messages = spark.readStream.format("mqtemplate").options(**self._options(first)).load()
        writer = (
            with_payload(messages, self.settings.payload, self.settings.bad_records)
            .writeStream.foreachBatch(self._batches(spark, first))
            .option("checkpointLocation", str(self._checkpoint.folder))
            .queryName(f"{self.settings.consumer_group}@{self._topic}")
        )
        trigger = self.settings.trigger
        if trigger == AVAILABLE_NOW:
            return writer.trigger(availableNow=True).start()
        span = f"{trigger // timedelta(milliseconds=1)} milliseconds" if isinstance(trigger, timedelta) else trigger
        return writer.trigger(processingTime=span).start()

    def _runs(self, spark: SparkSession, first: OffsetTable) -> Iterator[StreamingQuery]:
        """Yield the query; with ``available-now`` on Spark 4.0 and 4.1, one query after the other.

        There a run ends after one batch, which has a limit. So the next one starts, until the messages are handled that
        were stored at the start.
        """
        from mqtemplate.spark.records.versions import HAS_READ_LIMITS

        target = {}
        if self.settings.trigger == AVAILABLE_NOW and not HAS_READ_LIMITS:
            target = self._reader().latest_offsets()
        yield self._start_query(spark, first)
        before = -1
        while self._is_before(target) and self._checkpoint.committed() > before:
            before = self._checkpoint.committed()
            yield self._start_query(spark, first)

    def _is_before(self, target: OffsetTable) -> bool:
        reached = self._checkpoint.end_of(self._checkpoint.committed()) or {}
        return any(reached.get(queue, 0) < offset for queue, offset in target.items())

    def _reader(self) -> StoreReader:
        from mqtemplate.spark.reader.planner import StoreReader

        return StoreReader(SourceOptions.parse(self._options(None), streaming=True))

    def _batches(self, spark: object, first: OffsetTable) -> Callable[[DataFrame, int], None]:
        """Return the function for batches: of this object, or one that a process of Spark Connect can call."""
        if not _is_connect(spark):
            return partial(self._on_batch, self._work(first))
        # By name: an ordinary session does not need it.
        connect = import_module("mqtemplate.spark.listening.connect")
        batches: Callable[[DataFrame, int], None] = connect.ConnectBatches(
            endpoint=connect.ImportedFunction.of(self._endpoint, f"Spark listener {self.name}"),
            name=self.name,
            settings=self.settings,
            options=self._options(None),
            location=self._shared.location(),
            checkpoint=str(self._checkpoint.folder),
            broker_name=self._shared.broker.name,
            first=first,
            replayed=self._replayed,
        )
        return batches

    def _work(self, first: OffsetTable) -> BatchWork:
        settings, shared = self.settings, self._shared
        return BatchWork(
            listener=ListenerFunction(
                name=self.name, function=self._function, settings=settings, options=self._options(None)
            ),
            checkpoint=self._checkpoint,
            first=first,
            replayed=self._replayed,
            redelivery=Redelivery(
                shared.broker, shared.send_back, shared.metrics, self.name, settings, self._checkpoint.folder
            ),
            metrics=self.monitor,
            commit=partial(shared.commit, settings.consumer_group),
            wait=self._stopping.wait,
        )

    def _watch(self, query: StreamingQuery, runs: Iterator[StreamingQuery]) -> None:
        """Note the end of the query, which happens in a thread of Spark. After an error, start it again by policy.

        Args:
            runs: Queries to start after it.
        """
        from pyspark.errors import StreamingQueryException

        try:
            self._await_end(query)
            while (following := self._next_run(runs)) is not None:
                self._await_end(following)
        except Exception as exc:
            if not self._stopping.is_set():
                of_query = isinstance(exc, StreamingQueryException)
                self._failed(exc if of_query else SparkError(f"Spark's JVM has ended ({exc})"))
        finally:
            self.monitor.is_running = False
            self._ended.set()
        if self._error is not None:
            self._on_change()
            self._restart()

    def _next_run(self, runs: Iterator[StreamingQuery]) -> StreamingQuery | None:
        with self._lifecycle:
            if self._stopping.is_set():
                return None
            following = next(runs, None)
            self._query = following or self._query
            return following

    def _await_end(self, query: StreamingQuery) -> None:
        """Wait for the end of the query. Over Spark Connect, count its batches: another process handles them."""
        if not _is_connect(query):
            query.awaitTermination()
            return
        first, last = self._checkpoint.first_offsets() or {}, -1
        while True:
            has_ended = query.awaitTermination(_PROGRESS_S)
            for progress in query.recentProgress:
                if progress["batchId"] > last and (count := messages_of(progress, first)):
                    last = progress["batchId"]
                    self._restarts = 0
                    self.monitor.count(count, progress["durationMs"].get("addBatch", 0))
            if has_ended:
                return

    def _failed(self, error: Exception) -> None:
        """Log one event: with the stack of the listener's function, or with the text of an error of Spark."""
        own, self._error = self._error, self._error or error
        self.monitor.failures.add()
        left = self._restarts_left(self._error)
        self._log.error("spark.failed", reason=summary_of(self._error), restarts_left=left, exc_info=own)

    def _restarts_left(self, error: Exception) -> float:
        """Return the number of restarts after *error*; infinite while nothing but the broker is missing."""
        if self.settings.max_restarts is not None:
            return self.settings.max_restarts - self._restarts
        return math.inf if _is_unreached(error) else 0

    def _restart(self) -> None:
        """Start the query again, unless the restarts are used up; wait before, longer each time."""
        while self._error is not None and self._restarts_left(self._error) > 0:
            doubled = 2 ** min(self._restarts, _MAX_DOUBLINGS)
            delay_ms = min(self.settings.restart_delay * doubled, _MAX_RESTART_DELAY_MS)
            if self._stopping.wait(delay_ms / 1_000):
                return
            self._restarts += 1
            self.monitor.restarts.add()
            with self._lifecycle:
                if self._stopping.is_set():
                    return
                try:
                    self._begin()
                except Exception as exc:
                    self._error = None
                    self._failed(exc)
                    self._ended.set()
                    continue
            self._log.info("spark.restarted", restart=self._restarts)
            self._on_change()

    def _await_commit(self) -> None:
        """Wait until Spark has committed the last batch; otherwise a restart would repeat it."""
        deadline = time.monotonic() + _COMMIT_TIMEOUT_S
        while self._last_batch >= 0 and not self._checkpoint.is_committed(self._last_batch):
            if self._ended.wait(_POLL_S) or time.monotonic() > deadline:
                return

    # --- a batch -------------------------------------------------------------------------------

    def _on_batch(self, work: BatchWork, messages: DataFrame, batch_id: int) -> None:
        with self._lock:
            if self._stopping.is_set():
                raise _StoppingError(f"Spark listener {self.name} is being stopped")
            self._no_batch_runs.clear()
        try:
            work.run(messages, batch_id)
            self._last_batch, self._restarts = batch_id, 0
        except Exception as exc:
            if not self._stopping.is_set():
                self._error = exc
            raise
        finally:
            self._no_batch_runs.set()

    def _committed(self, queue: MessageQueue) -> int | None:
        return self._shared.broker.groups.committed_offset(self.settings.consumer_group, queue)


def _is_unreached(error: Exception) -> bool:
    """Return True if a broker or name server could not be reached: a restart can help, whatever the messages are.

    Spark reports an error of the data source as text, with the name of its class.
    """
    kinds = (RemoteConnectError, RemoteTimeoutError)
    return isinstance(error, kinds) or any(f"{kind.__name__}: " in str(error) for kind in kinds)


def _is_connect(spark: object) -> bool:
    """Return True for a session or query of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _name_of(endpoint: object) -> str:
    return str(getattr(endpoint, "__qualname__", type(endpoint).__qualname__))


def _only_spec(endpoint: object) -> ListenerSpec:
    listener = f"Spark listener {_name_of(endpoint)}"
    if isinstance(endpoint, type):
        raise ListenerError(f"{listener} is a class; give an object of it")
    specs = spark_listener_specs(endpoint)
    if len(specs) > 1:
        raise ListenerError(f"{listener} is decorated more than once; pass the 'spec' to run")
    if not specs:
        raise ListenerError(f"{listener} is not decorated with @spark_listener")
    return specs[0]


def _checkpoint_folder(root: Path | str, settings: SparkListenerSettings) -> Path:
    """Return the listener's own folder, or one for its group and topics; a path may not hold all their characters."""
    if settings.checkpoint is not None:
        return absolute_path(settings.checkpoint)
    name = f"{settings.consumer_group}@{','.join(settings.topics)}"
    return absolute_path(root) / "".join(
        char if char.isalnum() or char in "@,_-" else f"+{ord(char):02x}" for char in name
    )
