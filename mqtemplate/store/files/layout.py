"""Byte layouts of the store's own files. All numbers are big-endian.

`mqtemplate.record.layout` has the layout of a record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import NamedTuple

import numpy as np

from mqtemplate.hashes import crc32
from mqtemplate.store.files.mapped_files import MappedFile


def file_name(start_offset: int) -> str:
    """Return the name of a file in a mapped file queue: the offset of its first byte, in 20 digits."""
    return f"{start_offset:020d}"


# --- consume queue ----------------------------------------------------------------------------------


class CqUnit(NamedTuple):
    """A consume queue unit: the position of one message in the commit log. 20 bytes.

    ==  ==  ===============  ==========================================================================
     0  i8  physical_offset  first byte of the record in the commit log
     8  i4  size             bytes of the whole record, header included; or one of the marks below
    12  i8  tags_code        hash of the tag; in the schedule topic, the deliver time in ms
    ==  ==  ===============  ==========================================================================

    Source: RocketMQ ``store: ConsumeQueue.CQ_STORE_UNIT_SIZE``.
    """

    physical_offset: int
    size: int
    tags_code: int


_CQ_UNIT = struct.Struct(">qiq")
CQ_UNIT_SIZE = _CQ_UNIT.size
assert CQ_UNIT_SIZE == 20
CQ_UNIT_DTYPE = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
assert CQ_UNIT_DTYPE.itemsize == CQ_UNIT_SIZE

pack_cq_unit = _CQ_UNIT.pack
pack_cq_unit_into = _CQ_UNIT.pack_into
iter_cq_units = _CQ_UNIT.iter_unpack

PRE_BLANK_SIZE_MARK = 0x7FFFFFFF
"""Size in the units before the first message of a queue that does not start at queue offset 0.

Source: RocketMQ ``ConsumeQueue.fillPreBlank``.
"""

DONE_SIZE_MARK = 1
"""Size in a unit of the schedule topic whose message needs no delivery in its turn any more.

The message was cancelled, rescheduled, or released before the messages ahead of it. RocketMQ finds no record of one
byte and skips the unit.
"""


NO_UNIT_YET = _CQ_UNIT.pack((1 << 63) - 1, 0, 0)
"""First unit of a consume queue file that was created ahead, until a message overwrites it.

RocketMQ counts the first unit of a queue's last file as a message, even if it is zero. It drops the file only if that
unit points past the end of the log.
"""


def unpack_cq_unit(data: bytes | mmap, at: int = 0) -> CqUnit:
    """Return the unit at byte *at*."""
    return CqUnit(*_CQ_UNIT.unpack_from(data, at))


# --- checkpoint -------------------------------------------------------------------------------------


class CheckpointFields(NamedTuple):
    """RocketMQ's fields of the file ``checkpoint``, which has 4096 bytes.

    ==  ==  =======================  =================================================================
     0  i8  physic_msg_timestamp     store timestamp (ms) of the last flushed record of the commit log
     8  i8  logics_msg_timestamp     the same for the consume queues
    16  i8  index_msg_timestamp      the same for the index files
    24  i8  master_flushed_offset    replication; 0
    32  i8  confirm_physical_offset  end of the last valid record found by a recovery
    40  i8  logics_physical_offset   start of a record. All records before it are in flushed consume queues and in
                                     the progress files of the delay services
    ==  ==  =======================  =================================================================

    Source: RocketMQ ``store: StoreCheckpoint`` (5.5.0).
    """

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    logics_physical_offset: int = 0


_CHECKPOINT = struct.Struct(">qqqqqq")
CHECKPOINT_SIZE = 4_096

_OWN_CHECKPOINT = struct.Struct(">qII")
"""Fields of mqtemplate in the ``checkpoint``, after the fields of RocketMQ, which leaves these bytes unchanged.

==  ==  ============  ============================================================================
48  i8  replay_start  the last ``logics_physical_offset`` that mqtemplate wrote
56  u4  check         CRC-32 of ``replay_start``
60  u4  fields_check  CRC-32 of bytes 0..47 as mqtemplate wrote them: it differs once RocketMQ wrote the page
==  ==  ============  ============================================================================
"""


def pack_checkpoint_into(page: mmap, fields: CheckpointFields) -> None:
    """Write both parts of the checkpoint."""
    data = _CHECKPOINT.pack(*fields)
    replay_start = data[-8:]
    own = _OWN_CHECKPOINT.pack(fields.logics_physical_offset, crc32(replay_start), crc32(data))
    page[: _CHECKPOINT.size + _OWN_CHECKPOINT.size] = data + own


def unpack_checkpoint(page: mmap) -> CheckpointFields:
    """Return RocketMQ's fields."""
    return CheckpointFields(*_CHECKPOINT.unpack_from(page))


def unpack_replay_start(page: mmap) -> int:
    """Return the ``replay_start`` of mqtemplate; 0 if it is damaged or was never written."""
    at = _CHECKPOINT.size
    replay_start, check, _ = _OWN_CHECKPOINT.unpack_from(page, at)
    return int(replay_start) if check == crc32(page[at : at + 8]) else 0


_SIZES = struct.Struct(">qqI")
"""More fields of mqtemplate in the ``checkpoint``.

==  ==  ==================  =========================
64  i8  commit_log_size     bytes of a commit log file
72  i8  consume_queue_size  bytes of a consume queue file
80  u4  check               CRC-32 of bytes 64..79
==  ==  ==================  =========================
"""
_SIZES_AT = _CHECKPOINT.size + _OWN_CHECKPOINT.size


