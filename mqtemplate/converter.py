"""Conversion of payloads to message bodies, and of bodies to the types that handlers take."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

from pydantic_core import ValidationError, to_jsonable_python

from mqtemplate.errors import ConfigurationError, ConversionError
from mqtemplate.message import Message, PackedBody

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["CONTENT_TYPE", "JSON", "JsonMessageConverter", "MessageConverter", "payload_of"]

CONTENT_TYPE: Final = "contentType"
"""User property with the format of the body, as rocketmq-spring sets it."""

JSON: Final = "application/json"
"""Content type of bodies in JSON."""

_ALLOWED = (
    "allowed are bytes, str, dict, list, tuple, int, float, bool, dataclasses, pydantic models, "
    "and inside them datetime, date, time, timedelta, Decimal, UUID and Enum; "
    "for others convert first, or give the template a converter"
)


_TYPES = (
    "annotate the parameter with bytes, str, dict, list, int, float, bool, a dataclass, a pydantic model "
    "or a TypedDict, or give the application a converter"
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


class JsonMessageConverter:
    """The default converter: bytes unchanged, text as UTF-8, everything else as JSON.

    The body is the same with and without orjson (extra ``speed``), which only makes it faster.

    - The fields of models and dataclasses have their aliases as names.
    - ``NaN`` and infinities do not exist in JSON and are refused.
    - As ``object`` or ``Any``, a body with the content type JSON is parsed. Any other is text if UTF-8, else bytes.

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
                f"charset {charset!r} is no encoding; give a name that Python knows, such as 'utf-8' or 'gbk'"
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
        return body, None

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if no body can become this type: asked at the start for each handler."""
        if target_type not in (bytes, str, Any, object):
            _adapter_of(target_type)

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if target_type is bytes:
            return body
        if target_type is str:
            return _decode(body, self.charset)
        if target_type is Any or target_type is object:
            return _read_untyped(body, properties, self.charset)
        adapter = _adapter_of(target_type)
        try:
            return adapter.validate_json(body)
        except ValidationError as exc:
            raise ConversionError(f"the body is no {_name_of(target_type)}: {_first_errors(exc)}") from exc


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
            f"the body is no {charset.upper()} text: {exc.reason} at byte {exc.start}; use the type bytes instead"
        ) from exc


# --- JSON ---------------------------------------------------------------------------------------------

_plain = partial(to_jsonable_python, by_alias=True)
"""Converts types that JSON does not have: models, dataclasses, times, decimals, UUIDs, enums, sets."""

_encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode  # fmt: skip


def _to_json(payload: object) -> bytes:
    try:
        return _dump(payload)
    except (TypeError, ValueError, RecursionError) as exc:  # pydantic's PydanticSerializationError is a ValueError
        raise ConversionError(
            f"a payload of type {_name_of(type(payload))} cannot be written as JSON: {exc}; {_ALLOWED}"
        ) from exc


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


def _read_untyped(body: bytes, properties: Mapping[str, str], charset: str) -> object:
    if properties.get(CONTENT_TYPE, "").startswith(JSON):
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise ConversionError(f"the content type of the body is JSON, and it cannot be parsed: {exc}") from exc
    try:
        return body.decode(charset)
    except UnicodeDecodeError:
        return body


def _adapter_of(target_type: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(target_type)
    except TypeError:  # a type with unhashable annotations cannot be a key of the cache
        return _create_adapter(target_type)


def _create_adapter(target_type: Any) -> TypeAdapter[Any]:
    # Imported here: an application that sends and receives bytes and text only does not need it.
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(target_type)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as exc:
        raise ConversionError(f"a body cannot become a {_name_of(target_type)}; {_TYPES}") from exc


_cached_adapter = lru_cache(maxsize=1_024)(_create_adapter)


def _name_of(target_type: Any) -> str:
    is_generic = not isinstance(target_type, type) or hasattr(target_type, "__args__")
    return str(target_type) if is_generic else str(target_type.__name__)


def _first_errors(error: ValidationError, count: int = 3) -> str:
    """Return the first few errors, without the input, which may be secret."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    shown = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in errors[:count]]
    return "; ".join(shown) + (f"; and {len(errors) - count} more" if len(errors) > count else "")
