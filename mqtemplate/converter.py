"""Payload <-> body: what a sender passes and a handler gets, and the bytes that travel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from mqtemplate.errors import ConversionError

__all__ = ["CONTENT_TYPE", "JSON", "JsonMessageConverter", "MessageConverter"]

CONTENT_TYPE: Final = "contentType"
"""The user property that names a body's format, as rocketmq-spring sets it."""

JSON: Final = "application/json"

_ALLOWED = (
    "allowed are bytes, str, dict, list, tuple, int, float, bool, dataclasses, pydantic models, "
    "and inside them datetime, date, time, timedelta, Decimal, UUID and Enum; "
    "for others convert first, or give the template a converter"
)


class MessageConverter(Protocol):
    """Turns payloads into bodies and bodies into what handlers ask for."""

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        """The body, and its content type where a reader needs to know one.

        Raises:
            ConversionError: The payload is empty, or nothing this converter can write.
        """
        ...

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        """The body as *target_type*: a class, or a form such as ``list[Order]``.

        Raises:
            ConversionError: The body is not one.
        """
        ...


class JsonMessageConverter:
    """Bytes as they are, text as UTF-8, everything else as JSON. The default.

    What is written for a payload is the same with and without orjson, which only makes it faster (extra ``speed``).

    - Models and dataclasses are written by their aliases, and read by them.
    - ``NaN`` and infinities have no JSON and are refused.
    - Asked for ``object`` or ``Any``, a body that says it is JSON is parsed; another is text if UTF-8, else bytes.
    """

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        if isinstance(payload, bytes):
            body = payload
        elif isinstance(payload, str):
            body = _encode(payload)
        elif isinstance(payload, bytearray | memoryview):
            body = bytes(payload)
        elif payload is None:
            raise ConversionError(f"the payload is None; a message needs a body: {_ALLOWED}")
        else:
            return _to_json(payload), JSON
        if not body:
            raise ConversionError("the payload is empty; a message needs a body of at least one byte")
        return body, None

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if target_type is bytes:
            return body
        if target_type is str:
            return _decode(body)
        if target_type is Any or target_type is object:
            return _read_untyped(body, properties)
        adapter = _adapter_of(target_type)
        try:
            return adapter.validate_json(body)
        except ValidationError as exc:
            raise ConversionError(f"the body is no {_name_of(target_type)}: {_first_faults(exc)}") from exc


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise ConversionError(f"the text cannot be written as UTF-8: {exc.reason} at character {exc.start}") from exc


def _decode(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as exc:
        raise ConversionError(
            f"the body is no UTF-8 text: {exc.reason} at byte {exc.start}; ask for bytes instead"
        ) from exc


# --- JSON ---------------------------------------------------------------------------------------------

_plain = partial(to_jsonable_python, by_alias=True)
"""What JSON has no word for, as something it has: models, dataclasses, times, decimals, ids, enums, sets."""

_encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode  # fmt: skip


def _to_json(payload: object) -> bytes:
    try:
        return _dump(payload)
    except (TypeError, ValueError, RecursionError, PydanticSerializationError) as exc:
        raise ConversionError(
            f"a payload of type {_name_of(type(payload))} cannot be written as JSON: {exc}; {_ALLOWED}"
        ) from exc


def _dump_with_json(payload: object) -> bytes:
    return _encode_json(payload).encode()


def _fast_dump() -> Callable[[object], bytes]:
    """Orjson where it is installed. Whatever it cannot do, or does in another way, is left to `json`."""
    if find_spec("orjson") is None:
        return _dump_with_json
    orjson = import_module("orjson")
    options = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS

    def dump(payload: object) -> bytes:
        try:
            body: bytes = orjson.dumps(payload, _plain, options)
        except TypeError:
            return _dump_with_json(payload)
        # It writes NaN as null; only json tells a true null from a lost number.
        return _dump_with_json(payload) if b"null" in body else body

    return dump


_dump = _fast_dump()


def _read_untyped(body: bytes, properties: Mapping[str, str]) -> object:
    if properties.get(CONTENT_TYPE, "").startswith(JSON):
        try:
            return json.loads(body)
        except ValueError as exc:
            raise ConversionError(f"the body says it is JSON and is not: {exc}") from exc
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def _adapter_of(target_type: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(target_type)
    except TypeError:  # a type whose annotations cannot be hashed has no place in the cache
        return _make_adapter(target_type)


@lru_cache(maxsize=1_024)
def _cached_adapter(target_type: Any) -> TypeAdapter[Any]:
    return _make_adapter(target_type)


def _make_adapter(target_type: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(target_type)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as exc:
        raise ConversionError(f"a body cannot become a {_name_of(target_type)}: {_ALLOWED}") from exc


def _name_of(target_type: Any) -> str:
    return (
        target_type.__name__
        if isinstance(target_type, type) and not hasattr(target_type, "__args__")
        else str(target_type)
    )


def _first_faults(error: ValidationError, count: int = 3) -> str:
    """The first few faults, without the input, which may be secret."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    told = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:count]]
    return "; ".join(told) + (f"; and {len(faults) - count} more" if len(faults) > count else "")
