"""Discovery of endpoints: from a decorated function or object to one endpoint for each decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple

from mqtemplate.callables import load_name, name_of_callable
from mqtemplate.calls.middlewares import check_middleware, name_of
from mqtemplate.errors import ConfigurationError, DependencyError, DestinationError, ListenerError
from mqtemplate.listener.declaration.attributes import ListenerSpec, Resolve, check_handler
from mqtemplate.listener.declaration.decorator import is_itself_marked, listener_specs
from mqtemplate.listener.declaration.hooks import Enhancer, enhanced, hook_of
from mqtemplate.listener.declaration.resolution import default_resolve, is_pattern, resolve_spec, resolve_topics
from mqtemplate.listener.declaration.results import PUBLISHES_ATTRIBUTE, PublishSpec, publish_specs
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.listener.declaration.tags import has_tags, tag_expression, tag_methods
from mqtemplate.listener.handler.plan import Endpoint, ErrorHandler, Handler, HandlerPlan, routed_plan
from mqtemplate.listener.handler.providers import ObjectSource
from mqtemplate.listener.handler.results import ResultPublisher, SendingTemplate, is_allowed_result
from mqtemplate.listener.handler.signature import bare, hints_of, plan_handler
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template.options import parse_destination

_OTHER_RESULTS = {
    True: ", or the indices of those that failed as list[int]",
    False: "; put a reply that is only True or False into a dict, so that it is not taken for a status",
}


class _Sources(NamedTuple):
    """Sources of what endpoints need beside their decorator; see `make_endpoints`."""

    resolve: Resolve
    objects: ObjectSource | None
    template: Callable[[], SendingTemplate] | None


def make_endpoints(
    target: object,
    resolve: Resolve = default_resolve,
    enhancers: Sequence[Enhancer] = (),
    objects: ObjectSource | None = None,
    template: Callable[[], SendingTemplate] | None = None,
) -> list[Endpoint]:
    """Return the endpoints of a decorated function, or of an object of a decorated class; one for each decorator.

    Methods may be decorated too. Each one is a listener of its own.

    Args:
        enhancers: Functions that may change the attributes of the decorators.
        objects: Source of the objects that handlers take by type, and of middlewares.
        template: Function that returns the template for results of handlers.

    Raises:
        ListenerError: The target has no decorator, or an attribute or the signature of the handler is wrong.
        UnsupportedError: The broker cannot honour an attribute.
    """
    if inspect.isclass(target):
        raise ListenerError(
            f"{target.__qualname__} is a class; register an object of it, or let the application build one"
        )
    sources = _Sources(resolve, objects, template)
    endpoints = [
        _make_endpoint(enhanced(spec, _declared(target), enhancers), target, handler, name, sources)
        for spec, handler, name in _handlers(target)
    ]
    if not endpoints:
        raise ListenerError(
            f"{target!r} is not a listener; decorate it with @message_listener(topic=..., consumer_group=...)"
        )
    return endpoints


def declared_topics(component: object, resolve: Resolve = default_resolve) -> set[str]:
    """Return the topics that a decorated function or class, or an object of one, reads; its methods count too.

    Raises:
        ListenerError: A name is not allowed, or is used twice.
    """
    holders: list[Any] = [component] if is_itself_marked(component) else []
    if not inspect.isroutine(component):
        kind = component if inspect.isclass(component) else type(component)
        holders += [kind, *vars(kind).values()]
    specs = [spec for holder in holders for spec in listener_specs(holder)]
    name = f"listener of {name_of_callable(component)}"
    topics = (topic for spec in specs for topic in resolve_topics(name, spec, resolve))
    return {topic for topic in topics if not is_pattern(topic)}


def _declared(target: object) -> object:
    """Return what the decorator stands on: the function, or the class of the object."""
    return target if inspect.isroutine(target) or is_itself_marked(target) else type(target)


def _handlers(target: object) -> Iterator[tuple[ListenerSpec, Handler | None, str]]:
    """Yield spec, handler and default name of each listener of an object; None for a class with tag methods only."""
    if callable(target) and (own := listener_specs(target)):
        yield from _numbered(own, target, _name_of(target))
    if inspect.isroutine(target) or isinstance(target, functools.partial):
        return
    kind = type(target)
    if specs := listener_specs(kind):
        yield from _numbered(specs, getattr(target, "on_message", None), _name_of(kind))
    seen: set[str] = set()
    for owner in kind.__mro__:
        for name, member in vars(owner).items():
            if name not in seen and inspect.isroutine(member) and (specs := listener_specs(member)):
                yield from _numbered(specs, getattr(target, name), f"{_name_of(kind)}.{name}")
            seen.add(name)


def _numbered(
    specs: tuple[ListenerSpec, ...], handler: Handler | None, name: str
) -> Iterator[tuple[ListenerSpec, Handler | None, str]]:
    for number, spec in enumerate(specs, start=1):
        yield spec, handler, name if number == 1 else f"{name}#{number}"


def _name_of(target: object) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    qualname = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{getattr(target, '__module__', '')}.{qualname}".replace("<locals>.", "")


def _make_endpoint(
    spec: ListenerSpec, target: object, handler: Handler | None, name: str, sources: _Sources
) -> Endpoint:
    routes = _tag_methods(target, handler)
    if routes:
        spec = _with_tags(spec, routes, handler is not None)
    settings = resolve_spec(spec, sources.resolve, name, hook_of(target))
    where = f"listener {settings.id}"
    on_error = error_handler_of(spec.attributes.get("error_handler"), target, where)
    middlewares = own_middlewares(settings.middlewares, sources.objects, where)
    other = None if handler is None else _plan(handler, settings, sources)
    if not routes:
        assert other is not None  # a decorator refuses a class without a handler
        return Endpoint(settings, other, middlewares, on_error)
    plans = {tag: _plan(method, settings, sources) for tag, method in routes.items()}
    return Endpoint(settings, routed_plan(plans, other, where), middlewares, on_error)


def _plan(handler: Handler, settings: ListenerSettings, sources: _Sources) -> HandlerPlan:
    where, objects = f"listener {settings.id}", sources.objects
    plan = plan_handler(handler, where, batch=settings.batch, is_orderly=settings.is_orderly, objects=objects)
    result = bare(hints_of(handler, where).get("return", None))
    if not is_allowed_result(result, plan.is_batch):
        raise ListenerError(
            f"{where}: the handler returns {inspect.formatannotation(result)}, which has no meaning "
            "here; return None when the message is done, ConsumeStatus.RECONSUME_LATER to get it again"
            + _OTHER_RESULTS[plan.is_batch]
        )
    specs = [_resolved(each, sources.resolve, where) for each in publish_specs(handler)]
    if specs:
        _check_publishes(plan, where)
        # A class may publish the results of its tag methods, and one of them may return nothing.
        if result is NoneType and (not has_tags(handler) or hasattr(handler, PUBLISHES_ATTRIBUTE)):
            raise ListenerError(f"{where}: @publishes sends what the handler returns, and it returns None")
    return replace(plan, publisher=ResultPublisher(where, specs, sources.template))


def _tag_methods(target: object, handler: Handler | None) -> dict[str, Handler]:
    """Return the tag methods of a listener class; empty for a decorated method."""
    is_of_class = handler is None or getattr(handler, "__name__", "") == "on_message"
    return tag_methods(target) if is_of_class and not inspect.isroutine(target) else {}


def _with_tags(spec: ListenerSpec, routes: Mapping[str, Handler], has_other: bool) -> ListenerSpec:
    """Return a spec that selects the tags of the methods."""
    kind = spec.attributes.get("selector_type", SelectorType.TAG)
    if kind not in (SelectorType.TAG, SelectorType.TAG.value):
        return spec
    given = spec.attributes.get("selector_expression", "*")
    expression = given if "${" in given else tag_expression("the listener", routes, given.strip(), has_other)
    return replace(spec, attributes={**spec.attributes, "selector_expression": expression})


def _resolved(spec: PublishSpec, resolve: Resolve, where: str) -> PublishSpec:
    destination = resolve(spec.destination).strip()
    try:
        parse_destination(destination)
    except DestinationError as error:
        raise ListenerError(f"{where}: @publishes: {error}") from error
    return replace(spec, destination=destination)


def _check_publishes(plan: HandlerPlan, where: str) -> None:
    if plan.is_batch:
        raise ListenerError(
            f"{where}: @publishes is for handlers of single messages, since a list that a batch handler returns names "
            "messages that failed; return Send(...) or a list of them"
        )


def own_middlewares(given: Iterable[object], objects: ObjectSource | None, where: str) -> tuple[object, ...]:
    """Return the middlewares of one listener; classes are built.

    Raises:
        ListenerError: An item is not a middleware for listeners.
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


_ALLOWED = "a function (error, message), or the name of a method of the listener class"


def error_handler_of(given: Any, target: object, listener: str) -> ErrorHandler | None:
    """Return the error handler that an attribute names; None if it names none.

    Args:
        given: A function, the name of a method of *target*, or the dotted name of a function.

    Raises:
        ListenerError: The function is missing, or it does not take an error and a message.
    """
    if given is None or given == "":
        return None
    found = _named(given, target) if isinstance(given, str) else given
    if not callable(found):
        raise ListenerError(f"{listener}: error_handler must be {_ALLOWED}, got {given!r}")
    check_handler(found, f"{listener}: error_handler {given!r}")
    try:
        inspect.signature(found).bind(ValueError(), object())
    except TypeError as exc:
        raise ListenerError(f"{listener}: error_handler {given!r} cannot take (error, message): {exc}") from exc
    handler: ErrorHandler = found
    return handler


def _named(name: str, target: object) -> Any:
    if "." not in name:
        return getattr(target, name, None)
    try:
        return load_name(name)
    except (ValueError, AttributeError):
        return None  # reported by the caller, with the name
