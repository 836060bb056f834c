"""Payloads of Apache Avro, in Avro's single-object encoding. Needs the extra ``avro``.

::

    C3 01 | fingerprint of the writer's schema, 8 bytes | the value in binary

The fingerprint is CRC-64-AVRO of the schema's canonical form, little-endian. So a reader finds the schema that the
writer used, and reads older versions of a type. Source: the section "Single object encoding" of Avro's documentation.

fastavro decodes in C, one call inside the other: a body of a recursive schema that is nested deeply enough ends the
process, and a few bytes may announce an array of 2**60 nulls. So a body of a schema with which that is possible is
scanned here first, without recursion. Bodies of other schemas are not scanned.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mqtemplate.converters.content_types import PLAIN_TYPES, plain_body, read_body
from mqtemplate.converters.payload_types import BodyLimits, check_parts, kind_name, read_untyped
from mqtemplate.errors import ConfigurationError, ConversionError

# --- limits of bodies -----------------------------------------------------------------------------


_PRIMITIVES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_LARGE_BYTES: Final = 4_096
"""A shorter decimal takes less than some milliseconds; the time grows with the square of the length."""
_LONGEST_VARINT: Final = 10


class AvroLimits:
    """Limits for the bodies of one schema.

    Args:
        schema: A schema as `fastavro.parse_schema` returns it.
    """

    def __init__(self, schema: Any, limits: BodyLimits) -> None:
        self._schema = schema
        self._limits = limits
        self._named = {name: each for each in _definitions(schema) for name in _names(each)}
        self.is_recursive = self._may_be_recursive(schema, ())
        self._has_empty_items = any(
            each.get("type") == "array" and self._is_empty(each["items"], ()) for each in _definitions(schema)
        )
        self._has_decimals = any(_is_decimal(each) for each in _definitions(schema))

    def check_payload(self, payload: object) -> None:
        """Raise `ValueError` if a payload is nested deeper than the limit, or contains itself."""
        level: list[object] = [payload] if self.is_recursive else []
        for _ in range(self._limits.depth + 1):
            level = [item for value in level for item in _inside(value)]
            if not level:
                return
        raise ValueError(f"it is nested deeper than {self._limits.depth} values")

    def check_body(self, body: bytes, start: int) -> None:
        """Raise an error if the value that begins at a byte of a body exceeds the limits.

        Raises:
            ConversionError: It does.
            EOFError, IndexError: The body is not a value of the schema.
        """
        if self.is_recursive or self._has_empty_items or (self._has_decimals and len(body) > _LARGE_BYTES):
            _Scan(body, start, self._named, self._limits).run(self._schema)

    def _may_be_recursive(self, schema: Any, above: tuple[str, ...]) -> bool:
        if isinstance(schema, str):
            return schema in above or (schema in self._named and self._may_be_recursive(self._named[schema], above))
        inside = (*above, *_names(schema)) if isinstance(schema, dict) else above
        return any(self._may_be_recursive(each, inside) for each in _children(schema))

    def _is_empty(self, schema: Any, above: tuple[str, ...]) -> bool:
        """Return True if values of a schema take no byte."""
        if isinstance(schema, str):
            if schema not in self._named or schema in above:
                return schema == "null" or schema in above
            return self._is_empty(self._named[schema], above)
        if isinstance(schema, list):
            return False
        kind = schema["type"]
        if kind == "fixed":
            return bool(schema["size"] == 0)
        if kind in ("record", "error"):
            inside = (*above, *_names(schema))
            return all(self._is_empty(field["type"], inside) for field in schema["fields"])
        return kind not in ("array", "map", "enum") and self._is_empty(kind, above)


class _Scan:
    """One pass over a body. The values that are still to come are on a stack, so that depth costs no recursion."""

    def __init__(self, body: bytes, start: int, named: dict[str, Any], limits: BodyLimits) -> None:
        self._body = body
        self._at = start
        self._named = named
        self._limits = limits
        self._items = 0
        self._stack: list[tuple[Any, int]] = []

    def run(self, schema: Any) -> None:
        self._stack.append((schema, 1))
        while self._stack:
            schema, depth = self._stack.pop()
            if isinstance(schema, str) and schema in self._named:
                schema = self._named[schema]
            if depth > self._limits.depth + 1:
                raise ConversionError(
                    f"the body is nested deeper than {self._limits.depth} values; if it must be, give the converter "
                    "limits=BodyLimits(depth=...)"
                )
            if isinstance(schema, list):
                self._stack.append((schema[self._index(len(schema))], depth))
            elif isinstance(schema, _Block):
                self._next_item(schema, depth)
            else:
                self._value(schema, depth)

    def _value(self, schema: Any, depth: int) -> None:
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("record", "error"):
            self._stack.extend((field["type"], depth + 1) for field in reversed(schema["fields"]))
        elif kind in ("array", "map"):
            self._next_item(_Block(schema["items" if kind == "array" else "values"], is_map=kind == "map"), depth)
        elif kind in _PRIMITIVES:
            self._skip(_PRIMITIVES[kind])
        elif kind in ("int", "long", "enum"):
            self._long()
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind in ("string", "bytes"):
            self._text(schema)
        else:  # a schema inside of "type"
            self._stack.append((kind, depth))

    def _text(self, schema: Any) -> None:
        size = self._long()
        if _is_decimal(schema) and size > (most := schema["precision"] // 2 + 9):
            raise ConversionError(
                f"the body has a decimal of {size} bytes, allowed are {most} for {schema['precision']} digits"
            )
        self._skip(size)

    def _next_item(self, block: _Block, depth: int) -> None:
        """Put the next item of an array or map onto the stack; read the next block if the last one is at its end."""
        if block.remaining == 0:
            count = self._long()
            if count < 0:  # the size of the block in bytes follows
                count = -count
                self._long()
            if count == 0:
                return
            self._items += count
            if self._items > self._limits.items:
                raise ConversionError(
                    f"the body announces {self._items} items, allowed are {self._limits.items}; if it must have as "
                    "many, give the converter limits=BodyLimits(items=...)"
                )
            block.remaining = count
        block.remaining -= 1
        self._stack.append((block, depth))
        if block.is_map:
            self._skip(self._long())
        self._stack.append((block.items, depth + 1))

    def _index(self, count: int) -> int:
        index = self._long()
        if not 0 <= index < count:
            raise IndexError(f"branch {index} of a union with {count}")
        return index

    def _long(self) -> int:
        number = shift = 0
        for byte in self._body[self._at : self._at + _LONGEST_VARINT]:
            self._at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
        raise EOFError(f"no number ends at byte {self._at}")

    def _skip(self, size: int) -> None:
        if not 0 <= size <= len(self._body) - self._at:
            raise EOFError(f"{size} bytes are announced at byte {self._at}, and {len(self._body) - self._at} follow")
        self._at += size


class _Block:
    """Items of an array or map that are still to come."""

    __slots__ = ("is_map", "items", "remaining")

    def __init__(self, items: Any, *, is_map: bool) -> None:
        self.items = items
        self.is_map = is_map
        self.remaining = 0


def _children(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return schema
    if not isinstance(schema, dict):
        return []
    inside = [schema[key] for key in ("items", "values", "type") if isinstance(schema.get(key), str | list | dict)]
    return [*inside, *(field["type"] for field in schema.get("fields", ()))]


def _definitions(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each schema in a schema that is an object, itself first."""
    if isinstance(schema, dict):
        yield schema
    for each in _children(schema):
        yield from _definitions(each)


