"""Records by their place alone: what begins at a physical offset, if anything does."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

from mqtemplate.errors import CorruptRecordError, DeletedRecordError
from mqtemplate.record.codec import (
    HOST_FLAGS,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    BadRecordError,
    StoredRecord,
    parse_record,
)
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.layout import BLANK_SIZE

HEAD = struct.Struct(">ii20xqi16xq8x12xi")
"""Total size, magic, physical offset, sys flag, store timestamp, body length: of a record with IPv4 hosts."""
assert HEAD.size == 88

_SIZE_AND_MAGIC = struct.Struct(">ii")


class RecordHead(NamedTuple):
    """What a record says of itself."""

    total_size: int
    store_timestamp: int


def record_head(log: CommitLog, physical_offset: int) -> RecordHead | None:
    """The head of the record that begins at *physical_offset*; None where none does. Its body is not checked."""
    found = log.find(physical_offset)
    if found is None:
        return None
    file, file_start = found
    at = physical_offset - file_start
    if at + HEAD.size > file.size:
        return None
    size, magic, own_offset, sys_flag, timestamp, _ = HEAD.unpack_from(file.view, at)
    if magic not in (MAGIC_V1, MAGIC_V2) or own_offset != physical_offset or not HEAD.size < size <= file.size - at:
        return None
    if sys_flag & HOST_FLAGS:
        record = record_in(file.view, at, file_start)
        return None if record is None else RecordHead(size, record.store_timestamp)
    return RecordHead(size, timestamp)


def record_in(view: mmap, at: int, file_start: int) -> StoredRecord | None:
    """The record at *at* in a file, checked; None if it is not whole."""
    try:
        size = _SIZE_AND_MAGIC.unpack_from(view, at)[0]
        record = parse_record(view[at : at + max(size, 0)])
    except (BadRecordError, struct.error):
        return None
    return record if record.physical_offset == file_start + at else None


def is_blank(view: mmap, at: int, file_size: int) -> bool:
    """Whether the blank that ends a file begins at *at*."""
    return at + BLANK_SIZE <= file_size and _SIZE_AND_MAGIC.unpack_from(view, at) == (file_size - at, MAGIC_BLANK)


def read_record(log: CommitLog, physical_offset: int) -> StoredRecord | None:
    """The record that begins at *physical_offset*, checked; None where none does, or none any more.

    Raises:
        CorruptRecordError: One does, and it is damaged.
    """
    if not log.begin <= physical_offset < log.end:
        return None
    head = record_head(log, physical_offset)
    try:
        if head is not None:
            return log.read(physical_offset, head.total_size)
    except DeletedRecordError:
        return None
    except CorruptRecordError:
        if is_record_start(log, physical_offset):
            raise
        return None
    if is_record_start(log, physical_offset):
        raise CorruptRecordError(log.path_of(physical_offset), physical_offset, "its head is damaged")
    return None


def is_record_start(log: CommitLog, physical_offset: int) -> bool:
    """Whether the records before *physical_offset* lead to it: one begins there, then, whatever its bytes say.

    Reads the heads from the file's begin on. Where one is damaged it goes on behind it; what lies in such a hole
    counts if it has a head.
    """
    found = log.find(physical_offset)
    if found is None:
        return False
    file, at = found
    file_start, last_start = at, -1
    while at < physical_offset:
        if is_blank(file.view, at - file_start, file.size):
            return False
        head = record_head(log, at)
        if head is not None:
            last_start, at = at, at + head.total_size
            continue
        behind = log.find_record_after(at if last_start < 0 else last_start)
        if behind is None or behind > physical_offset:
            return record_head(log, physical_offset) is not None
        last_start, at = -1, behind
    return at == physical_offset and not is_blank(file.view, at - file_start, file.size)
