"""Reading of handler signatures: the payload type, and the other values that the parameters take."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from mqtemplate.callables import variables_of
from mqtemplate.errors import ListenerError
from mqtemplate.listener.attributes import check_handler
from mqtemplate.listener.calling.depends import Scope
from mqtemplate.listener.calling.objects import ObjectSource
from mqtemplate.listener.calling.parameters import LISTS, ParameterReader, bare, hints_of, signature_of, takes_queue
from mqtemplate.listener.consuming.handler_loop import is_async
from mqtemplate.listener.endpoint import Handler, HandlerPlan
from mqtemplate.message import Message, MessageExt, MessageQueue


def plan_handler(
    handler: Handler,
    name: str,
    *,
    batch: bool | None = None,
    is_orderly: bool = False,
    objects: ObjectSource | None = None,
) -> HandlerPlan:
    """Return how to call a handler, from its signature.

    Args:
        handler: A function, or a method bound to its object.
        name: Name of the handler in errors.
        batch: True if a list means several messages, False if one; None decides by the annotation.
        objects: Source of the objects that parameters take by type.

    Raises:
        ListenerError: A parameter takes a value that neither a message nor the application has.
    """
    check_handler(handler, f"{name}: the handler")
    parameters = list(signature_of(handler, name).parameters.values())
    hints = hints_of(handler, name)
    if not parameters or parameters[0].kind not in (
        parameters[0].POSITIONAL_ONLY,
        parameters[0].POSITIONAL_OR_KEYWORD,
    ):
        raise ListenerError(f"{name}: has no parameter for the payload; write it first, such as (message: str)")
    payload, *others = parameters
    if payload.name not in hints:
        raise ListenerError(
            f"{name}: parameter {payload.name!r} has no type; annotate it with the type to convert the body to: "
            "str, bytes, dict, a dataclass, a pydantic model, MessageExt, or list[...] of one of these for batches"
        )
    if unbound := variables_of(hints[payload.name]):
        raise ListenerError(
            f"{name}: parameter {payload.name!r} has the type variable {unbound[0]}, and nothing says which type it "
            "is; name it in the base class, such as 'class Orders(Listener[Order])', or give the variable a bound"
        )
    item_type, is_batch = _payload(hints[payload.name], batch, f"{name}: parameter {payload.name!r}")
    kind = bare(item_type)
    if kind is MessageQueue:
        raise ListenerError(f"{name}: the first parameter is the payload; put the MessageQueue after it")
    if is_batch and not is_orderly and takes_queue(others, hints):
        raise ListenerError(f"{name}: a concurrent batch mixes queues; take list[MessageExt], or use ORDERLY")
    reader = ParameterReader(name, is_batch=is_batch, is_async=is_async(handler), objects=objects)
    arguments = reader.read(handler, others, name)
    return HandlerPlan(
        handler=handler,
        payload_type=item_type,
        is_batch=is_batch,
        is_raw=kind in (Message, MessageExt),
        arguments=arguments,
        scope=Scope(tuple(reader.providers), reader.sender),
    )


def _payload(annotation: Any, batch: bool | None, where: str) -> tuple[Any, bool]:
    """Return the type of one payload, and True if the handler takes a batch."""
    kind = bare(annotation)
    is_list = kind in LISTS or get_origin(kind) in LISTS
    if not is_list:
        if batch:
            raise ListenerError(
                f"{where}: batch=True needs a list, and it is annotated {annotation!r}; write one, such as list[dict]"
            )
        return annotation, False
    if batch is False:
        return annotation, False
    items = get_args(kind)
    if not items and batch is None:
        raise ListenerError(
            f"{where}: a bare list may mean two things; write list[Order] for a batch of messages, "
            "or @message_listener(..., batch=False) if each body is a JSON list"
        )
    return (items[0] if items else Any), True
