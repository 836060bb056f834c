"""The batch side: Spark adds the payments up and writes Parquet."""

from __future__ import annotations

from threading import Condition
from typing import TYPE_CHECKING, Annotated

from mqtemplate import Section, SparkBatch, service, spark_listener

from .pipeline_settings import PipelineSettings
from .tax_data import TaxPayment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@service
class Progress:
    """How many messages Spark has worked on; the program waits for it."""

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self._changed = Condition()

    def add(self, messages: int) -> None:
        with self._changed:
            self.batches += 1
            self.messages += messages
            self._changed.notify_all()

    def wait_for(self, messages: int, patience_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.messages >= messages, patience_s)


@spark_listener(
    topic="tax-data",
    consumer_group="tax-summary-group",
    selector_expression="2021S4",
    payload=TaxPayment,
    include_properties=False,
)
class SummaryListener:
    """Sums by region and period, one folder for each batch.

    A batch that Spark repeats after a crash has the same number and the same messages, and overwrites its own
    folder: so each payment is counted once.
    """

    def __init__(self, settings: Annotated[PipelineSettings, Section("tax-pipeline")], progress: Progress) -> None:
        self._result_folder = settings.result_folder
        self._progress = progress

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        from pyspark.sql import functions as f

        sums = messages.groupBy("payload.region", "payload.period").agg(
            f.count("*").alias("payments"), f.sum("payload.amount_cents").alias("amount_cents")
        )
        sums.coalesce(1).write.mode("overwrite").parquet(str(self._result_folder / f"batch={batch.batch_id}"))
        self._progress.add(batch.message_count)
