"""An AsyncAPI document as tables for readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
