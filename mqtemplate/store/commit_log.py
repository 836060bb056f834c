"""The log that everything is written to first."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    BadRecordError,
    RecordDraft,
    StoredRecord,
    pack_host,
    parse_record,
)
from mqtemplate.store.folders import sync_folder
from mqtemplate.store.layout import BLANK_SIZE, pack_blank
from mqtemplate.store.mapped_file import MappedFile
from mqtemplate.store.mapped_file_queue import MappedFileQueue

__all__ = ["CommitLog", "LogFile", "PutResult"]

_SIZE_AND_MAGIC = struct.Struct(">ii")
_SMALLEST_RECORD = 91


class PutResult(NamedTuple):
    """Where a record is now."""

    physical_offset: int
    size: int
    queue_offset: int
    store_timestamp: int

    @property
    def end(self) -> int:
        """Physical offset behind the record; what `MessageStore.settle` waits for."""
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
        host = self._store_host
        self.make_room(draft.size(host))
        now = self._date()
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
        full, self._file = self._file, self._next_file(self._start + self._file_size)
        full.write(self._at, pack_blank(self._file_size - self._at))
        self._start += self._file_size
        self._at = 0
        self._low_water = self._file_size // 2

    def _next_file(self, start: int) -> MappedFile:
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
        size, magic = _SIZE_AND_MAGIC.unpack(head)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < _SMALLEST_RECORD:
            return None
        return self.read(physical_offset, size)

    def scan(self, start: int) -> Iterator[StoredRecord]:
        """Records from *start* on, until the first place where none is; `scan_end` tells where that was.

        Raises:
            BadRecordError: That place does not hold zeros. Whether it is a torn tail is for the recovery to judge.
        """
        self.scan_end = start
        while (found := self._files.find(self.scan_end)) is not None:
            file, file_start = found
            at = self.scan_end - file_start
            size, magic = _SIZE_AND_MAGIC.unpack_from(file.view, at) if at + BLANK_SIZE <= file.size else (0, 0)
            if magic == MAGIC_BLANK and size == file.size - at:
                self.scan_end = file_start + file.size
                continue
            if size == 0 and magic == 0:
                return
            record = parse_record(file.view[at : at + max(size, _SMALLEST_RECORD)])
            if record.physical_offset != self.scan_end:
                raise BadRecordError(f"the record there says it lies at {record.physical_offset}")
            yield record
            self.scan_end += size

    def scan_file_of(self, physical_offset: int) -> Iterator[StoredRecord]:
        """`scan` from the first byte of the file that holds *physical_offset*, or of the last file there is."""
        offset = min(physical_offset, max(self._files.end - 1, self._files.begin))
        found = self._files.find(offset)
        return self.scan(offset if found is None else found[1])

    def find_record_behind(self, physical_offset: int) -> int | None:
        """The first whole record anywhere behind *physical_offset*; None if the rest is empty or torn."""
        for file, file_start in zip(self._files.files, self._files.starts, strict=True):
            at = max(0, physical_offset + 1 - file_start)
            while at < file.size and (at := _find_magic(file.view, at)) >= 0:
                size = _SIZE_AND_MAGIC.unpack_from(file.view, at)[0]
                try:
                    if parse_record(file.view[at : at + size]).physical_offset == file_start + at:
                        return file_start + at
                except BadRecordError:
                    pass  # chance, or torn: not a record
                at += 1
        return None

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
        """Let go of the files that lie wholly before *begin*, but never of the last one; `unlink` removes them."""
        return self._files.take_before(begin)

    def unlink(self, files: Sequence[MappedFile]) -> None:
        """Remove files that were taken out; when this returns they stay away, whatever happens."""
        for file in files:
            file.unlink()
        if files and self._files.folder is not None:
            sync_folder(self._files.folder)

    def flush(self, start: int, end: int) -> None:
        self._files.flush(start, end)

    def close(self) -> None:
        with self._spare_lock:
            if self._spare is not None:
                self._spare.delete()
                self._spare = None
        self._files.close()


def _find_magic(view: object, at: int) -> int:
    """Where the next record of either version could begin, at or behind *at*; -1 if nowhere."""
    hits = [hit - 4 for magic in (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab") if (hit := view.find(magic, at + 4)) >= 0]  # type: ignore[attr-defined]
    return min(hits, default=-1)
