"""Results of handlers: the status, and messages that go on to another topic by `Send` or ``@publishes``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, Unpack

from mqtemplate.callables import refuse_bare
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.tags import is_of_class
from mqtemplate.template.options import Send, SendOptions, check_options, shows_send_options, with_units

PUBLISHES_ATTRIBUTE = "__mqtemplate_publishes__"
"""Attribute of a decorated handler that holds its tuple of `PublishSpec`."""

_Target = TypeVar("_Target", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """Arguments of one ``@publishes``. Placeholders of the destination are not replaced yet."""

    destination: str
    delay_level: int
    options: Mapping[str, Any]


@shows_send_options
def publishes(destination: str, delay_level: int = 0, **options: Unpack[SendOptions]) -> Callable[[_Target], _Target]:
    """Send what a handler returns to another topic; None is not sent, and a list is a batch.

    The send happens after the handler has succeeded and before its message is committed: at least once. If it fails,
    the message of the handler fails, too. Several decorators send to several topics.

    Args:
        destination: ``"topic"`` or ``"topic:tag"``; it may hold placeholders.
        options: Options of each send, as `RocketMQTemplate.sync_send` has them.

    Raises:
        TypeError: An option has an unknown name.
    """
    refuse_bare("@publishes", destination, "@publishes('invoices')", ListenerError)
    check_options("@publishes", options)
    spec = PublishSpec(destination, delay_level, with_units(options))

    def mark(target: _Target) -> _Target:
        if not callable(target):
            raise ListenerError(f"@publishes is for handlers, got {target!r}")
        setattr(target, PUBLISHES_ATTRIBUTE, (spec, *vars(target).get(PUBLISHES_ATTRIBUTE, ())))
        return target

    return mark


def publish_specs(handler: Callable[..., object]) -> tuple[PublishSpec, ...]:
    """Return the specs of a handler: of the function, and of the class of a listener whose method it is."""
    specs: tuple[PublishSpec, ...] = getattr(handler, PUBLISHES_ATTRIBUTE, ())
    if is_of_class(handler):
        specs += vars(type(getattr(handler, "__self__", None))).get(PUBLISHES_ATTRIBUTE, ())
    return specs


def is_sends(result: object) -> bool:
    """Return True for a `Send`, and for a list or tuple of them."""
    if isinstance(result, list | tuple):
        return bool(result) and all(isinstance(each, Send) for each in result)
    return isinstance(result, Send)


class ResultSender(ABC):
    """Sender of results inside of the scope of a message, such as an outbox with the session of the handler.

    A handler that takes one by ``Annotated[..., Depends(...)]`` sends its results through it, before the scope ends:
    in the same transaction as its other changes.
    """

    @abstractmethod
    def send(self, destination: str, payload: object, delay_level: int = 0, **options: Unpack[SendOptions]) -> object:
        """Send, as `RocketMQTemplate.sync_send`. An awaitable that it returns is awaited."""


class ConsumeStatus(Enum):
    """Status that a handler may return. Returning None means ``CONSUME_SUCCESS``, raising ``RECONSUME_LATER``."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"
