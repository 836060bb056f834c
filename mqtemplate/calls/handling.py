"""A call of a handler as one value, `HandlerCall`, and the types of what is around it.

A listener has two rings of wrappers. Both get the same `HandlerCall`:

- *Observers* (metrics, spans, message trace) are outside. Their `HandlerNext` never raises an error of the handler: it
  returns the failures.
- *Middlewares* are inside, around the handler itself. Their `Next` returns the result of the handler, or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mqtemplate.calls.send import SendWrapper
from mqtemplate.calls.steps import unwrapped
from mqtemplate.clock import Clock
from mqtemplate.message import MessageExt
from mqtemplate.results import HalfMessage, TransactionState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListenerInfo:
    """The listener of a call.

    Attributes:
        id: Name in logs and errors.
        is_batch: True if the handler takes several messages.
        is_async: True if the handler is ``async def``: middlewares then run on its event loop.
        clock: Clock of the broker; on a virtual clock, the clock of the test.
        is_done: Function that returns True unless a result of the handler says that messages must be handled again.
        resume: Function that ends a pause.
    """

    id: str
    group: str
    topics: tuple[str, ...]
    is_batch: bool
    is_async: bool
    clock: Clock
    is_done: Callable[[object], bool]
    resume: Callable[[], None]


class HandlerCall:
    """One call of a handler with its messages. It is not changed: `map` and `filter` return others.

    Middlewares know it as `Delivery`.

    Attributes:
        listener: The listener that handles them.
        messages: One message, or the messages of a batch.
        origins: Messages as they were fetched, in the order of *messages*; `map` does not change them.
    """

    __slots__ = ("listener", "messages", "origins")

    def __init__(
        self, listener: ListenerInfo, messages: Sequence[MessageExt], origins: Sequence[MessageExt] | None = None
    ) -> None:
        self.listener = listener
        self.messages = messages
        self.origins = messages if origins is None else origins

    def __repr__(self) -> str:
        return f"<Delivery of {len(self.messages)} message(s) to {self.listener.id}>"

    @property
    def message(self) -> MessageExt:
        """The message; the first one of a batch."""
        return self.messages[0]

    @property
    def attempt(self) -> int:
        """1 for the first call of the handler, one more for each retry; in a batch the attempt of the first message."""
        return self.messages[0].reconsume_times + 1

    def map(self, change: Callable[[MessageExt], MessageExt]) -> HandlerCall:
        """Return the call with other messages: ``delivery.map(lambda each: replace(each, body=...))``.

        Return a changed copy of each message. A retry must get the message as it was fetched.
        """
        return HandlerCall(self.listener, tuple(map(change, self.messages)), self.origins)

    def filter(self, keep: Callable[[MessageExt], bool]) -> HandlerCall:
        """Return the call with the messages for which *keep* returns True; the others count as done.

        Without any message left the handler is not called.
        """
        kept = [(each, origin) for each, origin in zip(self.messages, self.origins, strict=True) if keep(each)]
        return HandlerCall(self.listener, tuple(each for each, _ in kept), tuple(origin for _, origin in kept))


Delivery = HandlerCall
"""A `HandlerCall`, as middlewares call it."""


class FailedMessages(Protocol):
    """Messages that failed together, as observers see them."""

    @property
    def messages(self) -> Sequence[MessageExt]: ...

    @property
    def error(self) -> BaseException | None:
        """Exception of the handler; None if the handler requested redelivery without raising."""


HandlerNext: TypeAlias = Callable[[HandlerCall], Sequence[FailedMessages]]
"""The rest of the way of a call, for observers: it returns the failures, for one message none or one of them."""
AsyncHandlerNext: TypeAlias = Callable[[HandlerCall], Coroutine[Any, Any, Sequence[FailedMessages]]]
"""`HandlerNext` on an event loop, as a coroutine function."""
HandlerWrapper: TypeAlias = Callable[[Any], Any]
"""`steps.Wrapper` for the calls of a handler: it takes a `HandlerNext` or an `AsyncHandlerNext`, and returns the same
kind."""


class Observation:
    """Observer of one application: it measures or traces sends and calls of handlers. This one observes nothing.

    An observation *wraps* functions when objects are created. One that observes nothing returns the functions as they
    are, so that it costs nothing.
    """

    def sends(self, clock: Clock) -> SendWrapper:
        """Return the wrapper of the sends of one template.

        Args:
            clock: Clock of its broker.
        """
        return unwrapped

    def handling(self, listener: ListenerInfo) -> HandlerWrapper:
        """Return the wrapper of the calls of one listener. It runs in the context of the handler."""
        return unwrapped

    def transaction_ended(self, half: HalfMessage, state: TransactionState) -> None:
        """Note the end of a transaction whose half message went through `sends`."""

    def reply_properties(self, properties: Mapping[str, str]) -> Mapping[str, str]:
        """Return the properties of a reply, with the context of the handler that sends it."""
        return properties
