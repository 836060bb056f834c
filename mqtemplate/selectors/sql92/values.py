"""Values as Java has them: parsing strings as numbers, and comparing numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool | None
Evaluate: TypeAlias = Callable[[Mapping[str, str]], Value]
"""Function of the properties of a message; None is NULL."""

_INT_LIMIT = 1 << 31
_LONG_LIMIT = 1 << 63
_TRIMMED = "".join(map(chr, range(33)))  # the characters that Java's String.trim removes

# Java accepts the digits of all scripts, but only those in the basic plane (16 bits).
_WHOLE = re.compile(r"[+-]?(?:(?![\U00010000-\U0010ffff])\d)+")
_DECIMAL = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
_NAMED = re.compile(r"([+-]?)(NaN|Infinity)")


class ValueType(Enum):
    """Java type of a value. It is known before the evaluation, since all properties are strings."""

    STRING = "a string"
    INTEGER = "an integer"
    LONG = "a long integer"
    DOUBLE = "a decimal number"
    BOOLEAN = "a boolean"
    NULL = "NULL"


class NotComparableError(Exception):
    """Two values cannot be compared. It ends the evaluation of the whole expression, as in RocketMQ."""


def parse_integer(text: str) -> int:
    """Parse as Java's ``Integer.valueOf``: a sign and digits, 32 bits, no spaces."""
    return _parse_whole(text, _INT_LIMIT)


def parse_long(text: str) -> int:
    """Parse as Java's ``Long.valueOf``: a sign and digits, 64 bits, no spaces."""
    return _parse_whole(text, _LONG_LIMIT)


def _parse_whole(text: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal()) and not _WHOLE.fullmatch(text):
        raise NotComparableError(text)
    try:
        value = int(text)
    except ValueError as exc:  # more digits than Python converts
        raise NotComparableError(text) from exc
    if -limit <= value < limit:
        return value
    raise NotComparableError(text)


def parse_double(text: str) -> float:
    """Parse as Java's ``Double.valueOf``: decimal, hexadecimal, ``NaN``, ``Infinity``; a type suffix; spaces around."""
    text = text.strip(_TRIMMED)
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
    """Return -1, 0 or 1 as Java's ``Double.compareTo``: -0.0 < 0.0, and NaN equals itself and is above all others."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1, left) - math.copysign(1, right)) // 2 if left == 0 else 0
    return math.isnan(left) - math.isnan(right)
