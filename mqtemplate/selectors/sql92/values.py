"""Values as Java has them: how texts become numbers, and how numbers are ordered."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool | None
Evaluate: TypeAlias = Callable[[Mapping[str, str]], Value]
"""From a message's properties to a value; None is NULL."""

_INT = 1 << 31
_LONG = 1 << 63
_CONTROLS_AND_BLANK = "".join(map(chr, range(33)))  # what Java's String.trim takes away

# Java's digits are those of every script, but it looks at 16 bits at a time.
_WHOLE = re.compile(r"[+-]?(?:(?![\U00010000-\U0010ffff])\d)+")
_DECIMAL = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?",
)
_NAMED = re.compile(r"([+-]?)(NaN|Infinity)")


class Kind(Enum):
    """Java's class of a value, known before any message is seen: properties are texts."""

    TEXT = "a text"
    INTEGER = "a number"
    LONG = "a long number"
    DOUBLE = "a fraction"
    BOOLEAN = "a truth"
    NOTHING = "NULL"


class NotComparableError(Exception):
    """Two values cannot be compared; RocketMQ gives up the whole expression then. Never leaves this package."""


def read_integer(text: str) -> int:
    """``Integer.valueOf``: a sign and digits, 32 bits, no blanks."""
    return _read_whole(text, _INT)


def read_long(text: str) -> int:
    """``Long.valueOf``: a sign and digits, 64 bits, no blanks."""
    return _read_whole(text, _LONG)


def _read_whole(text: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal()) and not _WHOLE.fullmatch(text):
        raise NotComparableError(text)
    try:
        value = int(text)
    except ValueError as exc:  # more digits than Python converts
        raise NotComparableError(text) from exc
    if -limit <= value < limit:
        return value
    raise NotComparableError(text)


def read_double(text: str) -> float:
    """``Double.valueOf``: decimal or hexadecimal, ``NaN``, ``Infinity``, a type suffix, blanks around."""
    text = text.strip(_CONTROLS_AND_BLANK)
    if found := _DECIMAL.fullmatch(text):
        return float(found[1])
    if found := _HEXADECIMAL.fullmatch(text):
        try:
            return float.fromhex(found[1])
        except OverflowError:
            return -math.inf if text.startswith("-") else math.inf
    if found := _NAMED.fullmatch(text):
        return float(found[1] + found[2])
    raise NotComparableError(text)


def compare_doubles(left: float, right: float) -> int:
    """``Double.compareTo``, -1, 0 or 1: -0.0 lies below 0.0, and NaN, equal to itself, above everything."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1, left) - math.copysign(1, right)) // 2 if left == 0 else 0
    return math.isnan(left) - math.isnan(right)
