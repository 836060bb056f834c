"""Hash functions of Java and of files.

RocketMQ writes ``String.hashCode`` of Java into its files and chooses queues by it. CRC-32 is computed by zlib-ng where
it is installed (the extra ``speed``): the same sum, several times as fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["UTF_16", "crc32", "java_string_hash", "queue_number", "tags_code"]

UTF_16 = f"utf-16-{sys.byteorder[0]}e"
"""Encoding of a text whose bytes are Java's characters as numbers of this machine."""
_UNITS_A_STEP = 16
"""The sum is cut to 32 bits after so many units: each time costs more than the longer numbers between."""


@lru_cache(maxsize=65_536)
def java_string_hash(text: str) -> int:
    """Return ``String.hashCode``: over UTF-16 code units, ``h = 31 * h + unit``, as a signed 32-bit number."""
    units: Sequence[int] = (
        text.encode() if text.isascii() else memoryview(text.encode(UTF_16, "surrogatepass")).cast("H")
    )
    value = 0
    for start in range(0, len(units), _UNITS_A_STEP):
        for unit in units[start : start + _UNITS_A_STEP]:
            value = 31 * value + unit
        value &= 0xFFFF_FFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


def queue_number(hash_key: str, count: int) -> int:
    """Return which of *count* queues a Java client selects for this key: ``|hashCode % queues|``.

    Java's remainder has the sign of the dividend, so its absolute value is the remainder of the absolute value.

    Source: RocketMQ ``SelectMessageQueueByHash``.
    """
    return abs(java_string_hash(hash_key)) % count


def tags_code(tags: str | None) -> int:
    """Return the number that a consume queue stores for *tags*; 0 for no tag.

    Source: RocketMQ ``MessageExtBrokerInner.tagsString2tagsCode``.
    """
    return java_string_hash(tags) if tags else 0
