"""Log events of the library: a name and fields, written to Python's `logging`.

::

    _log = get_logger("mqtemplate.delay")
    _log.warning("release.stalled", service=self.name, reason=str(exc))

An event is one record of `logging`, whatever the program has configured there:

- Without configuration Python itself shows warnings and errors on standard error, and the library adds nothing.
- An ordinary formatter shows ``release.stalled service=timers reason='disk full'``; the level, the logger and the time
  are those of the record.
- structlog's ``ProcessorFormatter`` gets the fields, as from structlog's own loggers, so any of its renderers works. A
  formatter that takes a mapping as message, as formatters for JSON do, gets them too.

The library configures neither `logging` nor structlog. An event that nothing wants costs one call of ``isEnabledFor``.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeAlias

__all__ = ["Event", "EventLogger", "LimitedLog", "get_logger", "visible"]

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | None

_IN_RECORD = frozenset({"event", "level", "logger", "timestamp", "exc_info"})
"""Keys of an event that its text does not repeat: a formatter takes them from the record."""

_QUOTED = frozenset(" =\"'")
"""Characters that need quotes around a value."""

_MAX_PEER_TEXT = 500
"""Longest text in a field of an event that a peer caused."""

_STACK_LEVEL = 3  # the caller of `debug`, …, `critical`: the line that a formatter shows


class Event(dict[str, Any]):
    """An event with its fields. As text: ``name field=value …``."""

    def __str__(self) -> str:
        fields = (f" {key}={_shown(value)}" for key, value in self.items() if key not in _IN_RECORD)
        return f"{self['event']}{''.join(fields)}"


class EventLogger:
    """Logger of events, with fields that each of its events contains.

    Args:
        logger: Logger of the standard library that gets the records.
        fields: Fields of each event.
    """

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: dict[str, Any]) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: Any) -> EventLogger:
        """Return a logger whose events contain these fields, too."""
        return EventLogger(self._logger, self._fields | fields)

    def is_enabled_for(self, level: int) -> bool:
        """Return True if an event of this level is written: for fields that cost something to compute."""
        return self._logger.isEnabledFor(level)

    def debug(self, event: str, /, **fields: Any) -> None:
        """Write a detail for the search of an error."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Write what an operator wants to know in normal operation; nothing per message."""
        if self._logger.isEnabledFor(logging.INFO):
            self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Write what an operator should look at."""
        if self._logger.isEnabledFor(logging.WARNING):
            self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Write a failure. ``exc_info=error`` adds its stack."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Write a failure with the stack of the exception that is being handled."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._write(logging.ERROR, event, {"exc_info": True} | fields)

    def critical(self, event: str, /, **fields: Any) -> None:
        """Write a failure after which the program cannot go on."""
        if self._logger.isEnabledFor(logging.CRITICAL):
            self._write(logging.CRITICAL, event, fields)

    def log(self, level: int, event: str, /, **fields: Any) -> None:
        """Write an event of a level of `logging`, such as ``logging.WARNING``."""
        if self._logger.isEnabledFor(level):
            self._write(level, event, fields)

    def _write(self, level: int, name: str, fields: dict[str, Any]) -> None:
        method = logging.getLevelName(level).lower()
        event = Event(_context())
        event.update(self._fields)
        event.update(fields)
        event["event"] = name
        if _is_captured(self._logger, method, event):
            return
        exc_info = _exc_info(event)
        event["level"], event["logger"] = method, self._logger.name
        event["timestamp"] = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        # The two attributes are those of structlog's wrap_for_formatter: its ProcessorFormatter reads the fields.
        extra = {"_logger": self._logger, "_name": method}
        self._logger.log(level, event, exc_info=exc_info, extra=extra, stacklevel=_STACK_LEVEL)


class LimitedLog:
    """Logger of events that a peer can cause in any number: some lines of each event in a period, then a count.

    Fields and errors may contain what the peer sent. So texts are cut, and control characters are escaped: a formatter
    may write them to a terminal as they are.

    The first line of the next period has the number of suppressed ones, as ``suppressed``. `summarize` writes it if no
    such line comes.

    Args:
        now_ms: Returns the time in milliseconds, since any moment.
        burst: Number of lines of one event in a period.
    """

    def __init__(
        self, log: EventLogger, now_ms: Callable[[], int], *, burst: int = 10, period_ms: int = 60_000
    ) -> None:
        self._log = log
        self._now_ms = now_ms
        self._burst = burst
        self._period_ms = period_ms
        self._lock = threading.Lock()
        self._periods: dict[str, _Period] = {}

    def warning(self, event: str, /, **fields: Any) -> None:
        """Write what an operator should look at."""
        self.log(logging.WARNING, event, **fields)

    def log(self, level: int, event: str, /, **fields: Any) -> None:
        """Write an event of a level of `logging`, unless there were too many of its name in this period."""
        now_ms = self._now_ms()
        with self._lock:
            period = self._periods.get(event)
            if period is None or now_ms >= period.start_ms + self._period_ms:
                if period is not None and period.suppressed:
                    fields["suppressed"] = period.suppressed
                period = self._periods[event] = _Period(now_ms, level)
            if period.written >= self._burst:
                period.suppressed += 1
                return
            period.written += 1
        self._log.log(level, event, **{name: _bounded(name, value) for name, value in fields.items()})

    def summarize(self) -> None:
        """Write the number of suppressed lines of the periods that are over. Called from time to time."""
        limit = self._now_ms() - self._period_ms
        with self._lock:
            over = {event: period for event, period in self._periods.items() if period.start_ms <= limit}
            for event in over:
                del self._periods[event]
        for event, period in over.items():
            if period.suppressed:
                self._log.log(period.level, event, suppressed=period.suppressed)


@dataclass(slots=True)
class _Period:
    """The lines of one event since a time."""

    start_ms: int
    level: int
    written: int = 0
    suppressed: int = 0


def visible(text: str, *, keep: str = "") -> str:
    """Return *text* with an escape sequence in place of each character that cannot be printed, except those in *keep*.

    Such characters move the cursor of a terminal, change its title or colours, or start another line.
    """
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text])


def _bounded(name: str, value: object) -> object:
    if name == "exc_info":
        return _without_controls(value) if isinstance(value, BaseException) else value
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return visible(text if len(text) <= _MAX_PEER_TEXT else f"{text[:_MAX_PEER_TEXT]}… ({len(text)} characters)")


def _without_controls(error: BaseException) -> BaseException:
    """Return an error with the name, the stack and the visible text of *error*: formatters write texts as they are."""
    kind = type(error)
    copy = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    text = str(_bounded("", str(error)))
    return copy(text).with_traceback(error.__traceback__)  # type: ignore[no-any-return]


def get_logger(name: str) -> EventLogger:
    """Return the logger of events of a part of the library, such as ``mqtemplate.store``."""
    return EventLogger(logging.getLogger(name), {})


def _context() -> dict[str, Any]:
    """Return the fields that the program has bound to its context; none on Spark's executors without structlog."""
    try:
        from structlog.contextvars import get_contextvars
    except ImportError:
        return {}
    return get_contextvars()


