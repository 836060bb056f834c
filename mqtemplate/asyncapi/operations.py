"""Operations of an application: what it receives, sends and runs at times, read from its listeners and marks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mqtemplate.asyncapi.declaration import DocumentedSend, documented_sends
from mqtemplate.context import MQApplication
from mqtemplate.context.components import is_spark_listener
from mqtemplate.errors import ConfigurationError
from mqtemplate.listener.declaration.attributes import ListenerSpec
from mqtemplate.listener.declaration.decorator import SPARK_LISTENER_ATTRIBUTE, listener_specs
from mqtemplate.listener.declaration.results import ConsumeStatus, PublishSpec, Send
from mqtemplate.listener.handler.plan import Endpoint, HandlerPlan, TagRoutedPlan
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.template.options import parse_destination
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_NO_REPLY = (NoneType, None, ConsumeStatus, Send, Any)


@dataclass(frozen=True, slots=True)
class MessageType:
    """Kind of message of a topic: a tag, None for any, and the type of its payload, None for one that is not known."""

    tag: str | None
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation:
    """Something that an application sends or receives.

    Attributes:
        action: ``send`` or ``receive``.
        name: Name of the listener, or of the function that sends.
        summary: First sentence of its documentation.
        reply: Type of the reply; None if there is none.
        extensions: Facts that AsyncAPI has no field for; each key starts with ``x-``.
    """

    action: str
    name: str
    summary: str
    topic: str
    messages: tuple[MessageType, ...]
    reply: Any = None
    extensions: Mapping[str, Any] = field(default_factory=dict)


def operations_of(app: MQApplication) -> list[ApiOperation]:
    """Return the operations of an application that was checked or started."""
    schedules = {schedule.name for schedule in app.get(Schedules).own}
    found: list[ApiOperation] = []
    for container in app.containers:
        if container.endpoint.id not in schedules:
            found += _listener_operations(container.endpoint)
    for component in app.context.components:
        if is_spark_listener(component):
            found += _spark_operations(component, app)
        found += [_documented(target, spec, app) for target, spec in documented_sends(component)]
    return found


# --- receiving ----------------------------------------------------------------------------------


def _listener_operations(endpoint: Endpoint) -> Iterator[ApiOperation]:
    settings, plan = endpoint.settings, endpoint.plan
    extensions: dict[str, Any] = {"x-consumer-group": settings.group}
    if settings.is_orderly:
        extensions["x-consume-mode"] = settings.consume_mode.value
    if settings.is_broadcasting:
        extensions["x-message-model"] = settings.message_model.value
    else:
        extensions["x-dead-letter-topic"] = f"{DLQ_TOPIC_PREFIX}{settings.group}"
    if not isinstance(settings.selector, TagSelector):
        extensions["x-selector"] = settings.selector.expression
    if plan.is_batch:
        extensions["x-batch"] = True
    for topic in settings.topics or settings.topic_patterns:
        yield ApiOperation(
            action="receive",
            name=endpoint.id,
            summary=_summary(plan.handler if not isinstance(plan, TagRoutedPlan) else _owner(plan.handler)),
            topic=topic,
            messages=tuple(_received(plan, settings.selector)),
            reply=_reply_type(plan),
            extensions=extensions if settings.topics else {**extensions, "x-topic-pattern": True},
        )
    for each in plan.plans():
        yield from (_published(endpoint, each, spec) for spec in each.publisher.specs)


def _received(plan: HandlerPlan, selector: object) -> Iterator[MessageType]:
    if isinstance(plan, TagRoutedPlan):
        yield from (MessageType(tag, _payload(each)) for tag, each in plan.routes.items())
        plan_of_others = plan.other
        if plan_of_others is not None:
            yield MessageType(None, _payload(plan_of_others))
        return
    expression = selector.expression if isinstance(selector, TagSelector) else "*"
    tags: list[str | None] = [None] if expression == "*" else [tag.strip() for tag in expression.split("||")]
    yield from (MessageType(tag, _payload(plan)) for tag in tags)


def _payload(plan: HandlerPlan) -> Any:
    return None if plan.is_raw else plan.payload_type


def _reply_type(plan: HandlerPlan) -> Any:
    """Return the type of the reply to a request, from what the handler returns."""
    if plan.is_batch or plan.publishes or isinstance(plan, TagRoutedPlan):
        return None
    return _without_statuses(_result_type(plan.handler))


def _without_statuses(kind: Any) -> Any:
    """Return a type without the results that are no reply; None if nothing is left."""
    if kind in _NO_REPLY or (get_origin(kind) is list and get_args(kind) == (Send,)):
        return None
    if get_origin(kind) in (Union, UnionType):
        left = [each for each in get_args(kind) if _without_statuses(each) is not None]
        return Union[tuple(left)] if left else None  # noqa: UP007  # the members are known at run time only
    return kind


def _result_type(handler: Any) -> Any:
    return get_type_hints(handler).get("return") if inspect.isroutine(handler) else None


def _spark_operations(component: object, app: MQApplication) -> Iterator[ApiOperation]:
    holder: Any = component if inspect.isclass(component) or inspect.isroutine(component) else type(component)
    resolve = app.settings.resolve_text
    specs: tuple[ListenerSpec, ...] = vars(holder)[SPARK_LISTENER_ATTRIBUTE]
    for spec in specs:
        expression = resolve(str(spec.attributes.get("selector_expression", "*")))
        payload = spec.attributes.get("payload")
        tags: list[str | None] = [None] if expression == "*" else [tag.strip() for tag in expression.split("||")]
        for topic in spec.topics:
            yield ApiOperation(
                action="receive",
                name=_name_of(holder),
                summary=_summary(holder),
                topic=resolve(topic),
                messages=tuple(MessageType(tag, payload if inspect.isclass(payload) else None) for tag in tags),
                extensions={"x-consumer-group": resolve(spec.consumer_group), "x-spark": True},
            )


# --- sending ------------------------------------------------------------------------------------


def _published(endpoint: Endpoint, plan: HandlerPlan, spec: PublishSpec) -> ApiOperation:
    delays = {"delay": spec.options.get("delay"), "deliver-at": spec.options.get("deliver_at")}
    extensions = {f"x-{name}": str(value) for name, value in delays.items() if value is not None}
    target = parse_destination(spec.destination)
    result = _without_statuses(_result_type(plan.handler))
    items = get_args(result) if get_origin(result) is list else ()
    method = f".{plan.handler.__name__}" if isinstance(endpoint.plan, TagRoutedPlan) else ""
    return ApiOperation(
        action="send",
        name=f"{endpoint.id}{method}-publishes",
        summary=_summary(plan.handler),
        topic=target.topic,
        messages=(MessageType(target.tag, items[0] if items else result),),
        extensions=extensions | ({"x-delay-level": spec.delay_level} if spec.delay_level else {}),
    )


def _documented(target: Any, spec: DocumentedSend, app: MQApplication) -> ApiOperation:
    destination = parse_destination(app.settings.resolve_text(spec.destination))
    extensions: dict[str, Any] = {}
    if spec.delay is not None:
        try:
            extensions["x-delay"] = app.settings.resolve_text(str(spec.delay))
        except ConfigurationError as error:
            raise ConfigurationError(f"@documents_send on {_name_of(target)}: {error}") from error
    if spec.delay_level:
        extensions["x-delay-level"] = spec.delay_level
    return ApiOperation(
        action="send",
        name=_name_of(target) + ("-sends" if listener_specs(target) else ""),
        summary=_summary(target),
        topic=destination.topic,
        messages=(MessageType(destination.tag, spec.payload),),
        reply=spec.reply,
        extensions=extensions,
    )


def _name_of(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _owner(handler: Any) -> Any:
    """Return the class of a method."""
    return type(getattr(handler, "__self__", handler))


def _summary(target: Any) -> str:
    """Return the first paragraph of a docstring; for a listener's method without one, of its class."""
    text = inspect.getdoc(target) or (inspect.getdoc(_owner(target)) if hasattr(target, "__self__") else None) or ""
    return " ".join(text.partition("\n\n")[0].split())
