"""Times, durations, sizes and bodies: as text for a reader, and from arguments."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

import typer

from mqtemplate.converters.readable import (
    body_text,
    pretty_body,
    properties_text,
    short_body,
    size_text,
    span_text,
    time_text,
)
from mqtemplate.durations import duration_ms, is_duration_text
from mqtemplate.message import MessageExt
from mqtemplate.numbers import parse_number

__all__ = [
    "body_fields",
    "body_text",
    "duration",
    "future_time",
    "message_fields",
    "named_values",
    "past_time",
    "pretty_body",
    "properties_text",
    "short_body",
    "size_text",
    "span_text",
    "time_text",
]


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
    if (number := parse_number(text)) is not None and number >= 0:
        return number
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
