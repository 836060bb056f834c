"""Spark: a data source over the store, sessions that find Java, and listeners for DataFrames.

Importing it needs neither PySpark nor Java; using it raises an error that says what is missing. Names are imported
when they are used: each query starts Python processes that need the data source and nothing else.
"""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.spark.driver.jvm import find_java
    from mqtemplate.spark.driver.sessions import read_table, register, session
    from mqtemplate.spark.listening.container import SparkListenerContainer
    from mqtemplate.spark.listening.listener import (
        AVAILABLE_NOW,
        SparkBatch,
        SparkListenerAttributes,
        refuse_shared_groups,
        spark_listener,
        spark_listener_specs,
    )
    from mqtemplate.spark.listening.payloads import RegistryAvro
    from mqtemplate.spark.location.local_server import LocalServer
    from mqtemplate.spark.pending.changes import cancel_pending, reschedule_pending
    from mqtemplate.spark.reader.source import MqTemplateSource
    from mqtemplate.spark.records.offsets import QueueRange
    from mqtemplate.spark.records.schema import payload_schema, source_schema
else:
    _NAMES = {
        "driver.jvm": ("find_java",),
        "driver.sessions": ("read_table", "register", "session"),
        "listening.container": ("SparkListenerContainer",),
        "listening.listener": (
            *("AVAILABLE_NOW", "SparkBatch", "SparkListenerAttributes"),
            *("refuse_shared_groups", "spark_listener", "spark_listener_specs"),
        ),
        "listening.payloads": ("RegistryAvro",),
        "location.local_server": ("LocalServer",),
        "pending.changes": ("cancel_pending", "reschedule_pending"),
        "reader.source": ("MqTemplateSource",),
        "records.offsets": ("QueueRange",),
        "records.schema": ("payload_schema", "source_schema"),
    }
    __getattr__ = late_import(
        __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
    )


__all__ = [
    "AVAILABLE_NOW",
    "LocalServer",
    "MqTemplateSource",
    "QueueRange",
    "RegistryAvro",
    "SparkBatch",
    "SparkListenerAttributes",
    "SparkListenerContainer",
    "cancel_pending",
    "find_java",
    "payload_schema",
    "read_table",
    "refuse_shared_groups",
    "register",
    "reschedule_pending",
    "session",
    "source_schema",
    "spark_listener",
    "spark_listener_specs",
]
