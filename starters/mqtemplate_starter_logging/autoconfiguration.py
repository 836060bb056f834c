"""Configures structlog and the standard library's logging, unless the program has configured structlog."""

from __future__ import annotations

import structlog

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, configure_logging


class LoggingAutoConfiguration(AutoConfiguration):
    """Starter that configures logging while the application runs. The stop restores it as its last step."""

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.logging.enabled:
            return "mqtemplate.logging.enabled is false"
        return not structlog.is_configured() or "the program has configured structlog itself"

    def contribute(self, context: ApplicationContext) -> None:
        settings = context.settings.mqtemplate.logging
        context.lifecycle.push("logging", configure_logging(settings))
        context.note(f"{settings.format.lower()} from {settings.level} on")
