"""Reading of handler signatures: the payload type, and the other values that the parameters take."""

from __future__ import annotations

import collections.abc
import functools
import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mqtemplate.errors import ListenerError
from mqtemplate.listener.endpoint import Handler, HandlerPlan, Read, read_message, read_queue
from mqtemplate.listener.headers import message_headers
from mqtemplate.message import Message, MessageExt, MessageQueue

_ALLOWED_EXTRAS = "MessageExt, MessageQueue, or headers: dict[str, str]"
_LISTS = frozenset({list, collections.abc.Sequence})
_MAPPINGS = frozenset({dict, collections.abc.Mapping})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def plan_handler(handler: Handler, name: str, *, batch: bool | None = None, is_orderly: bool = False) -> HandlerPlan:
    """Return how to call a handler, from its signature.

    Args:
        handler: A function, or a method bound to its object.
        name: Name of the handler in errors.
        batch: True if a list means several messages, False if one; None decides by the annotation.

    Raises:
        ListenerError: A parameter takes a value that a message does not have.
    """
    parameters = list(_signature(handler, name).parameters.values())
    hints = _hints(handler, name)
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ListenerError(f"{name}: has no parameter for the payload; write it first, such as (message: str)")
    payload = parameters[0].name
    if payload not in hints:
        raise ListenerError(
            f"{name}: parameter {payload!r} has no type; annotate it with the type to convert the body to: "
            "str, bytes, dict, a dataclass, a pydantic model, MessageExt, or list[...] of one of these for batches"
        )
    item_type, is_batch = _payload(hints[payload], batch, f"{name}: parameter {payload!r}")
    bare = _bare(item_type)
    if bare is MessageQueue:
        raise ListenerError(f"{name}: the first parameter is the payload; put the MessageQueue after it")
    extras: dict[str, Read] = {}
    for parameter in parameters[1:]:
        extra = _extra(parameter, hints.get(parameter.name), is_batch)
        if extra is not None:
            extras[parameter.name] = extra
        elif parameter.default is parameter.empty and parameter.kind not in _COLLECTORS:
            raise _unknown(name, parameter, hints.get(parameter.name), is_batch)
    if is_batch and read_queue in extras.values() and not is_orderly:
        raise ListenerError(f"{name}: a concurrent batch mixes queues; take list[MessageExt], or use ORDERLY")
    return HandlerPlan(handler, item_type, is_batch, bare in (Message, MessageExt), extras)


def _signature(handler: Handler, name: str) -> inspect.Signature:
    try:
        return inspect.signature(handler)
    except (TypeError, ValueError) as error:
        raise ListenerError(f"{name}: its parameters cannot be read ({error}); wrap it in a Python function") from error


def _hints(handler: Handler, name: str) -> dict[str, Any]:
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
    """Return an annotation without its ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _payload(annotation: Any, batch: bool | None, where: str) -> tuple[Any, bool]:
    """Return the type of one payload, and True if the handler takes a batch."""
    bare = _bare(annotation)
    is_list = bare in _LISTS or get_origin(bare) in _LISTS
    if not is_list:
        if batch:
            raise ListenerError(
                f"{where}: batch=True needs a list, and it is annotated {annotation!r}; write one, such as list[dict]"
            )
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


def _extra(parameter: inspect.Parameter, annotation: Any, is_batch: bool) -> Read | None:
    """Return the function that reads the value of a parameter; None if it is unknown, or not passed by name."""
    if parameter.kind in (*_COLLECTORS, inspect.Parameter.POSITIONAL_ONLY):
        return None
    bare = _bare(annotation)
    if bare is MessageQueue:
        return read_queue
    if is_batch:
        if get_origin(bare) not in _LISTS:
            return None
        bare = _bare(get_args(bare)[0])
    if bare in (Message, MessageExt):
        return read_message
    is_text_mapping = get_origin(bare) in _MAPPINGS and get_args(bare) == (str, str)
    is_named_headers = parameter.name == "headers" and (bare in _MAPPINGS or bare is None)
    return message_headers if is_text_mapping or is_named_headers else None


def _unknown(name: str, parameter: inspect.Parameter, annotation: Any, is_batch: bool) -> ListenerError:
    shown = "no type" if annotation is None else f"the type {inspect.formatannotation(annotation)}"
    allowed = "list[MessageExt] or headers: list[dict[str, str]]" if is_batch else _ALLOWED_EXTRAS
    return ListenerError(
        f"{name}: parameter {parameter.name!r} has {shown}; after the payload a handler may take {allowed}; "
        "services are injected through the constructor of a listener class"
    )
