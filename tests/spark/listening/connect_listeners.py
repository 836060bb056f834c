"""Listeners that a process of Spark Connect imports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from mqtemplate.spark import SparkBatch, spark_listener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Order(BaseModel):
    id: int


@spark_listener(
    "orders",
    "collecting",
    payload=Order,
    bad_records="dlq",
    trigger="0 seconds",
    max_redeliveries=1,
    redelivery_delay="10s",
)
class Collect:
    """Listener that appends what it got to the file of the variable SEEN, and returns one row."""

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> DataFrame:
        rows = messages.select("payload.id", "reconsumeTimes").collect()
        with Path(os.environ["SEEN"]).open("a") as file:
            file.writelines(f"{json.dumps([row.id, row.reconsumeTimes, batch.message_count])}\n" for row in rows)
        return messages.where("payload.id = 2").selectExpr("*", "'no such customer' AS reason")


@spark_listener("orders", "failing", trigger="0 seconds", max_attempts=1)
def fail(messages: DataFrame, batch: SparkBatch) -> None:
    """Fail."""
    raise ValueError(f"no place for {batch.message_count} messages")


class NeedsService:
    """Listener with a service, which no process of Spark Connect has."""

    def __init__(self, service: object) -> None:
        self.service = service

    def on_batch(self, messages: object, batch: SparkBatch) -> None: ...
