"""Spark: a data source over the store, sessions that find Java, and listeners for DataFrames.

Importing it needs neither PySpark nor Java; using it raises an error that says what is missing. Names are imported
when they are used: each query starts Python processes that need the data source and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtemplate.spark.driver.jvm import find_java
    from mqtemplate.spark.driver.sessions import register, session
    from mqtemplate.spark.listening.container import SparkListenerContainer
    from mqtemplate.spark.listening.listener import (
        AVAILABLE_NOW,
        SparkBatch,
        SparkListenerAttributes,
        refuse_shared_groups,
        spark_listener,
        spark_listener_specs,
    )
    from mqtemplate.spark.location.local_server import LocalServer
    from mqtemplate.spark.pending.changes import cancel_pending, reschedule_pending
    from mqtemplate.spark.records.offsets import QueueRange
    from mqtemplate.spark.records.schema import payload_schema, source_schema
else:
    _MODULES = {
        "LocalServer": "location.local_server",
        "SparkListenerContainer": "listening.container",
        "find_java": "driver.jvm",
        "QueueRange": "records.offsets",
        **dict.fromkeys(("cancel_pending", "reschedule_pending"), "pending.changes"),
        **dict.fromkeys(("payload_schema", "source_schema"), "records.schema"),
        **dict.fromkeys(("register", "session"), "driver.sessions"),
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'listening.listener')}"), name)


__all__ = [
    "AVAILABLE_NOW",
    "LocalServer",
    "QueueRange",
    "SparkBatch",
    "SparkListenerAttributes",
    "SparkListenerContainer",
    "cancel_pending",
    "find_java",
    "payload_schema",
    "refuse_shared_groups",
    "register",
    "reschedule_pending",
    "session",
    "source_schema",
    "spark_listener",
    "spark_listener_specs",
]
