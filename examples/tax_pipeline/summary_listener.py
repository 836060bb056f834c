"""The Spark listener: it adds the payments of each batch and writes Parquet."""

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
    """Number of messages and batches that Spark has processed. The program waits for it."""

    def __init__(self) -> None:
        self.batches = 0
        self.messages = 0
        self._changed = Condition()

    def add(self, messages: int) -> None:
        """Add a batch."""
        with self._changed:
            self.batches += 1
            self.messages += messages
            self._changed.notify_all()

    def wait_for(self, messages: int, timeout_s: float) -> bool:
        """Wait until Spark has processed so many messages; return False if it does not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.messages >= messages, timeout_s)


@spark_listener(
    topic="tax-data",
    consumer_group="tax-summary-group",
    selector_expression="2021S4",
    payload=TaxPayment,
    bad_records="dlq",
    include_properties=False,
)
class SummaryListener:
    """Spark listener that writes the sums by region and period: as Parquet, and as messages to ``tax-sums``.

    After a crash Spark repeats a batch with the same ids and the same messages. The Parquet folder has the id of the
    query and of the batch, so the repeated batch overwrites its own folder, and a new checkpoint no older one. The
    broker drops messages of the batch that it has stored already. So each payment counts once, in both.
    """

    def __init__(self, settings: Annotated[PipelineSettings, Section("tax-pipeline")], progress: Progress) -> None:
        self._settings = settings
        self._progress = progress

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        """Add the payments of a batch."""
        from pyspark.sql import functions as f

        sums = messages.groupBy("payload.region", "payload.period").agg(
            f.count("*").alias("payments"), f.sum("payload.amount_cents").alias("amount_cents")
        )
        sums = sums.coalesce(1).sortWithinPartitions("region", "period").persist()
        folder = self._settings.result_folder / f"query={batch.query_id}" / f"batch={batch.batch_id}"
        sums.write.mode("overwrite").parquet(str(folder))
        # The numbers of the rows must be the same in a repeated batch, so they are sorted.
        outgoing = sums.select(f.struct("*").alias("body"), f.concat_ws("/", "region", "period").alias("keys"))
        outgoing.write.format("mqtemplate").mode("append").options(
            store=str(self._settings.store_folder), topic="tax-sums", tags="2021S4", **batch.write_options()
        ).save()
        sums.unpersist()
        self._progress.add(batch.message_count)
