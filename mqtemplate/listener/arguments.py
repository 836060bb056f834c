"""What a handler's parameters ask for, read once; what each message gives them, then without looking again."""

from __future__ import annotations

import collections.abc
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener.headers import message_headers
from mqtemplate.message import Message, MessageExt, MessageQueue

_Handler = Callable[..., object]
_Read = Callable[[MessageExt], object]
SingleCall = Callable[[MessageExt], object]
"""Calls a handler for one message."""


class Extra(Enum):
    """What a parameter after the payload can ask for."""

    MESSAGE = "message"
    QUEUE = "queue"
    HEADERS = "headers"


_READ_EXTRA: dict[Extra, _Read] = {
    Extra.MESSAGE: lambda message: message,
    Extra.QUEUE: lambda message: message.message_queue,
    Extra.HEADERS: message_headers,
}
_ALLOWED_EXTRAS = "MessageExt, MessageQueue, or headers: dict[str, str]"
_LISTS = frozenset({list, collections.abc.Sequence})
_MAPPINGS = frozenset({dict, collections.abc.Mapping})


@dataclass(frozen=True, slots=True)
class BatchCall:
    """Calls a batch handler: bodies are read one by one, so that one that cannot be read fails alone."""

    read: _Read
    call: Callable[[list[object], Sequence[MessageExt]], object]


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """How to call one handler.

    Attributes:
        payload_type: What a body is converted to; in a batch, the type of one item.
        is_raw: The payload is the message itself, nothing is converted.
        extras: Parameter -> what it gets, beside the payload.
    """

    handler: _Handler
    payload_type: Any
    is_batch: bool
    is_raw: bool
    extras: dict[str, Extra]

    def single_call(self, converter: MessageConverter) -> SingleCall:
        """The handler as a function of the message; the short ways matter, they run for each message."""
        handler, read = self.handler, self._reader(converter)
        extras = tuple((name, _READ_EXTRA[extra]) for name, extra in self.extras.items())
        if extras:
            return lambda message: handler(read(message), **{name: extra(message) for name, extra in extras})
        if self.is_raw:
            return handler
        return lambda message: handler(read(message))

    def batch_call(self, converter: MessageConverter) -> BatchCall:
        handler = self.handler
        extras = tuple((name, extra, _READ_EXTRA[extra]) for name, extra in self.extras.items())

        def call(payloads: list[object], messages: Sequence[MessageExt]) -> object:
            named = {
                # A batch with a queue parameter is an orderly one: all its messages are of one queue.
                name: read(messages[0]) if extra is Extra.QUEUE else [read(message) for message in messages]
                for name, extra, read in extras
            }
            return handler(payloads, **named)

        return BatchCall(self._reader(converter), call)

    def _reader(self, converter: MessageConverter) -> _Read:
        if self.is_raw:
            return _READ_EXTRA[Extra.MESSAGE]
        from_body, payload_type = converter.from_body, self.payload_type
        return lambda message: from_body(message.body, payload_type, message.properties)


def plan_handler(handler: _Handler, name: str, *, batch: bool | None = None, is_orderly: bool = False) -> HandlerPlan:
    """_Read a handler's signature.

    Args:
        handler: A function, or a method bound to its object.
        name: What errors call it.
        batch: Whether a list is several messages or one; None decides by the annotation.

    Raises:
        ListenerError: A parameter asks for what a message cannot give; or the return type promises an answer.
    """
    parameters = list(_signature(handler, name).parameters.values())
    hints = _hints(handler, name)
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise ListenerError(f"{name}: has no parameter for the payload; write it first, such as (message: str)")
    payload = parameters[0].name
    if payload not in hints:
        raise ListenerError(
            f"{name}: parameter {payload!r} has no type; annotate it with what the body shall become: "
            "str, bytes, dict, a dataclass, a pydantic model, MessageExt, or list[...] of one of these for batches"
        )
    item_type, is_batch = _payload(hints[payload], batch, f"{name}: parameter {payload!r}")
    bare = _bare(item_type)
    if bare is MessageQueue:
        raise ListenerError(f"{name}: the first parameter is the payload, a MessageQueue comes after it")
    extras: dict[str, Extra] = {}
    for parameter in parameters[1:]:
        extra = _extra(parameter, hints.get(parameter.name), is_batch)
        if extra is not None:
            extras[parameter.name] = extra
        elif parameter.default is parameter.empty and parameter.kind not in _COLLECTORS:
            raise _unknown(name, parameter, hints.get(parameter.name), is_batch)
    if is_batch and Extra.QUEUE in extras.values() and not is_orderly:
        raise ListenerError(f"{name}: a concurrent batch mixes queues; take list[MessageExt], or use ORDERLY")
    return HandlerPlan(handler, item_type, is_batch, bare in (Message, MessageExt), extras)


_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _signature(handler: _Handler, name: str) -> inspect.Signature:
    try:
        return inspect.signature(handler)
    except (TypeError, ValueError) as error:
        raise ListenerError(f"{name}: its parameters cannot be read ({error}); wrap it in a Python function") from error


def _hints(handler: _Handler, name: str) -> dict[str, Any]:
    target: Any = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ListenerError(
            f"{name}: an annotation cannot be read: {error}; import or define the name at the top of the module, "
            "outside of 'if TYPE_CHECKING' and of functions"
        ) from error


def _bare(annotation: Any) -> Any:
    """An annotation without its ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _payload(annotation: Any, batch: bool | None, where: str) -> tuple[Any, bool]:
    """The type of one payload, and whether the handler takes many of them."""
    bare = _bare(annotation)
    is_list = bare in _LISTS or get_origin(bare) in _LISTS
    if not is_list:
        if batch:
            raise ListenerError(f"{where}: batch=True needs a list, such as list[dict]; it is annotated {annotation!r}")
        return annotation, False
    if batch is False:
        return annotation, False
    items = get_args(bare)
    if not items and batch is None:
        raise ListenerError(
            f"{where}: a bare list may mean two things; write list[Order] for a batch of messages, "
            "or @message_listener(..., batch=False) if each body is a JSON list"
        )
    return (items[0] if items else Any), True


def _extra(parameter: inspect.Parameter, annotation: Any, is_batch: bool) -> Extra | None:
    """What a parameter after the payload asks for; None if nothing that is known, or if it cannot be given by name."""
    if parameter.kind in (*_COLLECTORS, inspect.Parameter.POSITIONAL_ONLY):
        return None
    bare = _bare(annotation)
    if bare is MessageQueue:
        return Extra.QUEUE
    if is_batch:
        if get_origin(bare) not in _LISTS:
            return None
        bare = _bare(get_args(bare)[0])
    if bare in (Message, MessageExt):
        return Extra.MESSAGE
    if get_origin(bare) in _MAPPINGS and get_args(bare) == (str, str):
        return Extra.HEADERS
    if parameter.name == "headers" and (bare in _MAPPINGS or bare is None):
        return Extra.HEADERS
    return None


def _unknown(name: str, parameter: inspect.Parameter, annotation: Any, is_batch: bool) -> ListenerError:
    shown = "no type" if annotation is None else f"the type {inspect.formatannotation(annotation)}"
    listed = "list[MessageExt] or headers: list[dict[str, str]]" if is_batch else _ALLOWED_EXTRAS
    return ListenerError(
        f"{name}: parameter {parameter.name!r} has {shown}; after the payload a handler may take {listed}; "
        "services come in through the constructor of a listener class"
    )
