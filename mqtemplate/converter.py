"""Conversion of payloads to message bodies, and of bodies to the types that handlers take."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

from pydantic_core import ValidationError, from_json, to_jsonable_python

from mqtemplate.converters.payload_types import (
    BINARY,
    UTF8_BOM,
    adapter_of,
    check_parts,
    check_values,
    first_errors,
    kind_name,
    parts_of,
    read_parts,
    read_untyped,
)
from mqtemplate.errors import ConfigurationError, ConversionError
from mqtemplate.message import Message, MessageExt, PackedBody

__all__ = [
    "CONTENT_TYPE",
    "INVALID_BODY_ERRORS",
    "JSON",
    "JsonMessageConverter",
    "MessageConverter",
    "TypeChecks",
    "payload_of",
]

# Others, such as the errors of a schema registry that cannot be reached, may go away.
INVALID_BODY_ERRORS = (ValueError, TypeError, LookupError, EOFError, OverflowError, RecursionError)
"""Errors of a converter that depend on the body alone, so that a retry cannot help; `ConversionError` is one."""

CONTENT_TYPE: Final = "contentType"
"""User property with the format of the body, as rocketmq-spring sets it."""

JSON: Final = "application/json"
"""Content type of bodies in JSON."""

_ALLOWED = (
    "allowed are bytes, str, dict, list, tuple, int, float, bool, dataclasses, pydantic models, "
    "and inside them datetime, date, time, timedelta, Decimal, UUID and Enum; "
    "for others convert first, or give the template a converter"
)


class MessageConverter(Protocol):
    """Interface of converters between payloads and message bodies.

    A converter may also have:

    - ``check_type(target_type)``: the application calls it at the start with the type of each handler; it raises
      `ConversionError` if no body can become the type.
    - ``properties_of(payload)``: returns properties of the message that belong to the payload, such as the attributes
      of a CloudEvent. Options of the call win over them.
    - ``with_charset(charset)``: returns a converter that writes and reads text in another encoding.
    """

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        """Return the body, and its content type if a consumer needs it.

        Raises:
            ConversionError: The payload is empty, or this converter does not support its type.
        """
        ...

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        """Return the body as *target_type*: a class, or a generic type such as ``list[Order]``.

        Raises:
            ConversionError: The body cannot be converted.
        """
        ...


def payload_of(message: Message, target_type: Any, converter: MessageConverter) -> object:
    """Return the body of *message* as *target_type*.

    Raises:
        ConversionError: The body could not be decompressed, or cannot be converted.
    """
    body = message.body
    if type(body) is PackedBody:
        raise ConversionError(body.reason)
    return converter.from_body(body, target_type, message.properties)


class TypeChecks:
    """Checks whether bodies can become the types that callers request; each type is checked once."""

    def __init__(self, converter: MessageConverter) -> None:
        self._check = getattr(converter, "check_type", None)
        self._passed: set[Any] = {bytes, str, Message, MessageExt}

    def check(self, target_type: Any) -> None:
        """Raise `ConversionError` if no body can become a type, or if a value could arrive as another one."""
        if self._check is None or self._has_passed(target_type):
            return
        self._check(target_type)
        with contextlib.suppress(TypeError):  # a type that cannot be hashed is checked each time
            self._passed.add(target_type)

    def _has_passed(self, target_type: Any) -> bool:
        try:
            return target_type in self._passed
        except TypeError:
            return False


class JsonMessageConverter:
    """The default converter: bytes unchanged, text as UTF-8, everything else as JSON.

    The body is the same with and without orjson (extra ``speed``), which only makes it faster.

    - The fields of models and dataclasses have their aliases as names.
    - ``NaN`` and infinities do not exist in JSON and are refused, and so are values nested deeper than 200.
    - Bytes have the content type ``application/octet-stream``, JSON has ``application/json``, and text has no type. By
      it a type such as ``Order | str | None`` or ``bytes | str`` gets the value that was sent; see `read_parts`.
    - As ``object`` or ``Any``, a body with the content type JSON is parsed. One without a content type is text if it
      can be decoded, else bytes.
    - A mark of UTF-8 (BOM) before JSON is ignored. Text is not changed.

    Args:
        charset: Encoding of text, as Python names it. JSON is always UTF-8.

    Raises:
        ConfigurationError: There is no encoding of this name.
    """

    def __init__(self, charset: str = "utf-8") -> None:
        try:
            self.charset = codecs.lookup(charset).name
        except LookupError:
            raise ConfigurationError(
                f"charset {charset!r} is not an encoding; give a name that Python knows, such as 'utf-8' or 'gbk'"
            ) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.charset == 'utf-8' else repr(self.charset)})"

    def with_charset(self, charset: str) -> JsonMessageConverter:
        """Return a converter that writes and reads text in another encoding."""
        return JsonMessageConverter(charset)

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        if isinstance(payload, bytes):
            body = payload
        elif isinstance(payload, str):
            body = _encode(payload, self.charset)
        elif isinstance(payload, bytearray | memoryview):
            body = bytes(payload)
        elif payload is None:
            raise ConversionError(f"the payload is None; a message needs a body: {_ALLOWED}")
        else:
            return _to_json(payload), JSON
        if not body:
            raise ConversionError("the payload is empty; a message needs a body of at least one byte")
        return body, None if isinstance(payload, str) else BINARY

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if no body can become this type, or if a value could arrive as another one."""
        if not any(target_type is each for each in (bytes, str, Any, object)):
            check_parts(target_type, adapter_of)
            check_values(target_type, self)

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if target_type is bytes:
            return body
        if target_type is str:
            return _decode(body, self.charset)
        if target_type is Any or target_type is object:
            return _read_untyped(body, properties, self.charset)
        return _reader_of(target_type)(body, properties, self.charset)


