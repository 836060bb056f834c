"""CloudEvents 1.0 as payloads, in the binary and in the structured content mode.

Binary: the data is the body, and each attribute is a property of the message, ``CE_id``, ``CE_source`` and so on.
Structured: the body is JSON with attributes and data. The properties have the names of CloudEvents' SDK for
Java (``cloudevents-rocketmq``), so that programs in Java read these events.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from mqtemplate import JsonMessageConverter, errors

PREFIX = "CE_"
DATA_TYPE = "CE_contenttype"
STRUCTURED = "application/cloudevents+json"
_NAMES = ("id", "source", "type", "specversion", "subject", "time", "dataschema", "datacontenttype")
_REQUIRED = ("id", "source", "type", "specversion")


@dataclass(frozen=True, kw_only=True)
class CloudEvent:
    """An event: attributes by the names of CloudEvents, and its data.

    Attributes:
        data: Any payload that JSON can hold, text or bytes.
        extensions: Further attributes.
    """

    type: str
    source: str
    data: Any = None
    subject: str | None = None
    id: str = field(default_factory=lambda: str(uuid4()))
    time: str | None = field(default_factory=lambda: datetime.now(UTC).isoformat())
    dataschema: str | None = None
    datacontenttype: str | None = None
    specversion: str = "1.0"
    extensions: Mapping[str, str] = field(default_factory=dict)


class CloudEventConverter:
    """Converter of `CloudEvent`; other payloads go to a second converter.

    Args:
        mode: How events are written. Both modes are read.
        other: Converter of everything else, and of the data of events.
    """

    def __init__(
        self, mode: Literal["binary", "structured"] = "binary", other: JsonMessageConverter | None = None
    ) -> None:
        self._mode = mode
        self._other = other or JsonMessageConverter()

    # --- writing ---------------------------------------------------------------------------------

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        if not isinstance(payload, CloudEvent):
            return self._other.to_body(payload)
        if self._mode == "structured":
            return json.dumps(self._envelope(payload)).encode(), STRUCTURED
        if payload.data is None:
            return b"\0", None  # a message needs a body; the SDK for Java writes this one too
        return self._other.to_body(payload.data)

    def properties_of(self, payload: object) -> Mapping[str, str]:
        """Return the attributes as properties, in the binary mode."""
        if not isinstance(payload, CloudEvent) or self._mode == "structured":
            return {DATA_TYPE: STRUCTURED} if isinstance(payload, CloudEvent) else {}
        attributes = _attributes(payload)
        data_type = attributes.pop("datacontenttype", None) or self._data_type(payload)
        named = {f"{PREFIX}{name}": text for name, text in attributes.items()}
        return named if data_type is None else {**named, DATA_TYPE: data_type}

    def _data_type(self, event: CloudEvent) -> str | None:
        return None if event.data is None else self._other.to_body(event.data)[1]

    def _envelope(self, event: CloudEvent) -> dict[str, Any]:
        envelope: dict[str, Any] = _attributes(event)
        if isinstance(event.data, bytes):
            envelope["data_base64"] = base64.b64encode(event.data).decode()
        elif event.data is not None:
            body, content_type = self._other.to_body(event.data)
            envelope["data"] = event.data if content_type is None else json.loads(body)
        return envelope

    # --- reading ---------------------------------------------------------------------------------

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if target_type is not CloudEvent:
            return self._other.from_body(body, target_type, properties)
        is_structured = STRUCTURED in (properties.get(DATA_TYPE), properties.get("contentType"))
        return self._opened(body) if is_structured else self._from_properties(body, properties)

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if no body can become the type."""
        if target_type is not CloudEvent:
            self._other.check_type(target_type)

    def _opened(self, body: bytes) -> CloudEvent:
        try:
            envelope: dict[str, Any] = json.loads(body)
        except ValueError as exc:
            raise errors.ConversionError(f"the body is not a CloudEvent in JSON: {exc}") from exc
        encoded = envelope.pop("data_base64", None)
        data = envelope.pop("data", None) if encoded is None else base64.b64decode(encoded)
        return _event(envelope, data)

    def _from_properties(self, body: bytes, properties: Mapping[str, str]) -> CloudEvent:
        attributes = {name.removeprefix(PREFIX): text for name, text in properties.items() if name.startswith(PREFIX)}
        content_type = attributes.pop("contenttype", None)
        if content_type is not None:
            attributes["datacontenttype"] = content_type
        untyped = {"contentType": content_type} if content_type else {}
        return _event(attributes, None if body == b"\0" else self._other.from_body(body, Any, untyped))


def _attributes(event: CloudEvent) -> dict[str, str]:
    own = {name: value for name in _NAMES if (value := getattr(event, name)) is not None}
    return {**own, **event.extensions}


def _event(attributes: Mapping[str, Any], data: object) -> CloudEvent:
    if missing := [name for name in _REQUIRED if name not in attributes]:
        raise errors.ConversionError(
            f"the message is not a CloudEvent: the attributes {', '.join(missing)} are missing"
        )
    known: dict[str, Any] = {name: attributes[name] for name in _NAMES if name in attributes}
    known.setdefault("time", None)
    extensions = {name: str(value) for name, value in attributes.items() if name not in _NAMES}
    return CloudEvent(data=data, extensions=extensions, **known)
