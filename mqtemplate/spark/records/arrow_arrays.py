"""Arrow arrays over bytes of a log: cells without a copy, their checksums, and columns of texts, numbers and times."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate, pairwise, repeat

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.hashes import crc32
from mqtemplate.numbers import parse_number

TIMESTAMP = pa.timestamp("us", "UTC")
_FIRST_MS, _LAST_MS = -62_135_510_400_000, 253_402_214_400_000  # the years 1 to 9999, less a day for time zones
_POLYNOMIAL = 0xEDB8_8320
_WORD = 4
LARGEST_IN_RUN = 2_048
"""Largest body whose `top_bits` are computed: above it, a sum of its own takes less time."""

# --- cells ------------------------------------------------------------------------------------------


def adjacent_cells(data: npt.NDArray[np.uint8], *starts: npt.NDArray[np.int64]) -> pa.Array:
    """Return *data* as one binary array, without a copy; a cell ends where the next one starts.

    Args:
        starts: Start of the first cell of each row, of its second cell, and so on.
    """
    width = len(starts)
    offsets = np.empty(width * len(starts[0]) + 1, np.int32)
    for number, of_rows in enumerate(starts):
        offsets[number:-1:width] = of_rows
    offsets[-1] = len(data)
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def cells_of_rows(cells: pa.Array, number: int, width: int) -> pa.Array:
    """Return the cell with this number of each row, as a copy. A row has *width* cells."""
    return cells.take(_numbers(number, len(cells), width))


@lru_cache(maxsize=16)
def _numbers(start: int, stop: int, step: int) -> pa.Array:
    """Return a range. Most blocks have the same number of rows."""
    return pa.array(np.arange(start, stop, step))


def cell_parts(cells: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the offsets and bytes of a binary array that starts at the start of its buffers."""
    _, offsets, data = cells.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(cells) + 1).astype(np.int64)
    return bounds, np.frombuffer(data, np.uint8, int(bounds[-1])) if data is not None else np.empty(0, np.uint8)


# --- checksums --------------------------------------------------------------------------------------


def crcs(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each cell of a binary array."""
    offsets, data = cell_parts(cells)
    view = data.data  # its slices copy nothing
    return np.array([crc32(view[start:end]) for start, end in pairwise(offsets.tolist())], np.uint32)


def top_bits(cells: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the highest bit of the CRC-32 of each cell of at most `LARGEST_IN_RUN` bytes, as its lowest bit.

    RocketMQ does not store this bit. It is the parity of some bits of the cell, which depend on their distance from the
    end only, and of a bit that depends on the length only.
    """
    offsets, data = cell_parts(cells)
    lengths, starts = np.diff(offsets), offsets[:-1]
    from_end, of_length = _parity_bits()
    found: npt.NDArray[np.uint8] = np.zeros(len(lengths), np.uint8)
    if len(data) and (lengths == lengths[0]).all():
        counted = data.reshape(len(lengths), -1) & from_end[-lengths[0] :]
        found = np.bitwise_xor.reduceat(counted.reshape(-1), starts)
    elif len(data):
        filled = lengths > 0  # an empty cell would get the bits of the next one
        counted = data & cell_parts(_ends_of_parity_bits().take(pa.array(lengths)))[1]
        found[filled] = np.bitwise_xor.reduceat(counted, starts[filled])
    for shift in (4, 2, 1):
        found ^= found >> np.uint8(shift)
    bits: npt.NDArray[np.uint32] = ((found & 1) ^ of_length[lengths]).astype(np.uint32)
    return bits


@cache
def _parity_bits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the bits of a cell that count, up to the last byte of one with the largest size, and those of lengths."""
    bits, state = np.empty(8 * LARGEST_IN_RUN, np.uint8), _POLYNOMIAL
    for distance in range(len(bits)):
        bits[distance] = state >> 31
        state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
    of_length = accumulate(repeat(b"\0", LARGEST_IN_RUN), lambda crc, byte: crc32(byte, crc), initial=0)
    return np.packbits(bits)[::-1].copy(), np.array([crc >> 31 for crc in of_length], np.uint8)


@cache
def _ends_of_parity_bits() -> pa.Array:
    """Return the bits that count in a cell of each length, from 0 to the largest."""
    from_end, _ = _parity_bits()
    return pa.array(
        [from_end[LARGEST_IN_RUN - length :].tobytes() for length in range(LARGEST_IN_RUN + 1)], pa.binary()
    )


def run_matches(cells: pa.Array, sums: npt.NDArray[np.uint32], *, restore: bool = True) -> bool:
    """Return True if rows have the stated CRC-32s: one sum over all rows.

    The sum of each row is combined by XOR with the first four bytes of the next one. It takes the register to the value
    that it starts with. So each row begins as if it were the first, and the sum over all rows is that of the last one.
    A wrong row leaves another register, and no later byte can correct it. Several wrong rows cancel each other in one
    of 2**32 cases, as any error may go undetected.

    Returns:
        False also if a row has one to three bytes: then each row must be compared.

    Args:
        cells: The cells of all rows, the same number in each row. No other array uses their memory.
        sums: One for each row.
        restore: False if the cells are not used any more: they stay changed.
    """
    offsets, data = cell_parts(cells)
    offsets = offsets[:: len(cells) // len(sums)]
    lengths = np.diff(offsets)
    filled = lengths > 0
    if not filled.all():  # the sum of a row without bytes is 0
        if sums[~filled].any():
            return False
        offsets, lengths, sums = np.append(offsets[:-1][filled], offsets[-1]), lengths[filled], sums[filled]
    if not len(sums):
        return True
    if lengths.min() < _WORD:
        return False
    words: npt.NDArray[np.uint32] = np.ndarray((len(data) - _WORD + 1,), "<u4", buffer=data.data, strides=(1,))
    size = int(lengths[0])
    following = slice(size, None, size) if (lengths == size).all() else offsets[1:-1]
    words[following] ^= sums[:-1]
    found = crc32(data)
    if restore:
        words[following] ^= sums[:-1]
    return bool(found == sums[-1])


# --- columns ----------------------------------------------------------------------------------------


def text(cells: pa.Array) -> pa.Array:
    """Return binary cells as strings. Bytes that are not UTF-8 are replaced as in Java: the JVM must not get them."""
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [None if cell is None else cell.decode("utf-8", "replace") for cell in cells.to_pylist()]
        return pa.array(decoded, pa.string())


def number_column(texts: pa.Array) -> pa.Array:
    """Return a column of texts as numbers of 64 bits; null for any other text, since any program may write it."""
    try:
        return texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.array([parse_number(text) for text in texts.to_pylist()], pa.int64())


def timestamp_column(milliseconds: pa.Array) -> pa.Array:
    """Return times; null for one that `datetime` does not have: one such row would fail the whole query."""
    found = pc.min_max(milliseconds).as_py()  # nulls do not count
    if not _FIRST_MS <= (found["min"] or 0) <= (found["max"] or 0) <= _LAST_MS:
        in_range = pc.and_(pc.greater_equal(milliseconds, _FIRST_MS), pc.less_equal(milliseconds, _LAST_MS))
        milliseconds = pc.if_else(in_range, milliseconds, None)
    return pc.multiply(milliseconds, 1_000).view(TIMESTAMP)
