"""Payloads of msgspec, such as structs, as JSON or MessagePack. Needs the extra ``msgspec``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from mqtemplate.converter import CONTENT_TYPE, JSON
from mqtemplate.converters.content_types import PLAIN_TYPES, media_type, plain_body, read_body
from mqtemplate.converters.payload_types import UTF8_BOM, check_parts, check_values, read_untyped
from mqtemplate.errors import ConversionError

MSGPACK: Final = "application/msgpack"
"""Content type of bodies in MessagePack."""

_UNTYPED = (Any, object)
_CODECS: dict[str, Any] = {JSON: msgspec.json, MSGPACK: msgspec.msgpack}
_TYPES = "annotate the parameter with a msgspec.Struct, a dataclass, a TypedDict or a type of Python; pydantic models "
_TYPES += "need JsonMessageConverter"


class MsgspecConverter:
    """Converter with msgspec: bytes unchanged, text as UTF-8, everything else as JSON or MessagePack.

    A body is decoded by its content type: JSON and MessagePack are read whichever of the two this converter writes. A
    body without a content type counts as the format that it writes.

    Args:
        format: Format of the bodies that it writes.
    """

    def __init__(self, format: Literal["json", "msgpack"] = "json") -> None:  # noqa: A002 (msgspec's own word)
        if format not in ("json", "msgpack"):
            raise ValueError(f"format must be 'json' or 'msgpack', got {format!r}")
        self._content_type = JSON if format == "json" else MSGPACK
        self._encode = _CODECS[self._content_type].Encoder().encode

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._content_type.rpartition('/')[2]!r})"

    def accepts(self, payload: object) -> bool:
        """Return True for structs: `ConverterByContentType` passes them here."""
        return isinstance(payload, msgspec.Struct)

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        plain = plain_body(payload)
        if plain is not None:
            return plain
        try:
            return self._encode(payload), self._content_type
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
            raise ConversionError(
                f"msgspec cannot write a payload of type {type(payload).__name__}: {exc}; allowed are structs, "
                "dataclasses, and the types of Python; for others convert first"
            ) from exc

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        content_type = media_type(properties.get(CONTENT_TYPE, ""))
        if target_type in _UNTYPED and content_type not in _CODECS:
            return read_untyped(body, properties, "utf-8")
        content_type = content_type if content_type in _CODECS else self._content_type
        return read_body(body, target_type, properties, lambda body, part: _decoded(body, part, content_type))

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if msgspec does not know the type, or if a value could arrive as another one."""
        if target_type not in (*PLAIN_TYPES, *_UNTYPED):
            check_parts(target_type, lambda part: _decoder(self._content_type, part))
            check_values(target_type, self)


def _decoded(body: bytes, target_type: Any, content_type: str) -> object:
    decoder = _decoder(content_type, target_type)
    try:
        return decoder.decode(body.removeprefix(UTF8_BOM) if content_type == JSON else body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as exc:
        raise ConversionError(f"the body cannot be read as {_name_of(target_type)}: {exc}") from exc


@lru_cache(maxsize=1_024)
def _decoder(content_type: str, target_type: Any) -> Any:
    try:
        return _CODECS[content_type].Decoder(Any if target_type in _UNTYPED else target_type)
    except TypeError as exc:
        raise ConversionError(f"msgspec does not know the type {_name_of(target_type)}: {exc}; {_TYPES}") from exc


def _name_of(target_type: Any) -> str:
    return getattr(target_type, "__name__", str(target_type))
