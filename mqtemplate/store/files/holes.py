"""Telling bytes that a power failure took away from bytes that went bad."""

from __future__ import annotations

from mqtemplate.record.codec import BadRecordError, parse_record
from mqtemplate.store.files.mapped_file import MappedFile

_SECTOR = 512


def is_lost_write(file: MappedFile, at: int, end: int) -> bool:
    """Whether the record at *at* is bad since part of it never came to the disk.

    A disk writes whole sectors. One that was not written holds what it held before: what was appended until then, and
    zeros up to its end. So from *at* on at least one sector has only zeros up to its end, or up to the file's.

    Args:
        end: Where the next whole record begins, or the file ends.
    """
    first_end = at - at % _SECTOR + _SECTOR
    head = file.view[at : min(first_end, end)]
    # Four bytes or fewer are the begin of the size, which often are zeros in a good record.
    if not any(head) and (len(head) > 4 or _is_whole_with_size(file.view[at:end], len(head))):
        return True
    return any(
        not any(file.view[sector : sector + _SECTOR])
        for sector in range(first_end, min(end, file.size) - _SECTOR + 1, _SECTOR)
    )


def _is_whole_with_size(data: bytes, lost: int) -> bool:
    """Whether a record is good once the *lost* first bytes of its size are put back."""
    try:
        parse_record(len(data).to_bytes(4, "big")[:lost] + data[lost:])
    except BadRecordError:
        return False
    return True
