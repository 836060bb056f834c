"""Delayed messages in batches to Spark: from tax payments to a Parquet table of sums by region and period."""
