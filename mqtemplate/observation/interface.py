"""Interface for what observes an application: metrics and traces of its sends and of the calls of its handlers.

An observation *wraps* functions when objects are created. One that observes nothing returns the functions as they are,
so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import HalfMessage, SendResult

_F = TypeVar("_F")

HandleOne: TypeAlias = Callable[[MessageExt], _F]
"""Function that handles a message. It returns the failure, an object with ``error`` and ``messages``, or None."""

HandleMany: TypeAlias = Callable[[Sequence[MessageExt]], _F]
"""Function that handles a batch. It returns a list of failures."""


HandleAsync: TypeAlias = Callable[[MessageExt], Coroutine[Any, Any, _F]]
"""`HandleOne` as a coroutine function."""


class Sends(Protocol):
    """The methods of `mqtemplate.broker.Broker` that send a message; see there."""

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult: ...

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult: ...

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]: ...

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None: ...

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage: ...

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]: ...

    def reply(self, request: MessageExt, body: bytes, properties: Any = None, timeout_ms: int = 3_000) -> Any: ...


@dataclass(frozen=True, slots=True)
class ObservedListener:
    """The listener whose handler is observed.

    Attributes:
        id: Id of the listener.
        group: Its consumer group.
    """

    id: str
    group: str


class Observation:
    """Observer of one application. This one observes nothing."""

    def sends(self, sends: Sends, clock: Clock) -> Sends:
        """Return an object whose methods do what those of *sends* do, and observe it."""
        return sends

    def one(self, listener: ObservedListener, handle: HandleOne[_F], clock: Clock) -> HandleOne[_F]:
        """Return a function that calls *handle* and observes the call. It runs in the context of the handler."""
        return handle

    def one_async(self, listener: ObservedListener, handle: HandleAsync[_F], clock: Clock) -> HandleAsync[_F]:
        """As `one`, for a coroutine function."""
        return handle

    def many(self, listener: ObservedListener, handle: HandleMany[_F], clock: Clock) -> HandleMany[_F]:
        """As `one`, for a handler of batches."""
        return handle
