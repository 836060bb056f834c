"""A listener whose order 2 fails, for tests over clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from mqtemplate.spark import SparkBatch, spark_listener

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BODIES = (b'{"id": 1}', b'{"id": 2}', b"not json", b'{"id": 3}')
HANDLED = [(1, 0), (2, 0), (2, 1), (3, 0)]
"""Id and retries of what the listener gets of `BODIES`. Two of them become dead letters."""


class Order(BaseModel):
    id: int


@spark_listener(
    "orders",
    "billing",
    payload=Order,
    bad_records="dlq",
    trigger="0 seconds",
    redelivery_delay="1s",
    max_redeliveries=1,
)
class OrderListener:
    """Collects the id and the retries of each order, and returns order 2."""

    def __init__(self) -> None:
        self.handled: list[tuple[int, int]] = []

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> DataFrame:
        rows = messages.select("payload.id", "reconsumeTimes").collect()
        self.handled.extend((row.id, row.reconsumeTimes) for row in rows)
        return messages.where("payload.id = 2").selectExpr("*", "'no such customer' AS reason")
