"""Starter of logging for people or machines, for ``mqtemplate.logging.*``."""

from mqtemplate_starter_logging.autoconfiguration import LoggingAutoConfiguration

__all__ = ["LoggingAutoConfiguration"]
