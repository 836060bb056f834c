"""JSON schemas of payload types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

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
