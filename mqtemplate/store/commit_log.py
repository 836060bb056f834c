"""The commit log: all messages of all topics, in the order in which they were stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import overload

from mqtemplate.clock import Clock
from mqtemplate.errors import CorruptRecordError, MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record.appends import NewRecords, PutBatch, PutResult
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.layout import BLANK_SIZE, pack_blank
from mqtemplate.store.checkpoint import ClockSteps
from mqtemplate.store.cleaning import LogFile
from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
from mqtemplate.store.log_reader import LogReader

_FILL_STEP = 256 << 10
"""Bytes that are filled at once: the flush that writes them takes less than a millisecond longer."""


class CommitLog(LogReader):
    """The log with its writer.

    - A record is in one file. Where the next record does not fit, a blank ends the file.
    - All bytes after ``end`` are zero.
    - Records are written to allocated bytes only, see `MappedFile.allocate`. After them a blank fits there as well.
    - Writing is not thread-safe: the `MessageStore` appends under its lock.

    Args:
        clock: Sets the store timestamps. Like RocketMQ's they follow the clock, also where it is set back: a message
            that was stored while the clock was ahead must not change the times of later ones.
        store_host: Address of this broker; part of each record.
        fills_ahead: `allocate` writes zeros where the next records will be, see `MappedFile.fill`.
        is_flushing: Returns True while another producer flushes: then `append` writes through the map, see
            `MappedFile.write_mapped`.
        clock_steps: Where the clock was set back. The log notes further steps there.

    Attributes:
        last_store_timestamp: Store timestamp of the last record; 0 if it is unknown.
    """

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
    def append(self, records: NewRecords, queue_offsets: Sequence[int]) -> PutBatch: ...
    def append(self, records: RecordDraft | NewRecords, queue_offsets: int | Sequence[int]) -> PutResult | PutBatch:
        """Append records to one file: all of them or, if that fails, none.

        A process that is killed while it writes may leave the first of them.

        Args:
            queue_offsets: Of the record, or of the first record of each of `NewRecords.queues`.

        Raises:
            StoreFullError: The disk has no space for them; the log is as before.
            MessageError: They do not fit into a file, or the properties of one are too large.
        """
        encode_at: Callable[..., tuple[bytes | memoryview, PutResult | PutBatch]] = records.encode_at
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
            if self._at + size > self._limit:  # else `allocate` has moved it meanwhile
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
        """Let records be written before *end*. Where `allocate` has to fill more, wake it one step earlier."""
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

    def on_low_water(self, wake: Callable[[], None]) -> None:
        """Call *wake* when a file is half full: then it is time for `allocate`."""
        self._on_low_water = wake
        self._low_water = self._file_size // 2

    def allocate(self) -> None:
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
        starts = list(self.files.starts)
        if len(starts) < 2:
            return None
        now_ms, newest_ms = self._clock.now_ms(), self.last_store_timestamp or None
        for start in starts[1:]:
            try:
                record = self.read_at(start)
            except CorruptRecordError:
                continue  # a consumer of that message gets the error
            if record is not None:
                newest_ms = min(record.store_timestamp, newest_ms or record.store_timestamp)
                if record.store_timestamp <= now_ms and not self.clock_steps.are_between(start, self.end):
                    break  # the usual case: all later ones are newer
        return LogFile(starts[0], starts[1], newest_ms)

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


class AllocateService:
    """Service that creates the next file of the log before it is needed. RocketMQ: ``AllocateMappedFileService``."""

    name = "store.allocate"

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._log.on_low_water(wake)

    def step(self) -> int | None:
        self._log.allocate()
        return None
