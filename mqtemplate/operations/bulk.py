"""Work on many messages: times, durations and rates as text, the pace, the progress, and the limit of a preview."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TypeAlias, TypeVar

from mqtemplate.clock import Clock
from mqtemplate.durations import duration_ms, is_duration_text
from mqtemplate.errors import MessageError
from mqtemplate.numbers import parse_number

T = TypeVar("T")

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


def parse_span(text: str) -> int | None:
    """Return a duration in milliseconds, which may be negative: ``2h``, ``-15m``; None for another text."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * duration_ms(rest) if is_duration_text(rest) else None


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
