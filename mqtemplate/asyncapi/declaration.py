"""``@documents_send``: what a function sends, for the AsyncAPI document."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from mqtemplate.durations import Duration, with_unit
from mqtemplate.errors import DestinationError

SENDS_ATTRIBUTE = "__mqtemplate_documented_sends__"
"""Attribute of a decorated function or class that holds its tuple of `DocumentedSend`."""

_Target = TypeVar("_Target", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class DocumentedSend:
    """Arguments of one ``@documents_send``. Placeholders are not replaced yet."""

    destination: str
    payload: Any
    delay: Duration | None
    delay_level: int
    reply: Any


def documents_send(
    destination: str,
    payload: Any = None,
    *,
    delay: Duration | None = None,
    delay_level: int = 0,
    reply: Any = None,
) -> Callable[[_Target], _Target]:
    """Declare a message that a function or method sends. It is for the AsyncAPI document and does nothing else.

    What ``@publishes`` sends is in the document without it. Several decorators declare several messages.

    Args:
        destination: ``"topic"`` or ``"topic:tag"``; it may hold placeholders.
        payload: Type of the payload; None if it is unknown.
        delay: Delay of the message: a text such as ``"3h"`` or ``"15m, then 1d"``, which may hold placeholders; or a
            timedelta.
        delay_level: Its delay level.
        reply: Type of the reply, if the message is a request.

    Raises:
        DestinationError: *destination* is not text.
    """
    if not isinstance(destination, str):
        raise DestinationError(f"@documents_send: destination must be 'topic' or 'topic:tag', got {destination!r}")
    spec = DocumentedSend(destination, payload, with_unit("delay", delay), delay_level, reply)

    def mark(target: _Target) -> _Target:
        setattr(target, SENDS_ATTRIBUTE, (spec, *vars(target).get(SENDS_ATTRIBUTE, ())))
        return target

    return mark


def documented_sends(component: object) -> Iterator[tuple[Any, DocumentedSend]]:
    """Yield what a component declares, with the function or class that is decorated."""
    holder = component if inspect.isclass(component) or inspect.isroutine(component) else type(component)
    for spec in vars(holder).get(SENDS_ATTRIBUTE, ()):
        yield holder, spec
    if inspect.isclass(holder):
        members = {name: member for base in reversed(holder.__mro__) for name, member in vars(base).items()}
        for member in members.values():
            if inspect.isroutine(member):
                for spec in getattr(member, SENDS_ATTRIBUTE, ()):
                    yield member, spec
