"""Starter of Spark listeners, functions and classes marked ``@spark_listener``, for ``mqtemplate.spark.*``."""

from mqtemplate_starter_spark.autoconfiguration import SparkAutoConfiguration

__all__ = ["SparkAutoConfiguration"]
