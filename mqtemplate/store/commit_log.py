"""The log that everything is written to first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from mqtemplate.clock import Clock
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record.batch import RecordBatch, read_batch
from mqtemplate.record.codec import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    SMALLEST_RECORD,
    BadRecordError,
    RecordDraft,
    StoredRecord,
    pack_host,
    parse_record,
    read_size_and_magic,
)
from mqtemplate.record.run import RecordRun
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.layout import BLANK_SIZE, pack_blank

_log = structlog.stdlib.get_logger("mqtemplate.store")

_PIECE = 1 << 20
"""Bytes that are scanned at once."""
_MAGIC_START = (MAGIC_V1 & 0xFFFF_FFFF).to_bytes(4, "big")[:3]


class PutResult(NamedTuple):
    """Where a record is now."""

    physical_offset: int
    size: int
    queue_offset: int
    store_timestamp: int

    @property
    def end(self) -> int:
        """Physical offset behind the record; what `MessageStore.confirm` waits for."""
        return self.physical_offset + self.size


class LogFile(NamedTuple):
    """One file of the log.

    Attributes:
        begin: Physical offset of its first byte.
        end: That of the next file's.
        newest_ms: No record in it was stored later (store timestamp); None if that is not known.
    """

    begin: int
    end: int
    newest_ms: int | None


class CommitLog:
    """Records, one behind the other, over files of one size.

    - A record lies in one file. Where the next one does not fit, a blank ends the file.
    - Behind ``end`` everything is zero.
    - Not thread-safe: the `MessageStore` appends under its lock. Reading needs no lock.

    Args:
        files: Where the bytes go.
        clock: Dates the records. Store timestamps never go back, whatever the clock does.
        store_host: This broker's address, as it stands in each record.
        maps_single: `append` writes through the map, so that no other sender runs in between; see `MappedFile.write`.
    """

    def __init__(
        self, files: MappedFileQueue, clock: Clock, store_host: HostAddress, maps_single: bool = False
    ) -> None:
        self._files = files
        self._clock = clock
        self._store_host = pack_host(store_host)
        self._file_size = files.file_size
        self._maps_single = maps_single
        self._spare: MappedFile | None = None
        self._spare_lock = threading.Lock()
        self._low_water = self._file_size
        self._on_low_water: Callable[[], None] = lambda: None
        self.last_store_timestamp = 0
        self.scan_end = files.begin
        self.open_at(files.begin)

    # --- writing -------------------------------------------------------------------------------

    @property
    def begin(self) -> int:
        return self._files.begin

    @property
    def end(self) -> int:
        """Physical offset of the next record (of the blank before it, at a file's end)."""
        return self._start + self._at

    def open_at(self, end: int) -> None:
        """Go on writing at *end*."""
        self._start = end - end % self._file_size
        self._at = end - self._start
        found = self._files.find(end)
        self._file = found[0] if found else None

    def append(self, draft: RecordDraft, queue_offset: int) -> PutResult:
        """Write one record.

        Raises:
            StoreFullError: The next file could not be made; the log is as before.
            MessageError: It does not fit into a file, or its properties are too large.
        """
        host, now = self._store_host, self._date()
        at = self._start + self._at
        record = draft.encode(queue_offset, at, now, host)
        if self._at + len(record) > self._file_size - BLANK_SIZE or self._file is None:
            self.make_room(len(record))
            at = self._start + self._at
            record = draft.encode(queue_offset, at, now, host)
        self._write(record, through_map=self._maps_single)
        return PutResult(at, len(record), queue_offset, now)

    def append_all(self, drafts: Sequence[RecordDraft], queue_offsets: Sequence[int]) -> list[PutResult]:
        """`append` for several: all are written into one file, or, if it fails, none.

        A process that dies meanwhile may leave the first of them.
        """
        host = self._store_host
        self.make_room(sum([draft.size(host) for draft in drafts]))
        now = self._date()
        at = self._start + self._at
        results, records = [], []
        for draft, queue_offset in zip(drafts, queue_offsets, strict=True):
            record = draft.encode(queue_offset, at, now, host)
            records.append(record)
            size = len(record)
            results.append(PutResult(at, size, queue_offset, now))
            at += size
        self._write(b"".join(records), through_map=False)
        return results

    def append_runs(
        self, runs: Sequence[RecordDraft | RecordRun], queue_offsets: Sequence[NDArray[np.int64]]
    ) -> list[PutResult]:
        """`append_all` for records of which many come as runs; gives the place of the first of each."""
        host = self._store_host
        self.make_room(sum([run.size(host) for run in runs]))
        now = self._date()
        at = self._start + self._at
        results, records = [], []
        for run, offsets in zip(runs, queue_offsets, strict=True):
            first = int(offsets[0])
            if isinstance(run, RecordDraft):
                data, count = run.encode(first, at, now, host), 1
            else:
                data, count = run.encode(offsets, at, now, host), len(run)
            records.append(data)
            results.append(PutResult(at, len(data) // count, first, now))
            at += len(data)
        self._write(b"".join(records), through_map=False)
        return results

    def _date(self) -> int:
        """The store timestamp of what is written now."""
        now = self._clock.now_ms()
        if now < self.last_store_timestamp:
            return self.last_store_timestamp
        self.last_store_timestamp = now
        return now

    def _write(self, data: bytes, *, through_map: bool) -> None:
        assert self._file is not None
        if through_map:
            self._file.write_mapped(self._at, data)
        else:
            self._file.write(self._at, data)
        self._at = end = self._at + len(data)
        if end > self._low_water:
            self._low_water = self._file_size  # once a file
            self._on_low_water()

    def make_room(self, size: int) -> None:
        """See that *size* bytes of records fit into the file that is written to, by going on to the next if need be.

        Raises:
            StoreFullError: The next file could not be made; the log is as before.
            MessageError: They would not fit into any file.
        """
        room = self._file_size - self._at - BLANK_SIZE
        if size <= room and self._file is not None:
            return
        if size > self._file_size - BLANK_SIZE:
            raise MessageError(
                f"{size} bytes of records do not fit into a commit log file of {self._file_size} bytes; "
                "send less at once, or make the files larger (mapped-file-size-commit-log)"
            )
        if self._file is None:
            self._file = self._next_file(self._start)
            if size <= room:
                return
        following = self._next_file(self._start + self._file_size)
        self._file.write(self._at, pack_blank(self._file_size - self._at))
        self._file = following
        self._at = 0  # first: whoever asks for the end without the lock may be told one too small, never one too far
        self._start += self._file_size
        self._low_water = self._file_size // 2

    def _next_file(self, start: int) -> MappedFile:
        if (found := self._files.find(start)) is not None:
            return found[0]  # the disk refused just behind its making, or whoever owned the folder made it ahead
        with self._spare_lock:
            spare, self._spare = self._spare, None
            return self._files.append_file(start, make=None if spare is None else lambda _: spare)

    # --- ahead of the writer -------------------------------------------------------------------

    def on_low_water(self, wake: Callable[[], None]) -> None:
        """Call *wake* when a file is half full, so that somebody calls `prepare`."""
        self._on_low_water = wake
        self._low_water = self._file_size // 2

    def prepare(self) -> None:
        """Make the next file before it is needed. Runs beside the writer, in another thread."""
        with self._spare_lock:
            if (
                self._at * 2 > self._file_size
                and self._spare is None
                and self._files.end == self._start + self._file_size
            ):
                self._spare = self._files.new_file(self._files.end)

    # --- reading -------------------------------------------------------------------------------

    def read(self, physical_offset: int, size: int) -> StoredRecord:
        """One record, checked against its CRC.

        Raises:
            CorruptRecordError: It is damaged.
            DeletedRecordError: Its file was deleted.
        """
        data = self._files.read(physical_offset, size)
        if not data and physical_offset < self.begin:
            raise DeletedRecordError(self.path_of(physical_offset), physical_offset, self.begin)
        try:
            record = parse_record(data)
            if record.physical_offset != physical_offset or record.total_size != size:
                raise BadRecordError(
                    f"it says it lies at {record.physical_offset} and has {record.total_size} bytes, expected {size}"
                )
        except BadRecordError as exc:
            raise CorruptRecordError(self.path_of(physical_offset), physical_offset, str(exc)) from exc
        return record

    def read_at(self, physical_offset: int) -> StoredRecord | None:
        """The record that begins at *physical_offset*, checked; None where none does, or none any more.

        Raises:
            CorruptRecordError: It is damaged.
        """
        head = self._files.read(physical_offset, BLANK_SIZE) if physical_offset < self.end else b""
        if len(head) < BLANK_SIZE:
            return None
        size, magic = read_size_and_magic(head)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < SMALLEST_RECORD:
            return None
        return self.read(physical_offset, size)

    def find(self, physical_offset: int) -> tuple[MappedFile, int] | None:
        """The file that holds *physical_offset*, and the offset of its first byte."""
        return self._files.find(physical_offset)

    def scan(self, start: int) -> Iterator[RecordBatch]:
        """Records from *start* on, until the first place where none is; `scan_end` tells where that was.

        Raises:
            BadRecordError: That place does not hold zeros. Whether it is a torn tail is for the recovery to judge.
        """
        self.scan_end = start
        while (found := self._files.find(self.scan_end)) is not None:
            file, file_start = found
            at = self.scan_end - file_start
            batch = read_batch(_piece(file, at), self.scan_end)
            if len(batch):
                yield batch
                self.scan_end += batch.byte_count
            elif self._ends_file(file, at):
                self.scan_end = file_start + file.size
            elif read_size_and_magic(file.view, at) == (0, 0):
                return
            else:
                raise BadRecordError(self.fault_at(self.scan_end))

    def _ends_file(self, file: MappedFile, at: int) -> bool:
        """Whether a blank begins at *at*. One of its two numbers is enough: no record has either there."""
        size, magic = (
            read_size_and_magic(file.view, at) if at + BLANK_SIZE <= file.size else (file.size - at, MAGIC_BLANK)
        )
        matches = (magic == MAGIC_BLANK, size == file.size - at)
        if any(matches) and not all(matches):
            _log.warning("store.damaged_blank", file=str(file.path), offset_in_file=at)
        return any(matches)

    def fault_at(self, physical_offset: int) -> str:
        """Why no good record begins there."""
        found = self._files.find(physical_offset)
        if found is None:
            return "there is no file"
        file, file_start = found
        at = physical_offset - file_start
        size = int.from_bytes(file.view[at : at + 4], "big", signed=True)
        try:
            record = parse_record(file.view[at : at + max(size, SMALLEST_RECORD)])
        except BadRecordError as exc:
            return str(exc)
        return f"the record there says it lies at {record.physical_offset}"

    def file_start_of(self, physical_offset: int) -> int:
        """Offset of the first byte of the file that holds *physical_offset*, or of the nearest file there is."""
        found = self._files.find(min(max(physical_offset, self._files.begin), max(self._files.end - 1, 0)))
        return self._files.begin if found is None else found[1]

    def records_after(self, physical_offset: int, since_ms: int = 0) -> Iterator[StoredRecord]:
        """The whole records that begin behind *physical_offset*, wherever they lie.

        Args:
            since_ms: Older ones are left out: RocketMQ does not clear the file behind a tail that it cut off, so
                that records from before may lie there.
        """
        for file, file_start in zip(self._files.files, self._files.starts, strict=True):
            at = max(0, physical_offset + 1 - file_start)
            while (at := _find_magic(file, at)) >= 0:
                record = self._whole_record(file, at)
                is_one = record is not None and record.physical_offset == file_start + at
                if record is not None and is_one and record.store_timestamp >= since_ms:
                    yield record
                at += record.total_size if record is not None and is_one else 1

    def find_record_after(self, physical_offset: int) -> int | None:
        """The first whole record anywhere behind *physical_offset*; None if the rest is empty or torn."""
        record = next(self.records_after(physical_offset), None)
        return None if record is None else record.physical_offset

    def _whole_record(self, file: MappedFile, at: int) -> StoredRecord | None:
        size = int.from_bytes(file.view[at : at + 4], "big", signed=True)
        try:
            return parse_record(file.view[at : at + max(size, SMALLEST_RECORD)])
        except BadRecordError:
            return None  # chance, or torn

    def path_of(self, physical_offset: int) -> Path:
        start = physical_offset - physical_offset % self._file_size
        return self._files.path_of(start) or Path(f"memory-{start:020d}")

    # --- files ---------------------------------------------------------------------------------

    def truncate(self, end: int) -> None:
        """Forget everything from *end* on, and write on there."""
        self._files.truncate(end)
        self.open_at(end)

    def oldest_file(self) -> LogFile | None:
        """The first file; None if it is the last one too.

        How old its newest record is at most, the first record of the next file tells.
        """
        starts = list(self._files.starts)
        if len(starts) < 2:
            return None
        newest_ms = self.last_store_timestamp or None  # if all behind it is empty
        for start in starts[1:]:
            try:
                record = self.read_at(start)
            except CorruptRecordError:
                continue  # whoever reads the message itself is told
            if record is not None:
                newest_ms = record.store_timestamp
                break
        return LogFile(starts[0], starts[1], newest_ms)

    def take_before(self, begin: int) -> list[MappedFile]:
        """Let go of the files that lie wholly before *begin*, but never of the last one; `remove` deletes them."""
        return self._files.take_before(begin)

    def remove(self, files: Sequence[MappedFile]) -> None:
        """Delete files that were taken out. They are gone for good when this returns."""
        self._files.remove(files)

    def flush(self, start: int, end: int) -> None:
        self._files.flush(start, end)

    def close(self) -> None:
        with self._spare_lock:
            if self._spare is not None:
                self._spare.delete()
                self._spare = None
        self._files.close()


def _piece(file: MappedFile, at: int) -> bytes:
    """The bytes from *at* on: some of them, or as many as the record there has."""
    size, magic = read_size_and_magic(file.view, at) if at + BLANK_SIZE <= file.size else (0, 0)
    is_large = size > _PIECE and magic in (MAGIC_V1, MAGIC_V2)
    return file.view[at : at + (size if is_large else _PIECE)]


def _find_magic(file: MappedFile, at: int) -> int:
    """Where the next record of either version could begin, at or behind *at*; -1 if nowhere."""
    for start in range(at + 4, file.size, _PIECE):
        piece = file.view[start : start + _PIECE + 3]
        hit = -1
        while (hit := piece.find(_MAGIC_START, hit + 1)) >= 0:
            if piece[hit + 3 : hit + 4] in (b"\xa7", b"\xab"):
                return start + hit - 4
    return -1
