"""Service that indexes the commit log, and finds records by their keys. RocketMQ: ``IndexService``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreError, StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.record.columns import RecordBatch
from mqtemplate.services import wall_time
from mqtemplate.store.commit_log import LogReader
from mqtemplate.store.files.layout import (
    INDEX_HEADER_SIZE,
    NEW_GEOMETRY,
    Geometry,
    IndexHeader,
    find_geometry,
    unpack_index_header,
)
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.index_file import (
    IndexFile,
    KeyedRecord,
    KeyRows,
    RecentKeys,
    filter_bytes,
)
from mqtemplate.store.key_reader import KeyReader, index_key_hashes, pending_key_hash
from mqtemplate.store.settings import StoreSettings

_log = get_logger("mqtemplate.store")

_FOLDER = "index"
_INTERVAL_MS = 1_000
_STEP_RECORDS = 256
"""Records of one step: less than a millisecond, in which no other thread runs."""
_RECENT_RECORDS = 8_192
"""Records in memory of one call of `index_recent`; mostly there are fewer, for 256 KiB of memory."""
_PAUSE_MS = 2
_BUSY_PAUSE_MS = 20
_LARGE_BACKLOG_BYTES = 128 << 20
_CATCH_UP_RECORDS = 4_096
_FLUSH_UNITS = 100_000
_CHAIN_UNITS = 256
_FILTER_UNITS = 65_536
"""Units of one step that a filter reads: less than a millisecond."""
_MOST_FILTER_BYTES = 32 << 20
"""Filters of 32 files of one million keys, the newest ones."""
_NAME_LENGTH = 17
_MAX_TIME_MS = (1 << 63) - 1


class IndexService:
    """Index files over the commit log, filled in the background.

    - The service reads the log from the end of the last index file. No producer waits for it. A step takes a
      millisecond, then it pauses, longer while the log grows. A query first indexes the rest, so each result is
      complete. The keys of the newest records are in memory, so they are not read from the log. The I/O thread of a
      server indexes those itself, see `index_recent`.
    - The headers of the index files contain how far the log is indexed. After a crash the unflushed rest is read again,
      so the older keys of a file that was not full are not lost.
    - Most pending keys are new, and then no file has them. From the first look-up of one, the full files get filters.
    - A record may be in the index twice, and another key may have the same hash. The caller checks the record.
    - Lock order: the mutex here, then the store's lock. One thread at a time reads the log or follows a chain.

    Attributes:
        flushed_timestamp: Store timestamp up to which the index is on the disk.
        geometry: Slots and units of each file. `load` takes them from the files, unless the settings set them.
        recent_keys: The newest records, in memory.
    """

    name = "store.index"

    def __init__(self, store_files: StoreFiles, settings: StoreSettings, clock: Clock) -> None:
        self._store_files = store_files
        self._clock = clock
        self._settings = settings
        self.geometry = NEW_GEOMETRY
        self._mutex = threading.Lock()
        self._files: list[IndexFile] = []
        self._end: Callable[[], int] = lambda: 0
        self._wake: Callable[[], None] = lambda: None
        self._due_ms: int | None = None
        self._seen_end = 0
        self._rest: KeyRows | None = None
        self._is_missing = False
        self._has_filters = False
        self._written_to = 0  # physical offset: the keys of all records before it are in the files
        self.flushed_timestamp = 0

    # --- loading -------------------------------------------------------------------------------

    def open(self, log: LogReader, recent_keys: RecentKeys, *, was_clean: bool) -> None:
        """Open the files.

        Args:
            recent_keys: Records that are written after `load`.
            was_clean: The last owner closed the store. Else the files are checked, and invalid parts are rebuilt.

        Raises:
            StoreFormatError: The files have another size than the settings.
        """
        self._log = log
        self.recent_keys = recent_keys
        self._reader = KeyReader(log, recent_keys)
        self._reader.move_to(log.start)
        self._open_files(was_clean=was_clean)
        self._is_missing = not self._files

    def add(self, batch: RecordBatch) -> None:
        """Index records that the recovery reads, if there was no index and they are the next ones: they are read once.

        What is left out here is indexed after `load`.
        """
        rows = self._reader.take(batch) if self._is_missing and self._rest is None else None
        if rows is None or not len(rows.key_hashes):
            return
        self._rest = rows
        try:
            self._write_rest()
        except (OSError, StoreError) as exc:
            _log.warning("store.index_incomplete", reason=str(exc))  # the service tries again

    def load(self, end: Callable[[], int], durable_timestamp: int, *, was_clean: bool) -> None:
        """Find out how far the log is indexed.

        Args:
            end: Returns the physical offset after the last whole record of the log.
            durable_timestamp: ``index_msg_timestamp`` of the checkpoint: files that end there or before were flushed.
        """
        self._end, recent_keys = end, self.recent_keys
        self._rest, self._is_missing = None, False
        self._repair(durable_timestamp, was_clean=was_clean)
        self._reader.move_to(self._indexed_end(was_clean=was_clean))
        self._seen_end = recent_keys.complete_from = end()
        self._written_to = self._reader.position
        if self._reader.position < self._seen_end:
            self.changed()

    def _open_files(self, *, was_clean: bool) -> None:
        sizes = {name: length for name, length in self._store_files.file_sizes(_FOLDER).items() if _is_file_name(name)}
        self.geometry = self._geometry_of(sizes)
        size = self.geometry.size
        for name, length in sizes.items():
            if length in (0, size):
                self._files.append(self._open_file(name))
            elif not self._has_keys(name, length) or (length < size and not was_clean and name == max(sizes)):
                # A process may be killed while it creates its newest file; another file was damaged.
                log = _log.warning if was_clean or name != max(sizes) else _log.info
                log("store.index_file_torn", file=name, size=length)
                self._store_files.delete(f"{_FOLDER}/{name}")
            else:
                raise StoreFormatError(self._wrong_size(name, length, size))

    def _geometry_of(self, sizes: dict[str, int]) -> Geometry:
        """Return the numbers from the settings, else from the files, else the defaults of a new directory."""
        slots, units = self._settings.max_hash_slot_num, self._settings.max_index_num
        found = NEW_GEOMETRY
        if slots is None or units is None:
            geometries = (find_geometry(file) for file in self._existing_files(sizes))
            found = next((each for each in geometries if each is not None), NEW_GEOMETRY)
        return Geometry(slots or found.slots, units or found.units)

    def _existing_files(self, sizes: dict[str, int]) -> Iterator[MappedFile]:
        """Yield the files that have a header, each as long as it is needed."""
        for name, length in sizes.items():
            if length > INDEX_HEADER_SIZE:
                file = self._store_files.open_mapped(f"{_FOLDER}/{name}", length, sparse=True)
                try:
                    yield file
                finally:
                    file.close()

    def _has_keys(self, name: str, length: int) -> bool:
        return any(unpack_index_header(file.view).index_count > 1 for file in self._existing_files({name: length}))

    def _wrong_size(self, name: str, length: int, size: int) -> str:
        slots, units = self.geometry
        return (
            f"{_FOLDER}/{name} has {length} bytes, but max-hash-slot-num {slots} and max-index-num {units} make {size} "
            "(40 + 4 x slots + 20 x keys); leave both out to take them from the files, or set both as they were when "
            f"the folder was created, or delete the folder {_FOLDER}: it is rebuilt from the log"
        )

    def _open_file(self, name: str) -> IndexFile:
        file = self._store_files.open_mapped(f"{_FOLDER}/{name}", self.geometry.size, sparse=True)
        return IndexFile(file, name, *self.geometry)

    def _repair(self, durable_timestamp: int, *, was_clean: bool) -> None:
        """Remove units that are invalid or point past the log's end. Their records are indexed again."""
        log_end = self._end()
        for at, file in enumerate(self._files):
            header, is_last = file.header, at == len(self._files) - 1
            is_durable = was_clean or (header.end_timestamp <= durable_timestamp and not is_last)
            if is_durable and header.end_physical_offset < log_end and (not is_last or self._agrees_with_log(file)):
                continue
            removed = file.keep_before(log_end)
            is_valid = self._agrees_with_log(file)
            if is_valid:
                file.flush()
            if removed or not is_valid:
                # The header is written by a flush only. So a killed process leaves an old one in its newest file.
                log = _log.warning if was_clean or not is_last else _log.info
                log("store.index_repaired", file=file.name, removed_keys=removed, is_dropped=not is_valid)
                self._drop_files(at + is_valid)
                break
        self.flushed_timestamp = self._files[-1].header.end_timestamp if self._files else 0

    def _agrees_with_log(self, file: IndexFile) -> bool:
        """Return True if the log has the first and the last record of the header. Deleted records count as present."""
        header = file.header
        ends = (
            (header.begin_physical_offset, header.begin_timestamp),
            (header.end_physical_offset, header.end_timestamp),
        )
        for physical_offset, timestamp in ends:
            if physical_offset >= self._log.start:
                head = self._log.head_at(physical_offset)
                # after `IndexFile.keep_before` the time of the last record is exact to the second only
                if head is None or not 0 <= head.store_timestamp - timestamp < 1_000:
                    return False
        return 1 < header.index_count <= self.geometry.units and ends[0][0] <= ends[1][0]

    def _drop_files(self, kept: int) -> None:
        while len(self._files) > kept:
            self._files.pop().delete()

    def _indexed_end(self, *, was_clean: bool) -> int:
        """Return the offset from which to read the log.

        The last record is read again if not all its keys may be in the file.
        """
        position = 0
        if self._files:
            last = self._files[-1]
            position = last.header.end_physical_offset
            if was_clean and not last.is_full and (head := self._log.head_at(position)) is not None:
                position += head.total_size
        return max(position, self._log.start)

    def close(self) -> None:
        """Unmap the files without a flush."""
        with self._mutex:
            self._end = lambda: 0
            self._rest = None
            for file in self._files:
                file.close()
            self._files = []

    # --- following the log ---------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def changed(self) -> None:
        """Plan a step, after the first write since the log was indexed completely."""
        if self._due_ms is None:
            self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
            self._wake()

    def hurry(self) -> None:
        """Plan a step now: many new records are in memory."""
        self._due_ms = self._clock.steady_ms()
        self._wake()

    def step(self) -> int | None:
        now = self._clock.steady_ms()
        if self._due_ms is None or self._due_ms > now:
            return wall_time(self._clock, self._due_ms)
        end = self._end()
        is_growing, self._seen_end = end != self._seen_end, end
        with self._mutex:
            backlog = self._index(end, _STEP_RECORDS)
            is_behind = backlog >= _LARGE_BACKLOG_BYTES or self._reader.has_recent
            if self._is_flush_due():
                self._flush()
            is_filtered = self._extend_filters()
        if backlog > 0 or not is_filtered:
            self._due_ms = now + (_BUSY_PAUSE_MS if is_growing and not is_behind else _PAUSE_MS)
        else:
            self._due_ms = now + _INTERVAL_MS if is_growing else None
        return wall_time(self._clock, self._due_ms)

    def index_recent(self) -> None:
        """Index new records in the thread that wrote them, if there are enough: mostly for less than a millisecond.

        For a thread that does most of the work of its process. The service's thread would cost it more: at each
        system call of the writer it gets the interpreter lock, and the writer then waits for it. What may take long is
        left to the service: reading the log, new files, flushes.
        """
        if not self.recent_keys.has_some or not self._mutex.acquire(blocking=False):
            return
        try:
            is_complete = self._index_recent()
        except (OSError, StoreError):
            is_complete = False  # the service tries again, and reports it
        finally:
            self._mutex.release()
        if not is_complete:
            self.hurry()

    def _index_recent(self) -> bool:
        """Return False if there is something left for the service."""
        if not self._files:
            return False
        if self._rest is None:
            self._rest = self._reader.read_recent(_RECENT_RECORDS)
        if self._rest is None:
            return False
        self._rest = _append(self._files[-1], self._rest)
        self._note_written()
        return self._rest is None and not self._reader.has_recent and not self._is_flush_due()

    def catch_up(self) -> None:
        """Index all records that are in the log now.

        Raises:
            StoreFullError: There is no space for another file.
        """
        end = self._end()
        with self._mutex:
            while self._index(end, _CATCH_UP_RECORDS) > 0:
                pass

    def _index(self, end: int, count: int) -> int:
        """Index up to *count* records. Return the bytes of the log that are not indexed yet."""
        self._write_rest()
        reader = self._reader
        if reader.position < self._log.start:
            reader.move_to(self._log.start)  # retention deleted records that were not indexed
        if reader.position < end:
            rows = reader.read(end, count)
            self._rest = rows if len(rows.key_hashes) else None
            self._write_rest()
        return end - reader.position

    def _write_rest(self) -> None:
        """Write the keys that were read. If a new file cannot be created, the rest is kept for the next call."""
        while self._rest is not None:
            self._rest = _append(self._current_file(), self._rest)
        self._note_written()

    def _note_written(self) -> None:
        if self._rest is None:
            self._written_to = self._reader.position
            self.recent_keys.forget_keyed(self._written_to)

    def _current_file(self) -> IndexFile:
        if self._files and not self._files[-1].is_full:
            return self._files[-1]
        self._flush()
        file = self._open_file(self._next_name())
        try:
            file.start_after(self._files[-1].header if self._files else IndexHeader())
        except BaseException:
            file.delete()  # else the next attempt leaves another one
            raise
        self._files = [*self._files, file]
        return file

    def _next_name(self) -> str:
        """Return local time, as in RocketMQ; always greater than the last name, even if the clock was set back."""
        now_ms = self._clock.now_ms()
        name = f"{time.strftime('%Y%m%d%H%M%S', time.localtime(now_ms // 1_000))}{now_ms % 1_000:03d}"
        return max(name, f"{int(self._files[-1].name) + 1:017d}") if self._files else name

    def flush(self) -> None:
        """Return when all indexed keys are on the disk."""
        with self._mutex:
            self._flush()

    def _is_flush_due(self) -> bool:
        return bool(self._files) and self._files[-1].unflushed >= max(_FLUSH_UNITS, self.geometry.units // 10)

    def _flush(self) -> None:
        if self._files:
            self._files[-1].flush()  # the files before were flushed when they were full
            self.flushed_timestamp = self._files[-1].header.end_timestamp

    # --- finding -------------------------------------------------------------------------------

    def find(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _MAX_TIME_MS, max_count: int = 64
    ) -> list[int]:
        """Return the first *max_count* of `candidates`."""
        return list(islice(self.candidates(topic, key, begin_ms, end_ms), max_count))

    def candidates(self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _MAX_TIME_MS) -> Iterator[int]:
        """Yield the physical offsets of all records that may have *key* and were stored about ``begin_ms..end_ms``.

        The newest is first. Memory does not grow with their number. Some may be other records whose keys have the
        same hash, or that were stored some seconds outside the span. The caller checks the record.

        Args:
            topic: Topic of the stored record: the system topic of a delayed message.
            key: A message id, a business key, or ``T#`` and tags.
        """
        self.catch_up()
        [key_hash] = index_key_hashes([f"{topic}#{key}"]).tolist()
        return self._with_hash(key_hash, begin_ms, end_ms)

    def newest_keyed(self, topic: str, key: str) -> KeyedRecord | Iterable[int]:
        """Find the newest record with a pending key, without a wait for the newest records to be indexed.

        Args:
            topic: The topic of the key. The record may be stored in any topic.

        Returns:
            The newest record, if it is not indexed yet. Else `candidates`, the newest first.
        """
        recent = self.recent_keys
        while True:
            complete_from = recent.complete_from
            if self._written_to < complete_from:
                self.catch_up()
            found = recent.newest_keyed(topic, key)
            if found is not None:
                return found
            if recent.complete_from == complete_from:  # else it may have been in memory, and not be indexed yet
                return self._indexed(pending_key_hash(topic, key))

    def _indexed(self, key_hash: int) -> Iterable[int]:
        if not self._has_filters:
            self._has_filters = True
            self.changed()
        with self._mutex:  # most keys are new: then this is all
            is_there = any(not file.is_closed and file.newest_unit(key_hash) for file in self._files)
        return self._with_hash(key_hash, 0, _MAX_TIME_MS) if is_there else ()

    def _extend_filters(self) -> bool:
        """Read one part of the units for the filter of a full file. Return False if there are more."""
        if not self._has_filters:
            return True
        most = _MOST_FILTER_BYTES // filter_bytes(self.geometry.units)
        first = max(len(self._files) - most, 0)
        for file in self._files[:first]:
            file.drop_filter()
        full = (file for file in self._files[first:] if file.is_full)
        return all(file.extend_filter(_FILTER_UNITS) for file in full)

    def _with_hash(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        last = -1
        for file in reversed(self._files):
            for physical_offset in self._candidates_in(file, key_hash, begin_ms, end_ms):
                if physical_offset != last:  # a record may have a key twice
                    yield physical_offset
                last = physical_offset

    def _candidates_in(self, file: IndexFile, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        unit: int | None = None
        header = file.header
        if self._log.clock_steps.are_between(header.begin_physical_offset, header.end_physical_offset):
            begin_ms, end_ms = 0, _MAX_TIME_MS  # chains are not in the order of time
        while unit != 0:
            with self._mutex:  # for some units only: the caller may pause between two candidates
                if file.is_closed or not file.may_contain(begin_ms, end_ms):
                    return
                unit = file.newest_unit(key_hash) if unit is None else unit
                found, unit = file.follow(key_hash, unit, begin_ms, end_ms, _CHAIN_UNITS)
            yield from found

    # --- retention -----------------------------------------------------------------------------

    def delete_before(self, physical_start: int) -> int:
        """Delete the files whose records all start before this offset, but never the last file. Return their number."""
        count = 0
        with self._mutex:
            while len(self._files) > 1 and self._files[0].header.end_physical_offset < physical_start:
                file, self._files = self._files[0], self._files[1:]
                file.delete()
                count += 1
        return count


def _append(file: IndexFile, rows: KeyRows) -> KeyRows | None:
    """Write keys as far as they fit into a file. Return the rest; None if all fit."""
    rest = rows.part(file.append(rows))
    return rest if len(rest.key_hashes) else None


def _is_file_name(name: str) -> bool:
    return len(name) == _NAME_LENGTH and name.isdecimal()
