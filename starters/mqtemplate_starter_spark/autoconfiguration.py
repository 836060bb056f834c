"""Connects the Spark listeners among the components of an application."""

from __future__ import annotations

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration
from mqtemplate.spark import spark_listener_specs
from mqtemplate_starter_spark.listeners import SparkListeners

__all__ = ["SparkAutoConfiguration"]


class SparkAutoConfiguration(AutoConfiguration):
    """Contributes `SparkListeners` if there is a Spark listener; without one no session is started."""

    requires = ("pyspark", "pyarrow", "pandas")
    after = ("logging", "embedded")

    def condition(self, settings: AppSettings) -> bool | str:
        return settings.mqtemplate.spark.enabled or "mqtemplate.spark.enabled is false"

    def contribute(self, context: ApplicationContext) -> None:
        marked = [component for component in context.components if spark_listener_specs(component)]
        if marked:
            context.add_part(SparkListeners(context, marked))
        else:
            context.note("no component is a @spark_listener")
