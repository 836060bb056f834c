"""Checksums of records that are the rows of one array."""

from __future__ import annotations

from binascii import hexlify

import numpy as np
from numpy.typing import NDArray

from mqtemplate.hashes import crc32
from mqtemplate.record import layout
from mqtemplate.record.arrays import Rows
from mqtemplate.record.layout import CHECK_SIZE

_CHECK_START = np.frombuffer(layout.CHECK_START, np.uint8)


def row_bytes(rows: Rows) -> list[bytes]:
    """Return each row as bytes."""
    if not rows.shape[1]:
        return [b""] * len(rows)
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}")[:, 0].tolist()  # type: ignore[no-any-return]


def crcs(rows: Rows) -> NDArray[np.int64]:
    """Return the CRC-32 of each row.

    The bytes of a row are adjacent and not copied: a copy of large rows takes longer, since its memory is new.
    """
    return np.fromiter(map(crc32, rows), np.int64, len(rows))


def checks(crcs: NDArray[np.int64], physical_offsets: NDArray[np.int64]) -> Rows:
    """Return the checks of records at these offsets whose bytes before the check have these CRCs."""
    numbers = np.empty((len(crcs), 2), ">u4")
    numbers[:, 0], numbers[:, 1] = crcs, physical_offsets & 0xFFFF_FFFF
    rows = np.empty((len(crcs), CHECK_SIZE), np.uint8)
    rows[:, : layout.CHECK_CRC_AT] = _CHECK_START
    rows[:, layout.CHECK_CRC_AT : -1] = np.frombuffer(hexlify(numbers.tobytes()), np.uint8).reshape(len(crcs), 2 * 8)
    rows[:, -1] = 2
    return rows
