"""Sets structlog up, unless the program has done so."""

from __future__ import annotations

import structlog

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, configure_logging

__all__ = ["LoggingAutoConfiguration"]


class LoggingAutoConfiguration(AutoConfiguration):
    """Configures the logs while the application lives, and takes that back as the last thing of all."""

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.logging.enabled:
            return "mqtemplate.logging.enabled is false"
        return not structlog.is_configured() or "the program has configured structlog itself"

    def contribute(self, context: ApplicationContext) -> None:
        settings = context.settings.mqtemplate.logging
        context.lifecycle.push("logging", configure_logging(settings))
        context.note(f"{settings.format.value.lower()} from {settings.level.value} on")