def _names(schema: dict[str, Any]) -> tuple[str, ...]:
    return (schema["name"],) if isinstance(schema.get("name"), str) else ()


def _is_decimal(schema: Any) -> bool:
    is_logical = isinstance(schema, dict) and schema.get("logicalType") == "decimal"
    return is_logical and schema["type"] == "bytes" and isinstance(schema.get("precision"), int)


def _inside(value: object) -> Iterator[object]:
    """Yield the containers in a container."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return (item for item in items if isinstance(item, dict | list | tuple))


# --- converter ------------------------------------------------------------------------------------


AVRO: Final = "avro/binary"
"""Content type of bodies in Avro. Source: Avro's documentation, "HTTP as transport"."""

Schema = Mapping[str, Any] | str | Path
"""A schema: parsed JSON, JSON as text, or the path of an ``.avsc`` file."""

_MARKER = b"\xc3\x01"
_HEADER_BYTES = 10
_UNTYPED = (Any, object, dict)
_DEFAULT_LIMITS = BodyLimits()


class _Parsed:
    """One schema with its fingerprint, and the limits of its bodies."""

    def __init__(self, schema: Schema, limits: BodyLimits) -> None:
        try:
            text = schema.read_text("utf-8-sig") if isinstance(schema, Path) else schema
            raw = json.loads(text) if isinstance(text, str) else dict(text)
            self.schema = cast("dict[str, Any]", parse_schema(raw))
        except (OSError, ValueError, SchemaParseException, KeyError) as exc:
            raise ConfigurationError(
                f"an Avro schema cannot be read: {type(exc).__name__}: {exc}; give a schema as dict, JSON text or Path"
            ) from exc
        self.limits = AvroLimits(self.schema, limits)
        self.name = str(self.schema.get("name", self.schema.get("type")))
        digest = fingerprint(to_parsing_canonical_form(raw), "CRC-64-AVRO")
        self.header = _MARKER + bytes.fromhex(digest)[::-1]


