"""Delays as users write them: ``"1h 30m"``, ``timedelta(minutes=5)``, or a number of seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TypeAlias

Delay: TypeAlias = str | timedelta | float
"""Text such as ``"5s"`` or ``"1h 30m"`` (units ms, s, m, h, d), a timedelta, or a number of seconds."""

LONGEST_DELAY_MS = 40 * 86_400_000

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_TEXT = re.compile(rf"{_PART.pattern}(?:\s*{_PART.pattern})*")


def read_delay_ms(delay: object) -> int:
    """Return a delay in milliseconds; fractions of one are rounded up, so that a retry is never early.

    Raises:
        ValueError: It is none, is negative, or is longer than 40 days.
    """
    text = delay.strip() if isinstance(delay, str) else None
    if isinstance(delay, timedelta):
        milliseconds = -(-delay // timedelta(milliseconds=1)) if delay >= timedelta() else -1
    elif isinstance(delay, int | float) and not isinstance(delay, bool) and not math.isnan(delay):
        milliseconds = _rounded_up(min(max(float(delay), -1.0), LONGEST_DELAY_MS) * 1_000)
    elif text is not None and _TEXT.fullmatch(text):
        milliseconds = _rounded_up(sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)))
    else:
        milliseconds = -1
    if not 0 <= milliseconds <= LONGEST_DELAY_MS:
        raise ValueError(
            f"a delay is a text such as '5s' or '1h 30m' (units ms, s, m, h, d), a timedelta, or a number of seconds, "
            f"up to 40 days; got {delay!r}"
        )
    return milliseconds


def show_delay(delay_ms: int) -> str:
    """Return a delay as users write it: ``1h 30m``."""
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        count, delay_ms = divmod(delay_ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def _rounded_up(milliseconds: float) -> int:
    return -int(-milliseconds // 1)
