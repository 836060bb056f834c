"""Times, durations, sizes and bodies: as text for a reader, and from arguments."""

from __future__ import annotations

import base64
import sys
from datetime import datetime
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import typer

from mqtemplate.cli.output import print_line
from mqtemplate.converters.readable import body_text, pretty_body, time_text
from mqtemplate.durations import duration_ms, is_duration_text
from mqtemplate.errors import MessageError
from mqtemplate.message import MessageExt

if TYPE_CHECKING:
    from mqtemplate.operations.changes import ChangePreview

_NAMES = 10


def record_of(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a value for JSON: ``queue.topic`` is the attribute ``topic`` of its ``queue``."""
    return {name.rpartition(".")[2]: _plain(attrgetter(name)(value)) for name in names}


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` if it is text, else ``body_base64``."""
    text = body_text(body)
    return {"body_base64": base64.b64encode(body).decode()} if text is None else {"body": text}


def body_of(record: Any) -> bytes:
    """Return the body of a record with `body_fields`."""
    return record["body"].encode() if "body" in record else base64.b64decode(record["body_base64"])


def record_body(record: Any) -> str | None:
    """Return the body of a record for a reader: text as it is, other bytes in base64; None without a body."""
    return pretty_body(record["body"].encode()) if "body" in record else record.get("body_base64")


def message_fields(message: MessageExt) -> dict[str, Any]:
    """Return a message for JSON. Times are epoch milliseconds."""
    return {
        **record_of(message, "msg_id", "offset_msg_id", "topic", "tags", "keys", "broker_name", "queue_id"),
        **record_of(message, "queue_offset", "store_timestamp", "born_timestamp"),
        "born_host": str(message.born_host),
        "reconsume_times": message.reconsume_times,
        "properties": dict(message.properties),
        **body_fields(message.body),
    }


def preview_lines(preview: ChangePreview) -> list[str]:
    """Return the preview of a change for a reader; the offsets of a reset are in a table."""
    lines = [preview.amount]
    if preview.offsets:
        lines[0] = f"{preview.skipped:,} messages are skipped, {preview.again:,} are delivered again"
    lines += [
        f"  by {name}: {', '.join(f'{each or none} {count:,}' for each, count in list(counts.items())[:_NAMES])}"
        f"{', …' if len(counts) > _NAMES else ''}"
        for name, none, counts in (("topic", "none", preview.topics), ("tag", "no tag", preview.tags))
        if counts
    ]
    if preview.first_ms is not None:
        end = "" if preview.last_ms is None else f" to {time_text(preview.last_ms)}"
        lines.append(f"  {preview.time_name} {time_text(preview.first_ms)}{end}")
    return [*lines, *preview.notes, *([preview.undo] if preview.undo else [])]


# --- arguments ----------------------------------------------------------------------------------


def past_time(text: str | None, now_ms: int, option: str, *, is_end: bool = False) -> int | None:
    """Return the time (epoch ms) of an option: ``2h`` is two hours ago, and ``20:00`` the last one.

    Args:
        is_end: A day, and ``tonight``, stand for their end.

    Raises:
        typer.BadParameter: The text is not a time.
    """
    return None if text is None else _time(text, now_ms, -1, option, is_end)


def future_time(text: str | None, now_ms: int, option: str, *, is_end: bool = False) -> int | None:
    """Return the time (epoch ms) of an option: ``2h`` is in two hours, and ``20:00`` the next one.

    Args:
        is_end: A day, and ``tonight``, stand for their end.

    Raises:
        typer.BadParameter: The text is not a time.
    """
    return None if text is None else _time(text, now_ms, 1, option, is_end)


def _time(text: str, now_ms: int, sign: int, option: str, is_end: bool) -> int:
    from mqtemplate.operations.bulk import named_time, parse_time

    if is_duration_text(text):
        return now_ms + sign * duration_ms(text)
    time_ms = named_time(text, now_ms, sign, is_end=is_end)
    if time_ms is not None:
        print_line(f"{option} is {zoned_text(time_ms)}", sys.stderr)
        return time_ms
    time_ms = parse_time(text)
    if time_ms is None:
        form = "from now" if sign > 0 else "ago"
        raise typer.BadParameter(
            f"{text!r} is not a time; give a duration ({form}) such as 2h or '1h 30m', a time such as 20:00, "
            "tonight, yesterday, 'mon 09:00' or 2026-01-31T08:00 (local, or with its offset), or epoch milliseconds",
            param_hint=option,
        )
    return time_ms


def zoned_text(time_ms: int) -> str:
    """Return a time in the local zone, which is named."""
    moment = datetime.fromtimestamp(time_ms / 1_000).astimezone()
    return f"{moment.isoformat(' ', 'seconds')} ({moment.tzname()})"


def duration(text: str, option: str) -> int:
    """Return the duration of an option in milliseconds. It may be negative.

    Raises:
        typer.BadParameter: The text is not a duration.
    """
    from mqtemplate.operations.bulk import parse_span

    try:
        span_ms = parse_span(text)
    except ValueError as exc:
        raise typer.BadParameter(f"it must be {exc}", param_hint=option) from None
    if span_ms is None:
        raise typer.BadParameter(
            f"it must be a duration with units, such as 90s, 2h or '1h 30m', got {text!r}", param_hint=option
        )
    return span_ms


def property_option(text: str | None) -> tuple[str, str] | None:
    """Return name and value of the option ``--property``; None without one.

    Raises:
        typer.BadParameter: It has another form.
    """
    from mqtemplate.operations.bulk import parse_property

    try:
        return parse_property(text)
    except MessageError as exc:
        raise typer.BadParameter(str(exc), param_hint="--property") from exc


def named_values(texts: list[str], option: str) -> dict[str, str]:
    """Return the values of a repeated option ``name=value``.

    Raises:
        typer.BadParameter: One has another form.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [name for name, equals, _ in pairs if not equals or not name]:
        raise typer.BadParameter(f"{wrong[0]!r} is not name=value", param_hint=option)
    return {name: value for name, _, value in pairs}
