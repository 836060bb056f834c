"""A generic base class whose annotations are texts, in a module of its own."""

from __future__ import annotations

from typing import Generic, TypeVar

Payload = TypeVar("Payload")


class Listener(Generic[Payload]):
    received: list[object]

    def on_message(self, message: Payload) -> None:
        self.received.append(message)
