"""Times, durations, sizes and bodies: as text for a reader, and from arguments."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import typer

from mqtemplate.durations import duration_ms, format_ms, is_duration_text
from mqtemplate.message import MessageExt

_SHORT = 60
_PRINTABLE = ("\n", "\r", "\t")


def time_text(time_ms: int | None) -> str:
    """Return a time (epoch ms) in the local time zone, to the second; empty for None."""
    if time_ms is None:
        return ""
    return datetime.fromtimestamp(time_ms / 1_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size_text(size: float) -> str:
    """Return a number of bytes, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} TiB"


def span_text(milliseconds: int) -> str:
    """Return a duration, rounded to two units: ``3h 12m``."""
    unit_ms = next((unit for unit in (60_000, 1_000) if abs(milliseconds) >= 60 * unit), 1)
    if abs(milliseconds) >= 86_400_000:
        unit_ms = 3_600_000
    return format_ms(round(milliseconds / unit_ms) * unit_ms)


# --- bodies -------------------------------------------------------------------------------------


def body_text(body: bytes) -> str | None:
    """Return a body as text; None if it is not printable UTF-8."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in _PRINTABLE for char in text) else None


def pretty_body(body: bytes) -> str:
    """Return a body for a reader: JSON is indented, and other bytes are shown as hex digits."""
    text = body_text(body)
    if text is None:
        return f"{len(body)} bytes: {body[:512].hex(' ')}{' …' if len(body) > 512 else ''}"
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False) if text[:1] in ("{", "[") else text
    except ValueError:
        return text


def short_body(body: bytes) -> str:
    """Return the start of a body in one line."""
    text = body_text(body)
    if text is None:
        return f"{len(body)} bytes"
    line = " ".join(text.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` if it is text, else ``body_base64``."""
    text = body_text(body)
    return {"body_base64": base64.b64encode(body).decode()} if text is None else {"body": text}


def message_fields(message: MessageExt) -> dict[str, Any]:
    """Return a message for JSON. Times are epoch milliseconds."""
    return {
        "msg_id": message.msg_id,
        "offset_msg_id": message.offset_msg_id,
        "topic": message.topic,
        "tags": message.tags,
        "keys": message.keys,
        "broker_name": message.broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "store_timestamp": message.store_timestamp,
        "born_timestamp": message.born_timestamp,
        "born_host": str(message.born_host),
        "reconsume_times": message.reconsume_times,
        "properties": dict(message.properties),
        **body_fields(message.body),
    }


def properties_text(properties: Mapping[str, str]) -> str:
    """Return properties as lines ``name=value``."""
    return "\n".join(f"{name}={value}" for name, value in sorted(properties.items()))


# --- arguments ----------------------------------------------------------------------------------


def past_time(text: str | None, now_ms: int, option: str) -> int | None:
    """Return the time (epoch ms) of an option: ``2h`` is two hours ago.

    Raises:
        typer.BadParameter: It is no time.
    """
    return None if text is None else _time(text, now_ms, -1, option)


def future_time(text: str | None, now_ms: int, option: str) -> int | None:
    """Return the time (epoch ms) of an option: ``2h`` is in two hours.

    Raises:
        typer.BadParameter: It is no time.
    """
    return None if text is None else _time(text, now_ms, 1, option)


def _time(text: str, now_ms: int, sign: int, option: str) -> int:
    if is_duration_text(text):
        return now_ms + sign * duration_ms(text)
    if text.isdecimal():
        return int(text)
    try:
        return round(datetime.fromisoformat(text).astimezone().timestamp() * 1_000)
    except ValueError:
        form = "from now" if sign > 0 else "ago"
        raise typer.BadParameter(
            f"{text!r} is no time; give a duration ({form}) such as 2h or '1h 30m', a time such as 2026-01-31T08:00 "
            "(local, or with its offset), or epoch milliseconds",
            param_hint=option,
        ) from None


def duration(text: str, option: str) -> int:
    """Return the duration of an option in milliseconds. It may be negative.

    Raises:
        typer.BadParameter: It is no duration.
    """
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    try:
        if not is_duration_text(rest):
            raise ValueError(f"a duration with units, such as 90s, 2h or '1h 30m', got {text!r}")
        return sign * duration_ms(rest)
    except ValueError as exc:
        raise typer.BadParameter(f"it must be {exc}", param_hint=option) from None


def named_values(texts: list[str], option: str) -> dict[str, str]:
    """Return the values of a repeated option ``name=value``.

    Raises:
        typer.BadParameter: One has another form.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [name for name, equals, _ in pairs if not equals or not name]:
        raise typer.BadParameter(f"{wrong[0]!r} is not name=value", param_hint=option)
    return {name: value for name, _, value in pairs}