class AvroConverter:
    """Converter of records of Avro: dataclasses, pydantic models and dicts by the schema of their type.

    ::

        AvroConverter({Order: Path("order.avsc")}, older=[Path("order-1.avsc")])

    Bytes are not changed, text is UTF-8. A dict is written with the only schema there is. A handler may declare any of
    the types, ``dict``, or another dataclass or model with the same fields.

    Args:
        schemas: Type -> schema with which its objects are written.
        older: Further schemas of bodies that are still read.
        limits: Depth and number of items of a body of a recursive schema, or of one with arrays of empty values.

    Raises:
        ConfigurationError: A schema is invalid.
    """

    def __init__(
        self, schemas: Mapping[type, Schema], older: Iterable[Schema] = (), *, limits: BodyLimits = _DEFAULT_LIMITS
    ) -> None:
        self._by_type = {kind: _Parsed(schema, limits) for kind, schema in schemas.items()}
        known = [*self._by_type.values(), *(_Parsed(schema, limits) for schema in older)]
        self._by_header = {each.header: each for each in known}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(kind.__name__ for kind in self._by_type)})"

    def accepts(self, payload: object) -> bool:
        """Return True for objects of the types that have a schema: `ConverterByContentType` passes them here."""
        return type(payload) in self._by_type

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        plain = plain_body(payload)
        if plain is not None:
            return plain
        parsed = self._schema_for(payload)
        buffer = io.BytesIO(parsed.header)
        buffer.seek(_HEADER_BYTES)
        try:
            record = _as_record(payload)
            parsed.limits.check_payload(record)
            schemaless_writer(buffer, parsed.schema, record)
        except Exception as exc:  # fastavro and the types inside of a record raise errors of many classes
            raise ConversionError(
                f"a payload of type {type(payload).__name__} does not fit the Avro schema {parsed.name}: {exc}"
            ) from exc
        return buffer.getvalue(), AVRO

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if target_type in (Any, object) and not body.startswith(_MARKER):
            return read_untyped(body, properties, "utf-8")
        return read_body(body, target_type, properties, self._decoded)

    def _decoded(self, body: bytes, target_type: Any) -> object:
        writer = self._by_header.get(bytes(body[:_HEADER_BYTES]))
        if writer is None:
            raise ConversionError(_unknown_schema(body, [each.name for each in self._by_header.values()]))
        reader = self._by_type.get(target_type)
        try:
            writer.limits.check_body(body, _HEADER_BYTES)
            value = schemaless_reader(
                io.BytesIO(body[_HEADER_BYTES:]), writer.schema, None if reader is None else reader.schema
            )
        except Exception as exc:  # fastavro and the types inside of a record raise errors of many classes
            reason = str(exc) if isinstance(exc, ConversionError) else f"{type(exc).__name__}: {exc}"
            raise ConversionError(f"the body cannot be read as {writer.name}: {reason}") from exc
        if target_type in _UNTYPED:
            return value
        try:
            return _adapter(target_type).validate_python(value)
        except ValidationError as exc:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in exc.errors()[:3])
            raise ConversionError(f"the {writer.name} is no {kind_name(target_type)}: {problems}") from exc

    def check_type(self, target_type: Any) -> None:
        """Raise `ConversionError` if no record can become the type, or if a value could arrive as another one."""
        if target_type not in (*PLAIN_TYPES, *_UNTYPED):
            check_parts(target_type, _adapter)

    def _schema_for(self, payload: object) -> _Parsed:
        found = self._by_type.get(type(payload))
        if found is None and isinstance(payload, dict) and len(self._by_type) == 1:
            [found] = self._by_type.values()
        if found is None:
            known = ", ".join(kind.__name__ for kind in self._by_type) or "none"
            raise ConversionError(
                f"there is no Avro schema for a payload of type {type(payload).__name__} (there is: {known}); "
                "give AvroConverter the schema of this type"
            )
        return found


def _as_record(payload: object) -> object:
    if is_dataclass(payload) and not isinstance(payload, type):
        return asdict(payload)
    return payload.model_dump() if isinstance(payload, BaseModel) else payload


@lru_cache(maxsize=1_024)
def _adapter(target_type: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(target_type)
    except PydanticSchemaGenerationError as exc:
        raise ConversionError(
            f"an Avro record cannot become a {getattr(target_type, '__name__', target_type)}; annotate the parameter "
            "with dict, a dataclass or a pydantic model"
        ) from exc


def _unknown_schema(body: bytes, known: list[str]) -> str:
    if body[:2] != _MARKER:
        return "the body is not in Avro's single-object encoding: it must start with the bytes C3 01"
    return (
        f"the body was written with a schema of fingerprint {bytes(body[2:10][::-1]).hex()}, and the converter "
        f"knows {', '.join(known) or 'no schemas'}; add that schema: AvroConverter(..., older=[...])"
    )
