"""The AsyncAPI 3 document of an application.

What the application receives, sends and runs at times is read from its listeners and marks. The document is built from
that: as JSON has it, with its schemas, and as tables for readers.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

from mqtemplate.asyncapi.declaration import DocumentedSend, documented_sends
from mqtemplate.context import MQApplication
from mqtemplate.context.components import is_spark_listener
from mqtemplate.context.config.masking import masked_text
from mqtemplate.context.settings.rocketmq import ClusterAddresses
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.errors import ConfigurationError
from mqtemplate.listener.declaration.attributes import ListenerSpec
from mqtemplate.listener.declaration.decorator import SPARK_LISTENER_ATTRIBUTE, listener_specs
from mqtemplate.listener.declaration.results import ConsumeStatus, PublishSpec
from mqtemplate.listener.handler.plan import Endpoint, HandlerPlan, TagRoutedPlan
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.template.options import Send, parse_destination
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
        reply: Type of the reply; None without a reply.
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
    if settings.is_pop:
        extensions["x-request-mode"] = settings.request_mode.value
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
        yield from (MessageType(tag, _payload_type(each)) for tag, each in plan.routes.items())
        if plan.other is not None:
            yield MessageType(None, _payload_type(plan.other))
        return
    expression = selector.expression if isinstance(selector, TagSelector) else "*"
    yield from (MessageType(tag, _payload_type(plan)) for tag in _tags(expression))


def _tags(expression: str) -> list[str | None]:
    return [None] if expression == "*" else [tag.strip() for tag in expression.split("||")]


def _payload_type(plan: HandlerPlan) -> Any:
    return None if plan.is_raw else plan.payload_type


def _reply_type(plan: HandlerPlan) -> Any:
    """Return the type of the reply to a request, from what the handler returns."""
    if plan.is_batch or plan.publishes or isinstance(plan, TagRoutedPlan):
        return None
    return _without_statuses(_result_type(plan.handler))


def _without_statuses(kind: Any) -> Any:
    """Return a type without the results that send no reply; None if nothing is left."""
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
        for topic in spec.topics:
            yield ApiOperation(
                action="receive",
                name=_name_of(holder),
                summary=_summary(holder),
                topic=resolve(topic),
                messages=tuple(
                    MessageType(tag, payload if inspect.isclass(payload) else None) for tag in _tags(expression)
                ),
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


_REF = "#/components/schemas/{model}"
_OPAQUE = (None, Any, object, bytes)


class Schemas:
    """Schemas of some types; models are in `definitions`, under names that differ for different classes.

    Args:
        types: Types of payloads. Those that have no JSON form have no schema.
    """

    def __init__(self, types: Iterable[Any]) -> None:
        adapters = [(kind, adapter) for kind in types if (adapter := _adapter(kind)) is not None]
        self._kinds = [kind for kind, _ in adapters]
        inputs: list[Any] = [(index, "serialization", adapter) for index, (_, adapter) in enumerate(adapters)]
        schemas, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF)
        self._schemas = {index: schema for (index, _), schema in schemas.items()}
        self.definitions: dict[str, Any] = shared.get("$defs", {})

    def of(self, kind: Any) -> dict[str, Any] | None:
        """Return the schema of a type; None without one."""
        for index, known in enumerate(self._kinds):
            if known is kind or (type(known) is type(kind) and known == kind):
                return self._schemas[index]
        return None


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    if any(kind is each for each in _OPAQUE):
        return None
    try:
        adapter = TypeAdapter(kind)
        adapter.json_schema(mode="serialization")
    except (PydanticSchemaGenerationError, PydanticUserError):  # such as a class of Protocol Buffers
        return None
    return adapter


def content_type_of(kind: Any) -> str | None:
    """Return the content type that the default converter gives to a payload; None if the type is not known."""
    if kind is None or kind is Any or kind is object:
        return None
    return {str: "text/plain", bytes: "application/octet-stream"}.get(kind, "application/json")


ASYNCAPI = "3.0.0"
_PROTOCOL = "rocketmq"


def asyncapi_document(
    app: MQApplication, *, title: str = "application", version: str = "0.0.0", description: str = ""
) -> dict[str, Any]:
    """Return the AsyncAPI 3 document of an application, as JSON has it.

    Channels are topics, messages are their tags with the JSON schemas of the payload types, operations are listeners
    and what is declared by ``@publishes`` and ``@documents_send``. Facts of RocketMQ are extensions: ``x-tag``,
    ``x-consumer-group``, ``x-delay``, ``x-schedules`` and others.

    Args:
        app: An application after `MQApplication.check` or `MQApplication.start`.
        version: Version of the application.

    Raises:
        DependencyError: The application was neither checked nor started.
    """
    operations = operations_of(app)
    is_json = isinstance(app.get(MessageConverter), JsonMessageConverter)  # type: ignore[type-abstract]
    parts = _Parts(operations, is_json=is_json)
    document: dict[str, Any] = {
        "asyncapi": ASYNCAPI,
        "info": {"title": title, "version": version} | ({"description": description} if description else {}),
        "defaultContentType": "application/json",
    }
    if servers := _servers(app):
        document["servers"] = servers
    document |= {"channels": parts.channels, "operations": parts.operations}
    if parts.schemas.definitions:
        document["components"] = {"schemas": parts.schemas.definitions}
    schedules = [{"name": each.name, "trigger": str(each.trigger)} for each in app.get(Schedules).own]
    return document | ({"x-schedules": schedules} if schedules else {})


def _servers(app: MQApplication) -> dict[str, Any]:
    """Return the name servers of a cluster. An embedded broker has no address."""
    choice = app.settings.broker_choice
    addresses = app.settings.rocketmq.name_server.split(";") if isinstance(choice, ClusterAddresses) else ()
    return {
        f"name-server-{number}": {
            "host": masked_text(address.strip()),
            "protocol": _PROTOCOL,
            "description": "Name server",
        }
        for number, address in enumerate(filter(None, addresses), start=1)
    }


class _Parts:
    """Channels and operations, which refer to each other."""

    def __init__(self, operations: Iterable[ApiOperation], *, is_json: bool) -> None:
        operations = list(operations)
        self._is_json = is_json
        self.schemas = Schemas(_types_of(operations))
        self.channels: dict[str, Any] = {}
        self.operations: dict[str, Any] = {}
        self._channel_of: dict[str, str] = {}
        names = Counter(_last_part(name) for name in {each.name for each in operations})
        for operation in operations:
            name = _last_part(operation.name)
            self._add(operation, _identifier(operation.name if names[name] > 1 else name))

    def _add(self, operation: ApiOperation, name: str) -> None:
        channel = self._channel(operation.topic, operation.topic)
        record: dict[str, Any] = {"action": operation.action, "channel": {"$ref": f"#/channels/{channel}"}}
        if operation.summary:
            record["summary"] = operation.summary
        record["messages"] = [self._message(channel, each) for each in operation.messages]
        if operation.reply is not None:
            replies = self._channel(f"{operation.topic}-reply", None)
            message = self._message(replies, MessageType(None, operation.reply))
            record["reply"] = {"channel": {"$ref": f"#/channels/{replies}"}, "messages": [message]}
        self.operations[self._free_name(name)] = record | dict(operation.extensions)

    def _free_name(self, name: str) -> str:
        number = 2
        found = name
        while found in self.operations:
            found, number = f"{name}-{number}", number + 1
        return found

    def _channel(self, name: str, address: str | None) -> str:
        """Return the identifier of a channel; the first call creates it."""
        if name not in self._channel_of:
            identifier = _identifier(name)
            while identifier in self.channels:
                identifier += "-"
            self._channel_of[name] = identifier
            self.channels[identifier] = {"address": address, "messages": {}}
            if address is None:
                self.channels[identifier]["description"] = "Replies go to the client that sent the request."
        return self._channel_of[name]

    def _message(self, channel: str, kind: MessageType) -> dict[str, str]:
        """Return a reference to a message of a channel; the first call creates it."""
        messages = self.channels[channel]["messages"]
        record = self._record(kind)
        name = kind.tag if kind.tag is not None else _type_name(kind.payload)
        identifier = _identifier(name)
        if identifier in messages and messages[identifier] != record:
            if "payload" not in record:  # a listener that takes the message as it is
                return {"$ref": f"#/channels/{channel}/messages/{identifier}"}
            if "payload" in messages[identifier]:
                identifier = _identifier(f"{name}-{_type_name(kind.payload)}")
        messages[identifier] = record
        return {"$ref": f"#/channels/{channel}/messages/{identifier}"}

    def _record(self, kind: MessageType) -> dict[str, Any]:
        record: dict[str, Any] = {"name": kind.tag or _type_name(kind.payload), "title": _type_name(kind.payload)}
        content_type = content_type_of(kind.payload) if self._is_json else None
        if content_type is not None:
            record["contentType"] = content_type
        if (schema := self.schemas.of(kind.payload)) is not None:
            record["payload"] = schema
        return record | ({"x-tag": kind.tag} if kind.tag is not None else {})


def _types_of(operations: Iterable[ApiOperation]) -> list[Any]:
    return [
        kind
        for operation in operations
        for kind in (*(message.payload for message in operation.messages), operation.reply)
    ]


def _type_name(kind: Any) -> str:
    if kind is None:
        return "message"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _last_part(name: str) -> str:
    """Return the last part of a dotted name, with its class if it is a method: ``OrderService.place``."""
    *_, owner, last = ["", *name.split(".")]
    return f"{owner}.{last}" if owner[:1].isupper() else last


def _identifier(name: str) -> str:
    """Return a name with the characters that the keys of a document may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "message"


