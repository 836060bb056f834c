"""Log events of the library: a name and fields, written to Python's `logging`.

::

    _log = get_logger("mqtemplate.delay")
    _log.warning("release.stalled", service=self.name, reason=error_text(exc))

An event is one record of `logging`, whatever the program has configured there:

- Without configuration Python itself shows warnings and errors on standard error, and the library adds nothing.
- An ordinary formatter shows ``release.stalled service=timers reason='disk full'``; the record has the level,
  the logger and the time. That text is the record's ``msg``, so the filters of the program can read and replace it.
- The fields are attributes of the record, as with ``extra``, so formatters for JSON show them.
- structlog's ``ProcessorFormatter`` gets the fields, as from structlog's own loggers, so any of its renderers works.

A filter that replaces ``msg`` takes the fields away, too: they may contain what it removed from the text.

The library configures neither `logging` nor structlog. An event that nothing wants costs one call of ``isEnabledFor``.
What filters, handlers and formatters of the program raise never reaches the code that logs: see `lost_events`.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import TracebackType
from typing import Any, TypeAlias

from mqtemplate.errors import escaped
from mqtemplate.user_code import error_text, is_interrupt, safe_text, traceback_of, type_name

__all__ = [
    "STRUCTLOG_KEY_PREFIX",
    "Event",
    "EventLogger",
    "LimitedLog",
    "get_logger",
    "has_handlers",
    "lost_events",
]

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | None

STRUCTLOG_KEY_PREFIX = "structlog_"
"""How the names of structlog's context variables begin. The library reads and sets them without an import of structlog,
which loads a library for terminals, and takes longer than an application otherwise needs to start."""

_IN_RECORD = frozenset({"event", "level", "logger", "timestamp", "exc_info"})
"""Keys of an event that its text does not repeat: a formatter takes them from the record."""

_RESERVED = _IN_RECORD | {"message", "asctime"}
"""Keys that do not become attributes of a record: a formatter sets the last two."""

_QUOTED = frozenset(" =\"'")
"""Characters that need quotes around a value."""

_MAX_PEER_TEXT = 500
"""Longest text in a field of an event that a peer caused."""

_STACK_LEVEL = 3  # the caller of `debug`, …, `critical`: the line that a formatter shows
_STRUCTLOG = ("_logger", "_name")
"""Attributes of a record by which structlog's ``ProcessorFormatter`` knows that ``msg`` has the fields."""

_ATTRIBUTE_TYPES = (str, int, float, bool, type(None), list, tuple, dict)
"""Types of the attributes of records: values that can be pickled, for handlers that pass records to other processes."""


# --- events ---------------------------------------------------------------------------------------


class Event(str):
    """The text of an event, ``name field=value …``, with its fields.

    Attributes:
        fields: The event as structlog has it: the fields, ``event``, ``level``, ``logger`` and ``timestamp``.
        attributes: Names of the attributes that the record has for the fields.
    """

    __slots__ = ("attributes", "fields")

    fields: dict[str, Any]
    attributes: tuple[str, ...]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Event:
        """Return the event with these fields. One whose text fails is replaced."""
        parts = [str(fields["event"])]
        for key, value in fields.items():
            if key in _IN_RECORD:
                continue
            try:
                parts.append(f"{key}={_shown(value)}")
            except BaseException as error:
                if is_interrupt(error):
                    raise
                fields[key] = f"<unprintable {type_name(value)}>"
                parts.append(f"{key}={fields[key]!r}")
        event = cls(" ".join(parts))
        event.fields, event.attributes = fields, ()
        return event

    def copy(self) -> dict[str, Any]:
        """Return the fields. structlog's ``ProcessorFormatter`` calls it on the message of a record."""
        return dict(self.fields)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a traceback cannot be pickled


@cache
def _record_class(base: type[logging.LogRecord]) -> type[logging.LogRecord]:
    """Return the class of records of events, from the class that the program's record factory makes."""

    class EventRecord(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            if name == "msg" and type(event := self.__dict__.get("msg")) is Event:
                if value == event:
                    return  # a filter that found nothing to replace, or `logging.handlers.QueueHandler`
                # "message" is the text that a formatter of another handler may have made before.
                for each in (*_STRUCTLOG, "message", *event.attributes):
                    self.__dict__.pop(each, None)
            super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Any, ...]:
            # The class has no name by which another process could find it. There the message is a text.
            return logging.makeLogRecord, ({k: v for k, v in self.__dict__.items() if k not in _STRUCTLOG},)

    EventRecord.__name__ = EventRecord.__qualname__ = base.__name__
    return EventRecord


