"""The AsyncAPI 3 document of an application: as JSON has it, with its schemas, and as tables for readers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

from mqtemplate.asyncapi.document import ApiOperation, MessageType, operations_of
from mqtemplate.context import MQApplication
from mqtemplate.context.config.masking import masked_text
from mqtemplate.context.settings.rocketmq import ClusterAddresses
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.scheduling.schedules import Schedules

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
        """Return the schema of a type; None if it has none."""
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
        for number, (field, kind) in enumerate(schema.get("properties", {}).items()):
            optional = "" if field in schema.get("required", ()) else ", optional"
            yield f"| {f'`{name}`' if not number else ''} | `{field}` | {_kind(kind)}{optional} |"


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
