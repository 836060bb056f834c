"""Templates of the pages. All values are escaped."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mqtemplate.converters.readable import (
    body_text,
    count_text,
    pretty_body,
    short_body,
    size_text,
    span_text,
    time_text,
)
from mqtemplate.operations.bulk import parse_time

MAX_SHOWN_BODY = 64 * 1_024
"""Bytes of a body that a page shows; the whole can be downloaded."""
_TIME = re.compile(r"\b(\d{4}-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d)\b")
_MARKUP_OR_LONG_WORD = re.compile(
    r"<(?:(?:(?P<whole>pre|textarea|script|style|title|option|svg)\b.*?</(?P=whole))|[^>]*)>|(?P<word>[^\s<>]{33,})",
    re.DOTALL,
)
"""Whole elements whose content is not to be broken, tags, and words that are longer than the id of a message."""
_PART_OF_WORD = re.compile("{0}{{3,15}}?(?<=[./_%@:-])|{0}{{1,16}}\\Z|{0}{{1,10}}".format(r"(?:&#?\w+;|[^&]|&)"))
"""Up to a separator, the end of the word, or some characters. An escaped one is not cut."""
_HERE = Path(__file__).parent
FORM_END = ("form_end", "complete")
"""Last field of each form for a change: without it the form was cut off, and a missing field would widen the change."""
_FORM_END = Markup('<input type="hidden" name="{}" value="{}">').format(*FORM_END)
STATIC_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def environment() -> Environment:
    """Return the templates. A name that a template uses and a page does not give is an error."""
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "time": _time,
        "zoned": _zoned_time,
        "size": size_text,
        "span": span_text,
        "count": lambda number: f"{number:,}",
        "compact": _compact,
        "plural": count_text,
        "body": shown_body,
        "timed": _with_times,
        "short": short_body,
        "body_text": body_text,
        "field_time": field_time,
    }
    found.globals |= {"static_version": static_version(), "time_zone": _time_zone, "form_end": _FORM_END}
    found.globals["max_body"] = MAX_SHOWN_BODY
    return found


def compile_templates() -> None:
    """Compile all templates now, so that the first page does not wait for it."""
    for name in environment().list_templates():
        environment().get_template(name)


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """Return a page."""
    page = with_breaks(environment().get_template(template).render(values))
    # A message may contain half of a surrogate pair, as an escape of its JSON.
    return page.encode("utf-8", "backslashreplace")


def with_breaks(page: str) -> str:
    """Return a page whose long words may be broken: names, keys and ids would push columns out of sight.

    A style sheet alone breaks either none, or each word in a table that is wide. ``<wbr>`` is in no copied text.
    """
    return _MARKUP_OR_LONG_WORD.sub(_broken, page)


def _broken(found: re.Match[str]) -> str:
    return found[0] if found["word"] is None else "<wbr>".join(_PART_OF_WORD.findall(found[0]))


def _time(time_ms: int | None) -> Markup | str:
    """Return a local time as an element that also has the exact one."""
    if time_ms is None:
        return ""
    exact = exact_time(time_ms)
    if exact is None:
        return f"{time_ms} ms"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, exact, time_text(time_ms))


def exact_time(time_ms: int) -> str | None:
    """Return a local time in ISO 8601, with its offset; None if it is out of range."""
    try:
        return datetime.fromtimestamp(time_ms / 1_000).astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def _with_times(text: str) -> Markup:
    """Return a sentence whose local times are elements, so that the page shows them in its zone."""
    parts = _TIME.split(text)
    found = [escape(parts[0])]
    for moment, rest in zip(parts[1::2], parts[2::2], strict=True):
        found += [escape(_time(parse_time(moment)) or moment), escape(rest)]
    return Markup("").join(found)


def shown_body(body: bytes) -> str:
    """Return a body for a reader; of a large one the beginning."""
    text = body_text(body) if len(body) > MAX_SHOWN_BODY else None
    if text is None:
        return pretty_body(body)
    return f"{body[:MAX_SHOWN_BODY].decode(errors='ignore')}…"


def _zoned_time(text: str | None) -> str:
    """Return a time in ISO 8601 to the second, with its zone: a schedule has its own, whatever the page's is."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return text or ""
    iso = moment.isoformat(" ", "seconds")
    return iso if moment.tzinfo is None else f"{iso[:19]} UTC{iso[19:]}"


def _compact(number: float) -> str:
    """Return a number in at most four characters, such as ``12k``."""
    for factor, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}" if number < 999.5 * factor else f"{number / factor:.0f}{unit}"
    return f"{round(number, 2):.3g}" if number < 999.5 else "1k"


def field_time(time_ms: int | None) -> str:
    """Return a time for a field of the type ``datetime-local``."""
    if time_ms is None:
        return ""
    return datetime.fromtimestamp(time_ms / 1_000).astimezone().replace(tzinfo=None).isoformat(timespec="seconds")


def _time_zone() -> str:
    return datetime.now().astimezone().strftime("%Z, UTC%z")


# --- scripts and styles -------------------------------------------------------------------------


@cache
def static_files() -> Mapping[str, bytes]:
    """Return the scripts and styles by name."""
    return {
        path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir()) if path.suffix in STATIC_TYPES
    }


@cache
def static_version() -> str:
    """Return a code that changes with the files, so that browsers may keep them."""
    return hashlib.sha256(b"".join(static_files().values())).hexdigest()[:12]
