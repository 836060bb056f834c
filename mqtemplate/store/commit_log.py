"""The commit log: all messages of all topics, in the order in which they were stored.

`LogReader` reads a record by its offset, and the next whole record after damage. `LogScan` reads from record to record.
`CommitLog` is the reader with the writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias, overload

import numpy as np

from mqtemplate.clock import Clock
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.record import layout
from mqtemplate.record.appends import NewRecords, PutBatch, PutResult
from mqtemplate.record.codec import BadRecordError, DraftPair, RecordDraft, StoredRecord, pack_host, parse_record
from mqtemplate.record.columns import RecordBatch
from mqtemplate.record.layout import BLANK_SIZE, pack_blank
from mqtemplate.store.checkpoint import ClockSteps
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue, only_zeros

_log = get_logger("mqtemplate.store")

_BYTES_AT_ONCE = 1 << 20
_BATCH_BYTES = 4 << 20
"""Bytes of records that are parsed together: with fewer the calls of numpy take much of the time."""
_MAGIC_START = (layout.MAGIC_V1 & 0xFFFF_FFFF).to_bytes(4, "big")[:3]
_MAGIC_ENDS = tuple((magic & 0xFF).to_bytes(1, "big") for magic in (layout.MAGIC_V1, layout.MAGIC_V2))
_NEAR_BYTES = 4_096
"""Records with less than this between them are read at once: to copy the bytes takes less time than to read again."""
_FILL_STEP = 256 << 10
"""Bytes that are filled at once: the flush that writes them takes less than a millisecond longer."""


class RecordHead(NamedTuple):
    """The numbers of a record needed to find the next one."""

    total_size: int
    store_timestamp: int


class LogFile(NamedTuple):
    """One file of the log.

    Attributes:
        start: Physical offset of its first byte.
        end: Physical offset of the next file.
        newest_ms: No record in it was stored later, by the clock of now. None if that is unknown.
    """

    start: int
    end: int
    newest_ms: int | None


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

    def is_whole(self, physical_offset: int) -> bool:
        """Return True if a whole record starts at this offset."""
        found = self.files.find(physical_offset)
        return found is not None and whole_record_at(found[0], physical_offset - found[1], found[1]) is not None

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
    for start in range(at + layout.MAGIC_AT, file.size, _BYTES_AT_ONCE):
        piece = file.view[start : start + _BYTES_AT_ONCE + 3]  # a magic may cross the end of a chunk
        if only_zeros(piece):
            continue  # a search in zeros takes six times longer (measured)
        hit = -1
        while (hit := piece.find(_MAGIC_START, hit + 1)) >= 0:
            if piece[hit + 3 : hit + 4] in _MAGIC_ENDS:
                return start + hit - layout.MAGIC_AT
    return -1


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


class LogScan:
    """Reads records in order, from file to file, until no record starts.

    Attributes:
        end: Physical offset where the last `batches` stopped.
        verify: Compare the checksums.
    """

    def __init__(self, log: LogReader, *, verify: bool = True) -> None:
        self._log = log
        self.verify = verify
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
            batch = RecordBatch(_next_bytes(file, at), self.end, verify=self.verify)
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
    """Return the bytes from *at* on: some megabytes, or as many as a larger record there has."""
    size, magic = layout.read_size_and_magic(file.view, at) if at + layout.BLANK_SIZE <= file.size else (0, 0)
    is_record = magic in (layout.MAGIC_V1, layout.MAGIC_V2)
    return file.read(at, max(size, _BATCH_BYTES) if is_record else layout.BLANK_SIZE)


def _ends_file(file: MappedFile, at: int) -> bool:
    """Return True if a blank starts at *at*. One valid number of the two is enough: no record has either there."""
    if at + layout.BLANK_SIZE > file.size:
        return True  # a blank of fewer bytes than its own header
    size, magic = layout.read_size_and_magic(file.view, at)
    matches = (magic == layout.MAGIC_BLANK, size == file.size - at)
    if any(matches) and not all(matches):
        _log.warning("store.blank_damaged", file=str(file.path), offset_in_file=at)
    return any(matches)


# --- writing ------------------------------------------------------------------------------------


_Puts: TypeAlias = PutResult | tuple[PutResult, PutResult] | PutBatch


class CommitLog(LogReader):
    """The log with its writer. As a `Service` it creates the next file before it is needed, and fills the next bytes.

    RocketMQ: ``CommitLog``, ``AllocateMappedFileService``.

    - A record is in one file. Where the next record does not fit, a blank ends the file.
    - All bytes after ``end`` are zero.
    - Records are written to allocated bytes only, see `MappedFile.allocate`. After them a blank fits there as well.
    - Writing is not thread-safe: the `MessageStore` appends under its lock.

    Args:
        clock: Sets the store timestamps. Like RocketMQ's they follow the clock, also where it is set back: a message
            that was stored while the clock was ahead must not change the times of later ones.
        store_host: Address of this broker; part of each record.
        fills_ahead: `step` writes zeros where the next records will be, see `MappedFile.fill`.
        is_flushing: Returns True while another producer flushes: then `append` writes through the map, see
            `MappedFile.write_mapped`.
        clock_steps: Where the clock was set back. The log notes further steps there.

    Attributes:
        last_store_timestamp: Store timestamp of the last record; 0 if it is unknown.
    """

    name = "store.allocate"

    def __init__(
        self,
        files: MappedFileQueue,
        clock: Clock,
        store_host: HostAddress,
        *,
        fills_ahead: bool = False,
        is_flushing: Callable[[], bool] = lambda: False,
        clock_steps: ClockSteps | None = None,
    ) -> None:
        super().__init__(files, clock_steps)
        self._clock = clock
        self._store_host = pack_host(store_host)
        self._fills_ahead = fills_ahead
        self._is_flushing = is_flushing
        self._claim_lock = threading.Lock()  # held while `_limit` changes
        self._next_file: MappedFile | None = None
        self._next_file_lock = threading.Lock()
        self._low_water = self._file_size
        self._on_low_water: Callable[[], None] = lambda: None
        self.last_store_timestamp = 0
        self.open_at(files.start)

    # --- writing -------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """Physical offset of the next record, or of the blank before it."""
        return self._start + self._at

    def open_at(self, end: int) -> None:
        """Continue writing at *end*."""
        self._start = end - end % self._file_size
        self._at = end - self._start
        found = self.files.find(end)
        self._file = found[0] if found else None
        self._limit = 0  # where the next record must end, within the file: `_reserve` moves it

    @overload
    def append(self, records: RecordDraft, queue_offsets: int) -> PutResult: ...
    @overload
    def append(self, records: DraftPair, queue_offsets: int) -> tuple[PutResult, PutResult]: ...
    @overload
    def append(self, records: NewRecords, queue_offsets: Sequence[int]) -> PutBatch: ...
    def append(self, records: RecordDraft | DraftPair | NewRecords, queue_offsets: int | Sequence[int]) -> _Puts:
        """Append records to one file: all of them or, if that fails, none.

        A process that is killed while it writes may leave the first of them.

        Args:
            queue_offsets: Of the record, of the first of a pair, or of the first record of each of `NewRecords.queues`.

        Raises:
            StoreFullError: The disk has no space for them; the log is as before.
            MessageError: They do not fit into a file, or the properties of one are too large.
        """
        encode_at: Callable[..., tuple[bytes | memoryview, _Puts]] = records.encode_at
        host, now = self._store_host, self._next_store_timestamp()
        at = self._start + self._at
        data, puts = encode_at(queue_offsets, at, now, host)
        if self._at + len(data) > self._limit:
            self._reserve(len(data))
            if self.end != at:  # in the next file
                data, puts = encode_at(queue_offsets, self.end, now, host)
        # Through the map only one record: many bytes take longer there than a producer that flushes.
        if type(puts) is PutResult and self._is_flushing():
            self._file.write_mapped(self._at, data)  # type: ignore[union-attr]
        else:
            self._file.write(self._at, data)  # type: ignore[union-attr]
        self._at = end = self._at + len(data)
        if end > self._low_water:
            self._low_water = self._file_size  # so that this happens once for each file
            self._on_low_water()
        return puts

    def _next_store_timestamp(self) -> int:
        now = self._clock.now_ms()
        if now < self.last_store_timestamp:
            self.clock_steps.note(self.end, self.last_store_timestamp, now)
        self.last_store_timestamp = now
        return now

    def _reserve(self, size: int) -> None:
        """Reserve *size* bytes in the current file; if they do not fit, continue in the next file.

        Raises:
            StoreFullError: There is no space for them, or for the next file; the log is as before.
            MessageError: They do not fit into any file.
        """
        if size > self._file_size - BLANK_SIZE:
            raise MessageError(
                f"{size} bytes of records do not fit into a commit log file of {self._file_size} bytes; "
                "send less at once, or make the files larger (mapped-file-size-commit-log)"
            )
        with self._claim_lock:
            if self._at + size > self._limit:  # else `step` has moved it meanwhile
                self._claim(size)

    def _claim(self, size: int) -> None:
        if self._file is None:
            self._file = self._file_at(self._start)
        if self._at + size + BLANK_SIZE <= self._file_size:
            self._file.allocate(self._at + size + BLANK_SIZE)
            self._set_limit(self._end_of_claim(self._file, self._at + size + BLANK_SIZE))
            return
        following = self._file_at(self._start + self._file_size)
        following.allocate(size + BLANK_SIZE)
        self._file.allocate(self._at + BLANK_SIZE)
        self._file.write(self._at, pack_blank(self._file_size - self._at))
        self._file = following
        # In this order: a thread that reads `end` without the lock may get one too small, never one too large.
        self._at = 0
        self._start += self._file_size
        self._low_water = self._file_size // 2
        self._set_limit(self._end_of_claim(following, size + BLANK_SIZE))

    def _end_of_claim(self, file: MappedFile, end: int) -> int:
        """Return the end of the bytes that the writer takes, at least *end*: all that are allocated, or one step."""
        return min(max(end, self._at + _FILL_STEP), file.allocated) if self._fills_ahead else file.allocated

    def _set_limit(self, end: int) -> None:
        """Let records be written before *end*. Where the service has to fill more, wake it one step earlier."""
        self._limit = end - BLANK_SIZE
        if self._fills_ahead:
            early = end - _FILL_STEP
            self._low_water = early if end < self._file_size else max(early, self._file_size // 2)

    def _file_at(self, start: int) -> MappedFile:
        if (found := self.files.find(start)) is not None:
            # RocketMQ created it ahead, or the disk failed here after an earlier call had created it.
            return found[0]
        with self._next_file_lock:
            next_file, self._next_file = self._next_file, None
            return self.files.append_file(start, next_file)

    # --- files ---------------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call *wake* when a file is half full: then it is time for `step`."""
        self._on_low_water = wake
        self._low_water = self._file_size // 2

    def step(self) -> None:
        """Create the next file ahead, and fill the next part of this one. Not called in the writer's thread."""
        if self._fills_ahead:
            self._fill_next()
        with self._next_file_lock:
            is_last = self.files.end == self._start + self._file_size
            if self._at * 2 > self._file_size and self._next_file is None and is_last:
                self._next_file = self.files.new_file(self.files.end)
                if self._fills_ahead:
                    self._next_file.fill(0, min(_FILL_STEP, self._file_size))

    def _fill_next(self) -> None:
        """Fill the bytes after `_limit`, where nothing was written. The writer waits if it needs them already."""
        with self._claim_lock:
            file, start = self._file, self._limit + BLANK_SIZE
            end = min(start + _FILL_STEP, self._file_size)
            is_early = not self._limit or start - self._at > _FILL_STEP
            if file is None or is_early or start == end:
                return
            file.allocate(end)
            file.fill(start, end)
            self._set_limit(end)

    def file_start_of(self, physical_offset: int) -> int:
        """Return the offset of the first byte of the file with this offset, or of the nearest file."""
        found = self.files.find(min(max(physical_offset, self.files.start), max(self.files.end - 1, 0)))
        return self.files.start if found is None else found[1]

    def oldest_file(self) -> LogFile | None:
        """Return the first file; None if it is the only one.

        No record in it was stored later than the first record of any later file, or than the last record. So a time at
        which the clock was ahead does not count once a record was stored by the right one.
        """
        return next(self.complete_files(), None)

    def complete_files(self) -> Iterator[LogFile]:
        """Yield all files but the last one, oldest first; see `oldest_file`."""
        starts = list(self.files.starts)
        for index, (start, end) in enumerate(pairwise(starts)):
            yield LogFile(start, end, self._newest_ms(starts[index + 1 :]))

    def _newest_ms(self, later_starts: Sequence[int]) -> int | None:
        """Return the time after which no record before these files was stored; None if it is unknown."""
        now_ms, newest_ms = self._clock.now_ms(), self.last_store_timestamp or None
        for start in later_starts:
            try:
                record = self.read_at(start)
            except CorruptRecordError:
                continue  # a consumer of that message gets the error
            if record is not None:
                newest_ms = min(record.store_timestamp, newest_ms or record.store_timestamp)
                if record.store_timestamp <= now_ms and not self.clock_steps.are_between(start, self.end):
                    break  # the usual case: all later ones are newer
        return newest_ms

    def detach_before(self, physical_offset: int) -> list[MappedFile]:
        """Detach the files that end at this offset or before, but never the last one. `files.remove` deletes them."""
        detached = self.files.detach_before(physical_offset)
        self.clock_steps.forget_outside(self.files.start, self.end + 1)
        return detached

    def truncate(self, end: int) -> None:
        """Remove all bytes from *end* on, and continue writing there."""
        self.files.truncate(end)
        self.clock_steps.forget_outside(self.files.start, end)
        self.open_at(end)

    def start_flush(self, put: PutResult) -> None:
        """Let the disk begin to write a record. A flush is needed as before, and takes less time."""
        if (found := self.files.find(put.physical_offset)) is not None:
            file, file_start = found
            file.start_flush(put.physical_offset - file_start, put.size)

    def close(self) -> None:
        """Unmap all files."""
        with self._next_file_lock:
            if self._next_file is not None:
                self._next_file.delete()
                self._next_file = None
        self.files.close()
