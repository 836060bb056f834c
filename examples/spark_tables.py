"""Spark listeners whose tables have each message once, whatever is killed: Delta, Iceberg, a database, Parquet.

A batch that is repeated has the same ``(query_id, batch_id)`` and the same messages. So each listener stores that pair
in the commit of its table, or replaces what it has written under it. `bench/spark_exactly_once.py` kills them.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mqtemplate import SparkBatch, spark_listener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = ("topic", "queueId", "queueOffset", "bigint(string(body)) as number")
DELTA_TABLE = "tables/delta"
ICEBERG_TABLE = "lake.shop.orders"
MERGED_TABLE = "lake.shop.merged_orders"
DATABASE = "tables.db"
PARQUET_FOLDER = "tables/parquet"

_SETTINGS: dict[str, Any] = {
    "topic": "orders",
    "trigger": "available-now",
    "max_offsets_per_trigger": 200,
    "max_restarts": 20,
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


@spark_listener(consumer_group="database", **_SETTINGS)
def to_database(messages: DataFrame, batch: SparkBatch) -> None:
    rows = messages.selectExpr(*COLUMNS)
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("DELETE FROM orders_of_a_batch")
    options = {"driver": "org.sqlite.JDBC"}
    rows.coalesce(1).write.jdbc(f"jdbc:sqlite:{DATABASE}", "orders_of_a_batch", "append", options)
    with closing(sqlite3.connect(DATABASE)) as database, database:  # one transaction
        entry = "INSERT INTO batches (query, batch) VALUES (?, ?) ON CONFLICT DO NOTHING"
        if database.execute(entry, (batch.query_id, batch.batch_id)).rowcount:
            database.execute("INSERT INTO orders SELECT DISTINCT * FROM orders_of_a_batch")


@spark_listener(consumer_group="parquet", **_SETTINGS)
def to_parquet(messages: DataFrame, batch: SparkBatch) -> None:
    folder = f"{PARQUET_FOLDER}/query={batch.query_id}/batch={batch.batch_id}"
    messages.selectExpr(*COLUMNS).write.mode("overwrite").parquet(folder)
