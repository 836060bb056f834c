"""Recordings for tests: sent, received and handled messages, handlers that failed, and the content of a topic."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack, cast

from mqtemplate.broker import Broker
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.listener.declaration.decorator import ListenerAttributes, message_listener
from mqtemplate.listener.failures.failure import DeadLetter, Failure, RetryLater
from mqtemplate.message import MessageExt
from mqtemplate.pending import PendingMessage
from mqtemplate.results import PullStatus, SendResult
from mqtemplate.template.options import parse_destination
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.user_code import error_text

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One successful call of a sending method.

    Attributes:
        verb: ``sync_send``, ``async_send``, ``send_one_way``, ``send_in_transaction``, ``async_send_and_receive``;
            the other methods and Spring's names call one of these.
        payload: The passed object, before its conversion to bytes.
        options: Other arguments by name.
        result: Result of the call.
    """

    verb: str
    destination: str
    payload: Any
    options: dict[str, Any]
    result: SendResult | Future[Any] | None

    @property
    def topic(self) -> str:
        """Topic of the destination."""
        return parse_destination(self.destination).topic

    @property
    def tag(self) -> str | None:
        """Tag of the destination, if it has one."""
        return parse_destination(self.destination).tag


def _recorded(verb: _Verb) -> _Verb:
    """Return a sending method that records its calls."""

    @functools.wraps(verb)
    def send(self: RecordingTemplate, *args: Any, **options: Any) -> Any:
        result = verb(self, *args, **options)
        named = inspect.signature(verb).bind(self, *args, **options).arguments
        given = {key: value for key, value in named.items() if key not in ("self", "destination", "payload", "options")}
        rest = given | named.get("options", {})
        self.sent.append(SentMessage(verb.__name__, named["destination"], named["payload"], rest, result))
        return result

    return cast("_Verb", send)


class RecordingTemplate(RocketMQTemplate):
    """Template that sends messages and records the calls.

    Attributes:
        sent: Recorded calls, oldest first. A test may clear it.
    """

    def __init__(self, broker: Broker, **settings: Any) -> None:
        super().__init__(broker, **settings)
        self.sent: list[SentMessage] = []

    # The other sending methods call one of these.
    sync_send = _recorded(RocketMQTemplate.sync_send)
    async_send = _recorded(RocketMQTemplate.async_send)
    send_one_way = _recorded(RocketMQTemplate.send_one_way)
    send_in_transaction = _recorded(RocketMQTemplate.send_in_transaction)
    async_send_and_receive = _recorded(RocketMQTemplate.async_send_and_receive)


class Inbox:
    """Listener that collects its messages.

    ::

        inbox = Inbox()
        mqtemplate_app(inbox.listener("orders", "audit", selector_expression="paid"))

    Attributes:
        received: Messages, oldest first.
    """

    def __init__(self) -> None:
        self.received: list[MessageExt] = []

    def listener(
        self, topic: str, consumer_group: str, **attributes: Unpack[ListenerAttributes]
    ) -> Callable[[MessageExt], None]:
        """Return a decorated function that collects messages here; arguments as `message_listener`."""

        @message_listener(topic, consumer_group, **attributes)
        def collect(message: MessageExt) -> None:
            self.received.append(message)

        return collect

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the received messages."""
        return [message.body for message in self.received]


_MAX_PAYLOAD = 80


def shortened(text: str, length: int) -> str:
    """Return a text of at most *length* characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def line_of(message: MessageExt | PendingMessage) -> str:
    """Return one line for a message: topic and tag, keys, and the first characters of the body or the deliver time."""
    title = f"{message.topic}:{message.tags}" if message.tags else message.topic
    keys = f", keys {message.keys}" if message.keys else ""
    if isinstance(message, PendingMessage):
        return f"{title}{keys}, {message.body_size} bytes, due {message.deliver_at.isoformat(timespec='milliseconds')}"
    body = message.body[: 4 * _MAX_PAYLOAD].decode(errors="backslashreplace")
    return f"{title}{keys}: {shortened(body, _MAX_PAYLOAD)}"


def messages_in(broker: Broker, topic: str) -> list[MessageExt]:
    """Return all messages of *topic* that a consumer could get now, queue by queue; no pending ones."""
    found: list[MessageExt] = []
    for queue in broker.queues(topic):
        queue_offset = broker.reader.min_offset(queue)
        while (page := broker.reader.pull(queue, queue_offset)).pull_status is not PullStatus.NO_NEW_MSG:
            found += page.messages
            queue_offset = page.next_begin_offset
    return found


_REQUESTS = (RetryLater, DeadLetter, PauseListener)
"""Exceptions by which a handler requests something, which does not fail the test."""


class HandlerFailedError(AssertionError):
    """Handlers raised during a test that does not expect it."""


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """One call of a handler that raised.

    Attributes:
        listener: Name of the listener.
        messages: Messages of the call that failed.
        error: The exception.
    """

    listener: str
    messages: Sequence[MessageExt]
    error: BaseException

    def __str__(self) -> str:
        first = self.messages[0]
        return f"{self.listener}: {error_text(self.error)} (topic {first.topic}, msg_id {first.msg_id})"


@dataclass(slots=True)
class HandledMessages:
    """Record of one listener.

    Attributes:
        received: Messages that its handler took without an exception, oldest first.
        failures: Calls that raised, oldest first; shared by all listeners of a harness.
    """

    container: ListenerContainer
    failures: list[HandlerFailure]
    received: list[MessageExt] = field(default_factory=list)

    def note(self, messages: Sequence[MessageExt], failed: Sequence[Failure]) -> None:
        """Note one call; an observer of the container."""
        lost = {id(message) for failure in failed for message in failure.messages}
        self.received += [message for message in messages if id(message) not in lost]
        self.failures += [
            HandlerFailure(self.container.endpoint.id, failure.messages, failure.error)
            for failure in failed
            if failure.error is not None and not isinstance(failure.error, _REQUESTS)
        ]

    def is_of(self, listener: object) -> bool:
        """Return True for the name, the function, the class or the object of this listener."""
        endpoint = self.container.endpoint
        return listener == endpoint.id or any(
            _is_of(handler, listener) for plan in endpoint.plan.plans() for handler in _wrapped(plan.handler)
        )


def _wrapped(handler: object) -> Iterator[object]:
    """Yield a handler, and the functions inside of it: a starter may have put a context around the handler."""
    inner: object | None = handler
    while inner is not None:
        yield inner
        inner = getattr(inner, "__wrapped__", None)


def _is_of(handler: object, listener: object) -> bool:
    owner = getattr(handler, "__self__", None)
    return listener == handler or (owner is not None and (listener is owner or listener is type(owner)))
