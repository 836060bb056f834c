"""The column ``payload`` of a listener's DataFrame, and the rows whose body has no payload."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mqtemplate.errors import ConfigurationError, ListenerError, SparkError
from mqtemplate.extras import install_command
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

    if payload is None or isinstance(payload, RegistryAvro):  # see `with_registry_payload`
        return messages
    if not isinstance(payload, type):
        return _marked(messages.withColumn("payload", payload(f.col("body"))), bad_records)
    schema, body = payload_schema(payload), f.col("body").cast("string")
    if bad_records == "null":
        return messages.withColumn("payload", f.from_json(body, schema, {"mode": "PERMISSIVE"}))
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = messages.withColumn("payload", f.from_json(body, schema.add(_CORRUPT, StringType()), options))
    is_bad = f.col("payload").isNull() | f.col(f"payload.{_CORRUPT}").isNotNull()
    return parsed.withColumn(_BAD, is_bad).withColumn("payload", f.col("payload").dropFields(_CORRUPT))


def with_registry_payload(messages: DataFrame, payload: Any, bad_records: str) -> DataFrame:
    """Add the ``payload`` of a `RegistryAvro`: the schemas of a batch are known when it is read, not before."""
    return _marked(payload(messages), bad_records) if isinstance(payload, RegistryAvro) else messages


def _marked(parsed: DataFrame, bad_records: str) -> DataFrame:
    return parsed if bad_records == "null" else parsed.withColumn(_BAD, _is_empty(parsed))


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


# --- Avro with a schema registry ------------------------------------------------------------------------------------

_HEADER_BYTES = 5
_MOST_SCHEMAS = 1_000
_TIMEOUT_S = 10
_NOT_FOUND = 404


class RegistryAvro:
    """Payload of Avro bodies in Confluent's format; a schema registry has their schemas. Needs the extra ``registry``.

    ::

        00 | id of the writer's schema, 4 bytes, big-endian | the value in binary

    It is the ``payload`` of a listener, or is called with a DataFrame that has the column ``body``. Each body is read
    by the schema that it was written with, and becomes a struct of one schema. The payload is null for a body without
    the five bytes, with an id that the registry does not have, or that cannot be read. Only the driver asks the
    registry. Spark's package ``spark-avro`` decodes. Source: "Wire format" in Confluent's documentation.

    Args:
        subject: Subject whose newest schema gives the fields of the payload. The first batch reads it.
        registry: Settings of the ``SchemaRegistryClient`` of ``confluent-kafka``: at least ``url``, and such as
            ``basic.auth.user.info``. They are not shown.
        schema: Schema of the payload as JSON, instead of the newest one.

    Raises:
        ConfigurationError: A setting is wrong, or the packages of the extra are missing. From the calls:
        SparkError: The registry cannot be reached, or refuses. A retry can help.
    """

    def __init__(self, subject: str, registry: Mapping[str, Any], *, schema: str | None = None) -> None:
        self._subject, self._registry, self._schema = subject, dict(registry), schema
        self._client: Any = None
        self._newest: tuple[str, int] | None = None
        self._open()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._subject!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the connections: Spark Connect runs a listener in another process."""
        return {**self.__dict__, "_client": None}

    def __call__(self, messages: DataFrame) -> DataFrame:
        """Return the messages with the column ``payload``. It reads the ids of the schemas from all bodies."""
        from pyspark.sql import functions as f
        from pyspark.sql.avro.functions import from_avro

        body = f.col("body")
        has_header = (f.length(body) >= _HEADER_BYTES) & (f.substring(body, 1, 1) == f.lit(b"\0"))
        schema_id = f.when(has_header, f.conv(f.hex(f.substring(body, 2, 4)), 16, 10).cast("long"))
        found = messages.select(schema_id.alias("id")).where("id IS NOT NULL").distinct().limit(_MOST_SCHEMAS + 1)
        ids = sorted(row.id for row in found.collect())
        if len(ids) > _MOST_SCHEMAS:
            raise SparkError(f"the messages have more than {_MOST_SCHEMAS} ids of schemas; read fewer at once")
        reader, _ = self._reader()
        options = {"mode": "PERMISSIVE", "avroSchema": reader}
        value, payload = (
            f.expr(f"substring(body, {_HEADER_BYTES + 1})"),
            from_avro(f.lit(None).cast("binary"), reader, options),
        )
        for number in ids:
            if (writer := self._writer(number)) is not None:
                payload = f.when(schema_id == number, from_avro(value, writer, options)).otherwise(payload)
        return messages.withColumn("payload", payload)

    def body(self, value: Column) -> Column:
        """Return the column ``body`` for a struct with the fields of the schema. A given schema is registered."""
        from pyspark.sql import functions as f
        from pyspark.sql.avro.functions import to_avro

        schema, number = self._reader()
        if self._schema is not None:
            from confluent_kafka.schema_registry import Schema

            number = self._ask("register_schema", self._subject, Schema(schema, "AVRO"))
        return f.concat(f.lit(b"\0" + number.to_bytes(4, "big")), to_avro(value, schema))

    def _reader(self) -> tuple[str, int]:
        """Return the schema of the payload, and its id; 0 if it was given."""
        if self._schema is not None:
            return self._schema, 0
        if self._newest is None:
            newest = self._ask("get_latest_version", self._subject)
            self._newest = self._text_of(newest.schema, newest.schema_id), newest.schema_id
        return self._newest

    def _writer(self, number: int) -> str | None:
        schema = self._ask("get_schema", number, missing=None)
        return None if schema is None or schema.schema_type != "AVRO" else self._text_of(schema, number)

    def _text_of(self, schema: Any, number: int) -> str:
        if schema.references:
            raise SparkError(
                f"schema {number} of {self._subject!r} refers to other schemas, which are not read; register one "
                "schema that contains them"
            )
        return str(schema.schema_str)

    def _ask(self, method: str, *arguments: object, **default: None) -> Any:
        """Call a method of the client. With *missing*, return it if the registry has no such thing."""
        client = self._open()
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return getattr(client, method)(*arguments)
        except Exception as exc:  # also of the client's HTTP library, which is not named in its interface
            if default and isinstance(exc, SchemaRegistryError) and exc.http_status_code == _NOT_FOUND:
                return default["missing"]
            where = ", ".join(urlsplit(url).netloc.rpartition("@")[2] for url in self._registry["url"].split(","))
            raise SparkError(
                f"schema registry {where}: {method} {arguments[0]!r}: {type(exc).__name__}: {exc}"
            ) from exc

    def _open(self) -> Any:
        if self._client is None:
            try:
                from confluent_kafka.schema_registry import SchemaRegistryClient
            except ImportError as exc:
                raise ConfigurationError(f"a schema registry needs its client: {install_command('registry')}") from exc
            try:
                self._client = SchemaRegistryClient({"timeout": _TIMEOUT_S, **self._registry})
            except (ValueError, TypeError, OSError) as exc:  # it shows no values
                known = ", ".join(sorted(self._registry))
                raise ConfigurationError(f"schema registry with the settings {known}: {exc}") from exc
        return self._client
