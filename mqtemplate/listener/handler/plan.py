"""Endpoint: a handler, the way to call it with a message, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mqtemplate.converter import INVALID_BODY_ERRORS, MessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.listener.failures.failure import DeadLetter, InvalidBodyError
from mqtemplate.listener.handler.payload import Read, read_message
from mqtemplate.listener.handler.providers import HandlerArguments, Scope, compose, is_async
from mqtemplate.listener.handler.results import ResultPublisher
from mqtemplate.message import MessageExt, PackedBody

Handler = Callable[..., object]
_NOTHING_TO_SEND = ResultPublisher()


@dataclass(frozen=True, kw_only=True)
class HandlerPlan:
    """Signature of one handler, read once.

    Attributes:
        payload_type: Type that a body is converted to; in a batch, the type of one item.
        is_raw: True if the payload is the message itself and nothing is converted.
        arguments: HandlerArguments for the parameters after the payload.
        scope: Providers of values that are created for one call.
        publisher: Sender of the results.
    """

    handler: Handler
    payload_type: Any
    is_batch: bool
    is_raw: bool
    arguments: HandlerArguments = field(default_factory=HandlerArguments)
    scope: Scope = field(default_factory=Scope)
    publisher: ResultPublisher = _NOTHING_TO_SEND

    def plans(self) -> Sequence[HandlerPlan]:
        """Return the signatures of all functions that may be called: one, unless methods are chosen by tag."""
        return (self,)

    @cached_property
    def is_async(self) -> bool:
        """True if each call returns an awaitable: the handler is ``async def``."""
        return is_async(self.handler)

    @property
    def publishes(self) -> bool:
        """True if each result is sent to another topic."""
        return bool(self.publisher.specs)

    @property
    def sends_results(self) -> bool:
        """True if results need a sender even if they are no `Send`, or a value of the scope sends them."""
        return self.publishes or self.scope.sender is not None

    def single_call(self, converter: MessageConverter) -> Read:
        """Return the handler as a function of the message. It runs for each message, so common cases are short."""
        handler, read = self.arguments.bind(self.handler), self.payload_reader(converter)
        if self.scope.providers:
            call = compose(self.handler, self.arguments, self.scope, self.publisher, is_async=self.is_async)
            return lambda message: call(message, [read(message)])
        extras = tuple(self.arguments.reads.items())
        if extras:
            return lambda message: handler(read(message), **{name: extra(message) for name, extra in extras})
        if self.is_raw:
            return handler
        return lambda message: handler(read(message))

    def sending_call(self, converter: MessageConverter) -> Read:
        """Return the handler as a function of the message; it sends its results."""
        call = self.single_call(converter)
        return call if self.scope.sender is not None else self.publisher.around(call, is_async=self.is_async)

    def batch_call(self) -> Callable[..., Any]:
        """Return the handler as a function of payloads and messages; it sends its results."""
        call = compose(self.handler, self.arguments, self.scope, self.publisher, is_async=self.is_async)
        if self.scope.sender is not None:
            return lambda payloads, messages: call(messages, [payloads])
        published = self.publisher.around(lambda source: call(source[1], [source[0]]), is_async=self.is_async)
        return lambda payloads, messages: published((payloads, messages))

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
        middlewares: Middlewares around each call, the outermost first.
        on_error: Function that is called when the handler raised, if the listener has one.
    """

    settings: ListenerSettings
    plan: HandlerPlan
    middlewares: tuple[object, ...] = ()
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


@dataclass(frozen=True, kw_only=True)
class TagRoutedPlan(HandlerPlan):
    """Signatures of the methods of one class, chosen by the tag of the message.

    Attributes:
        routes: Tag -> method.
        other: Method for all other messages; None: such a message goes to the dead letter topic.
    """

    routes: Mapping[str, HandlerPlan]
    other: HandlerPlan | None

    def plans(self) -> Sequence[HandlerPlan]:
        return tuple(self._each())

    def _each(self) -> Iterator[HandlerPlan]:
        yield from self.routes.values()
        if self.other is not None:
            yield self.other

    @cached_property
    def is_async(self) -> bool:
        """True if all methods are ``async def``. If only some are, a consume thread waits for each of their calls."""
        return all(plan.is_async for plan in self.plans())

    @property
    def publishes(self) -> bool:
        return any(plan.publishes for plan in self.plans())

    @property
    def sends_results(self) -> bool:
        return any(plan.sends_results for plan in self.plans())

    def single_call(self, converter: MessageConverter) -> Read:
        """Return a function that calls the method of a message's tag."""
        return self._by_tag(lambda plan: plan.single_call(converter))

    def sending_call(self, converter: MessageConverter) -> Read:
        """Return a function that calls the method of a message's tag, and sends the results of that method."""
        return self._by_tag(lambda plan: plan.sending_call(converter))

    def _by_tag(self, call_of: Callable[[HandlerPlan], Read]) -> Read:
        calls: Mapping[str | None, Read] = {tag: call_of(plan) for tag, plan in self.routes.items()}
        other = _no_method if self.other is None else call_of(self.other)
        return lambda message: calls.get(message.tags, other)(message)


def _no_method(message: MessageExt) -> object:
    raise DeadLetter(f"no method of the listener handles the tag {message.tags!r}; mark one with @on_tag")


def routed_plan(routes: Mapping[str, HandlerPlan], other: HandlerPlan | None, listener: str) -> TagRoutedPlan:
    """Return the plan of a class with tag methods.

    Raises:
        ListenerError: A method takes a batch.
    """
    for tag, plan in routes.items():
        if plan.is_batch:
            raise ListenerError(
                f"{listener}: the method for the tag {tag!r} takes a batch, and a batch may have several tags; take "
                "one message, or write a listener of its own with selector_expression"
            )
    if other is not None and other.is_batch:
        raise ListenerError(f"{listener}: on_message takes a batch, and the methods marked @on_tag take one message")
    first = next(iter(routes.values()))
    return TagRoutedPlan(
        handler=first.handler,
        payload_type=first.payload_type,
        is_batch=False,
        is_raw=False,
        publisher=first.publisher,
        routes=routes,
        other=other,
    )


ErrorHandler = Callable[[BaseException, Any], object]
"""Function (error, message or messages) that may decide what happens to them."""
