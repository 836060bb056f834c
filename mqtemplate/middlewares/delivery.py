"""Deliveries: the messages of one call of a handler, as middlewares see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mqtemplate.clock import Clock
from mqtemplate.message import MessageExt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListenerInfo:
    """The listener of a delivery.

    Attributes:
        id: Name in logs and errors.
        is_batch: True if the handler takes several messages.
        is_async: True if the handler is ``async def``: middlewares then run on its event loop.
        clock: Clock of the broker; on a virtual clock, that of the test.
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


class Delivery:
    """Messages of one call of a handler. It is not changed: `map` and `filter` return others.

    Attributes:
        listener: The listener that handles them.
        messages: One message, or those of a batch.
    """

    __slots__ = ("_origins", "listener", "messages")

    def __init__(
        self, listener: ListenerInfo, messages: Sequence[MessageExt], origins: Sequence[MessageExt] | None = None
    ) -> None:
        self.listener = listener
        self.messages = messages
        self._origins = messages if origins is None else origins

    def __repr__(self) -> str:
        return f"<Delivery of {len(self.messages)} message(s) to {self.listener.id}>"

    @property
    def message(self) -> MessageExt:
        """The message; the first one of a batch."""
        return self.messages[0]

    @property
    def attempt(self) -> int:
        """1 for the first call of the handler, one more for each retry; in a batch that of the first message."""
        return self.messages[0].reconsume_times + 1

    @property
    def origins(self) -> Sequence[MessageExt]:
        """Messages as they were fetched, in the order of *messages*; `map` does not change them."""
        return self._origins

    def map(self, change: Callable[[MessageExt], MessageExt]) -> Delivery:
        """Return the delivery with other messages: ``delivery.map(lambda each: replace(each, body=...))``.

        Return a changed copy of each message. A retry must get the message as it was fetched.
        """
        return Delivery(self.listener, tuple(map(change, self.messages)), self._origins)

    def filter(self, keep: Callable[[MessageExt], bool]) -> Delivery:
        """Return the delivery with the messages for which *keep* returns True; the others count as done.

        Without any message left the handler is not called.
        """
        kept = [(each, origin) for each, origin in zip(self.messages, self._origins, strict=True) if keep(each)]
        return Delivery(self.listener, tuple(each for each, _ in kept), tuple(origin for _, origin in kept))
