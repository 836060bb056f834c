"""Starter: readable or machine-readable logs, from ``mqtemplate.logging.*``."""

from mqtemplate_starter_logging.autoconfiguration import LoggingAutoConfiguration

__all__ = ["LoggingAutoConfiguration"]
