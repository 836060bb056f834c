"""Bytes and text, which every converter leaves as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mqtemplate.converter import CONTENT_TYPE, JsonMessageConverter
from mqtemplate.converters.payload_types import parts_of, read_parts

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
        ConversionError: The body is no value of the type.
    """
    if target_type in PLAIN_TYPES:
        return _TEXT.from_body(body, target_type, {})
    parts = parts_of(target_type)
    if parts.is_structured:
        return structured(body, target_type)
    return read_parts(body, parts, properties.get(CONTENT_TYPE, ""), _TEXT.charset, structured)
