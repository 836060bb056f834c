"""An endpoint: a handler that was decorated, with everything about it resolved."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from mqtemplate.errors import ListenerError
from mqtemplate.listener.arguments import HandlerPlan, plan_handler
from mqtemplate.listener.decorator import ListenerSpec, listener_specs
from mqtemplate.listener.modes import ConsumeStatus
from mqtemplate.listener.resolution import ListenerSettings, Resolve, default_resolve, resolve_spec


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One listener, ready for a container.

    Attributes:
        plan: How to call the handler with a message.
    """

    settings: ListenerSettings
    plan: HandlerPlan

    @property
    def id(self) -> str:
        return self.settings.id

    @property
    def take_size(self) -> int:
        """How many messages a thread takes at a time. A batch handler that names no size gets what one fetch brings."""
        size = self.settings.batch_max_size
        return self.settings.pull_batch_size if self.plan.is_batch and size == 1 else size


def make_endpoints(target: object, resolve: Resolve = default_resolve) -> list[Endpoint]:
    """The endpoints of a decorated function, or of an object of a decorated class; one for each decorator.

    Methods may be decorated too, each a listener of its own.

    Raises:
        ListenerError: There is no decorator, or what it says or the handler's signature is wrong.
        UnsupportedError: A decorator asks for what cannot be honoured.
    """
    if inspect.isclass(target):
        raise ListenerError(
            f"{target.__qualname__} is a class; register an object of it, or let the application build one"
        )
    endpoints = [_make_endpoint(spec, handler, name, resolve) for spec, handler, name in _handlers(target)]
    if not endpoints:
        raise ListenerError(
            f"{target!r} is no listener; decorate it with @message_listener(topic=..., consumer_group=...)"
        )
    return endpoints


def _handlers(target: object) -> Iterator[tuple[ListenerSpec, Callable[..., object], str]]:
    """Spec, handler and default name of each listener of an object."""
    if callable(target) and (own := listener_specs(target)):
        yield from _numbered(own, target, _name_of(target))
        return
    kind = type(target)
    if specs := listener_specs(kind):
        yield from _numbered(specs, target.on_message, _name_of(kind))  # type: ignore[attr-defined]
    seen: set[str] = set()
    for owner in kind.__mro__:
        for name, member in vars(owner).items():
            if name not in seen and inspect.isroutine(member) and (specs := listener_specs(member)):
                yield from _numbered(specs, getattr(target, name), f"{_name_of(kind)}.{name}")
            seen.add(name)


def _numbered(
    specs: tuple[ListenerSpec, ...], handler: Callable[..., object], name: str
) -> Iterator[tuple[ListenerSpec, Callable[..., object], str]]:
    for number, spec in enumerate(specs, start=1):
        yield spec, handler, name if number == 1 else f"{name}#{number}"


def _name_of(target: object) -> str:
    qualname = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{getattr(target, '__module__', '')}.{qualname}".replace("<locals>.", "")


def _make_endpoint(spec: ListenerSpec, handler: Callable[..., object], name: str, resolve: Resolve) -> Endpoint:
    settings = resolve_spec(spec, resolve, name)
    plan = plan_handler(handler, f"listener {settings.id}", batch=spec.batch, is_orderly=settings.is_orderly)
    answer = get_type_hints(handler).get("return", None) if inspect.isroutine(handler) else None
    if not _is_answer(answer, plan.is_batch):
        raise ListenerError(
            f"listener {settings.id}: the handler promises to return {inspect.formatannotation(answer)}, "
            "and nobody would hear it; return None when the message is done, ConsumeStatus.RECONSUME_LATER to get it "
            "again" + _OTHER_ANSWERS[plan.is_batch]
        )
    return Endpoint(settings, plan)


_OTHER_ANSWERS = {
    True: ", or the indices of those that failed as list[int]",
    False: "; a reply to a request that is a mere truth value goes into a dict, so that it is not taken for a status",
}
_INDEX_COLLECTIONS = (
    list,
    set,
    frozenset,
    tuple,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Set,
)


def _is_answer(annotation: Any, is_batch: bool) -> bool:
    """Whether a return type is one that `Concurrently` and `Orderly` understand, or a reply to a request.

    A truth value is refused: whoever writes ``return False`` means that the message is not done.
    """
    if annotation in (None, NoneType, Any, NoReturn, object, ConsumeStatus):
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(_is_answer(argument, is_batch) for argument in arguments)
    if origin in (collections.abc.Awaitable, collections.abc.Coroutine):
        return _is_answer(arguments[-1], is_batch)
    if not is_batch:
        return annotation is not bool
    return origin in _INDEX_COLLECTIONS and int in arguments
