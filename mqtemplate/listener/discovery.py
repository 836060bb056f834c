"""Discovery of endpoints: from a decorated function or object to one endpoint for each decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import NoneType
from typing import get_type_hints

from mqtemplate.errors import ConfigurationError, DependencyError, DestinationError, ListenerError
from mqtemplate.listener.attributes import ListenerSpec, Resolve
from mqtemplate.listener.calling.objects import ObjectSource
from mqtemplate.listener.calling.publisher import Publisher, Template
from mqtemplate.listener.calling.send import PublishSpec, publish_specs
from mqtemplate.listener.decorator import listener_specs
from mqtemplate.listener.endpoint import Endpoint, Handler, HandlerPlan
from mqtemplate.listener.handler_result import is_allowed_result
from mqtemplate.listener.resolution import default_resolve, resolve_spec, resolve_topics
from mqtemplate.listener.signature import plan_handler
from mqtemplate.middlewares.declaration import check_middleware, name_of
from mqtemplate.template.destination import parse_destination

_OTHER_RESULTS = {
    True: ", or the indices of those that failed as list[int]",
    False: "; put a reply that is only True or False into a dict, so that it is not taken for a status",
}


def make_endpoints(
    target: object,
    resolve: Resolve = default_resolve,
    *,
    objects: ObjectSource | None = None,
    template: Callable[[], Template] | None = None,
) -> list[Endpoint]:
    """Return the endpoints of a decorated function, or of an object of a decorated class; one for each decorator.

    Methods may be decorated too. Each one is a listener of its own.

    Args:
        objects: Source of the objects that handlers take by type, and of middlewares.
        template: Function that returns the template for results of handlers.

    Raises:
        ListenerError: There is no decorator, or an attribute or the signature of the handler is wrong.
        UnsupportedError: The broker cannot honour an attribute.
    """
    if inspect.isclass(target):
        raise ListenerError(
            f"{target.__qualname__} is a class; register an object of it, or let the application build one"
        )
    endpoints = [
        _make_endpoint(spec, handler, name, resolve, objects, template) for spec, handler, name in _handlers(target)
    ]
    if not endpoints:
        raise ListenerError(
            f"{target!r} is no listener; decorate it with @message_listener(topic=..., consumer_group=...)"
        )
    return endpoints


def declared_topics(component: object, resolve: Resolve = default_resolve) -> set[str]:
    """Return the topics that a decorated function or class, or an object of one, reads; its methods count too.

    Raises:
        ListenerError: A name is not allowed, or is used twice.
    """
    kind = component if inspect.isclass(component) or inspect.isroutine(component) else type(component)
    members = vars(kind).values() if inspect.isclass(kind) else ()
    specs = [spec for holder in (kind, *members) for spec in listener_specs(holder)]
    return {topic for spec in specs for topic in resolve_topics(f"listener of {kind.__name__}", spec, resolve)}


def _handlers(target: object) -> Iterator[tuple[ListenerSpec, Handler, str]]:
    """Yield spec, handler and default name of each listener of an object."""
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
    specs: tuple[ListenerSpec, ...], handler: Handler, name: str
) -> Iterator[tuple[ListenerSpec, Handler, str]]:
    for number, spec in enumerate(specs, start=1):
        yield spec, handler, name if number == 1 else f"{name}#{number}"


def _name_of(target: object) -> str:
    qualname = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{getattr(target, '__module__', '')}.{qualname}".replace("<locals>.", "")


def _make_endpoint(
    spec: ListenerSpec,
    handler: Handler,
    name: str,
    resolve: Resolve,
    objects: ObjectSource | None,
    template: Callable[[], Template] | None,
) -> Endpoint:
    settings = resolve_spec(spec, resolve, name)
    where = f"listener {settings.id}"
    plan = plan_handler(handler, where, batch=settings.batch, is_orderly=settings.is_orderly, objects=objects)
    result = get_type_hints(handler).get("return", None) if inspect.isroutine(handler) else None
    if not is_allowed_result(result, plan.is_batch):
        raise ListenerError(
            f"{where}: the handler returns {inspect.formatannotation(result)}, which has no meaning "
            "here; return None when the message is done, ConsumeStatus.RECONSUME_LATER to get it again"
            + _OTHER_RESULTS[plan.is_batch]
        )
    specs = [_resolved(each, resolve, where) for each in publish_specs(handler)]
    if specs:
        _check_publishes(plan, result, where)
    middlewares = own_middlewares(settings.middlewares, objects, where)
    return Endpoint(settings, plan, middlewares, Publisher(where, specs, template))


def _resolved(spec: PublishSpec, resolve: Resolve, where: str) -> PublishSpec:
    destination = resolve(spec.destination).strip()
    try:
        parse_destination(destination)
    except DestinationError as error:
        raise ListenerError(f"{where}: @publishes: {error}") from error
    return replace(spec, destination=destination)


def _check_publishes(plan: HandlerPlan, result: object, where: str) -> None:
    if plan.is_batch:
        raise ListenerError(
            f"{where}: @publishes is for handlers of single messages, since a list that a batch handler returns names "
            "messages that failed; return Send(...) or a list of them"
        )
    if result is NoneType:
        raise ListenerError(f"{where}: @publishes sends what the handler returns, and it returns None")


def own_middlewares(given: Iterable[object], objects: ObjectSource | None, where: str) -> tuple[object, ...]:
    """Return the middlewares of one listener; classes are built.

    Raises:
        ListenerError: Something is no middleware for listeners.
    """
    found = []
    for each in given:
        try:
            check_middleware(each)
            built = each if not inspect.isclass(each) else each() if objects is None else objects.middleware(each)
        except (ConfigurationError, DependencyError) as error:
            raise ListenerError(f"{where}: middlewares: {error}") from error
        if not hasattr(built, "consume"):
            raise ListenerError(
                f"{where}: middlewares: {name_of(built)} has no consume, so it does nothing for a listener; "
                "give it to the template"
            )
        found.append(built)
    return tuple(found)
