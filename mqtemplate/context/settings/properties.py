"""Base class, field helpers and value types of the sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import HostAddress

SECTION_CONFIG = ConfigDict(
    extra="forbid",
    hide_input_in_errors=True,  # pydantic's own error texts would show secrets
    coerce_numbers_to_str=True,  # a group or a key may consist of digits; YAML reads those as a number
    defer_build=True,  # `AppSettings` builds its validator over all sections, which need none of their own
)


class Properties(BaseModel):
    """A section of the configuration: frozen, and an unknown key in it is an error.

    Field names are in snake_case and have no aliases; the binding maps other spellings of a key. The text under a field
    is its documentation; `reference` reads it.
    """

    model_config = ConfigDict(frozen=True, **SECTION_CONFIG)


@dataclass(frozen=True, slots=True)
class DeclaredIn:
    """Mark of a field whose default and documentation are in a broker's settings."""

    settings: type
    name: str


def section() -> Any:
    """Return a field for a section below a section, by default with the defaults of all its keys.

    An instance as the default would need a validator of its own for each section, at the import of the library.
    """
    return Field({}, validate_default=True)


def same_as(settings: type, name: str, **rules: Any) -> Any:
    """Return a field with the default and the documentation of a field in a broker's settings.

    Args:
        rules: Ranges for pydantic, such as ``ge=0``.
    """
    [declared] = [field for field in dataclasses.fields(settings) if field.name == name]
    field: FieldInfo = Field(declared.default, **rules)
    field.metadata.append(DeclaredIn(settings, name))
    return field


@contextmanager
def as_value_error() -> Iterator[None]:
    """Turn an error of the library inside the context into a ValueError, as validators of pydantic raise it."""
    try:
        yield
    except MQTemplateError as exc:
        raise ValueError(exc.problem or str(exc)) from exc


def upper_case(value: Any) -> Any:
    """Return the name of an enumeration's member: ``sync-flush`` is ``SYNC_FLUSH``."""
    return value.upper().replace("-", "_") if isinstance(value, str) else value


def host_and_port(value: Any) -> Any:
    """Return the address for ``127.0.0.1:10911`` or ``[::1]:10911``; an address object unchanged."""
    if not isinstance(value, str):
        return value
    ip, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError("must be ip:port, for example 127.0.0.1:10911")
    return HostAddress(ip.strip("[]"), int(port))


def bytes_of(value: Any) -> Any:
    """Return the number of bytes for ``64MiB``; None for None."""
    if value is None:
        return None
    try:
        return int(_BYTE_SIZE.validate_python(value))
    except ValidationError as exc:
        raise ValueError(exc.errors()[0]["msg"]) from None


def duration_in(unit_ms: int) -> Callable[[Any], Any]:
    """Return a validator that reads a duration, such as ``1h 30m``, as a whole number of units."""

    def read(value: Any) -> Any:
        if isinstance(value, str | timedelta):
            try:
                milliseconds = duration_ms(value, unit_ms)
            except ValueError as exc:
                raise ValueError(f"must be {exc}") from None
            if milliseconds % unit_ms:
                raise ValueError(f"must be a whole number of units of {format_ms(unit_ms)}")
            return milliseconds // unit_ms
        return value

    return read


def _blank_is_none(value: Any) -> Any:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return None if isinstance(text, str) and not text.strip() else value


def _split_commas(value: Any) -> Any:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


_BYTE_SIZE = TypeAdapter(ByteSize)

OptionalText = Annotated[str | None, BeforeValidator(_blank_is_none)]
"""Text or None; ``${NAME:}`` without a value is None."""

OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_blank_is_none)]
"""As `OptionalText`, and never printed."""

CommaList = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
"""A list, or one text with commas, as in an environment variable."""

UpperCase = BeforeValidator(upper_case)
"""Validator of an enumeration."""

HostPort = Annotated[HostAddress, BeforeValidator(host_and_port)]
"""An address as ``ip:port``."""

Milliseconds = Annotated[int, BeforeValidator(duration_in(1))]
"""A duration in milliseconds: ``3s``, or a number."""

Seconds = Annotated[int, BeforeValidator(duration_in(1_000))]
"""A duration in whole seconds: ``3s``, or a number."""
