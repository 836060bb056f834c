"""Every error the library raises on purpose.

::

    MQTemplateError
    ├── MessageError               the message itself cannot be sent; a retry cannot help
    │   ├── DestinationError       "topic:tag" does not parse, or the topic name is illegal
    │   ├── ConversionError        a payload cannot become a body, or a body cannot become the type asked for
    │   └── DelayError             the delay asked for is not a delay the broker can keep
    ├── SendError                  the broker did not take the message; a retry may help
    │   └── SendTimeoutError       no answer in time; the broker may have stored it all the same
    ├── BrokerError                the broker cannot do what was asked now
    │   ├── BrokerClosedError      it was closed
    │   ├── OffsetOutOfRangeError  the queue offset asked for is not in the queue
    │   ├── RequestTimeoutError    a request was sent, and no reply came in time
    │   ├── RemoteProtocolError    the peer sent what is not RocketMQ's protocol
    │   ├── RemoteConnectError     no connection to that address, or it was lost
    │   ├── RemoteTimeoutError     a request was not answered in time; it may have been carried out all the same
    │   ├── ForkedError            the client was made before a fork, and this is the child
    │   └── UnsupportedError       this kind of broker cannot do it at all
    ├── StoreError                 the files under the broker
    │   ├── StoreLockedError       another process owns the folder
    │   ├── StoreFormatError       the folder was written with other settings
    │   ├── StoreFullError         no room on the disk for another file
    │   └── CorruptRecordError     a record inside a file is damaged
    │       └── DeletedRecordError     it is not damaged: retention deleted it with its file
    ├── ListenerError              a listener or its subscription is declared wrongly
    │   └── SelectorError              an SQL92 expression that cannot be read, with the column of the mistake
    ├── ConfigurationError         application.yml, the environment, or a setting
    ├── DependencyError            an object of the application cannot be built
    └── SparkError                 Spark, its Java, or the state of a query
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = [
    "BrokerClosedError",
    "BrokerError",
    "ConfigurationError",
    "ConversionError",
    "CorruptRecordError",
    "DelayError",
    "DeletedRecordError",
    "DependencyError",
    "DestinationError",
    "ForkedError",
    "ListenerError",
    "MQTemplateError",
    "MessageError",
    "OffsetOutOfRangeError",
    "RemoteConnectError",
    "RemoteProtocolError",
    "RemoteTimeoutError",
    "RequestTimeoutError",
    "SelectorError",
    "SendError",
    "SendTimeoutError",
    "SparkError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreLockedError",
    "UnsupportedError",
]


class MQTemplateError(Exception):
    """The root: whatever the library raises on purpose is one of these."""


class MessageError(MQTemplateError, ValueError):
    """The message itself cannot be sent; a retry cannot help."""


class DestinationError(MessageError):
    """A destination is not ``topic`` or ``topic:tag``, or the topic's name is illegal."""


class ConversionError(MessageError):
    """A payload cannot become a message body, or a body cannot become the type a handler asks for."""


class DelayError(MessageError):
    """The delay asked for is contradictory, unreadable, or beyond what the broker can keep."""


class SendError(MQTemplateError):
    """The broker did not take the message. A retry may help."""


class SendTimeoutError(SendError, TimeoutError):
    """No answer in time; the broker may have stored the message all the same."""


class BrokerError(MQTemplateError):
    """The broker cannot do what was asked, now."""


class BrokerClosedError(BrokerError):
    """The broker was closed, or was never started."""


class OffsetOutOfRangeError(BrokerError):
    """A pull asked for a queue offset that the queue does not hold.

    Attributes:
        next_offset: Where to go on: the queue's minimum or maximum.
    """

    def __init__(self, message: str, next_offset: int) -> None:
        super().__init__(message)
        self.next_offset = next_offset


class RequestTimeoutError(BrokerError, TimeoutError):
    """A request was sent, and no reply to it came in time. Somebody may have handled it all the same."""


