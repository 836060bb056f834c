"""Delayed messages in batches to Spark: tax payments become a Parquet table of sums by region and period."""
