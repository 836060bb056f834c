"""Parts that converters share: bytes and text as they are, and the choice of a converter by the content type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mqtemplate.converter import CONTENT_TYPE, JsonMessageConverter, MessageConverter
from mqtemplate.converters.payload_types import parts_of, read_parts
from mqtemplate.errors import ConversionError

# --- bytes and text -------------------------------------------------------------------------------


_TEXT = JsonMessageConverter()
PLAIN_TYPES = (bytes, str)
"""Types of a body that is not decoded."""


def plain_body(payload: object) -> tuple[bytes, str | None] | None:
    """Return the body and the content type of bytes or text; None for anything else.

    Raises:
        ConversionError: The payload is empty, or None.
    """
    if payload is None or isinstance(payload, bytes | bytearray | memoryview | str):
        return _TEXT.to_body(payload)
    return None


def read_body(
    body: bytes, target_type: Any, properties: Mapping[str, str], structured: Callable[[bytes, Any], object]
) -> object:
    """Return a body as a type, whose text and bytes are read here.

    Args:
        structured: Reads a body in the format of the converter as a type.

    Raises:
        ConversionError: The body is not a value of the type.
    """
    if target_type in PLAIN_TYPES:
        return _TEXT.from_body(body, target_type, {})
    parts = parts_of(target_type)
    if parts.is_structured:
        return structured(body, target_type)
    return read_parts(body, parts, properties.get(CONTENT_TYPE, ""), _TEXT.charset, structured)


# --- choice of a converter ------------------------------------------------------------------------


def media_type(content_type: str) -> str:
    """Return a content type without its parameters: ``application/json; charset=utf-8`` is ``application/json``."""
    return content_type.partition(";")[0].strip().lower()


class ConverterByContentType:
    """Converter that passes each body to the converter of its content type.

    ::

        ConverterByContentType({"application/x-protobuf": ProtobufConverter()})

    A payload goes to the first converter that has ``accepts(payload)`` and returns True there, else to the default one.
    A body without a content type, or with another one than those given, goes to the default converter.

    Args:
        converters: Content type without parameters -> converter.
        default: Converter of everything else; JSON by default.
    """

    def __init__(self, converters: Mapping[str, MessageConverter], default: MessageConverter | None = None) -> None:
        self._converters = {media_type(content_type): converter for content_type, converter in converters.items()}
        self._default: MessageConverter = JsonMessageConverter() if default is None else default

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._converters)}, default={self._default!r})"

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        return self._converter_for(payload).to_body(payload)

    def properties_of(self, payload: object) -> Mapping[str, str]:
        """Return the properties that the converter of a payload sets."""
        properties_of = getattr(self._converter_for(payload), "properties_of", None)
        return {} if properties_of is None else properties_of(payload)

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        converter = self._converters.get(media_type(properties.get(CONTENT_TYPE, "")), self._default)
        return converter.from_body(body, target_type, properties)

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if none of the converters returns this type."""
        errors = [_refusal(converter, target_type) for converter in (self._default, *self._converters.values())]
        if all(error is not None for error in errors):
            raise errors[0]  # type: ignore[misc]  # checked in the line above

    def _converter_for(self, payload: object) -> MessageConverter:
        for converter in self._converters.values():
            accepts = getattr(converter, "accepts", None)
            if accepts is not None and accepts(payload):
                return converter
        return self._default


def _refusal(converter: MessageConverter, target_type: Any) -> ConversionError | None:
    check = getattr(converter, "check_type", None)
    if check is None:
        return None
    try:
        check(target_type)
    except ConversionError as exc:
        return exc
    return None
