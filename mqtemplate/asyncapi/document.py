"""The AsyncAPI 3 document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mqtemplate.asyncapi.operations import MessageType, Operation, operations_of
from mqtemplate.asyncapi.schemas import Schemas, content_type_of
from mqtemplate.context import MQApplication
from mqtemplate.context.config.masking import masked_text
from mqtemplate.context.settings.rocketmq import ClusterAddresses
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.scheduling.schedules import Schedules

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

    def __init__(self, operations: Iterable[Operation], *, is_json: bool) -> None:
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

    def _add(self, operation: Operation, name: str) -> None:
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


def _types_of(operations: Iterable[Operation]) -> list[Any]:
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
