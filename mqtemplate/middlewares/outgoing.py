"""Outgoing messages: those of one call of a template, as middlewares see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqtemplate.clock import Clock
from mqtemplate.message import Message


class Outgoing:
    """Messages of one call of a template. It is not changed: `map` and `filter` return others.

    Attributes:
        messages: One message, or those of a batch, with body and properties as the broker gets them.
        verb: ``send``, ``one_way``, ``transaction`` or ``request``. All sending methods are one of these.
        clock: Clock of the broker.
    """

    __slots__ = ("clock", "messages", "verb")

    def __init__(self, messages: Sequence[Message], verb: str, clock: Clock) -> None:
        self.messages = messages
        self.verb = verb
        self.clock = clock

    def __repr__(self) -> str:
        return f"<Outgoing {self.verb} of {len(self.messages)} message(s)>"

    @property
    def message(self) -> Message:
        """The message; the first one of a batch."""
        return self.messages[0]

    def map(self, change: Callable[[Message], Message]) -> Outgoing:
        """Return it with other messages: *change* may change a message, or return another one."""
        return Outgoing([change(message) for message in self.messages], self.verb, self.clock)

    def filter(self, keep: Callable[[Message], bool]) -> Outgoing:
        """Return it with the messages for which *keep* returns True. Without any left nothing is sent."""
        return Outgoing([message for message in self.messages if keep(message)], self.verb, self.clock)
