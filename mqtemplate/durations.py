"""Durations as people write them: ``"3h"``, ``"250ms"``, ``"1h 30m"``, a timedelta, or a number; named delay levels."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum
from typing import TypeAlias

from mqtemplate.numbers import PARSED_MAX
from mqtemplate.user_code import shown

__all__ = ["ALLOWED", "DelayLevel", "Duration", "duration_ms", "format_ms", "is_duration_text", "option_ms"]

Duration: TypeAlias = str | timedelta | float
"""A duration as text, as a timedelta, or as a number in the unit that the parameter documents."""

ALLOWED = "'3h', '1h 30m', '250ms' (units: d h m s ms) or a timedelta"
"""The forms of a duration, for errors."""

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_UNIT_NAMES = {1: "milliseconds", 1_000: "seconds", 60_000: "minutes", 3_600_000: "hours", 86_400_000: "days"}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|[dhms])(?![a-zA-Z])", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_LONGEST_TEXT = 100  # a longer text is not a duration; the limit also bounds the time of the search
_MILLISECOND = timedelta(milliseconds=1)


def duration_ms(value: object, unit_ms: int = 1) -> int:
    """Return a duration in milliseconds; a fraction of a millisecond is rounded up, so nothing happens early.

    Args:
        value: A text such as ``"1h 30m"``, a timedelta, or a number, also as text, in units of *unit_ms*.

    Raises:
        ValueError: It is something else, or negative. The text is the end of the sentence "… must be".
    """
    if isinstance(value, timedelta):
        milliseconds = -1 if value < timedelta(0) else value // _MILLISECOND + bool(value % _MILLISECOND)
    elif isinstance(value, str):
        milliseconds = _text_ms(value.strip(), unit_ms)
    elif isinstance(value, int) and not isinstance(value, bool):
        milliseconds = value * unit_ms
    elif isinstance(value, float) and math.isfinite(value * unit_ms):
        # Rounded first: the binary error of 0.1 + 0.2 must not add a millisecond.
        milliseconds = math.ceil(round(value * unit_ms, 6))
    else:
        raise ValueError(_refusal(value, unit_ms))
    if milliseconds < 0:
        raise ValueError(f"0 or longer, got {shown(value)}")
    if milliseconds > PARSED_MAX:
        raise ValueError(f"at most {format_ms(PARSED_MAX)}, got {shown(value)}")
    return milliseconds


def is_duration_text(text: str) -> bool:
    """Return True for a text with units: ``"90s"``, but not ``"90"``."""
    return _parts_ms(text.strip()) is not None


def option_ms(name: str, value: object, error: type[Exception], unit_ms: int = 1_000) -> int:
    """Return a duration that a caller gives as an option, in milliseconds.

    Args:
        name: Name of the option in the error.
        unit_ms: Unit of a number.

    Raises:
        Exception: An *error*: the value is not a duration.
    """
    try:
        return duration_ms(value, unit_ms)
    except ValueError as refusal:
        raise error(f"{name} must be {refusal}") from None


def format_ms(milliseconds: int) -> str:
    """Return a duration as people write it: ``3h``, ``1h 30m``, ``250ms``; `duration_ms` reads it."""
    sign, rest = ("-" if milliseconds < 0 else ""), abs(milliseconds)
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        count, rest = divmod(rest, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return sign + (" ".join(parts) or "0s")


def _text_ms(text: str, unit_ms: int) -> int:
    if len(text) <= _LONGEST_TEXT and _NUMBER.fullmatch(text):
        return math.ceil(Decimal(text) * unit_ms)
    milliseconds = _parts_ms(text)
    if milliseconds is None:
        raise ValueError(_refusal(text, unit_ms))
    return milliseconds


def _parts_ms(text: str) -> int | None:
    """Return the sum of ``1h 30m``; None if the text has another form."""
    total, at = Decimal(0), 0
    while at < len(text) <= _LONGEST_TEXT:
        found = _PART.match(text, at)
        if found is None:
            return None
        total += Decimal(found[1]) * _UNITS_MS[found[2].lower()]
        at = found.end()
    return math.ceil(total) if at else None


def _refusal(value: object, unit_ms: int) -> str:
    unit = _UNIT_NAMES.get(unit_ms, f"units of {unit_ms} ms")
    return f"a duration: {ALLOWED}, or a number of {unit}; got {shown(value)}"


class DelayLevel(IntEnum):
    """RocketMQ's 18 delay levels by the delay that each has: ``delay_level=DelayLevel.M1`` is level 5, one minute.

    The names follow the default table, ``1s 5s 10s 30s 1m … 2h``. A broker with another ``message-delay-level``
    gives the numbers other delays. Source: ``MessageStoreConfig.messageDelayLevel``.
    """

    S1 = 1
    S5 = 2
    S10 = 3
    S30 = 4
    M1 = 5
    M2 = 6
    M3 = 7
    M4 = 8
    M5 = 9
    M6 = 10
    M7 = 11
    M8 = 12
    M9 = 13
    M10 = 14
    M20 = 15
    M30 = 16
    H1 = 17
    H2 = 18

    @property
    def delay(self) -> str:
        """Delay of the level in the default table, such as ``1m``."""
        return f"{self.name[1:]}{self.name[0].lower()}"

    def __str__(self) -> str:
        return f"{int(self)} ({self.delay})"

    def __format__(self, format_spec: str) -> str:
        is_number = format_spec[-1:] in tuple("bcdeEfFgGnoxX%")
        return format(int(self) if is_number else str(self), format_spec)
