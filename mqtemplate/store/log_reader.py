"""Reading the commit log: a record by its offset, the next whole record after damage, and a scan to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mqtemplate.errors import CorruptRecordError, DeletedRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record
from mqtemplate.record.columns import RecordBatch
from mqtemplate.store.checkpoint import ClockSteps
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue

_CHUNK = 1 << 20
_MAGIC_START = (layout.MAGIC_V1 & 0xFFFF_FFFF).to_bytes(4, "big")[:3]
_MAGIC_ENDS = tuple((magic & 0xFF).to_bytes(1, "big") for magic in (layout.MAGIC_V1, layout.MAGIC_V2))


class RecordHead(NamedTuple):
    """The numbers of a record needed to find the next one."""

    total_size: int
    store_timestamp: int


class LogReader:
    """Records of the commit log by their physical offsets. Reading needs no lock.

    Args:
        files: The files of the log.
        clock_steps: Where the clock was set back between two records.
    """

    def __init__(self, files: MappedFileQueue, clock_steps: ClockSteps | None = None) -> None:
        self.files = files
        self.clock_steps = ClockSteps() if clock_steps is None else clock_steps
        self._file_size = files.file_size

    @property
    def start(self) -> int:
        """Physical offset of the first byte that still exists."""
        return self.files.start

    @property
    def end(self) -> int:
        """Physical offset after the last byte that may belong to a record."""
        return self.files.end

    def path_of(self, physical_offset: int) -> Path:
        """Return the path of the file with this offset; in memory an invented name."""
        start = physical_offset - physical_offset % self._file_size
        return self.files.path_of(start) or Path(f"memory-{start:020d}")

    # --- one record ----------------------------------------------------------------------------

    def read(self, physical_offset: int, size: int) -> StoredRecord:
        """Return a record of known size, verified.

        Raises:
            CorruptRecordError: It is damaged.
            DeletedRecordError: Its file was deleted.
        """
        data = self.files.read(physical_offset, size)
        if not data and physical_offset < self.start:
            raise DeletedRecordError(self.path_of(physical_offset), physical_offset, self.start)
        try:
            record = parse_record(data)
            if record.physical_offset != physical_offset or record.total_size != size:
                raise BadRecordError(
                    f"its header has physical offset {record.physical_offset} and size {record.total_size}, "
                    f"expected size {size}"
                )
        except BadRecordError as exc:
            raise CorruptRecordError(self.path_of(physical_offset), physical_offset, str(exc)) from exc
        return record

    def read_at(self, physical_offset: int) -> StoredRecord | None:
        """Return the record that starts at this offset, verified; None if no record starts there, or it was deleted.

        Raises:
            CorruptRecordError: A record starts there and is damaged.
        """
        if not self.start <= physical_offset < self.end:
            return None
        head = self.head_at(physical_offset)
        try:
            if head is not None:
                return self.read(physical_offset, head.total_size)
        except DeletedRecordError:
            return None
        except CorruptRecordError:
            if self._is_record_start(physical_offset):
                raise
            return None
        if self._is_record_start(physical_offset):
            raise CorruptRecordError(self.path_of(physical_offset), physical_offset, "its header is damaged")
        return None

    def head_at(self, physical_offset: int) -> RecordHead | None:
        """Return the head of the record at this offset, or None without a record. The body is not verified."""
        found = self.files.find(physical_offset)
        if found is None:
            return None
        file, file_start = found
        at = physical_offset - file_start
        if at + layout.HEAD.size > file.size:
            return None
        size, magic, own_offset, sys_flag, timestamp, _, _ = layout.HEAD.unpack_from(file.view, at)
        if magic not in (layout.MAGIC_V1, layout.MAGIC_V2) or own_offset != physical_offset:
            return None
        if not layout.HEAD.size < size <= file.size - at:
            return None
        if sys_flag & layout.HOST_FLAGS:  # then the store timestamp is elsewhere
            record = whole_record_at(file, at, file_start)
            return None if record is None else RecordHead(size, record.store_timestamp)
        return RecordHead(size, timestamp)

    def _is_record_start(self, physical_offset: int) -> bool:
        """Return True if the preceding records lead to this offset. Then a record starts there, whatever its bytes are.

        Read the heads from the start of the file. After a damaged one continue with the next whole record; inside the
        gap an offset counts if it has a valid head.
        """
        found = self.files.find(physical_offset)
        if found is None:
            return False
        file, at = found
        file_start, last_start = at, -1
        while at < physical_offset:
            if is_blank(file, at - file_start):
                return False
            head = self.head_at(at)
            if head is not None:
                last_start, at = at, at + head.total_size
                continue
            # The damage may be the size of the record before, so the search starts there.
            following = self.find_record_after(at if last_start < 0 else last_start)
            if following is None or following > physical_offset:
                return self.head_at(physical_offset) is not None
            last_start, at = -1, following
        return at == physical_offset and not is_blank(file, at - file_start)

    # --- the records after damage --------------------------------------------------------------

    def records_after(self, physical_offset: int, since_ms: int = 0) -> Iterator[StoredRecord]:
        """Yield the whole records that start after this offset, wherever they are.

        Args:
            since_ms: Skip records with an older store timestamp. RocketMQ does not clear the bytes after a tail that it
                cut off, so old records may be there.
        """
        for file, file_start in zip(self.files.files, self.files.starts, strict=True):
            at = max(0, physical_offset + 1 - file_start)
            while (at := _find_magic(file, at)) >= 0:
                record = whole_record_at(file, at, file_start)  # the magic may be chance, or of a torn record
                if record is not None and record.store_timestamp >= since_ms:
                    yield record
                at += 1 if record is None else record.total_size

    def find_record_after(self, physical_offset: int) -> int | None:
        """Return the offset of the first whole record after this offset; None if the rest is empty or torn."""
        record = next(self.records_after(physical_offset), None)
        return None if record is None else record.physical_offset


def parse_at(file: MappedFile, at: int, file_start: int) -> StoredRecord:
    """Return the record at byte *at* of a file, verified.

    Raises:
        BadRecordError: No whole record starts there.
    """
    size = int.from_bytes(file.view[at : at + 4], "big", signed=True)
    record = parse_record(file.view[at : at + max(size, layout.SMALLEST_RECORD)])
    if record.physical_offset != file_start + at:
        raise BadRecordError(f"its header has physical offset {record.physical_offset}")
    return record


def whole_record_at(file: MappedFile, at: int, file_start: int) -> StoredRecord | None:
    """Return the record at byte *at* of a file, verified; None if no whole record starts there."""
    try:
        return parse_at(file, at, file_start)
    except BadRecordError:
        return None


def is_blank(file: MappedFile, at: int) -> bool:
    """Return True if the blank that ends a file starts at byte *at*."""
    return at + layout.BLANK_SIZE <= file.size and layout.read_size_and_magic(file.view, at) == (
        file.size - at,
        layout.MAGIC_BLANK,
    )


def _find_magic(file: MappedFile, at: int) -> int:
    """Return the first byte from *at* on where a record of either version may start; -1 if not found."""
    for start in range(at + layout.MAGIC_AT, file.size, _CHUNK):
        piece = file.view[start : start + _CHUNK + 3]  # a magic may cross the end of a chunk
        hit = -1
        while (hit := piece.find(_MAGIC_START, hit + 1)) >= 0:
            if piece[hit + 3 : hit + 4] in _MAGIC_ENDS:
                return start + hit - layout.MAGIC_AT
    return -1


_NEAR_BYTES = 4_096
"""Records with less than this between them are read at once: to copy the bytes takes less time than to read again."""


def read_records(read_bytes: Callable[[int, int], bytes], physical_offsets: Sequence[int], size: int) -> bytes | None:
    """Return *size* bytes at each physical offset, unchecked and joined; None if the log does not have them all.

    Args:
        read_bytes: `MessageStore.read_bytes`.
    """
    between = np.diff(physical_offsets) - size
    gaps = np.flatnonzero((between < 0) | (between >= _NEAR_BYTES)) + 1
    parts: list[bytes] = []
    for first, end in pairwise([0, *gaps.tolist(), len(physical_offsets)]):
        group = physical_offsets[first:end]
        start, length = group[0], group[-1] + size - group[0]
        data = read_bytes(start, length)
        if len(data) != length:
            return None
        is_adjacent = length == size * len(group)
        parts += [data] if is_adjacent else [data[at - start : at - start + size] for at in group]
    return parts[0] if len(parts) == 1 else b"".join(parts)


_log = get_logger("mqtemplate.store")

_BYTES_AT_ONCE = 1 << 20


class LogScan:
    """Reads records in order, from file to file, until no record starts.

    Attributes:
        end: Physical offset where the last `batches` stopped.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self.end = log.start

    def batches(self, start: int) -> Iterator[RecordBatch]:
        """Yield the records from *start* on, until no record starts.

        Raises:
            BadRecordError: The bytes there are not zero. The recovery decides whether they are a torn tail.
        """
        self.end = start
        while (found := self._log.files.find(self.end)) is not None:
            file, file_start = found
            at = self.end - file_start
            batch = RecordBatch(_next_bytes(file, at), self.end)
            if len(batch):
                yield batch
                self.end += batch.byte_count
            elif _ends_file(file, at):
                self.end = file_start + file.size
            elif layout.read_size_and_magic(file.view, at) == (0, 0):
                return
            else:
                parse_at(file, at, file_start)  # raises the reason
                raise BadRecordError("it is not a record")


def _next_bytes(file: MappedFile, at: int) -> bytes:
    """Return the bytes from *at* on: a megabyte, or as many as a larger record there has."""
    size, magic = layout.read_size_and_magic(file.view, at) if at + layout.BLANK_SIZE <= file.size else (0, 0)
    is_large = size > _BYTES_AT_ONCE and magic in (layout.MAGIC_V1, layout.MAGIC_V2)
    return file.read(at, size if is_large else _BYTES_AT_ONCE)


def _ends_file(file: MappedFile, at: int) -> bool:
    """Return True if a blank starts at *at*. One valid number of the two is enough: no record has either there."""
    if at + layout.BLANK_SIZE > file.size:
        return True  # a blank of fewer bytes than its own header
    size, magic = layout.read_size_and_magic(file.view, at)
    matches = (magic == layout.MAGIC_BLANK, size == file.size - at)
    if any(matches) and not all(matches):
        _log.warning("store.blank_damaged", file=str(file.path), offset_in_file=at)
    return any(matches)
