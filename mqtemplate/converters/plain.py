"""Bytes and text, which every converter leaves as they are."""

from __future__ import annotations

from typing import Any

from mqtemplate.converter import JsonMessageConverter

_TEXT = JsonMessageConverter()
PLAIN_TYPES = (bytes, str)
"""Types of a body that is not decoded."""


def plain_body(payload: object) -> bytes | None:
    """Return the body of bytes or text; None for anything else.

    Raises:
        ConversionError: The payload is empty, or None.
    """
    if payload is None or isinstance(payload, bytes | bytearray | memoryview | str):
        return _TEXT.to_body(payload)[0]
    return None


def plain_payload(body: bytes, target_type: Any) -> object:
    """Return a body as bytes or text.

    Raises:
        ConversionError: The body is no UTF-8 text.
    """
    return _TEXT.from_body(body, target_type, {})
