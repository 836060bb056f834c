"""Byte layouts of the store's own files; `mqtemplate.record.codec` has the record's. All numbers are big-endian."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

import numpy as np

from mqtemplate.checksum import crc32
from mqtemplate.record.codec import MAGIC_BLANK


class CqUnit(NamedTuple):
    """One consume queue entry: where a message lies. 20 bytes.

    ==  ==  ===============  ======================================================
     0  i8  physical_offset  first byte of the record in the commit log
     8  i4  size             bytes of the whole record, header included
    12  i8  tags_code        hash of the tag; in the schedule topic, the deliver time in ms
    ==  ==  ===============  ======================================================

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

pack_cq_unit_into = _CQ_UNIT.pack_into
iter_cq_units = _CQ_UNIT.iter_unpack

PRE_BLANK_SIZE_MARK = 0x7FFFFFFF
"""The size in units that stand before a queue's first message, where that is not the queue's first place."""

DONE_SIZE_MARK = 1
"""Written over the size in a unit of the schedule topic whose message needs no handing over any more: it was
cancelled, rescheduled, or released before those in front of it. Upstream finds no record of that size, and passes the
unit over."""


NO_UNIT_YET = _CQ_UNIT.pack((1 << 63) - 1, 0, 0)
"""Stands at the begin of a consume queue file that was made ahead, until a first unit is written over it. When upstream
starts, it takes what stands at the begin of a queue's last file for a unit, even nothing, unless that points behind the
log's end: then it drops the file."""


def unpack_cq_unit(data: bytes | mmap, at: int = 0) -> CqUnit:
    return CqUnit(*_CQ_UNIT.unpack_from(data, at))


_BLANK = struct.Struct(">ii")
BLANK_SIZE = _BLANK.size
"""Bytes that each commit log file keeps free for the blank that ends it."""


def pack_blank(remaining_bytes: int) -> bytes:
    """What fills the end of a commit log file when the next record does not fit: its length, and a magic."""
    return _BLANK.pack(remaining_bytes, MAGIC_BLANK)


class CheckpointFields(NamedTuple):
    """How far the files agree. ``checkpoint``, 4096 bytes.

    ==  ==  =======================  =================================================================
     0  i8  physic_msg_timestamp     store timestamp (ms) of the last record flushed in the commit log
     8  i8  logics_msg_timestamp     the same for the consume queues
    16  i8  index_msg_timestamp      the same for the last full index file
    24  i8  master_flushed_offset    replication; 0
    32  i8  confirm_physical_offset  first byte of the last valid record found by a recovery
    40  i8  logics_physical_offset   start of a record; everything before it is in flushed consume queues,
                                     and the progress files of the delay services tell of it
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


class OwnCheckpoint(NamedTuple):
    """What we write behind upstream's fields of the ``checkpoint``, where upstream leaves the page as it is.

    ==  ==  ============  ============================================================================
    48  i8  replay_start  our last logics_physical_offset
    56  u4  check         CRC-32 of replay_start
    60  u4  fields_check  CRC-32 of bytes 0..47 as we wrote them; another sum: upstream ran after us
    ==  ==  ============  ============================================================================
    """

    replay_start: int
    is_last: bool


_OWN_CHECKPOINT = struct.Struct(">qII")


def pack_checkpoint_into(page: mmap, fields: CheckpointFields) -> None:
    data = _CHECKPOINT.pack(*fields)
    replay_start = data[-8:]
    own = _OWN_CHECKPOINT.pack(fields.logics_physical_offset, crc32(replay_start), crc32(data))
    page[: _CHECKPOINT.size + _OWN_CHECKPOINT.size] = data + own


def unpack_checkpoint(page: mmap) -> CheckpointFields:
    return CheckpointFields(*_CHECKPOINT.unpack_from(page))


def unpack_own_checkpoint(page: mmap) -> OwnCheckpoint | None:
    """Our part of the page; None if it is damaged, or never was written."""
    at = _CHECKPOINT.size
    replay_start, check, fields_check = _OWN_CHECKPOINT.unpack_from(page, at)
    if check != crc32(page[at : at + 8]):
        return None
    return OwnCheckpoint(replay_start, fields_check == crc32(page[:at]))


class IndexHeader(NamedTuple):
    """The begin of an index file, 40 bytes; the slots follow, i4 each, then the units.

    ==  ==  =====================  ===================================================================
     0  i8  begin_timestamp        store timestamp (ms) of the first record; of the last one of the
                                   file before, while this one is empty
     8  i8  end_timestamp          that of the last record
    16  i8  begin_physical_offset  first byte of the first record, or as above
    24  i8  end_physical_offset    first byte of the last record
    32  i4  hash_slot_count        slots in use
    36  i4  index_count            number of the next unit; begins at 1, unit 0 is never used
    ==  ==  =====================  ===================================================================

    Source: RocketMQ ``store: IndexHeader``.
    """

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    hash_slot_count: int = 0
    index_count: int = 1


_INDEX_HEADER = struct.Struct(">qqqqii")
INDEX_HEADER_SIZE = _INDEX_HEADER.size
assert INDEX_HEADER_SIZE == 40
INDEX_SLOT_DTYPE = np.dtype(">i4")
"""A slot: the number of the newest unit whose key falls into it; 0 for none."""


class IndexUnit(NamedTuple):
    """One key of one record, 20 bytes.

    ==  ==  ===============  ===================================================================
     0  i4  key_hash         of ``topic#key``, never negative
     4  i8  physical_offset  first byte of the record in the commit log
    12  i4  seconds          whole seconds from the file's begin_timestamp to the store timestamp
    16  i4  previous         number of the unit before it in the same slot; 0 for none
    ==  ==  ===============  ===================================================================

    Source: RocketMQ ``store: IndexFile``.
    """

    key_hash: int
    physical_offset: int
    seconds: int
    previous: int


_INDEX_UNIT = struct.Struct(">iqii")
INDEX_UNIT_SIZE = _INDEX_UNIT.size
assert INDEX_UNIT_SIZE == 20
INDEX_UNIT_DTYPE = np.dtype([("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
assert INDEX_UNIT_DTYPE.itemsize == INDEX_UNIT_SIZE


def index_file_size(hash_slot_num: int, index_num: int) -> int:
    return INDEX_HEADER_SIZE + INDEX_SLOT_DTYPE.itemsize * hash_slot_num + INDEX_UNIT_SIZE * index_num


def pack_index_header(header: IndexHeader) -> bytes:
    return _INDEX_HEADER.pack(*header)


def unpack_index_header(data: bytes | mmap) -> IndexHeader:
    header = IndexHeader(*_INDEX_HEADER.unpack_from(data))
    return header if header.index_count > 0 else header._replace(index_count=1)


def unpack_index_unit(data: bytes | mmap, at: int = 0) -> IndexUnit:
    return IndexUnit(*_INDEX_UNIT.unpack_from(data, at))


def file_name(start_offset: int) -> str:
    """A mapped queue names each file by the offset of its first byte: 20 digits."""
    return f"{start_offset:020d}"
