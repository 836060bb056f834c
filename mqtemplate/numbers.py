"""Whole numbers: those in texts that a message, a peer or a file gives, and the ranges of Java's types."""

from __future__ import annotations

__all__ = ["INT_MAX", "LONG_MAX", "PARSED_MAX", "parse_number"]

INT_MAX = 2**31 - 1
"""Largest ``int`` of Java."""
LONG_MAX = 2**63 - 1
"""Largest ``long`` of Java."""
_MAX_DIGITS = 18
"""Such a number fits into Java's ``long``. Python's `int` refuses texts of more than 4,300 digits with a ValueError."""
PARSED_MAX = 10**_MAX_DIGITS - 1
"""Largest number that `parse_number` reads."""


def parse_number(text: object) -> int | None:
    """Return the whole number that *text* is; None if RocketMQ would not read it as one.

    Only ASCII digits after an optional sign count, as for Java's ``Long.parseLong``, and at most 18 of them:
    `str.isdecimal` and `int` also accept the digits of other scripts, and `int` accepts spaces and underscores.
    """
    if type(text) is not str or len(text) > _MAX_DIGITS + 1:
        return None
    digits = text[1:] if text[:1] in ("-", "+") else text
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS else None
