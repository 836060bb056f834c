"""Work on many messages: times, durations and rates as text, the pace, the progress, and the limit of a preview."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from typing import TypeAlias, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.durations import duration_ms, is_duration_text
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.numbers import parse_number

T = TypeVar("T")

DAY_MS = 86_400_000
_SHOWN = 3

OnProgress: TypeAlias = Callable[[int], None]
"""Function that is called with the number of messages done since the last call."""


def no_progress(count: int) -> None:
    """Report nothing."""


# --- texts --------------------------------------------------------------------------------------


def parse_time(text: str) -> int | None:
    """Return a time (epoch ms): of digits, or a local time such as ``2026-01-31T08:00``; None for another text."""
    number = parse_number(text)
    if number is not None and number >= 0:
        return number
    try:
        return round(datetime.fromisoformat(text).astimezone().timestamp() * 1_000)
    except (ValueError, OverflowError, OSError):
        return None


_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)
_EVENING, _MORNING = clock_time(18), clock_time(6)


def named_time(text: str, now_ms: int, sign: int, *, is_end: bool = False) -> int | None:
    """Return a local time (epoch ms) by name: ``tonight``, ``20:00``, ``mon 09:00``; None for another text.

    Args:
        sign: -1 for the last such time before now, 1 for the next one.
        is_end: A day without a time of day stands for its end, not its start. ``tonight`` is from 18:00 to 06:00.
    """
    words = text.lower().split()
    match = _CLOCK.fullmatch(words[-1]) if words else None
    at = None if match is None else clock_time(int(match[1]), int(match[2]))
    names = words if at is None else words[:-1]
    if len(names) > 1 or not words:
        return None
    now = datetime.fromtimestamp(now_ms / 1_000).astimezone().replace(tzinfo=None)
    if not names:
        found = _nearest(now, now.date(), at or clock_time(), sign, 1)
    elif names[0] == "tonight":
        found = _tonight(now, at, is_end=is_end)
    elif names[0] in _DAYS:
        found = datetime.combine(now.date() + timedelta(_DAYS[names[0]] + (is_end and at is None)), at or clock_time())
    else:
        weekday = next((number for number, day in enumerate(_WEEKDAYS) if names[0] in (day, day[:3])), None)
        if weekday is None:
            return None
        ahead = sign * (sign * (weekday - now.weekday()) % 7)
        day = now.date() + timedelta(ahead)
        if at is None:
            found = datetime.combine(day + timedelta(is_end), clock_time())
        else:
            found = _nearest(now, day, at, sign, 7)
    return round(found.astimezone().timestamp() * 1_000)


def _nearest(now: datetime, day: date, at: clock_time, sign: int, period: int) -> datetime:
    """Return a time of a day, or of the day some days later or earlier, so that it is after or before now."""
    found = datetime.combine(day, at)
    is_wrong = found <= now if sign > 0 else found > now
    return datetime.combine(day + timedelta(sign * period), at) if is_wrong else found


def _tonight(now: datetime, at: clock_time | None, *, is_end: bool) -> datetime:
    """Return the start or the end of the night: the present one before six o'clock, else the next one."""
    evening = now.date() - timedelta(now.time() < _MORNING)
    at = at or (_MORNING if is_end else _EVENING)
    return datetime.combine(evening + timedelta(at < clock_time(12)), at)


def yesterday_of(now_ms: int) -> tuple[int, int]:
    """Return start and end (epoch ms) of the local day before a time."""
    times = (named_time("yesterday", now_ms, -1, is_end=is_end) or 0 for is_end in (False, True))
    return next(times), next(times)


def only_one(text: str, ids: Iterable[str]) -> str:
    """Return the only id that begins with a text.

    Raises:
        UnknownNameError: There are several.
    """
    found = sorted(set(ids))
    if len(found) > 1:
        shown = ", ".join(found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
        raise UnknownNameError(f"{len(found):,} ids begin with {text!r}: {shown}; give more of one")
    return found[0]


def parse_span(text: str) -> int | None:
    """Return a duration in milliseconds, which may be negative: ``2h``, ``-15m``; None for another text."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * duration_ms(rest) if is_duration_text(rest) else None


def parse_property(text: str | None) -> tuple[str, str] | None:
    """Return name and value of a property ``name=value``; None without a text.

    Raises:
        MessageError: It has another form.
    """
    if not text:
        return None
    name, _, value = text.partition("=")
    if not name or not value:
        raise MessageError(f"a property must be name=value, such as tenant=T, got {text[:40]!r}")
    return name, value


def parse_rate(text: str) -> float | None:
    """Return a rate per second; None without a text.

    Raises:
        MessageError: It is not a number above 0.
    """
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise MessageError(f"the rate must be a number above 0 per second, got {text!r}; leave it empty for no limit")
    return rate


# --- pace and limit -----------------------------------------------------------------------------


def paced(items: Iterable[T], rate: float | None, clock: Clock) -> Iterator[T]:
    """Yield *items*, at most *rate* per second. The first one comes at once.

    Args:
        rate: None for no limit.

    Raises:
        MessageError: *rate* is not above 0.
    """
    if rate is None:
        yield from items
        return
    if rate <= 0:
        raise MessageError(f"the rate must be above 0 per second, got {rate}; leave it out for no limit")
    start_ms = clock.now_ms()
    for number, item in enumerate(items):
        left_s = clock.seconds_until(start_ms + round(number * 1_000 / rate))
        if left_s > 0:
            clock.sleep(left_s)
        yield item


def at_most(previewed: int, chosen: Iterable[T]) -> Iterator[T]:
    """Yield the messages of a change before it happens; it must not reach more than its preview showed.

    Raises:
        MessageError: There is one more.
    """
    for number, each in enumerate(chosen, start=1):
        if number > previewed:
            raise MessageError(
                f"the preview showed {previewed:,}, and the change would reach more of them now; nothing was changed, "
                "make a new preview"
            )
        yield each
