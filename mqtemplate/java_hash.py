"""The hash of Java's strings, which RocketMQ writes into its files and chooses queues by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["java_hash_of_rows", "java_string_hash", "java_string_hashes", "tags_code"]


@lru_cache(maxsize=65_536)
def java_string_hash(text: str) -> int:
    """``String.hashCode``: over UTF-16 code units, ``h = 31 * h + unit``, as a signed 32-bit number."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


def java_string_hashes(texts: Sequence[str]) -> NDArray[np.int32]:
    """`java_string_hash` of each text: many at once cost a fraction of one by one.

    A hash is the sum of ``unit * 31 ** (units behind it)``, so one sweep over all units and one running sum give all.
    """
    units = np.frombuffer("".join(texts).encode("utf-16-le", "surrogatepass"), "<u2")
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if lengths.sum() != len(units):  # some characters take two units
        lengths = np.fromiter(
            (len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts), np.int64, len(texts)
        )
    ends = np.cumsum(lengths)
    units_behind = np.repeat(ends, lengths) - np.arange(1, len(units) + 1)
    powers = _powers_of_31(int(lengths.max(initial=0)).bit_length())
    sums = np.zeros(len(units) + 1, np.uint32)
    np.cumsum(units * powers[units_behind], dtype=np.uint32, out=sums[1:])
    hashes: NDArray[np.uint32] = sums[ends] - sums[ends - lengths]
    return hashes.view(np.int32)


def java_hash_of_rows(prefix: str, rows: NDArray[np.uint8]) -> NDArray[np.int32]:
    """`java_string_hash` of *prefix* and the ASCII text in each row: texts of one length cost next to nothing."""
    length = rows.shape[1]
    powers = _powers_of_31(length.bit_length())
    begin = np.uint32(java_string_hash(prefix) & 0xFFFF_FFFF) * powers[length : length + 1]
    hashes: NDArray[np.uint32] = rows.astype(np.uint32) @ powers[length - 1 :: -1][:length] + begin
    return hashes.view(np.int32)


@lru_cache(maxsize=32)
def _powers_of_31(bits: int) -> NDArray[np.uint32]:
    """``31 ** 0 .. 31 ** (2 ** bits - 1)``, modulo 2 ** 32."""
    factors = np.full(1 << bits, 31, np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


def tags_code(tags: str | None) -> int:
    """What a consume queue stores beside a message to pre-select by tag; 0 for no tag.

    Source: RocketMQ ``MessageExtBrokerInner.tagsString2tagsCode``.
    """
    return java_string_hash(tags) if tags else 0
