"""Work on one batch of a Spark listener: its payloads, the calls of its function, the rows that come back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mqtemplate.errors import SparkError
from mqtemplate.event_log import get_logger
from mqtemplate.metrics import Metrics
from mqtemplate.spark.listening.checkpoint import QueryCheckpoint
from mqtemplate.spark.listening.listener import SparkBatch, SparkListenerSettings
from mqtemplate.spark.listening.payloads import (
    refuse_bad_records,
    rows_of,
    split_bad_records,
    with_registry_payload,
    without_rows,
)
from mqtemplate.spark.listening.redelivery import FailedRow, Redelivery
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange
from mqtemplate.user_code import error_text, safe_text, type_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = get_logger("mqtemplate.spark")

_MAX_TEXT = 100_000  # the stacks of Spark, of which this finds the last line
_STACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerFunction:
    """Function of a listener, with its resolved attributes.

    Attributes:
        name: Name of the listener, for logs.
        options: Options of the source.
    """

    name: str
    function: Callable[[DataFrame, SparkBatch], object]
    settings: SparkListenerSettings
    options: Mapping[str, str]


class BatchMetrics:
    """Metrics ``spark.<group>.*`` of the batches; docs/metrics.md has their names."""

    def __init__(self, metrics: Metrics, group: str) -> None:
        prefix = f"spark.{group}"
        self.batches = metrics.counter(f"{prefix}.batches")
        self.rows = metrics.counter(f"{prefix}.messages")
        self.batch_ms = metrics.histogram(f"{prefix}.batch_ms")
        self.failed_attempts = metrics.counter(f"{prefix}.failed_attempts")

    def count(self, messages: int, took_ms: int) -> None:
        """Count a handled batch."""
        self.batches.add()
        self.rows.add(messages)
        self.batch_ms.observe(took_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWork:
    """Work on the batches of one query, which is called in the process that has the listener's function.

    Attributes:
        first: Start of the first batch.
        replayed: Id of the batch that was planned and not committed when the query started; -1 if there is none.
        commit: Commits the end of a batch for the group.
        wait: Waits so many seconds before an attempt; returns True if the listener is being stopped.
    """

    listener: ListenerFunction
    checkpoint: QueryCheckpoint
    first: OffsetTable
    replayed: int
    redelivery: Redelivery
    metrics: BatchMetrics
    commit: Callable[[OffsetTable], None]
    wait: Callable[[float], bool]

    def run(self, messages: DataFrame, batch_id: int) -> None:
        """Pass a batch to the function. Its end is committed for the group when the function has returned.

        Raises:
            Exception: The function raised it in its last attempt, with ``on_failure="stop"``.
            SparkError: There are bad records, with ``bad_records="fail"``; or a file of the checkpoint is damaged.
        """
        settings = self.listener.settings
        end = self.checkpoint.end_of(batch_id) or {}
        query_id = self.checkpoint.query_id()
        batch = partial(
            SparkBatch,
            query_id=query_id,
            batch_id=batch_id,
            ranges=self._ranges(end, batch_id),
            is_replay=batch_id == self.replayed,
            topic=",".join(settings.topics),
            consumer_group=settings.consumer_group,
        )
        sent_back = self.redelivery.resume(query_id, batch_id)
        self._handle(self._good_records(without_rows(messages, sent_back), query_id, batch_id), batch)
        self.commit(end)

    def _good_records(self, messages: DataFrame, query_id: str, batch_id: int) -> DataFrame:
        """Return the rows with a payload; refuse the others, or send them to the dead-letter topic."""
        settings = self.listener.settings
        messages = with_registry_payload(messages, settings.payload, settings.bad_records)
        good, bad = split_bad_records(messages, settings.payload)
        if settings.bad_records == "fail":
            refuse_bad_records(bad)
        self.redelivery.send(query_id, batch_id, bad)
        return good

    def _handle(self, messages: DataFrame, make_batch: Callable[..., SparkBatch]) -> None:
        """Call the function until it returns, at most *max_attempts* times. Send the rows back that failed."""
        settings = self.listener.settings
        for attempt in range(1, settings.max_attempts + 1):
            batch = make_batch(attempt=attempt)
            log = self._log().bind(batch=batch.batch_id, attempt=attempt)
            started = time.monotonic()
            try:
                result = self.listener.function(messages, batch)
                failed = rows_of(cast(Any, result), "the listener returned it") if _is_frame(result) else []
            except BaseException as raised:
                exc = _as_exception(raised)
                self.metrics.failed_attempts.add()
                if attempt == settings.max_attempts:
                    self._give_up(messages, batch, exc)
                    return
                reason = f"{type_name(exc)}: {summary_of(exc)}"
                log.warning("spark.attempt_failed", reason=reason, attempts=settings.max_attempts)
                if self.wait(settings.retry_delay * 2 ** (attempt - 1) / 1_000):
                    raise exc from exc.__cause__
            else:
                sent_back = self.redelivery.send(batch.query_id, batch.batch_id, self._delayed(failed))
                took_ms, count = int((time.monotonic() - started) * 1_000), batch.message_count
                self.metrics.count(count, took_ms)
                log.info(
                    "spark.batch_handled", took_ms=took_ms, messages=count, replay=batch.is_replay, sent_back=sent_back
                )
                return

    def _give_up(self, messages: DataFrame, batch: SparkBatch, error: Exception) -> None:
        """After the last attempt: end the query, or send all rows back and go on."""
        settings = self.listener.settings
        if settings.on_failure == "stop":
            raise error
        reason = f"{type_name(error)}: {summary_of(error)}"
        rows = rows_of(messages, reason, is_dead=settings.on_failure == "dlq")
        count = self.redelivery.send(batch.query_id, batch.batch_id, self._delayed(rows), error)
        self._log().error("spark.batch_sent_back", batch=batch.batch_id, rows=count, exc_info=error)

    def _delayed(self, rows: list[FailedRow]) -> list[FailedRow]:
        default = self.listener.settings.redelivery_delay
        return [row if row.delay_ms is not None else row._replace(delay_ms=default) for row in rows]

    def _ranges(self, end: OffsetTable, batch_id: int) -> tuple[QueueRange, ...]:
        """Return the offsets of a batch. A queue that is new in it starts at 0."""
        before = self.checkpoint.end_of(batch_id - 1) if batch_id else self.first
        start = {**dict.fromkeys(end, 0), **(before or {})}
        ranges = (QueueRange.of(queue, start[queue], stop) for queue, stop in sorted(end.items()))
        found = tuple(each for each in ranges if len(each))
        return found if self.listener.settings.fail_on_data_loss else self._stored(found)

    def _stored(self, ranges: tuple[QueueRange, ...]) -> tuple[QueueRange, ...]:
        """Return what is left of some ranges after a data loss: the offsets of the rows of the DataFrame."""
        from mqtemplate.spark.reader.planner import StoreReader

        return StoreReader(SourceOptions.parse(self.listener.options, streaming=True)).stored_ranges(ranges)

    def _log(self) -> Any:
        settings = self.listener.settings
        return _log.bind(listener=self.listener.name, topic=",".join(settings.topics), group=settings.consumer_group)


def _as_exception(raised: BaseException) -> Exception:
    """Return what the function raised as an `Exception`: Py4J, whose thread calls it, reports no other class."""
    if isinstance(raised, Exception):
        return raised
    error = SparkError(f"the function of the listener raised {error_text(raised)}")
    error.__cause__ = raised
    return error


def _is_frame(result: object) -> bool:
    """Return True for a DataFrame of Spark, also of Spark Connect."""
    return hasattr(result, "toArrow") and hasattr(result, "sparkSession")


def summary_of(error: object) -> str:
    """Return the message of a Spark error without its stacks; if it contains an error of this library, that one's.

    An error of a process of Spark Connect contains the stack of Python: its last line is the message.
    """
    text = safe_text(error, _MAX_TEXT)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type_name(error)]
    ours = [line for line in lines if line.startswith("mqtemplate.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    _, is_stack, stack = text.rpartition(_STACK)
    raised = re.search(r"^[A-Za-z_][\w.]*: (.+)$", stack, re.MULTILINE) if is_stack else None
    return lines[0] if raised is None else raised[1]