def _add_fields(record: logging.LogRecord, event: Event) -> None:
    """Give a record the fields as attributes. A name that the record has already keeps its value."""
    values = record.__dict__
    names = [name for name in event.fields if name not in _RESERVED and name not in values]
    for name in names:
        value = event.fields[name]
        values[name] = value if isinstance(value, _ATTRIBUTE_TYPES) else _shown(value)
    event.attributes = tuple(names)
    record.__class__ = _record_class(type(record))  # type: ignore[arg-type]  # mypy: a record is not hashable


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
        try:
            method = logging.getLevelName(level).lower()
            found = _context()
            found.update(self._fields)
            found.update(fields)
            found["event"] = name
            if _is_captured(self._logger, method, found):
                return
            exc_info = _exc_info(found)
            logger = self._logger
            found["level"], found["logger"] = method, logger.name
            found["timestamp"] = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            event = Event.of(found)
            path, line, function, _ = logger.findCaller(False, _STACK_LEVEL)
            extra = dict(zip(_STRUCTLOG, (logger, method), strict=True))  # as structlog's wrap_for_formatter
            record = logger.makeRecord(logger.name, level, path, line, event, (), exc_info, function, extra)
            _add_fields(record, event)
            logger.handle(record)
        except BaseException as error:  # of a filter, handler, formatter, processor or record factory of the program
            if is_interrupt(error):
                raise
            _LOST.note(name, error)


class _LostEvents:
    """Events that the program's logging refused with an exception. The first one is reported on standard error."""

    def __init__(self) -> None:
        self.count = 0
        self._is_reported = False

    def note(self, event: str, error: BaseException) -> None:
        self.count += 1
        if self._is_reported or not logging.raiseExceptions:
            return
        self._is_reported = True
        try:
            sys.stderr.write(
                f"mqtemplate: the event {event} was not logged, since the logging of this program raised "
                f"{error_text(error)}; further ones are counted and not reported\n"
            )
        except BaseException as failure:
            if is_interrupt(failure):
                raise
            self._is_reported = False  # no standard error, or a closed one


_LOST = _LostEvents()


def lost_events() -> int:
    """Return how many events were lost, since the program's logging raised something."""
    return _LOST.count


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


def _bounded(name: str, value: object) -> object:
    if name == "exc_info":
        return _without_controls(value) if isinstance(value, BaseException) else value
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else safe_text(value, sys.maxsize)
    return escaped(text if len(text) <= _MAX_PEER_TEXT else f"{text[:_MAX_PEER_TEXT]}… ({len(text)} characters)")


def _without_controls(error: BaseException) -> BaseException:
    """Return an error with the name, the stack and the visible text of *error*: formatters write texts as they are."""
    # Code of an application may have raised it, and its class may refuse every question.
    names = {name: type_name(error, name) for name in ("__module__", "__qualname__")}
    copy = type(type_name(error), (Exception,), names)
    return copy(str(_bounded("", safe_text(error, sys.maxsize)))).with_traceback(traceback_of(error))  # type: ignore[no-any-return]


def get_logger(name: str) -> EventLogger:
    """Return the logger of events of a part of the library, such as ``mqtemplate.store``."""
    return EventLogger(logging.getLogger(name), {})


def has_handlers() -> bool:
    """Return True if the program has configured a handler that gets the library's events."""
    return logging.getLogger("mqtemplate").hasHandlers()


def _context() -> dict[str, Any]:
    """Return the fields that the program has bound to its context, as ``structlog.contextvars.get_contextvars``."""
    return {
        variable.name.removeprefix(STRUCTLOG_KEY_PREFIX): value
        for variable, value in copy_context().items()
        if variable.name.startswith(STRUCTLOG_KEY_PREFIX) and value is not ...
    }


def _exc_info(event: dict[str, Any]) -> _ExcInfo:
    """Put the exception of an event into the one form that all formatters take; return it."""
    given = event.pop("exc_info", None)
    if given is None or given is False:
        return None
    if issubclass(type(given), BaseException):
        given = (type(given), given, traceback_of(given))
    elif not isinstance(given, tuple):
        given = sys.exc_info()
    event["exc_info"] = given = _formattable(given)
    exc_info: _ExcInfo = given
    return exc_info


def _formattable(exc_info: Any) -> Any:
    """Return an exception, or another one in its place if its traceback cannot be formatted, or written to a stream."""
    if exc_info[1] is None:
        return exc_info
    try:
        "".join(_texts(traceback.TracebackException(*exc_info, lookup_lines=False))).encode()
    except BaseException as error:
        if is_interrupt(error):
            raise
        text = escaped(error_text(exc_info[1]), keep="\n\t")
        return RuntimeError, RuntimeError(text), exc_info[2]
    return exc_info


def _texts(trace: traceback.TracebackException) -> Iterator[str]:
    """Yield the texts of an exception and of those that its traceback shows with it."""
    yield from trace.format_exception_only()
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            yield from _texts(other)


def _is_captured(logger: logging.Logger, method: str, event: dict[str, Any]) -> bool:
    """Return True if a test collects events: ``structlog.testing.capture_logs`` gets ours, too, and no handler does."""
    testing = sys.modules.get("structlog.testing")
    if testing is None:
        return False  # a test would have imported it
    import structlog

    processors = structlog.get_config()["processors"]
    if not processors or not isinstance(processors[-1], testing.LogCapture):
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
