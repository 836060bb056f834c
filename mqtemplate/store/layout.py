"""The byte layouts of the store's own files; the record's is in `mqtemplate.record`. All numbers are big-endian."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

import numpy as np

from mqtemplate.record import MAGIC_BLANK

__all__ = [
    "BLANK_SIZE",
    "CHECKPOINT_SIZE",
    "CQ_UNIT_DTYPE",
    "CQ_UNIT_SIZE",
    "DONE_SIZE_MARK",
    "PRE_BLANK_SIZE_MARK",
    "CheckpointFields",
    "CqUnit",
    "file_name",
    "iter_cq_units",
    "pack_blank",
    "pack_checkpoint_into",
    "pack_cq_unit_into",
    "unpack_checkpoint",
    "unpack_cq_unit",
]


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


def pack_checkpoint_into(page: mmap, fields: CheckpointFields) -> None:
    _CHECKPOINT.pack_into(page, 0, *fields)


def unpack_checkpoint(page: mmap) -> CheckpointFields:
    return CheckpointFields(*_CHECKPOINT.unpack_from(page))


def file_name(start_offset: int) -> str:
    """A mapped queue names each file by the offset of its first byte: 20 digits."""
    return f"{start_offset:020d}"
