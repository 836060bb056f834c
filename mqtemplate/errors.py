"""Errors that the library raises on purpose.

::

    MQTemplateError
    ├── MessageError               the message itself cannot be sent; a retry cannot help
    │   ├── DestinationError       a destination is not "topic:tag", or the topic name is illegal
    │   ├── ConversionError        a payload cannot become a body, or a body cannot become the requested type
    │   ├── DelayError             the broker cannot keep the requested delay
    │   └── MessageDroppedError    a middleware of the template dropped the message
    ├── SendError                  the broker did not accept the message; a retry may help
    │   ├── SendConnectError       no connection to a broker or name server (a RemoteConnectError too)
    │   └── SendTimeoutError       no response in time; the broker may have stored the message
    ├── BrokerError                the broker cannot carry out the request now
    │   ├── BrokerClosedError      the broker is closed or was never started
    │   ├── OffsetOutOfRangeError  the queue does not contain the requested queue offset
    │   ├── RequestTimeoutError    no reply to a request arrived in time
    │   ├── RemoteProtocolError    the peer violated RocketMQ's protocol
    │   ├── RemoteConnectError     no connection to an address, or the connection was lost
    │   ├── RemoteTimeoutError     no response in time; the broker may have carried out the request
    │   ├── ForkedError            an object that was started before a fork is used in the child process
    │   ├── InvalidReceiptHandleError  the invisible time of a message was over; it was delivered again
    │   ├── PendingKeyError        a message with the same pending key is pending, and the send does not replace it
    │   ├── UnknownNameError       an administrator names a topic, a group or a message that does not exist
    │   └── UnsupportedError       this kind of broker does not support the operation
    │       └── PendingKeyUnknownError  a broker cannot decide about a pending key during a hand-over
    ├── StoreError                 the broker's files cannot be used as they are
    │   ├── StoreLockedError       another process owns the store directory
    │   ├── StoreFormatError       the store directory was written with other settings
    │   ├── StoreFullError         no disk space for another file
    │   │   └── StoreFencedError       this process may not be the owner of the store's history any more
    │   ├── CopyError              a copy of a store directory cannot be written or read
    │   └── CorruptRecordError     a record in a file is corrupt
    │       └── DeletedRecordError     a record is gone because retention deleted its file; it is not corrupt
    ├── ListenerError              the declaration of a listener or of its subscription is invalid
    │   ├── SelectorError              an SQL92 expression is invalid; it names the column
    │   └── ScheduleError              the declaration of a schedule is invalid, or there is no such schedule
    ├── ConfigurationError         application.yml, an environment variable or a setting is invalid
    ├── DependencyError            an object of the application cannot be created
    ├── EventLoopBlockedError      a blocking call on an event loop that would wait for this very loop
    └── SparkError                 Spark, its Java, or the state of a query cannot be used

And one warning: `UnitWarning`, for a duration without a unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

__all__ = [
    "BodyTooLargeError",
    "BrokerBusyError",
    "BrokerClosedError",
    "BrokerError",
    "ConfigurationError",
    "ConversionError",
    "CopyError",
    "CorruptRecordError",
    "DelayError",
    "DeletedRecordError",
    "DependencyError",
    "DestinationError",
    "EventLoopBlockedError",
    "ForkedError",
    "InvalidReceiptHandleError",
    "ListenerError",
    "MQTemplateError",
    "MessageDroppedError",
    "MessageError",
    "OffsetOutOfRangeError",
    "PendingKeyError",
    "PendingKeyUnknownError",
    "Picklable",
    "RemoteConnectError",
    "RemoteProtocolError",
    "RemoteTimeoutError",
    "RequestTimeoutError",
    "ScheduleError",
    "SelectorError",
    "SendConnectError",
    "SendError",
    "SendTimeoutError",
    "SparkError",
    "StoreError",
    "StoreFencedError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "UnitWarning",
    "UnknownNameError",
    "UnsupportedError",
    "escaped",
    "reworded",
]

_MAX_TEXT = 20_000

_E = TypeVar("_E", bound=BaseException)

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, among them those that start commands of a terminal
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction of the text around them
    "\u200b\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # separators, invisible characters
    "\ud800-\udfff]"  # lone surrogates, which no stream can write
)


def _as_python(char: str) -> str:
    return repr(char)[1:-1]


def escaped(text: str, *, keep: str = "", escape: Callable[[str], str] = _as_python) -> str:
    """Return a text without characters that a terminal obeys, that hide, or that no stream can write.

    Args:
        keep: Characters that stay, such as line feed and tab.
        escape: Returns what stands for such a character.
    """
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else escape(found[0]), text)


class Picklable(Exception):  # noqa: N818 (a base class of errors and of requests of handlers)
    """Exception that can be copied, and pickled for another process, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a pickle contains. An exception is otherwise rebuilt as ``Class(*args)``, which may not fit."""
        return _rebuilt, (type(self), self.args), self.__dict__ or None


def _rebuilt(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


def reworded(error: _E, text: str) -> _E:
    """Return the same error with another text. Its class may be one of the user, with a constructor of its own."""
    twin = copy(error)
    twin.args = (text,)
    return twin


class MQTemplateError(Picklable):
    """Base class of all errors that the library raises on purpose.

    An error can be pickled and copied. Its text can be printed everywhere.

    Attributes:
        source: File and line of the class or function that caused the error, if that is known.
        operation: What failed, such as the send of one message, if the text starts with it.
        problem: The text without the name of the value that is wrong, if it begins with one. Configuration errors show
            the key of the file instead.
    """

    source: str | None = None
    operation: str = ""
    problem: str | None = None

    @classmethod
    def during(cls, operation: str, reason: str) -> Self:
        """Return an error whose text is the operation and the reason."""
        error = cls(f"{operation}: {reason}")
        error.operation = operation
        return error

    def of_part(self, operation: str) -> Self:
        """Return the error of one part of the operation, such as one message of a batch, with the same reason.

        It is another object: the parts may belong to several threads, and each raises its own.
        """
        text = operation + str(self).removeprefix(self.operation) if self.operation else str(self)
        error = reworded(self, text)
        error.operation = operation if self.operation else ""
        error.__cause__ = self.__cause__
        return error

    @classmethod
    def of_value(cls, name: str, problem: str) -> Self:
        """Return an error whose text is the name of a value and the problem with it."""
        error = cls(f"{name}: {problem}")
        error.problem = problem
        return error

    def __str__(self) -> str:
        text = escaped(super().__str__(), keep="\n\t")
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT:,} characters more)"


class MessageError(MQTemplateError, ValueError):
    """The message itself cannot be sent; a retry cannot help."""


class DestinationError(MessageError):
    """A destination is not ``topic`` or ``topic:tag``, or the name of the topic is illegal."""


class ConversionError(MessageError):
    """A payload cannot become a message body, or a body cannot become the type that a handler declares."""


class BodyTooLargeError(ConversionError):
    """A compressed body is larger than ``max-decompressed-size`` when it is decompressed. A retry cannot help."""


class DelayError(MessageError):
    """The requested delay is contradictory, not a number, or longer than the broker supports."""


class MessageDroppedError(MessageError):
    """A middleware of the template dropped the message; nothing was sent."""


class SendError(MQTemplateError):
    """The broker did not accept the message. A retry may help.

    Attributes:
        tries: Each try of a remote broker and why it failed; equal ones in a row are one entry.
        queue_is_away: The broker of the chosen queue has stopped, and the route has lost the queue. Nothing was stored.
    """

    tries: tuple[str, ...] = ()
    queue_is_away: bool = False


class SendTimeoutError(SendError, TimeoutError):
    """The broker did not respond in time. It may have stored the message."""


class BrokerError(MQTemplateError):
    """The broker cannot carry out the request now."""


class BrokerBusyError(BrokerError):
    """The broker is overloaded, and refused the request. A retry may help."""


class BrokerClosedError(BrokerError):
    """The broker is closed or was never started."""


class OffsetOutOfRangeError(BrokerError):
    """The queue does not contain the queue offset that a pull requested.

    Attributes:
        next_offset: The queue offset to continue from: the minimum or the maximum of the queue.
    """

    def __init__(self, message: str, next_offset: int) -> None:
        super().__init__(message)
        self.next_offset = next_offset


class RequestTimeoutError(BrokerError, TimeoutError):
    """No reply to a request arrived in time. A consumer may have handled the request."""


class RemoteProtocolError(BrokerError):
    """The peer sent bytes, a header or a body that violates RocketMQ's protocol.

    An invalid frame closes its connection. A retry on a new connection may help if the peer speaks the protocol. An
    invalid header or body fails only its own request; the same request fails again.
    """


class RemoteConnectError(BrokerError):
    """There is no connection to an address, or it was lost before the response arrived.

    A retry may help; with another broker or name server it may help at once. If the connection was lost, the peer may
    have carried out the request.

    Attributes:
        was_sent: The connection was lost after the request was sent, or while it was.
    """

    def __init__(self, message: str, *, was_sent: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class SendConnectError(SendError, RemoteConnectError):
    """The last try of a send found no connection. A retry may help later: the send was tried for its whole timeout.

    If a connection was lost (*was_sent*), the broker may have stored the message.
    """


class RemoteTimeoutError(BrokerError, TimeoutError):
    """No response to a request arrived in time. The peer may have carried it out. A retry may help."""


class ForkedError(BrokerError):
    """A broker, store, consumer, template or application is used in a process that was forked after its start.

    The message names the object, the process that started it, and what to do: start after the fork, or share one broker
    by running it as a server. The parent process is not affected.
    """


class InvalidReceiptHandleError(BrokerError):
    """The receipt handle of a delivery by POP is not valid any more. A retry cannot help.

    The invisible time of the message was over, so it is delivered again, and may be acknowledged by its newer receipt
    handle only.
    """


class PendingKeyError(BrokerError):
    """A message with the same pending key is pending, and the send has ``on_pending="refuse"``. Nothing was stored.

    Attributes:
        key: The pending key.
        topic: Topic that receives the pending message when it is due.
        handle: Handle of the pending message.
        msg_id: Its message id.
        deliver_ms: Its deliver time (epoch ms).
    """

    def __init__(self, key: str, topic: str, handle: str, msg_id: str, deliver_ms: int) -> None:
        due = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=deliver_ms)
        super().__init__(
            f"a message with pending_key {key!r} is pending for topic {topic!r}: id {msg_id}, due "
            f"{due.isoformat(timespec='milliseconds')}, handle {handle}; nothing was stored. Pass "
            "on_pending='replace', 'keep' or 'postpone' to allow for it, or cancel it first by its handle"
        )
        self.key, self.topic, self.handle, self.msg_id, self.deliver_ms = key, topic, handle, msg_id, deliver_ms


class UnknownNameError(BrokerError):
    """An administrator names a topic, a consumer group or a message that does not exist. The text has similar names."""


class UnsupportedError(BrokerError):
    """This kind of broker does not support the operation. The message names the reason and an alternative."""


class PendingKeyUnknownError(UnsupportedError):
    """A broker cannot decide about a pending key during a hand-over. Afterwards the same send succeeds.

    The message that is pending under the key may be in another broker.
    """


class StoreError(MQTemplateError):
    """The files of the broker cannot be used as they are."""


class StoreLockedError(StoreError):
    """Another process owns the store directory."""


class StoreFormatError(StoreError):
    """The store directory was written with other settings, or by another program."""


class StoreFullError(StoreError):
    """There is no disk space for another file.

    Acknowledged messages are safe. Sending works again when there is space.
    """


class StoreFencedError(StoreFullError):
    """Nothing is stored: another process may own the history of the store, or its messages have moved to a new broker.

    As with a full disk nothing was written, and releases are tried again.
    """


class CopyError(StoreError):
    """A copy of a store directory cannot be written or read: its place does not answer, or an object is damaged."""


class CorruptRecordError(StoreError):
    """A record in a file is corrupt.

    An incomplete record at the end of the log is not an error: recovery truncates it and logs that.

    Attributes:
        path: The file.
        physical_offset: Commit log offset of the first byte of the record.
        reason: Description of the damage.
        queue_offset: Queue offset that the record was read from; None if unknown.
    """

    queue_offset: int | None = None

    def __init__(self, path: Path | str, physical_offset: int, reason: str) -> None:
        super().__init__(
            f"{Path(path).name}: bad record at physical offset {physical_offset}: {reason}; "
            "keep a copy of the folder, then restore the file from a backup"
        )
        self.path, self.physical_offset, self.reason = Path(path), physical_offset, reason


class DeletedRecordError(CorruptRecordError):
    """A record cannot be read because retention deleted its file.

    The files are valid; readers continue after the deleted records.

    Attributes:
        log_start: Physical offset of the first record that still exists.
    """

    def __init__(self, path: Path | str, physical_offset: int, log_start: int) -> None:
        StoreError.__init__(
            self,
            f"the record at physical offset {physical_offset} was deleted by retention: the commit log now starts at "
            f"{log_start}; to keep messages longer, raise file-reserved-time or free disk space",
        )
        self.path, self.physical_offset, self.log_start = Path(path), physical_offset, log_start
        self.reason = "it was deleted by retention"


class ListenerError(MQTemplateError):
    """The declaration of a listener or of its subscription is invalid. Raised when the application starts."""


class ScheduleError(ListenerError):
    """A schedule is declared wrongly, or there is no schedule of that name."""


class SelectorError(ListenerError):
    """An SQL92 expression has a syntax error, or compares operands that cannot be compared.

    Attributes:
        expression: The whole expression.
        line: Line of the mistake, counted from 1.
        column: Column of the mistake, counted from 1; one past the end if something is missing there.
        reason: Description of the mistake, and what to write instead.
    """

    def __init__(self, expression: str, at: int, reason: str) -> None:
        lines = re.split(r"\r\n|\r|\n", expression[:at])
        self.expression, self.reason = expression, reason
        self.line, self.column = len(lines), len(lines[-1]) + 1
        position = f"line {self.line}, column" if re.search(r"[\r\n]", expression) else "column"
        first, last = max(0, at - 60), at + 60
        shown = f"{'…' if first else ''}{expression[first:last]}{'…' if last < len(expression) else ''}"
        super().__init__(f"SQL92 expression {shown!r}, {position} {self.column}: {reason}")


class ConfigurationError(MQTemplateError):
    """The configuration is invalid. The message names file, line and the most similar known key."""


class DependencyError(MQTemplateError):
    """An object of the application cannot be created.

    The message names the class, the parameter and the available objects.
    """


class EventLoopBlockedError(MQTemplateError, RuntimeError):
    """A blocking call in the thread of an event loop would wait for something that runs on this loop.

    The message names the call to await instead.
    """


class SparkError(MQTemplateError):
    """Spark, its Java, or the state of a query cannot be used."""


class UnitWarning(UserWarning):
    """A duration is a number without a unit, which is easily read as another duration.

    The text says how it is read, and what to write. The warning points at the line of the application.
    """