_EXTENSIONS = {
    "x-consumer-group": "group `{}`",
    "x-consume-mode": "{}",
    "x-request-mode": "by {}",
    "x-message-model": "{}",
    "x-spark": "Spark",
    "x-batch": "in batches",
    "x-delay": "delay {}",
    "x-delay-level": "delay level {}",
    "x-deliver-at": "at {}",
    "x-selector": "`{}`",
}


def markdown_of(document: Mapping[str, Any]) -> str:
    """Return channels, payloads and schedules of a document as Markdown."""
    parts = [_channels(document), _payloads(document), _schedules(document)]
    return "\n".join(line for part in parts for line in part)


def _channels(document: Mapping[str, Any]) -> Iterator[str]:
    yield "| Channel | Message | Payload | Sent by | Received by |"
    yield "|---|---|---|---|---|"
    for identifier, channel in document["channels"].items():
        title = f"`{channel['address']}`" if channel["address"] else f"replies of `{identifier.removesuffix('-reply')}`"
        for key, message in channel["messages"].items():
            ref = f"#/channels/{identifier}/messages/{key}"
            sent, received = (", ".join(_users(document, ref, action)) for action in ("send", "receive"))
            tag = f"`{message['x-tag']}`" if "x-tag" in message else ""
            yield f"| {title} | {tag} | {_payload(message)} | {sent} | {received} |"


