"""What all models of settings share: the base class, and types for values as people write them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr

from mqtemplate.message import HostAddress


class Properties(BaseModel):
    """A section of the configuration: frozen, and an unknown key in it is an error.

    Field names are snake_case and carry no aliases; the binding knows how else a key may be written.
    The text under a field is its documentation. Values are never part of an error's text: pydantic would
    print secrets.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        coerce_numbers_to_str=True,  # a group or a key may consist of digits; YAML reads those as a number
    )


class ContradictionError(ValueError):
    """Two keys that cannot both be meant.

    Attributes:
        keys: Their paths below the model that found it, for the file and line in the message.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


def _blank_is_none(value: Any) -> Any:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return None if isinstance(text, str) and not text.strip() else value


def _split_commas(value: Any) -> Any:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper().replace("-", "_") if isinstance(value, str) else value


def _host_and_port(value: Any) -> Any:
    """``127.0.0.1:10911`` or ``[::1]:10911``; an address object passes."""
    if not isinstance(value, str):
        return value
    ip, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError("must be ip:port, for example 127.0.0.1:10911")
    return HostAddress(ip.strip("[]"), int(port))


OptionalText = Annotated[str | None, BeforeValidator(_blank_is_none)]
"""Text, or nothing; ``${NAME:}`` without a value is nothing."""

OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_blank_is_none)]
"""As `OptionalText`, and never printed."""

CommaList = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
"""A list, or one text with commas, which is how an environment variable says it."""

UpperCase = BeforeValidator(_upper)
"""For an enumeration: ``sync-flush`` is ``SYNC_FLUSH``."""

HostPort = Annotated[HostAddress, BeforeValidator(_host_and_port)]
