"""Runs the Spark listeners of an application."""

from __future__ import annotations

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, is_spark_listener


class SparkAutoConfiguration(AutoConfiguration):
    """Starter that adds `SparkListeners` if there is a Spark listener; without one it starts no session."""

    requires = ("pyspark", "pyarrow", "pandas")
    after = ("logging", "embedded")

    def condition(self, settings: AppSettings) -> bool | str:
        return settings.mqtemplate.spark.enabled or "mqtemplate.spark.enabled is false"

    def contribute(self, context: ApplicationContext) -> None:
        marked = [component for component in context.components if is_spark_listener(component)]
        if not marked:
            context.note_nothing_to_do("no component is a @spark_listener")
            return
        from mqtemplate_starter_spark.listeners import SparkListeners

        context.add_part(SparkListeners(context, marked))