def _payload(message: Mapping[str, Any]) -> str:
    return "" if message["title"] == "message" else f"`{message['title']}`"


def _users(document: Mapping[str, Any], ref: str, action: str) -> Iterator[str]:
    """Yield the operations with a message. Who receives a request sends the reply."""
    for name, operation in document["operations"].items():
        if operation["action"] == action and _has(operation, ref):
            yield f"`{name}`{_notes(operation)}"
        if operation["action"] != action and _has(operation.get("reply", {}), ref):
            yield f"`{name}`"


def _has(part: Mapping[str, Any], ref: str) -> bool:
    return any(each["$ref"] == ref for each in part.get("messages", ()))


def _notes(operation: Mapping[str, Any]) -> str:
    notes = [text.format(operation[key]) for key, text in _EXTENSIONS.items() if key in operation]
    return f" ({', '.join(notes)})" if notes else ""


def _payloads(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    if schemas:
        yield from ("", "| Payload | Field | Type |", "|---|---|---|")
    for name, schema in schemas.items():
        for number, (attribute, kind) in enumerate(schema.get("properties", {}).items()):
            optional = "" if attribute in schema.get("required", ()) else ", optional"
            yield f"| {f'`{name}`' if not number else ''} | `{attribute}` | {_kind(kind)}{optional} |"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type", "any"))


def _schedules(document: Mapping[str, Any]) -> Iterator[str]:
    schedules = document.get("x-schedules", ())
    if schedules:
        yield from ("", "| Schedule | Trigger |", "|---|---|")
    for schedule in schedules:
        yield f"| `{schedule['name']}` | {schedule['trigger']} |"
