"""Starter: runs the functions and classes marked ``@spark_listener``, from ``mqtemplate.spark.*``."""

from mqtemplate_starter_spark.autoconfiguration import SparkAutoConfiguration
from mqtemplate_starter_spark.listeners import SparkListeners

__all__ = ["SparkAutoConfiguration", "SparkListeners"]
