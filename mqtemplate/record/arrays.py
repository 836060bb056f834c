"""Numbers of many records at once, as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.uint8]
"""Bytes of records of one size: a row for each record."""


def count_leading(is_valid: NDArray[np.bool_]) -> int:
    """Return the number of true values before the first false one."""
    return len(is_valid) if is_valid.all() else int(np.argmin(is_valid))


def read_column(rows: Rows, at: int, kind: str) -> NDArray[np.int64]:
    """Return the number at byte *at* of each row. *kind* is its numpy format, such as ``>i8``."""
    width = np.dtype(kind).itemsize
    numbers: NDArray[np.int64] = np.ascontiguousarray(rows[:, at : at + width]).view(kind)[:, 0].astype(np.int64)
    return numbers


def to_bytes(numbers: NDArray[np.int64], kind: str) -> Rows:
    """Return each number as a row of bytes."""
    return numbers.astype(kind).view(np.uint8).reshape(-1, np.dtype(kind).itemsize)


def to_rows(texts: Sequence[bytes]) -> Rows:
    """Return texts of one length as rows."""
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), len(texts[0]))
