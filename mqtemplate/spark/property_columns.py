"""Message properties as Arrow columns, parsed by their separators for many messages at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.record.layout import CHECK_NAME

_NAME_END, _PAIR_END = 0x01, 0x02


class PropertyColumns:
    """Properties of a batch of messages, ``name 0x01 value 0x02 …`` each.

    They are parsed as RocketMQ does (``MessageDecoder.string2messageProperties``): the last separator may be missing,
    the first 0x01 ends the name, a pair without a name or without a value is ignored, and a later pair replaces an
    earlier one of the same name.

    Args:
        encoded: Arrow binary array with one cell for each message.
    """

    def __init__(self, encoded: pa.Array) -> None:
        encoded = _with_last_separator(encoded)
        self._count = len(encoded)
        offsets, self._data = cell_parts(encoded)
        # One entry for each pair of all messages: its start, its first 0x01, its 0x02, and the row of its message.
        stops = np.flatnonzero(self._data == _PAIR_END)
        starts = np.concatenate([np.zeros(min(1, len(stops)), np.int64), stops[:-1] + 1])
        middles = _first_after(np.flatnonzero(self._data == _NAME_END), starts)
        counts = np.diff(np.searchsorted(stops, offsets))
        rows = np.repeat(np.arange(self._count), counts)
        counted = (middles > starts) & (middles < stops - 1)  # neither the name nor the value is empty
        if not counted.all():
            starts, middles, stops, rows = starts[counted], middles[counted], stops[counted], rows[counted]
        self._starts, self._middles, self._stops, self._rows = starts, middles, stops, rows
        # Four cells a pair: name, 0x01, value, and 0x02 up to the next name.
        self._cells = adjacent_cells(self._data, self._starts, self._middles, self._middles + 1, self._stops)

    def value(self, name: str) -> pa.Array:
        """Return one property of each message as a string column; null where it is missing."""
        pairs = self._pairs_named(name.encode())
        at = np.full(self._count, -1)
        at[self._rows[pairs]] = pairs  # for equal names in one message, numpy keeps the last assignment
        return text(self._cells.take(pa.array(4 * at + 2, mask=at < 0)))

    def maps(self) -> pa.Array:
        """Return all properties of each message as a column of maps."""
        pairs = self._last_of_each_name()
        # The check of a record that another broker copied is no property of the message.
        if len(copied_checks := self._pairs_named(CHECK_NAME.encode())):
            pairs = np.setdiff1d(pairs, copied_checks)
        offsets = np.searchsorted(self._rows[pairs], np.arange(self._count + 1)).astype(np.int32)
        names = text(self._cells.take(pa.array(4 * pairs)))
        values = text(self._cells.take(pa.array(4 * pairs + 2)))
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values)

    def _pairs_named(self, name: bytes) -> npt.NDArray[np.int64]:
        pairs = np.flatnonzero((self._middles - self._starts == len(name)) & (self._data[self._starts] == name[0]))
        found = self._data[self._starts[pairs, None] + np.arange(len(name))]
        same: npt.NDArray[np.bool_] = (found == np.frombuffer(name, np.uint8)).all(axis=1)
        return pairs[same]

    def _last_of_each_name(self) -> npt.NDArray[np.int64]:
        """Return the indices of the pairs, without those that a later pair of the same message and name replaces."""
        every = np.arange(len(self._starts))
        marks = np.sort(self._name_marks())
        if (marks[1:] != marks[:-1]).all():
            return every
        names = self._cells.take(pa.array(4 * every)).to_pylist()
        last = {(row, name): pair for pair, (row, name) in enumerate(zip(self._rows.tolist(), names, strict=True))}
        return np.array(sorted(last.values()), np.int64)

    def _name_marks(self) -> npt.NDArray[np.uint64]:
        """Return a number for each pair: equal for equal names in one message, and rarely equal otherwise.

        It consists of the row of the message, the length of the name, and its first and last two bytes. Names that
        differ only in their middle get equal numbers, which costs time and nothing else.
        """
        lengths = self._middles - self._starts
        head = self._data[self._starts].astype(np.uint64)
        second = self._data[np.minimum(self._starts + 1, self._middles - 1)].astype(np.uint64)
        tail = self._data[self._middles - 1].astype(np.uint64)
        before = self._data[np.maximum(self._middles - 2, self._starts)].astype(np.uint64)
        mark = head << np.uint64(24) | second << np.uint64(16) | before << np.uint64(8) | tail
        mark = mark ^ (lengths.astype(np.uint64) << np.uint64(16))
        marks: npt.NDArray[np.uint64] = mark | self._rows.astype(np.uint64) << np.uint64(32)
        return marks


def adjacent_cells(data: npt.NDArray[np.uint8], *starts: npt.NDArray[np.int64]) -> pa.Array:
    """Return *data* as one binary array, without a copy; a cell ends where the next one starts.

    Args:
        starts: Start of the first cell of each row, of its second cell, and so on.
    """
    bounds = np.stack(starts, axis=1, dtype=np.int32, casting="same_kind").reshape(-1)
    offsets = np.append(bounds, np.int32(len(data)))
    return pa.Array.from_buffers(pa.binary(), len(bounds), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def text(cells: pa.Array) -> pa.Array:
    """Return binary cells as strings. Bytes that are not UTF-8 are replaced as in Java: the JVM must not get them."""
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [None if cell is None else cell.decode("utf-8", "replace") for cell in cells.to_pylist()]
        return pa.array(decoded, pa.string())


def _with_last_separator(encoded: pa.Array) -> pa.Array:
    """Return the cells with 0x02 at the end of each one that is not empty. An extra 0x02 is an empty pair."""
    offsets, data = cell_parts(encoded)
    filled = offsets[1:] > offsets[:-1]
    if (data[offsets[1:][filled] - 1] == _PAIR_END).all():
        return encoded
    return pc.binary_join_element_wise(encoded, pa.scalar(bytes([_PAIR_END])), pa.scalar(b""))


def cell_parts(cells: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the offsets and bytes of a binary array that starts at the start of its buffers."""
    _, offsets, data = cells.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(cells) + 1).astype(np.int64)
    return bounds, np.frombuffer(data, np.uint8, int(bounds[-1])) if data is not None else np.empty(0, np.uint8)


def _first_after(positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return, for each start, the first of the ascending *positions* at or after it; -1 if there is none."""
    if len(positions) == len(starts) and (positions >= starts).all() and (positions[:-1] < starts[1:]).all():
        return positions  # the usual case: one 0x01 in each pair
    found = np.searchsorted(positions, starts)
    return np.append(positions, -1)[found]
