"""Sales by article, added up by Spark. The shop runs without it: only ``examples.shop.with_spark`` imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from mqtemplate import SparkBatch, spark_listener
from mqtemplate.outbox import SQLAlchemyInbox

from .database import Database
from .messages import OrderPaid
from .model import SalesOfArticle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@spark_listener(
    topic="orders",
    consumer_group="sales",
    selector_expression="paid",
    payload=OrderPaid,
    bad_records="dlq",
    include_properties=False,
    max_restarts=3,
)
class Sales:
    """Spark listener that adds the sums of each batch to a table.

    A batch that Spark repeats has the same id and the same messages, so the inbox knows it: each sale counts once.
    """

    def __init__(self, database: Database, inbox: SQLAlchemyInbox) -> None:
        self._database = database
        self._inbox = inbox

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        """Add the sales of a batch."""
        from pyspark.sql import functions as f

        sums = messages.groupBy("payload.article").agg(
            f.sum("payload.quantity").alias("quantity"), f.sum("payload.cents").alias("cents")
        )
        rows = sums.collect()  # one row for each article
        with self._database.begin() as session:
            if not self._inbox.is_new(session, f"{batch.query_id}/{batch.batch_id}", consumer="sales"):
                return
            for row in rows:
                sales = session.get(SalesOfArticle, row["article"]) or SalesOfArticle(article=row["article"])
                sales.quantity = (sales.quantity or 0) + row["quantity"]
                sales.cents = (sales.cents or 0) + row["cents"]
                session.add(sales)

    def all(self) -> list[SalesOfArticle]:
        """Return the sums over all batches."""
        with self._database.begin() as session:
            return list(session.scalars(sa.select(SalesOfArticle).order_by(SalesOfArticle.article)))
