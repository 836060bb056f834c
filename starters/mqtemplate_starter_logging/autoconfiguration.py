"""Shows the events of the library while `run` owns the process, unless the program has configured logging."""

from __future__ import annotations

from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, has_handlers


class LoggingAutoConfiguration(AutoConfiguration):
    """Starter that shows the library's events on standard error. The stop restores everything as its last step."""

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.logging.enabled:
            return "mqtemplate.logging.enabled is false"
        return not has_handlers() or "the program has configured logging itself"

    def contribute(self, context: ApplicationContext) -> None:
        if not context.owns_process:
            context.note_nothing_to_do("only run() owns the process and its standard error")
            return
        from mqtemplate.context import show_events  # structlog's console renderer loads a library for terminals

        settings = context.settings.mqtemplate.logging
        context.lifecycle.push("logging", show_events(settings))
        context.note(f"{settings.format.lower()} from {settings.level} on")
