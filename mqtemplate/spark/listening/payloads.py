"""The column ``payload`` of a listener's DataFrame, and the rows whose body has no payload."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from mqtemplate.errors import ListenerError, SparkError
from mqtemplate.spark.listening.redelivery import FailedRow

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_BAD, _CORRUPT = "_bad_record", "_corrupt_record"
POSITION = ("topic", "brokerName", "queueId", "queueOffset")
_REQUIRED = tuple(name for name in POSITION if name != "brokerName")
_SHOWN = 100


def with_payload(messages: DataFrame, payload: Any, bad_records: str) -> DataFrame:
    """Add ``payload``; unless bad records are null, also a hidden column that marks them.

    Args:
        payload: A pydantic model or dataclass for JSON bodies; or a function from the column ``body`` to the payload,
            such as ``lambda body: from_avro(body, schema)``. It is null for a bad record, or a struct of nulls, as
            Spark's functions return in their mode ``PERMISSIVE``.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType

    from mqtemplate.spark.records.schema import payload_schema

    if payload is None:
        return messages
    if not isinstance(payload, type):
        parsed = messages.withColumn("payload", payload(f.col("body")))
        return parsed if bad_records == "null" else parsed.withColumn(_BAD, _is_empty(parsed))
    schema, body = payload_schema(payload), f.col("body").cast("string")
    if bad_records == "null":
        return messages.withColumn("payload", f.from_json(body, schema, {"mode": "PERMISSIVE"}))
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = messages.withColumn("payload", f.from_json(body, schema.add(_CORRUPT, StringType()), options))
    is_bad = f.col("payload").isNull() | f.col(f"payload.{_CORRUPT}").isNotNull()
    return parsed.withColumn(_BAD, is_bad).withColumn("payload", f.col("payload").dropFields(_CORRUPT))


def _is_empty(parsed: DataFrame) -> Column:
    """Return True for a payload that is null, or a struct without any value."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    kind, payload = parsed.schema["payload"].dataType, f.col("payload")
    fields = [payload[name].isNull() for name in kind.names] if isinstance(kind, StructType) else []
    return payload.isNull() | reduce(and_, fields) if fields else payload.isNull()


def split_bad_records(messages: DataFrame, payload: Any) -> tuple[DataFrame, list[FailedRow]]:
    """Return the rows with a payload, and the others as dead letters."""
    from pyspark.sql import functions as f

    if _BAD not in messages.columns:
        return messages, []
    bad = messages.where(_BAD).select(*POSITION, f.left(f.col("body").cast("string"), f.lit(_SHOWN)).alias("body"))
    kind = f"JSON of {payload.__qualname__}" if isinstance(payload, type) else "readable by the payload function"
    rows = [
        FailedRow(
            *(row.topic, row.queueId, row.queueOffset, f"the body is not {kind}: {row.body!r}"),
            is_dead=True,
            broker_name=row.brokerName,
        )
        for row in bad.collect()
    ]
    return messages.where(~f.col(_BAD)).drop(_BAD), rows


def refuse_bad_records(rows: list[FailedRow]) -> None:
    """Raise an error that names the first bad record.

    Raises:
        SparkError: There is one.
    """
    if rows:
        first = min(rows)
        raise SparkError(
            f"{len(rows)} bad records; the first is {first.topic}, queue {first.queue_id}, offset "
            f"{first.queue_offset}: {first.reason}. With bad_records='dlq' only such rows go to the dead-letter topic"
        )


def rows_of(frame: DataFrame, reason: str, *, is_dead: bool = False) -> list[FailedRow]:
    """Return the positions of rows, with the columns ``brokerName``, ``reason`` and ``delay`` if they have them.

    Raises:
        ListenerError: Columns are missing.
    """
    from mqtemplate.durations import duration_ms

    missing = [name for name in _REQUIRED if name not in frame.columns]
    if missing:
        raise ListenerError(
            f"the returned DataFrame lacks {', '.join(missing)}; return rows of the batch that failed, with the "
            "columns topic, queueId, queueOffset, and if you like reason (string) and delay (seconds, or '5m')"
        )
    optional = [name for name in ("brokerName", "reason", "delay") if name in frame.columns]
    rows = frame.select(*_REQUIRED, *optional).toArrow().to_pylist()
    return [
        FailedRow(
            row["topic"],
            row["queueId"],
            row["queueOffset"],
            row.get("reason") or reason,
            is_dead,
            None if row.get("delay") is None else duration_ms(row["delay"], 1_000),
            row.get("brokerName") or "",
        )
        for row in rows
    ]


def without_rows(messages: DataFrame, rows: list[FailedRow]) -> DataFrame:
    """Return the DataFrame without rows that were sent back before the batch was repeated."""
    if not rows:
        return messages
    from pyspark.sql import functions as f

    schema = ", ".join(f"{name} {messages.schema[name].dataType.simpleString()}" for name in POSITION)
    sent = messages.sparkSession.createDataFrame([row.position for row in rows], schema)
    return messages.join(f.broadcast(sent), on=list(POSITION), how="left_anti").select(*messages.columns)
