"""Column with the JSON body as a struct, and what happens to a body that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_CORRUPT = "mqtemplate_corrupt"


def with_payload(messages: DataFrame, payload: type, bad_records: str) -> DataFrame:
    """Add the column ``payload``.

    Args:
        payload: A pydantic model or a dataclass; see `payload_schema`.
        bad_records: For a body that is no JSON of the payload: ``null`` sets its fields to null, ``fail`` fails the
            read with the position of the message and the start of its body.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    from mqtemplate.spark.schema import payload_schema

    schema, body = payload_schema(payload), f.col("body").cast("string")
    if bad_records != "fail":
        return messages.withColumn("payload", f.from_json(body, schema, {"mode": "PERMISSIVE"}))
    marked = StructType([*schema, StructField(_CORRUPT, StringType())])
    parsed = f.from_json(body, marked, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT})
    is_bad = parsed[_CORRUPT].isNotNull() | parsed.isNull()
    checked = f.when(is_bad, f.raise_error(_reason(payload.__name__, body))).otherwise(parsed.dropFields(_CORRUPT))
    return messages.withColumn("payload", checked)


def _reason(payload: str, body: Column) -> Column:
    from pyspark.sql import functions as f

    return f.format_string(
        f"%s, queue %d, offset %d: the body is no JSON of {payload}: %s",
        f.col("topic"),
        f.col("queueId"),
        f.col("queueOffset"),
        f.substring(f.coalesce(body, f.lit("")), 1, 200),
    )
