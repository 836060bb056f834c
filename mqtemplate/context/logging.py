"""Formats of log events, for a process that the application owns and for programs that want them.

The library writes events to `logging` and configures nothing (`mqtemplate.event_log`). Three functions may be called:

- `event_formatter` returns a formatter for any handler of the program.
- `show_events` shows the events of the library. ``MQApplication.run`` and the command line call it, by the starter
  ``logging``, if the program has configured no handler.
- `configure_logging` sends everything, structlog's events and the records of `logging`, through one handler. Only a
  program calls it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import StringIO
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from mqtemplate.context.failure_report import is_of_application
from mqtemplate.context.settings.features import LoggingSettings
from mqtemplate.context.settings.source import PROCESS
from mqtemplate.errors import escaped
from mqtemplate.listener.handler.current import add_current_message
from mqtemplate.processes import is_terminal, write_text

_LIBRARY = "mqtemplate"
_MULTILINE = ("event", "exception", "stack")
_VERBOSE = ("py4j",)  # logs each of its sockets at INFO

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    add_current_message,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
]


def event_formatter(log_format: str = "CONSOLE", *, colors: bool = False) -> logging.Formatter:
    """Return structlog's formatter for events of the library and records of `logging`.

    - A line that is written while a handler runs contains the topic, tag, group and msg_id of its message.
    - Tracebacks do not show local variables, which may contain payloads and passwords.

    Args:
        log_format: ``CONSOLE`` for people, ``JSON`` for machines; one line per event.
        colors: True: colours, for a terminal.

    Raises:
        ValueError: There is no such format.
    """
    name = log_format.upper()
    if name not in ("CONSOLE", "JSON"):
        raise ValueError(f"log_format must be 'console' or 'json', got {log_format!r}")
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
        processors=[
            add_current_message,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers("JSON" if name == "JSON" else "CONSOLE", colors=colors),
        ],
    )


def show_events(settings: LoggingSettings, stream: TextIO | None = None) -> Callable[[], None]:
    """Show the events of the library on *stream*, and nothing else: the program's own log lines stay as they are.

    Under ``mqtemplate run`` the program has no place to configure them, so they are shown too, with the warnings of
    other libraries. If the program configures the root logger later, its handlers take over, so a line appears once.

    Args:
        stream: By default standard error: standard output belongs to the program.

    Returns:
        A function that restores the previous configuration.
    """
    target = stream or sys.stderr
    handler = _StandardError(target)
    handler.setFormatter(event_formatter(settings.format, colors=is_terminal(target)))
    root = logging.getLogger()
    handler.addFilter(lambda _record: all(each is handler for each in root.handlers))
    if not PROCESS.given.is_run:
        return _attached(handler, logging.getLogger(_LIBRARY), settings.level)
    handler.addFilter(_is_shown_by_run)
    return _attached(handler, root, settings.level)


def change_level(level: str) -> None:
    """Show events from this level on, where `show_events` or `configure_logging` shows them."""
    for logger in (logging.getLogger(), logging.getLogger(_LIBRARY)):
        if any(isinstance(handler, _StandardError) for handler in logger.handlers):
            logger.setLevel(level)


def _is_shown_by_run(record: logging.LogRecord) -> bool:
    is_ours = record.name.partition(".")[0] == _LIBRARY
    return is_ours or record.levelno >= logging.WARNING or is_of_application(record.pathname)


def configure_logging(settings: LoggingSettings, stream: TextIO | None = None) -> Callable[[], None]:
    """Write all events of structlog and all records of `logging` to *stream*, in one format.

    It adds a handler to the root logger and configures structlog, so only the program itself calls it.

    Args:
        stream: By default standard error: standard output belongs to the program.

    Returns:
        A function that restores the previous configuration.
    """
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # a cached logger would keep an earlier configuration
    )
    target = stream or sys.stderr
    handler = _StandardError(target)
    handler.setFormatter(event_formatter(settings.format, colors=is_terminal(target)))
    root = logging.getLogger()
    detach = _attached(handler, root, settings.level)
    before = {logger: logger.level for logger in map(logging.getLogger, _VERBOSE)}
    for logger in before:
        logger.setLevel(max(root.level, logging.WARNING))

    def undo() -> None:
        detach()
        for logger, level in before.items():
            logger.setLevel(level)
        structlog.reset_defaults()

    return undo


class _StandardError(logging.StreamHandler[Any]):
    """Handler for a stream that may be missing, closed, or an object of another program: a lost line ends nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            write_text(f"{text}{self.terminator}", self.stream)
        except OSError:
            return  # `handleError` would write to the same stream

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (`logging` calls this method)
        try:
            super().handleError(record)
        except (AttributeError, ValueError):
            return  # it reports to standard error, which is closed: there is no other place


def _attached(handler: logging.Handler, logger: logging.Logger, level: str) -> Callable[[], None]:
    """Add a handler to a logger and set the logger's level; return the function that undoes both."""
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before)

    return undo


def _renderers(log_format: Literal["CONSOLE", "JSON"], *, colors: bool) -> list[Processor]:
    if log_format == "JSON":
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(without_locals), structlog.processors.JSONRenderer(default=str)]
    return [_escape_controls, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback)]


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters in fields: structlog writes them to the terminal as they are."""
    return {
        name: escaped(value, keep="\n\t" if name in _MULTILINE else "") if isinstance(value, str) else value
        for name, value in event.items()
    }


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    """Write a traceback without control characters: the text of an error may contain what a message contains."""
    text = StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(escaped(text.getvalue(), keep="\n\t"))