class RemoteProtocolError(BrokerError):
    """The peer sent bytes, a header or a body that RocketMQ's protocol does not have.

    A broken frame ends its connection; over a new one a retry may help, if the peer does speak the protocol. A header
    or a body that cannot be read ends that one request; the same request fails again.
    """


class RemoteConnectError(BrokerError):
    """There is no connection to that address, or it was lost while an answer was awaited.

    A retry may help, with another broker or name server at once. A request whose connection was lost may have been
    carried out all the same.
    """


class RemoteTimeoutError(BrokerError, TimeoutError):
    """A request was not answered in time. It may have been carried out all the same; a retry may help."""


class ForkedError(BrokerError):
    """The client was made before a fork, and this is the child, which must make one of its own."""


class UnsupportedError(BrokerError):
    """This kind of broker cannot do it at all; the message names the reason and a way out."""


class StoreError(MQTemplateError):
    """The files under the broker cannot be used as they are."""


class StoreLockedError(StoreError):
    """Another process owns the folder."""


class StoreFormatError(StoreError):
    """The folder was written with other settings, or by something else."""


class StoreFullError(StoreError):
    """There is no room for another file. What was acknowledged is safe; sending works again when there is room."""


class CorruptRecordError(StoreError):
    """A record inside a file is damaged. (A torn tail is not: recovery cuts it off and logs that.)

    Attributes:
        path: The file.
        physical_offset: First byte of the record, counted over the whole commit log.
        reason: What is wrong with it.
        queue_offset: Its place in the queue that it was read from, where that is known.
    """

    queue_offset: int | None = None

    def __init__(self, path: Path | str, physical_offset: int, reason: str) -> None:
        super().__init__(
            f"{Path(path).name}: bad record at physical offset {physical_offset}: {reason}; "
            "keep a copy of the folder, then restore the file from a backup"
        )
        self.path, self.physical_offset, self.reason = Path(path), physical_offset, reason


class DeletedRecordError(CorruptRecordError):
    """A record cannot be read since retention deleted its file. Nothing is wrong with the files; go on behind it.

    Attributes:
        log_begin: Physical offset of the first record that was kept.
    """

    def __init__(self, path: Path | str, physical_offset: int, log_begin: int) -> None:
        StoreError.__init__(
            self,
            f"the record at physical offset {physical_offset} was deleted by retention: the commit log begins at "
            f"{log_begin} now; to keep messages longer, raise file-reserved-time, or see that the disk has room",
        )
        self.path, self.physical_offset, self.log_begin = Path(path), physical_offset, log_begin
        self.reason = "it was deleted by retention"


class ListenerError(MQTemplateError):
    """A listener or its subscription is declared wrongly; found when the application starts."""


class SelectorError(ListenerError):
    """An SQL92 expression cannot be read, or compares what cannot be compared. The same text fails again.

    Attributes:
        expression: The whole text.
        line: Of the mistake, from 1.
        column: Of the mistake in its line, from 1; behind the end where something is missing.
        reason: What is wrong there, and what to write.
    """

    def __init__(self, expression: str, at: int, reason: str) -> None:
        lines = re.split(r"\r\n|\r|\n", expression[:at])
        self.expression, self.reason = expression, reason
        self.line, self.column = len(lines), len(lines[-1]) + 1
        place = f"line {self.line}, column" if re.search(r"[\r\n]", expression) else "column"
        first, last = max(0, at - 60), at + 60
        shown = f"{'…' if first else ''}{expression[first:last]}{'…' if last < len(expression) else ''}"
        super().__init__(f"SQL92 expression {shown!r}, {place} {self.column}: {reason}")


class ConfigurationError(MQTemplateError):
    """The configuration cannot be used; the message names file, line, and the nearest known key."""


class DependencyError(MQTemplateError):
    """An object of the application cannot be built; the message names the class, the parameter and what there is."""


class SparkError(MQTemplateError):
    """Spark, its Java, or the state of a query cannot be used as it is."""
