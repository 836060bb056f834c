"""Endpoint: a handler, the way to call it with a message, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqtemplate.converter import MessageConverter
from mqtemplate.listener.failures.outcomes import INVALID_BODY_ERRORS, InvalidBodyError
from mqtemplate.listener.settings import ListenerSettings
from mqtemplate.message import MessageExt, MessageQueue, PackedBody

Handler = Callable[..., object]
Read = Callable[[MessageExt], object]
"""Function that returns a value of the message, such as that of a parameter."""
BatchCall = Callable[[list[object], Sequence[MessageExt]], object]
"""Function that calls a batch handler with its payloads and their messages."""

ErrorHandler = Callable[[BaseException, Any], object]
"""Function (error, message or messages) that may decide what happens to them."""


def read_message(message: MessageExt) -> MessageExt:
    """Return the message itself."""
    return message


def read_queue(message: MessageExt) -> MessageQueue:
    """Return the queue of the message."""
    return message.message_queue


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """Signature of one handler, read once.

    Attributes:
        payload_type: Type that a body is converted to; in a batch, the type of one item.
        is_raw: True if the payload is the message itself and nothing is converted.
        extras: Parameter after the payload -> function that reads its value.
    """

    handler: Handler
    payload_type: Any
    is_batch: bool
    is_raw: bool
    extras: Mapping[str, Read]

    def plans(self) -> Sequence[HandlerPlan]:
        """Return the signatures of all functions that may be called: one, unless methods are chosen by tag."""
        return (self,)

    def single_call(self, converter: MessageConverter) -> Read:
        """Return the handler as a function of the message. It runs for each message, so common cases are short."""
        handler, read = self.handler, self.payload_reader(converter)
        extras = tuple(self.extras.items())
        if extras:
            return lambda message: handler(read(message), **{name: extra(message) for name, extra in extras})
        if self.is_raw:
            return handler
        return lambda message: handler(read(message))

    def batch_call(self) -> BatchCall:
        """Return the handler as a function of payloads and messages."""
        handler, extras = self.handler, tuple(self.extras.items())

        def call(payloads: list[object], messages: Sequence[MessageExt]) -> object:
            named = {
                # Only an orderly batch may have a queue parameter: all its messages are of one queue.
                name: extra(messages[0]) if extra is read_queue else [extra(message) for message in messages]
                for name, extra in extras
            }
            return handler(payloads, **named)

        return call

    def payload_reader(self, converter: MessageConverter) -> Read:
        """Return the function that converts the body of a message to the payload; it raises `InvalidBodyError`."""
        if self.is_raw:
            return read_message
        from_body, payload_type = converter.from_body, self.payload_type

        def read(message: MessageExt) -> object:
            body = message.body
            if type(body) is PackedBody:
                raise InvalidBodyError(body.reason)
            try:
                return from_body(body, payload_type, message.properties)
            except INVALID_BODY_ERRORS as error:
                raise InvalidBodyError(str(error)) from error

        return read


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One listener, ready for a container.

    Attributes:
        on_error: Function that is called when the handler raised; None if the listener has none.
    """

    settings: ListenerSettings
    plan: HandlerPlan
    on_error: ErrorHandler | None = None

    @property
    def id(self) -> str:
        """Name in logs and errors."""
        return self.settings.id

    @property
    def take_size(self) -> int:
        """Number of messages that a thread takes at a time. A batch handler without a size takes one whole fetch."""
        size = self.settings.consume_message_batch_max_size
        return self.settings.pull_batch_size if self.plan.is_batch and size == 1 else size
