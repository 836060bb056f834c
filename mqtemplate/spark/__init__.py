"""Spark: a data source over the store, sessions that find their Java, listeners that get DataFrames.

Importing it needs neither PySpark nor Java; using it says in one sentence what is missing.
"""

from mqtemplate.spark.container import SparkListenerContainer
from mqtemplate.spark.jvm.java import find_java
from mqtemplate.spark.listener import (
    AVAILABLE_NOW,
    SparkBatch,
    SparkListenerSpec,
    refuse_shared_groups,
    spark_listener,
    spark_listener_specs,
)
from mqtemplate.spark.offsets import QueueRange
from mqtemplate.spark.schema import payload_schema, source_schema
from mqtemplate.spark.session import register, session

__all__ = [
    "AVAILABLE_NOW",
    "QueueRange",
    "SparkBatch",
    "SparkListenerContainer",
    "SparkListenerSpec",
    "find_java",
    "payload_schema",
    "refuse_shared_groups",
    "register",
    "session",
    "source_schema",
    "spark_listener",
    "spark_listener_specs",
]
