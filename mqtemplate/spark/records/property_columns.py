"""Message properties as Arrow columns, parsed by their separators for many messages at once."""

from __future__ import annotations

from functools import cached_property
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

    A producer usually gives all its messages the same names in the same order. Then one message says where each name
    is, and no other name is compared.

    Args:
        encoded: Arrow binary array with one cell for each message.
    """

    def __init__(self, encoded: pa.Array) -> None:
        encoded = _with_last_separator(encoded)
        self._count = len(encoded)
        offsets, self._data = cell_parts(encoded)
        # One entry for each pair of all messages: its start, its first 0x01, its 0x02, and the row of its message.
        starts, middles, stops = _pairs(self._data)
        counts = np.diff(np.searchsorted(stops, offsets))
        counted = (middles > starts) & (middles < stops - 1)  # neither the name nor the value is empty
        if not counted.all():
            rows = np.repeat(np.arange(self._count), counts)[counted]
            starts, middles, stops = starts[counted], middles[counted], stops[counted]
            counts = np.bincount(rows, minlength=self._count)
        self._starts, self._middles, self._stops, self._counts = starts, middles, stops, counts
        # Four cells a pair: name, 0x01, value, and 0x02 up to the next name.
        self._cells = adjacent_cells(self._data, starts, middles, middles + 1, stops)

    def value(self, name: str) -> pa.Array:
        """Return one property of each message as a string column; null where it is missing."""
        pairs = self._pairs_named(name.encode())
        if not len(pairs):
            return pa.nulls(self._count, pa.string())
        if self._common_names is not None:
            return text(self._cells.take(pa.array(4 * pairs + 2)))
        at = np.full(self._count, -1)
        at[self._rows[pairs]] = pairs  # for equal names in one message, numpy keeps the last assignment
        return text(self._cells.take(pa.array(4 * at + 2, mask=at < 0)))

    def maps(self) -> pa.Array:
        """Return all properties of each message as a column of maps."""
        # The check of a record that another broker copied is no property of the message.
        copied_checks = self._pairs_named(CHECK_NAME.encode())
        if self._common_names is not None and not len(copied_checks):
            values = text(self._cells.take(pa.array(np.arange(2, 4 * len(self._starts), 4))))
            offsets = np.append(0, np.cumsum(self._counts)).astype(np.int32)
            return pa.MapArray.from_arrays(pa.array(offsets), _repeated(self._common_names, self._count), values)
        pairs = np.setdiff1d(self._last_of_each_name(), copied_checks)
        offsets = np.searchsorted(self._rows[pairs], np.arange(self._count + 1)).astype(np.int32)
        names, values = (text(self._cells.take(pa.array(4 * pairs + cell))) for cell in (0, 2))
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        """Row of the message of each pair."""
        return np.repeat(np.arange(self._count), self._counts)

    @cached_property
    def _common_names(self) -> list[bytes] | None:
        """Names of each message, if all have the same ones in the same order, each once; else None."""
        pairs = int(self._counts[0]) if self._count else 0
        if not pairs or (self._counts != pairs).any():
            return None
        lengths = (self._middles - self._starts).reshape(-1, pairs)
        if (lengths != lengths[0]).any():
            return None
        names = [
            self._data[start:end].tobytes() for start, end in zip(self._starts, self._middles[:pairs], strict=False)
        ]
        for pair, name in enumerate(names):
            if not self._equal(self._starts[pair::pairs], name).all():
                return None
        return names if len(set(names)) == pairs else None

    def _pairs_named(self, name: bytes) -> npt.NDArray[np.int64]:
        if self._common_names is not None:
            names = self._common_names
            return np.arange(names.index(name), len(self._starts), len(names)) if name in names else np.arange(0)
        pairs = np.flatnonzero((self._middles - self._starts == len(name)) & (self._data[self._starts] == name[0]))
        return pairs[self._equal(self._starts[pairs], name)]

    def _equal(self, at: npt.NDArray[np.int64], name: bytes) -> npt.NDArray[np.bool_]:
        """Return where the bytes at some positions are *name*."""
        size = len(name)
        if not len(at):
            return np.empty(0, np.bool_)
        every: npt.NDArray[Any] = np.ndarray(
            (len(self._data) - size + 1,), f"V{size}", buffer=self._data.data, strides=(1,)
        )
        same: npt.NDArray[np.bool_] = every[at] == np.void(name)
        return same

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


def _pairs(data: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return start, first 0x01 and 0x02 of each pair; -1 or a later position for a pair without 0x01."""
    separators = np.flatnonzero(data - np.uint8(_NAME_END) <= _PAIR_END - _NAME_END)
    middles, stops = separators[::2], separators[1::2]
    is_usual = not len(separators) % 2 and (data[middles] == _NAME_END).all() and (data[stops] == _PAIR_END).all()
    if not is_usual:
        stops = separators[data[separators] == _PAIR_END]
    starts = np.append(0, stops[:-1] + 1)[: len(stops)]
    if not is_usual:
        middles = _first_after(separators[data[separators] == _NAME_END], starts)
    return starts, middles, stops


def _repeated(names: list[bytes], times: int) -> pa.Array:
    """Return a string array with all names, so many times."""
    data = np.tile(np.frombuffer(b"".join(names), np.uint8), times)
    sizes = np.tile(np.array([len(name) for name in names], np.int32), times)
    offsets = np.append(np.int32(0), np.cumsum(sizes, dtype=np.int32))
    return text(pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)]))


def _first_after(positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return, for each start, the first of the ascending *positions* at or after it; -1 if there is none."""
    found = np.searchsorted(positions, starts)
    return np.append(positions, -1)[found]
