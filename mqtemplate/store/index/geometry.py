"""Numbers of slots and of units of existing index files: they follow from size and content of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mqtemplate.store import layout
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.layout import (
    INDEX_HEADER_SIZE,
    INDEX_SLOT_DTYPE,
    INDEX_UNIT_DTYPE,
    INDEX_UNIT_SIZE,
    IndexHeader,
    index_file_size,
)

_SLOT_SIZE = INDEX_SLOT_DTYPE.itemsize
_CHUNK_UNITS = 1 << 18
_CHECKED_UNITS = 256
_MAX_CANDIDATES = 10_000


class Geometry(NamedTuple):
    """Number of slots (``max_hash_slot_num``), and of units with the unused one (``max_index_num``)."""

    slots: int
    units: int

    @property
    def size(self) -> int:
        """Bytes of a file."""
        return index_file_size(self.slots, self.units)


NEW_GEOMETRY = Geometry(250_000, 1_000_000)
ROCKETMQ_GEOMETRY = Geometry(5_000_000, 20_000_000)


def find_geometry(file: MappedFile) -> Geometry | None:
    """Return the geometry of an index file; None if its content does not show it.

    The well-known ones are recognized by their size. Else the first unit is searched. It has the offset of the header's
    first record, and all units must fit to their slots.
    """
    for known in (NEW_GEOMETRY, ROCKETMQ_GEOMETRY):
        if known.size == file.size:
            return known
    header = layout.unpack_index_header(file.view)
    if header.index_count < 2:
        return None
    for tried, slots in enumerate(_candidates(file, header)):
        if tried == _MAX_CANDIDATES:
            return None
        geometry = Geometry(slots, (file.size - index_file_size(slots, 0)) // INDEX_UNIT_SIZE)
        if _fits(file, header, geometry):
            return geometry
    return None


def _candidates(file: MappedFile, header: IndexHeader) -> Iterator[int]:
    """Yield the numbers of slots with which unit 1 starts at bytes that can be that unit."""
    # Size and number of slots determine each other modulo the size of a unit: the rest of the file has whole units.
    first = (file.size - INDEX_HEADER_SIZE) % INDEX_UNIT_SIZE
    if first % _SLOT_SIZE:
        return
    at = INDEX_HEADER_SIZE + first + INDEX_UNIT_SIZE  # unit 1, after the unused unit 0
    while at + INDEX_UNIT_SIZE <= file.size:
        data = file.read(at, _CHUNK_UNITS * INDEX_UNIT_SIZE)
        units = np.frombuffer(data[: len(data) // INDEX_UNIT_SIZE * INDEX_UNIT_SIZE], INDEX_UNIT_DTYPE)
        is_first = (units["physical_offset"] == header.begin_physical_offset) & (units["previous"] == 0)
        is_first &= units["key_hash"] > 0
        for row in np.flatnonzero(is_first).tolist():
            slots = (at + row * INDEX_UNIT_SIZE - INDEX_UNIT_SIZE - INDEX_HEADER_SIZE) // _SLOT_SIZE
            if slots > 0:
                yield slots
        at += len(units) * INDEX_UNIT_SIZE


def _fits(file: MappedFile, header: IndexHeader, geometry: Geometry) -> bool:
    """Return True if the first units are valid, and each is in the chain of its slot."""
    count = min(header.index_count - 1, _CHECKED_UNITS)
    if geometry.units < header.index_count:
        return False
    units_at = index_file_size(geometry.slots, 1)
    units = np.frombuffer(file.read(units_at, count * INDEX_UNIT_SIZE), INDEX_UNIT_DTYPE)
    offsets, hashes = units["physical_offset"].astype(np.int64), units["key_hash"].astype(np.int64)
    previous, numbers = units["previous"].astype(np.int64), np.arange(1, count + 1)
    is_valid = (hashes >= 0) & (previous >= 0) & (previous < numbers)
    if not is_valid.all() or (np.diff(offsets) < 0).any():
        return False
    has_previous = previous > 0
    slots = hashes % geometry.slots
    if (slots[previous[has_previous] - 1] != slots[has_previous]).any():
        return False
    table = np.frombuffer(file.read(INDEX_HEADER_SIZE, geometry.slots * _SLOT_SIZE), INDEX_SLOT_DTYPE)
    newest = table[slots]
    return bool(((newest >= numbers) & (newest < header.index_count)).all())