def pack_sizes_into(page: mmap, commit_log_size: int, consume_queue_size: int) -> None:
    """Note the sizes of the files."""
    data = struct.pack(">qq", commit_log_size, consume_queue_size)
    _SIZES.pack_into(page, _SIZES_AT, commit_log_size, consume_queue_size, crc32(data))


def unpack_sizes(page: mmap) -> tuple[int, int] | None:
    """Return the sizes of the files; None if they are damaged or were never written."""
    commit_log_size, consume_queue_size, check = _SIZES.unpack_from(page, _SIZES_AT)
    is_valid = commit_log_size > 0 and check == crc32(page[_SIZES_AT : _SIZES_AT + 16])
    return (commit_log_size, consume_queue_size) if is_valid else None


MAX_CLOCK_STEPS = 128
_CLOCK_STEP = struct.Struct(">qqq")
_CLOCK_STEPS = struct.Struct(">II")
"""More fields of mqtemplate in the ``checkpoint``: where the clock was set back, see `ClockStep`.

==  ==  =========  ================================================================
96  u4  count      number of steps, at most 128
100  u4  check      CRC-32 of the steps
104      steps      physical offset, store timestamp before and after, i8 each
==  ==  =========  ================================================================
"""
_CLOCK_STEPS_AT = 96
assert _SIZES_AT + _SIZES.size <= _CLOCK_STEPS_AT
assert _CLOCK_STEPS_AT + _CLOCK_STEPS.size + MAX_CLOCK_STEPS * _CLOCK_STEP.size <= CHECKPOINT_SIZE


def pack_clock_steps_into(page: mmap, steps: Sequence[tuple[int, int, int]]) -> None:
    """Note the steps of the clock."""
    data = b"".join(_CLOCK_STEP.pack(*step) for step in steps)
    start = _CLOCK_STEPS_AT + _CLOCK_STEPS.size
    page[start : start + len(data)] = data
    _CLOCK_STEPS.pack_into(page, _CLOCK_STEPS_AT, len(steps), crc32(data))


def unpack_clock_steps(page: bytes | mmap) -> list[tuple[int, int, int]]:
    """Return the steps of the clock; none if they are damaged or were never written."""
    count, check = _CLOCK_STEPS.unpack_from(page, _CLOCK_STEPS_AT)
    start = _CLOCK_STEPS_AT + _CLOCK_STEPS.size
    data = page[start : start + min(count, MAX_CLOCK_STEPS) * _CLOCK_STEP.size]
    return list(_CLOCK_STEP.iter_unpack(data)) if count <= MAX_CLOCK_STEPS and check == crc32(data) else []


# --- index file -------------------------------------------------------------------------------------


class IndexHeader(NamedTuple):
    """The first 40 bytes of an index file. The slots follow, i4 each, then the units.

    ==  ==  =====================  ===================================================================
     0  i8  begin_timestamp        store timestamp (ms) of the first record; in an empty file, of the last record of
                                   the file before
     8  i8  end_timestamp          store timestamp (ms) of the last record
    16  i8  begin_physical_offset  first byte of the first record; in an empty file as above
    24  i8  end_physical_offset    first byte of the last record
    32  i4  hash_slot_count        slots in use
    36  i4  index_count            number of the next unit. It starts at 1; unit 0 is never used
    ==  ==  =====================  ===================================================================

    Source: RocketMQ ``store: IndexHeader``.
    """

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    hash_slot_count: int = 0
    index_count: int = 1


class IndexUnit(NamedTuple):
    """One key of one record, 20 bytes.

    ==  ==  ===============  ===================================================================
     0  i4  key_hash         of ``topic#key``, never negative
     4  i8  physical_offset  first byte of the record in the commit log
    12  i4  seconds          seconds from the file's begin_timestamp to the store timestamp
    16  i4  previous         number of the previous unit in the same slot; 0 for none
    ==  ==  ===============  ===================================================================

    Source: RocketMQ ``store: IndexFile``.
    """

    key_hash: int
    physical_offset: int
    seconds: int
    previous: int


_INDEX_HEADER = struct.Struct(">qqqqii")
INDEX_HEADER_SIZE = _INDEX_HEADER.size
assert INDEX_HEADER_SIZE == 40
INDEX_SLOT_DTYPE = np.dtype(">i4")
"""A slot: the number of its newest unit; 0 for none."""
_INDEX_UNIT = struct.Struct(">iqii")
INDEX_UNIT_SIZE = _INDEX_UNIT.size
assert INDEX_UNIT_SIZE == 20
INDEX_UNIT_DTYPE = np.dtype([("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
assert INDEX_UNIT_DTYPE.itemsize == INDEX_UNIT_SIZE


def index_file_size(hash_slot_num: int, index_num: int) -> int:
    """Return the size of an index file in bytes."""
    return INDEX_HEADER_SIZE + INDEX_SLOT_DTYPE.itemsize * hash_slot_num + INDEX_UNIT_SIZE * index_num


def pack_index_header(header: IndexHeader) -> bytes:
    """Return the bytes of the header."""
    return _INDEX_HEADER.pack(*header)


def unpack_index_header(data: bytes | mmap) -> IndexHeader:
    """Return the header. In a new file all bytes are zero; the first unit is number 1 there as well."""
    header = IndexHeader(*_INDEX_HEADER.unpack_from(data))
    return header if header.index_count > 0 else header._replace(index_count=1)


def unpack_index_unit(data: bytes | mmap, at: int = 0) -> IndexUnit:
    """Return the unit at byte *at*."""
    return IndexUnit(*_INDEX_UNIT.unpack_from(data, at))


# --- geometry of an index file ------------------------------------------------------------------------

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
    header = unpack_index_header(file.view)
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
