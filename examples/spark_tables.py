"""Spark listeners whose tables have each message once, whatever is killed: Delta, Iceberg, PostgreSQL, Parquet.

A batch that is repeated has the same ``(query_id, batch_id)`` and the same messages. So each listener stores that pair
in the commit of its table, or replaces what it has written under it. `bench/spark_exactly_once.py` kills them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import psycopg

from mqtemplate import SparkBatch, spark_listener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

COLUMNS = ("topic", "queueId", "queueOffset", "bigint(string(body)) as number")
DELTA_TABLE = "tables/delta"
ICEBERG_TABLE = "lake.shop.orders"
MERGED_TABLE = "lake.shop.merged_orders"
STREAMED_TABLE = "lake.shop.streamed_orders"
DATABASE = os.environ.get("DATABASE", "localhost/shop?user=shop")
PARQUET_FOLDER = "tables/parquet"

_SETTINGS: dict[str, Any] = {
    "topic": "orders",
    "max_offsets_per_trigger": 200,
    "max_restarts": 20,
    "restart_delay": "5s",
}


@spark_listener(consumer_group="delta", **_SETTINGS)
def to_delta(messages: DataFrame, batch: SparkBatch) -> None:
    rows = messages.selectExpr(*COLUMNS)
    rows.write.format("delta").mode("append").options(**batch.write_options()).save(DELTA_TABLE)


@spark_listener(consumer_group="iceberg", **_SETTINGS)
def to_iceberg(messages: DataFrame, batch: SparkBatch) -> None:
    written = f"{batch.query_id}/{batch.batch_id}"
    snapshots = messages.sparkSession.table(f"{ICEBERG_TABLE}.snapshots")
    if snapshots.where(f"summary['mqtemplate-batch'] = '{written}'").isEmpty():
        rows = messages.selectExpr(*COLUMNS)
        rows.writeTo(ICEBERG_TABLE).option("snapshot-property.mqtemplate-batch", written).append()


@spark_listener(consumer_group="iceberg-merge", **_SETTINGS)
def to_iceberg_by_merge(messages: DataFrame, batch: SparkBatch) -> None:
    rows = messages.selectExpr(*COLUMNS)
    position = " AND ".join(f"known.{name} = rows.{name}" for name in ("topic", "queueId", "queueOffset"))
    rows.sparkSession.sql(
        f"MERGE INTO {MERGED_TABLE} AS known USING {{rows}} AS rows ON {position} WHEN NOT MATCHED THEN INSERT *",
        rows=rows,
    )


def stream_to_iceberg(spark: SparkSession, store: str, checkpoint: str) -> StreamingQuery:
    source = {"store": store, "topic": "orders", "maxOffsetsPerTrigger": "200"}
    rows = spark.readStream.format("mqtemplate").options(**source).load().selectExpr(*COLUMNS)
    return rows.writeStream.option("checkpointLocation", checkpoint).toTable(STREAMED_TABLE)


@spark_listener(consumer_group="postgresql", **_SETTINGS)
def to_postgresql(messages: DataFrame, batch: SparkBatch) -> None:
    this = (batch.query_id, batch.batch_id)
    rows = messages.selectExpr(*COLUMNS, f"'{batch.query_id}' as query", f"{batch.batch_id} as batch")
    with psycopg.connect(f"postgresql://{DATABASE}") as database:
        database.execute("DELETE FROM orders_of_a_batch")
    options = {"driver": "org.postgresql.Driver"}
    rows.write.jdbc(f"jdbc:postgresql://{DATABASE}", "orders_of_a_batch", "append", options)
    with psycopg.connect(f"postgresql://{DATABASE}") as database:  # one transaction
        entry = "INSERT INTO batches (query, batch) VALUES (%s, %s) ON CONFLICT DO NOTHING"
        if database.execute(entry, this).rowcount:
            columns = "topic, queueid, queueoffset, number"
            found = f"SELECT DISTINCT {columns} FROM orders_of_a_batch WHERE query = %s AND batch = %s"
            database.execute(f"INSERT INTO orders ({columns}) {found}", this)


@spark_listener(consumer_group="parquet", **_SETTINGS)
def to_parquet(messages: DataFrame, batch: SparkBatch) -> None:
    folder = f"{PARQUET_FOLDER}/query={batch.query_id}/batch={batch.batch_id}"
    messages.selectExpr(*COLUMNS).write.mode("overwrite").parquet(folder)
