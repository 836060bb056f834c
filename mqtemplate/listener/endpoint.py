"""Endpoint: a handler, the way to call it with a message, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mqtemplate.converter import MessageConverter
from mqtemplate.listener.headers import message_headers
from mqtemplate.listener.settings import ListenerSettings
from mqtemplate.message import MessageExt

Handler = Callable[..., object]
SingleCall = Callable[[MessageExt], object]
"""Function that calls a handler with one message."""

_Read = Callable[[MessageExt], object]


class Extra(Enum):
    """Value that a handler can take after the payload."""

    MESSAGE = "message"
    QUEUE = "queue"
    HEADERS = "headers"


_READ_EXTRA: dict[Extra, _Read] = {
    Extra.MESSAGE: lambda message: message,
    Extra.QUEUE: lambda message: message.message_queue,
    Extra.HEADERS: message_headers,
}


@dataclass(frozen=True, slots=True)
class BatchCall:
    """Functions that call a batch handler. Each body is read alone, so that an unreadable one fails alone."""

    read: _Read
    call: Callable[[list[object], Sequence[MessageExt]], object]


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """Signature of one handler, read once.

    Attributes:
        payload_type: Type that a body is converted to; in a batch, the type of one item.
        is_raw: True if the payload is the message itself and nothing is converted.
        extras: Parameter -> value that it takes, beside the payload.
    """

    handler: Handler
    payload_type: Any
    is_batch: bool
    is_raw: bool
    extras: dict[str, Extra]

    def single_call(self, converter: MessageConverter) -> SingleCall:
        """Return the handler as a function of the message. It runs for each message, so common cases are short."""
        handler, read = self.handler, self._reader(converter)
        extras = tuple((name, _READ_EXTRA[extra]) for name, extra in self.extras.items())
        if extras:
            return lambda message: handler(read(message), **{name: extra(message) for name, extra in extras})
        if self.is_raw:
            return handler
        return lambda message: handler(read(message))

    def batch_call(self, converter: MessageConverter) -> BatchCall:
        """Return the handler as functions of a batch of messages."""
        handler = self.handler
        extras = tuple((name, extra, _READ_EXTRA[extra]) for name, extra in self.extras.items())

        def call(payloads: list[object], messages: Sequence[MessageExt]) -> object:
            named = {
                # Only an orderly batch may have a queue parameter: all its messages are of one queue.
                name: read(messages[0]) if extra is Extra.QUEUE else [read(message) for message in messages]
                for name, extra, read in extras
            }
            return handler(payloads, **named)

        return BatchCall(self._reader(converter), call)

    def _reader(self, converter: MessageConverter) -> _Read:
        if self.is_raw:
            return _READ_EXTRA[Extra.MESSAGE]
        from_body, payload_type = converter.from_body, self.payload_type
        return lambda message: from_body(message.body, payload_type, message.properties)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One listener, ready for a container."""

    settings: ListenerSettings
    plan: HandlerPlan

    @property
    def id(self) -> str:
        """Name in logs and errors."""
        return self.settings.id

    @property
    def take_size(self) -> int:
        """Number of messages that a thread takes at a time. A batch handler without a size takes one whole fetch."""
        size = self.settings.consume_message_batch_max_size
        return self.settings.pull_batch_size if self.plan.is_batch and size == 1 else size
