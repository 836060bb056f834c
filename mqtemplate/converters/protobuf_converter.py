"""Payloads of Protocol Buffers: generated message classes. Needs the extra ``protobuf``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mqtemplate.converter import CONTENT_TYPE
from mqtemplate.converters.content_types import PLAIN_TYPES, plain_body, read_body
from mqtemplate.converters.payload_types import kind_name, members_of, parts_of, read_untyped
from mqtemplate.errors import ConversionError

PROTOBUF: Final = "application/x-protobuf"
"""Content type of bodies in Protocol Buffers. Its parameter ``messageType`` is the full name of the message."""

_MESSAGE_TYPE = re.compile(r'messageType="?([\w.]+)')
_UNTYPED = (Any, object)


class ProtobufConverter:
    """Converter of generated protobuf messages: bytes unchanged, text as UTF-8.

    A handler gets the message class that it declares. As ``object``, a body becomes the class that its content type
    names, if its module was imported.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def accepts(self, payload: object) -> bool:
        """Return True for protobuf messages: `ConverterByContentType` passes them here."""
        return isinstance(payload, Message)

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        plain = plain_body(payload)
        if plain is not None:
            return plain
        if not isinstance(payload, Message):
            raise ConversionError(
                f"a payload of type {type(payload).__name__} is not a protobuf message; pass an object of a generated "
                "class, bytes or text"
            )
        name = payload.DESCRIPTOR.full_name
        try:
            body = payload.SerializeToString()
        except EncodeError as exc:
            raise ConversionError(f"the {name} cannot be written: {exc}; set its required fields") from exc
        if not body:
            raise ConversionError(
                f"the {name} has default values only, so its body is empty, and a message needs a body of at least one "
                "byte; set a field"
            )
        return body, f'{PROTOBUF}; messageType="{name}"'

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        named = _MESSAGE_TYPE.search(properties.get(CONTENT_TYPE, ""))
        if target_type in _UNTYPED:
            if named is not None:
                return _parsed(body, _class_named(named[1]))
            return read_untyped(body, properties, "utf-8")
        return read_body(body, target_type, properties, lambda body, part: _as_one_of(body, part, named and named[1]))

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if a part of the type is neither a class of protobuf messages nor text or bytes."""
        structured = parts_of(target_type).structured
        if target_type not in (*PLAIN_TYPES, *_UNTYPED) and structured is not None:
            _classes_of(structured)


def _classes_of(annotation: Any) -> list[type[Message]]:
    """Return the classes of messages in an annotation, such as both of ``Order | Refund``."""
    kinds = [kind for kind in members_of(annotation) if kind is not NoneType]
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Message)):
            raise ConversionError(
                f"{kind_name(kind)} is not a protobuf message; annotate the parameter with a generated class, bytes "
                "or str"
            )
    return kinds


def _as_one_of(body: bytes, annotation: Any, named: str | None) -> Message:
    """Return a body as the class that its content type names; without one, as the only class there is."""
    kinds = {kind.DESCRIPTOR.full_name: kind for kind in _classes_of(annotation)}
    wanted = " or ".join(kinds) or kind_name(annotation)
    if named is None and len(kinds) != 1:
        raise ConversionError(
            f"the body may be {wanted}, and its content type names no message; let the producer do so"
        )
    kind = next(iter(kinds.values())) if named is None else kinds.get(named)
    if kind is None:
        raise ConversionError(f"the body is a {named} by its content type, not a {wanted}")
    return _parsed(body, kind)


def _class_named(name: str) -> type[Message]:
    try:
        kind: type[Message] = GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))
    except KeyError as exc:
        raise ConversionError(
            f"the body is a {name} by its content type, and no imported module defines it; import the generated module"
        ) from exc
    return kind


def _parsed(body: bytes, kind: type[Message]) -> Message:
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise ConversionError(f"the body cannot be read as {kind.DESCRIPTOR.full_name}: {exc}") from exc
    return message
