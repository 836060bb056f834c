"""A message's properties as one text: ``name 0x01 value 0x02`` for each property, without escaping.

Headers carry this text; `mqtemplate.record.codec` has the same as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from mqtemplate.errors import MessageError


def encode_properties_text(properties: Mapping[str, str]) -> str:
    """Return all pairs as text. As in 5.x the last pair ends with a separator too; readers accept both.

    Raises:
        MessageError: A name or a value contains one of the two separators.
    """
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    if text.count("\x01") != len(properties) or text.count("\x02") != len(properties):
        bad = next(name for name, value in properties.items() if not {"\x01", "\x02"}.isdisjoint(name + value))
        raise MessageError(
            f"property {bad!r} has the character 0x01 or 0x02 in its name or its value; they separate properties on "
            "the wire, so put such data into the body"
        )
    return text


def decode_properties_text(text: str | None) -> dict[str, str]:
    """Return the pairs, without those that have no name or no value; as in Java the last of equal names counts."""
    properties = {}
    for pair in (text or "").split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            properties[name] = value
    return properties
