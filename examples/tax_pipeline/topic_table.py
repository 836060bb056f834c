"""A topic as a table of Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_ROW = "region string, period string, amount_cents bigint"


def sums_in_topic(store: Path) -> Counter[tuple[str, str]]:
    """Return the cents by region and period, from all messages in ``tax-sums``."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()  # the session of the listener
    messages = spark.read.format("mqtemplate").options(store=str(store), topic="tax-sums").load()
    rows = messages.selectExpr(f"from_json(string(body), '{_ROW}') AS row").select("row.*")
    found = rows.groupBy("region", "period").sum("amount_cents").collect()
    return Counter({(region, period): cents for region, period, cents in found})
