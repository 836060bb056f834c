"""Logging of an application: structlog and the standard library through one formatter.

The library itself writes events and configures nothing. The logging starter calls `configure_logging` unless the
program has configured structlog itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

from mqtemplate.context.settings.starters import LoggingSettings
from mqtemplate.listener.current import add_current_message

_VERBOSE = ("py4j",)  # logs each of its sockets at INFO


def configure_logging(settings: LoggingSettings, stream: TextIO | None = None) -> Callable[[], None]:
    """Write all events of structlog and of the standard library to *stream*, one line each.

    - Each line contains structlog's context variables, the lines of other libraries too.
    - A line that is written while a handler runs contains the topic, tag, group and msg_id of its message.
    - Tracebacks do not show local variables, which may contain payloads and passwords.

    Args:
        stream: By default standard error: standard output belongs to the program.

    Returns:
        A function that restores the previous configuration.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_current_message,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a cached logger would keep an earlier configuration
    )
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(settings.format, target),
            ],
        )
    )
    root = logging.getLogger()
    before = {logger: logger.level for logger in (root, *map(logging.getLogger, _VERBOSE))}
    root.addHandler(handler)
    root.setLevel(settings.level)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))

    def undo() -> None:
        root.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)
        structlog.reset_defaults()

    return undo


def _renderers(log_format: Literal["CONSOLE", "JSON"], stream: TextIO) -> list[Processor]:
    if log_format == "JSON":
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(without_locals), structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
