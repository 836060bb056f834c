"""Times, durations, sizes and bodies as text for a reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from mqtemplate.durations import format_ms

_SHORT = 60
_PRINTABLE = ("\n", "\r", "\t")
_HEX_BYTES = 512
_MAX_INDENTED = 1 << 18
_MAX_DEPTH = 50


def time_text(time_ms: int | None) -> str:
    """Return a time (epoch ms) in the local time zone, to the second; empty for None."""
    if time_ms is None:
        return ""
    try:
        return datetime.fromtimestamp(time_ms / 1_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # of a message or a peer, and outside of the years 1 to 9999
        return f"{time_ms} ms"


def size_text(size: float) -> str:
    """Return a number of bytes, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} TiB"


def count_text(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, such as ``1,240 messages``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def span_text(milliseconds: int) -> str:
    """Return a duration, rounded to two units: ``3h 12m``."""
    unit_ms = next((unit for unit in (60_000, 1_000) if abs(milliseconds) >= 60 * unit), 1)
    if abs(milliseconds) >= 86_400_000:
        unit_ms = 3_600_000
    return format_ms(round(milliseconds / unit_ms) * unit_ms)


def body_text(body: bytes) -> str | None:
    """Return a body as text; None if it is not printable UTF-8."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in _PRINTABLE for char in text) else None


def pretty_body(body: bytes) -> str:
    """Return a body for a reader: JSON is indented, and other bytes are shown as hex digits.

    JSON of great depth or size stays as it is: each level indents all lines in it.
    """
    text = body_text(body)
    if text is None:
        return f"{len(body)} bytes: {body[:_HEX_BYTES].hex(' ')}{' …' if len(body) > _HEX_BYTES else ''}"
    if text[:1] not in ("{", "[") or len(text) > _MAX_INDENTED:
        return text
    try:
        value = json.loads(text)
        return text if _is_deep(value) else json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def short_body(body: bytes) -> str:
    """Return the start of a body in one line."""
    text = body_text(body)
    if text is None:
        return f"{len(body)} bytes"
    line = " ".join(text.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


def properties_text(properties: Mapping[str, str]) -> str:
    """Return properties as lines ``name=value``."""
    return "\n".join(f"{name}={value}" for name, value in sorted(properties.items()))
