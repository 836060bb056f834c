"""One request to the dashboard, as its pages see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from mqtemplate.durations import duration_ms, is_duration_text
from mqtemplate.errors import MessageError
from mqtemplate.http.exchange import HttpRequest
from mqtemplate.numbers import parse_number

T = TypeVar("T")

_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 3_000
_REPEATED = frozenset({"handle", "letter", "name", "value"})
FORM_END = ("form_end", "complete")
"""Last field of each form for a change: without it the form was cut off, and a missing field would widen the change."""
_MAX_DIGITS = 14
"""Epoch milliseconds with 14 digits are before the year 5139; Python's dates end in 9999."""


@dataclass(frozen=True)
class Call:
    """A request with its query and form, and the addresses of pages."""

    request: HttpRequest
    query: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # Empty fields of a form for a search mean: no filter.
        object.__setattr__(self, "query", {name: value.strip() for name, value in self.request.query if value.strip()})

    # --- values --------------------------------------------------------------------------------

    def text(self, name: str) -> str | None:
        """Return a value of the query; None if it is missing or empty."""
        return self.query.get(name)

    def needed(self, name: str) -> str:
        """Return a value of the query.

        Raises:
            MessageError: It is missing.
        """
        value = self.query.get(name)
        if value is None:
            raise MessageError(f"the address lacks {name}=…")
        return value

    def time_ms(self, name: str) -> int | None:
        """Return a time of the query (epoch ms)."""
        return parse_time(self.query.get(name), name)

    @cached_property
    def form(self) -> Sequence[tuple[str, str]]:
        """Names and values of the form in the body.

        Raises:
            MessageError: The body is no form, or has too many fields.
        """
        content_type = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != _FORM:
            raise MessageError(f"a change must be sent as {_FORM}, got {content_type or 'nothing'}")
        try:
            body = self.request.body.decode()
            return parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError as exc:
            raise MessageError(f"the form cannot be read: {exc}; it may have {_MAX_FIELDS} fields") from exc

    def check_complete(self) -> None:
        """Check that the whole form has arrived.

        Raises:
            MessageError: Its last field is missing, or it has a field twice.
        """
        if self.fields(FORM_END[0]) != [FORM_END[1]]:
            raise MessageError(
                "the end of the form is missing, so nothing was changed; reload the page, and send it again"
            )
        for name in {key for key, _ in self.form} - _REPEATED:
            self.field(name)

    def field(self, name: str) -> str:
        """Return the value of a field of the form; empty if it is missing.

        Raises:
            MessageError: It is given twice.
        """
        found = self.fields(name)
        if len(found) > 1:
            raise MessageError(f"the form has {name} {len(found)} times, allowed is once")
        return found[0] if found else ""

    def fields(self, name: str) -> list[str]:
        """Return all values of a field of the form."""
        return [value for key, value in self.form if key == name]

    def number_field(self, name: str) -> int:
        """Return a whole number of the form; 0 if it is missing.

        Raises:
            MessageError: It is no number.
        """
        text = self.field(name) or "0"
        number = parse_number(text)
        if number is None or number < 0 or len(text) > _MAX_DIGITS:
            raise MessageError(f"{name} must be a whole number, got {text[:40]!r}")
        return number

    def scope_field(self) -> str:
        """Return ``chosen`` or ``all``: whether a change is of the ticked messages, or of all that match.

        Raises:
            MessageError: It is neither.
        """
        scope = self.field("scope")
        if scope not in ("chosen", "all"):
            raise MessageError(f"scope must be chosen or all, got {scope!r}")
        return scope

    def previewed(self) -> int:
        """Return the number of messages that the preview of a change showed.

        Raises:
            MessageError: There was no preview.
        """
        number = self.number_field("expected")
        if not number or parse_time(self.field("until"), "until") is None:
            raise MessageError("a change needs its preview first")
        return number

    # --- addresses -----------------------------------------------------------------------------

    def url(self, path: str, /, **query: object) -> str:
        """Return the address of a page. Values that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return f"{self.request.mount}{quote(path)}{'?' + urlencode(given) if given else ''}"

    def same_page(self, /, **query: object) -> str:
        """Return the address of this page with other values."""
        return self.url(self.request.path or "/", **{**self.query, **query})


def parse_time(text: str | None, name: str) -> int | None:
    """Return a time (epoch ms): of digits, or a local time such as ``2026-01-31T08:00``.

    Raises:
        MessageError: It is no time.
    """
    if not text:
        return None
    number = parse_number(text) if len(text) <= _MAX_DIGITS else None
    if number is not None and number >= 0:
        return number
    try:
        return round(datetime.fromisoformat(text).astimezone().timestamp() * 1_000)
    except (ValueError, OverflowError, OSError):
        raise MessageError(
            f"{name} must be a time such as 2026-01-31T08:00, or epoch milliseconds, got {text[:40]!r}"
        ) from None


def at_most(previewed: int, chosen: Iterable[T]) -> Iterator[T]:
    """Yield the messages of a change; it must not reach more than its preview showed.

    Raises:
        MessageError: There is one more.
    """
    for number, each in enumerate(chosen, start=1):
        if number > previewed:
            raise MessageError(
                f"the preview showed {previewed:,}, and the change reaches more of them now; those beyond it are left "
                "as they are, make a new preview"
            )
        yield each


def check_count(previewed: int, chosen: Iterable[object]) -> None:
    """Check that a change reaches no more messages than its preview showed, before the first one is changed.

    Raises:
        MessageError: It does.
    """
    count = sum(1 for _ in chosen)
    if count > previewed:
        raise MessageError(
            f"the preview showed {previewed:,}, and the change would reach {count:,}; nothing was changed, make a new "
            "preview"
        )


def parse_span(text: str, name: str) -> int:
    """Return a duration in milliseconds; it may be negative.

    Raises:
        MessageError: It is no duration.
    """
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    if not is_duration_text(rest):
        raise MessageError(f"{name} must be a duration such as 30m, 2h or -15m, got {text!r}")
    return sign * duration_ms(rest)
