"""Listeners of the tests, and settings of a listener. A process of Spark Connect imports them, too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mqtemplate.listener import ListenerSpec
from mqtemplate.spark import SparkBatch, SparkListenerContainer, spark_listener
from mqtemplate.spark.listening.listener import SparkListenerSettings, resolve_spark_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqtemplate.brokers import EmbeddedBroker

BODIES = (b'{"id": 1}', b'{"id": 2}', b"not json", b'{"id": 3}')
HANDLED = [(1, 0), (2, 0), (2, 1), (3, 0)]
"""Id and retries of what `OrderListener` gets of `BODIES`. Two of them become dead letters."""


def resolved(
    topics: tuple[str, ...] = ("orders",), consumer_group: str = "billing", **attributes: Any
) -> SparkListenerSettings:
    """Return the settings of a listener with these attributes."""
    spec = ListenerSpec(topics=topics, consumer_group=consumer_group, attributes=attributes)
    return resolve_spark_spec(spec, "work", lambda text: text)


def started(
    spark: SparkSession,
    broker: EmbeddedBroker,
    checkpoints: Path,
    endpoint: object,
    consumer_group: str = "billing",
    on_change: Callable[[], None] = lambda: None,
    created: Callable[[SparkListenerContainer], None] = lambda container: None,
    **attributes: Any,
) -> SparkListenerContainer:
    """Start a listener whose next batch starts when the last one is done. *created* gets it before its start."""
    attributes = {"trigger": "0 seconds", "retry_delay": 0, **attributes}
    spec = ListenerSpec(topics=("orders",), consumer_group=consumer_group, attributes=attributes)
    container = SparkListenerContainer(endpoint, spark, broker, checkpoints, spec=spec, on_change=on_change)
    created(container)
    container.start()
    return container


class Order(BaseModel):
    id: int


_orders_with_a_retry = {"payload": Order, "bad_records": "dlq", "trigger": "0 seconds", "max_redeliveries": 1}


@spark_listener("orders", "billing", **_orders_with_a_retry, redelivery_delay="1s")  # type: ignore[arg-type]
class OrderListener:
    """Collects the id and the retries of each order, and returns order 2."""

    def __init__(self) -> None:
        self.handled: list[tuple[int, int]] = []

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> DataFrame:
        rows = messages.select("payload.id", "reconsumeTimes").collect()
        self.handled.extend((row.id, row.reconsumeTimes) for row in rows)
        return messages.where("payload.id = 2").selectExpr("*", "'no such customer' AS reason")


@spark_listener("orders", "collecting", **_orders_with_a_retry, redelivery_delay="10s")  # type: ignore[arg-type]
class Collect(OrderListener):
    """Also appends what it got to the file of the variable SEEN, since it runs in another process."""

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> DataFrame:
        failed = super().on_batch(messages, batch)
        with Path(os.environ["SEEN"]).open("a") as file:
            file.writelines(f"{json.dumps([*row, batch.message_count])}\n" for row in self.handled)
        self.handled.clear()
        return failed


@spark_listener("orders", "failing", trigger="0 seconds", max_attempts=1)
def fail(messages: DataFrame, batch: SparkBatch) -> None:
    """Fail."""
    raise ValueError(f"no place for {batch.message_count} messages")


class NeedsService:
    """Listener with a service, which no process of Spark Connect has."""

    def __init__(self, service: object) -> None:
        self.service = service

    def on_batch(self, messages: object, batch: SparkBatch) -> None: ...