def _encode(text: str, charset: str) -> bytes:
    try:
        return text.encode(charset)
    except UnicodeEncodeError as exc:
        raise ConversionError(
            f"the text cannot be written as {charset.upper()}: {exc.reason} at character {exc.start}"
        ) from exc


def _decode(body: bytes, charset: str) -> str:
    try:
        return body.decode(charset)
    except UnicodeDecodeError as exc:
        raise ConversionError(
            f"the body is not {charset.upper()} text: {exc.reason} at byte {exc.start}; use the type bytes instead"
        ) from exc


# --- JSON ---------------------------------------------------------------------------------------------

_plain = partial(to_jsonable_python, by_alias=True)
"""Converts types that JSON does not have: models, dataclasses, times, decimals, UUIDs, enums, sets."""

_encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode  # fmt: skip


_MAX_DEPTH = 200
"""Depth to which every reader here parses JSON. Source: jiter, ``DEFAULT_RECURSION_LIMIT``."""
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NO_STRUCTURE = re.compile(rb"""["](?:[^"\\]|\\.)*["]|[^][{}"]+""", re.DOTALL)
"""Strings, and what is outside of them, without brackets."""


def _to_json(payload: object) -> bytes:
    try:
        body = _dump(payload)
    except (TypeError, ValueError, RecursionError) as exc:  # pydantic's PydanticSerializationError is a ValueError
        raise ConversionError(
            f"a payload of type {kind_name(type(payload))} cannot be written as JSON: {exc}; {_ALLOWED}"
        ) from exc
    if _is_too_deep(body):
        raise ConversionError(
            f"a payload of type {kind_name(type(payload))} cannot be written as JSON: it is nested deeper than "
            f"{_MAX_DEPTH} values, and no reader would parse it; send a flat form, such as a list with references"
        )
    return body


def _dump_with_json(payload: object) -> bytes:
    return _encode_json(payload).encode()


def _fast_dump() -> Callable[[object], bytes]:
    """Return the encoder: orjson if installed, with `json` for values that orjson writes differently or refuses."""
    if find_spec("orjson") is None:
        return _dump_with_json
    orjson = import_module("orjson")
    options = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS

    def dump(payload: object) -> bytes:
        try:
            body: bytes = orjson.dumps(payload, _plain, options)
        except TypeError:
            return _dump_with_json(payload)
        # orjson writes NaN as null. json refuses NaN, so it decides whether each null is a real one.
        return _dump_with_json(payload) if b"null" in body else body

    return dump


_dump = _fast_dump()


def _is_too_deep(body: bytes) -> bool:
    """Return True if JSON is nested deeper than a reader parses."""
    if len(body) < 2 * _MAX_DEPTH or body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return False
    # Nearly all bodies end after the first search, in which brackets inside of strings count too.
    return _is_nested(body.translate(_SQUARE, _NO_BRACKETS)) and _is_nested(
        _NO_STRUCTURE.sub(b"", body).translate(_SQUARE)
    )


def _is_nested(brackets: bytes) -> bool:
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")  # one level
        if not brackets:
            return False
    return True


def _reader(target_type: Any) -> Callable[[bytes, Mapping[str, str], str], object]:
    """Return the function (body, properties, charset) that returns a body as a type."""
    parts = parts_of(target_type)
    if not parts.is_structured:
        return lambda body, properties, charset: read_parts(
            body, parts, properties.get(CONTENT_TYPE, ""), charset, _read_json
        )
    validate = adapter_of(target_type).validate_json

    def read(body: bytes, properties: Mapping[str, str], charset: str) -> object:
        try:
            return validate(body)
        except ValidationError:
            if CONTENT_TYPE not in properties and (text := _as_own_text(body, target_type, charset)) is not None:
                return text
            return _read_json(body, target_type)

    return read


_cached_reader = lru_cache(maxsize=1_024)(_reader)


def _reader_of(target_type: Any) -> Callable[[bytes, Mapping[str, str], str], object]:
    try:
        return _cached_reader(target_type)
    except TypeError:  # a type with unhashable annotations cannot be a key of the cache
        return _reader(target_type)


def _as_own_text(body: bytes, target_type: Any, charset: str) -> str | None:
    """Return the value of a type whose values are texts though it is no ``str``, such as ``EmailStr``."""
    try:
        value = adapter_of(target_type).validate_python(body.decode(charset))
    except ValueError:  # pydantic's, or the encoding's; the caller reports the error of JSON
        return None
    return value if isinstance(value, str) else None


def _read_json(body: bytes, target_type: Any) -> object:
    try:
        return adapter_of(target_type).validate_json(body.removeprefix(UTF8_BOM))
    except ValidationError as exc:
        reason = _other_encoding(body) or first_errors(exc)
        raise ConversionError(f"the body cannot be read as {kind_name(target_type)}: {reason}") from exc


def _other_encoding(body: bytes) -> str:
    """Return the reason why a body is no JSON if it is text in another encoding; empty if it is not."""
    is_utf16 = body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or 0 in body[:4]
    return "it seems to be UTF-16 or UTF-32, and JSON is UTF-8; let the producer write UTF-8" if is_utf16 else ""


def _read_untyped(body: bytes, properties: Mapping[str, str], charset: str) -> object:
    if not properties.get(CONTENT_TYPE, "").lower().startswith(JSON):
        return read_untyped(body, properties, charset)
    try:
        return from_json(body.removeprefix(UTF8_BOM), allow_inf_nan=False)
    except ValueError as exc:
        reason = _other_encoding(body) or str(exc)
        raise ConversionError(f"the content type of the body is JSON, and it cannot be parsed: {reason}") from exc
