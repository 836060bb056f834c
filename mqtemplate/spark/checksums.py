"""CRC-32 of many cells of Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.hashes import crc32
from mqtemplate.spark.property_columns import cell_parts

_TO_ZERO = np.uint32(0x6DD9_0A9D)
"""``crc32(x + w)`` is 0 if the four bytes *w*, the lowest first, are ``crc32(x) ^ _TO_ZERO``, and for no other *w*."""


def crcs(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each cell of a binary array."""
    offsets, data = cell_parts(cells)
    view = data.data  # its slices copy nothing
    return np.array([crc32(view[start:end]) for start, end in pairwise(offsets.tolist())], np.uint32)


def rows_match(parts: Sequence[pa.Array], stated: npt.NDArray[Any]) -> bool:
    """Return True if in each row the adjacent cells of *parts* have the stated CRC-32: one sum over all rows.

    After each row there are four bytes that take the sum to 0, if it is the stated one. So the next row begins as if it
    were the first, and the last sum is 0 too. A wrong row leaves another sum, and no later byte can make 0 of it again.
    Several wrong rows cancel each other in one of 2**32 cases, as any error may go undetected.
    """
    words = stated.astype("<u4") ^ _TO_ZERO
    bounds = np.arange(0, 4 * len(words) + 1, 4, dtype=np.int32)
    ends = pa.Array.from_buffers(pa.binary(), len(words), [None, pa.py_buffer(bounds), pa.py_buffer(words)])
    _, data = cell_parts(pc.binary_join_element_wise(*parts, ends, b""))
    return crc32(data) == 0