def _exc_info(event: Event) -> _ExcInfo:
    """Put the exception of an event into the one form that all formatters take; return it."""
    given = event.get("exc_info")
    if not given:
        event.pop("exc_info", None)
        return None
    if isinstance(given, BaseException):
        given = (type(given), given, given.__traceback__)
    elif not isinstance(given, tuple):
        given = sys.exc_info()
    event["exc_info"] = given
    exc_info: _ExcInfo = given
    return exc_info


def _is_captured(logger: logging.Logger, method: str, event: Event) -> bool:
    """Return True if a test collects events: ``structlog.testing.capture_logs`` gets ours, too, and no handler does."""
    try:
        import structlog
        from structlog.testing import LogCapture
    except ImportError:
        return False
    processors = structlog.get_config()["processors"]
    if not processors or not isinstance(processors[-1], LogCapture):
        return False
    given: Any = dict(event)
    try:
        for processor in processors:
            given = processor(logger, method, given)
    except structlog.DropEvent:
        pass  # how LogCapture ends the chain
    return True


def _shown(value: object) -> str:
    """Return a value as one word, or in quotes."""
    if isinstance(value, list | tuple | dict | set | frozenset):
        return repr(value)
    text = str(value)
    return text if text and text.isprintable() and _QUOTED.isdisjoint(text) else repr(text)
