"""Payloads of Protocol Buffers: generated message classes. Needs the extra ``protobuf``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mqtemplate.converter import CONTENT_TYPE
from mqtemplate.converters.plain import PLAIN_TYPES, plain_body, plain_payload
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
            return plain, None
        if not isinstance(payload, Message):
            raise ConversionError(
                f"a payload of type {type(payload).__name__} is no protobuf message; pass an object of a generated "
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
        if target_type in PLAIN_TYPES:
            return plain_payload(body, target_type)
        content_type = properties.get(CONTENT_TYPE, "")
        named = _MESSAGE_TYPE.search(content_type)
        if target_type in _UNTYPED:
            return _parsed(body, _class_named(named[1])) if named is not None else body
        self.check_type(target_type)
        wanted = target_type.DESCRIPTOR.full_name
        if named is not None and named[1] != wanted:
            raise ConversionError(f"the body is a {named[1]} by its content type, and no {wanted}")
        return _parsed(body, target_type)

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if the type is no class of protobuf messages."""
        if target_type in (*PLAIN_TYPES, *_UNTYPED):
            return
        if not (isinstance(target_type, type) and issubclass(target_type, Message)):
            raise ConversionError(
                f"{getattr(target_type, '__name__', target_type)} is no protobuf message; annotate the parameter with "
                "a generated class, bytes or str"
            )


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
        raise ConversionError(f"the body is no {kind.DESCRIPTOR.full_name}: {exc}") from exc
    return message
