"""Payloads of Apache Avro, in Avro's single-object encoding. Needs the extra ``avro``.

::

    C3 01 | fingerprint of the writer's schema, 8 bytes | the value in binary

The fingerprint is CRC-64-AVRO of the schema's canonical form, little-endian. So a reader finds the schema that the
writer used, and reads older versions of a type. Source: the section "Single object encoding" of Avro's documentation.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mqtemplate.converters.avro_limits import AvroLimits
from mqtemplate.converters.payload_types import BodyLimits, check_parts, read_untyped, type_name
from mqtemplate.converters.plain import PLAIN_TYPES, plain_body, read_body
from mqtemplate.errors import ConfigurationError, ConversionError

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
            raise ConversionError(f"the body is no {writer.name}: {reason}") from exc
        if target_type in _UNTYPED:
            return value
        try:
            return _adapter(target_type).validate_python(value)
        except ValidationError as exc:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in exc.errors()[:3])
            raise ConversionError(f"the {writer.name} is no {type_name(target_type)}: {problems}") from exc

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
        f"the body was written with a schema of fingerprint {bytes(body[2:10][::-1]).hex()}, which is none of "
        f"{', '.join(known) or 'no schemas'}; add that schema: AvroConverter(..., older=[...])"
    )
