"""Keeps the index files in step with the commit log, and finds records by their keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import StoreFormatError
from mqtemplate.store.commit_log import CommitLog
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.index.index_file import IndexFile, KeyRows, index_key_hashes
from mqtemplate.store.index.index_keys import KeyReader
from mqtemplate.store.layout import IndexHeader, index_file_size
from mqtemplate.store.log_walk import record_head
from mqtemplate.store.settings import StoreSettings

_log = structlog.stdlib.get_logger("mqtemplate.store")

_FOLDER = "index"
_INTERVAL_MS = 1_000
_STEP_RECORDS = 256
"""Records a step takes: less than a millisecond, in which no other thread runs."""
_PAUSE_MS = 2
_BUSY_PAUSE_MS = 20
_FAR_BEHIND_BYTES = 128 << 20
_CATCH_UP_RECORDS = 4_096
_FLUSH_UNITS = 100_000
_HOPS = 256
_NAME_LENGTH = 17
_END_OF_TIME_MS = (1 << 63) - 1


class IndexService:
    """Index files over the commit log, filled behind the senders' backs.

    - The log is read here, from where the last file stands; no sender waits for it. A `step` takes a millisecond
      and pauses, longer while the log grows; who asks a question catches up first, so every answer is complete.
    - What it knows it reads off its own files: they tell of everything before ``position``. After a crash that is
      what was flushed, and the rest is read again, so no older key is lost with a file that was not full.
    - A record may be in the index twice, and a unit may have another key with the same hash: who asks looks at the
      record.
    - Lock order: the mutex here, then the store's. One thread at a time reads the log or walks a file.
    """

    name = "store.index"

    def __init__(self, store_files: StoreFiles, settings: StoreSettings, clock: Clock) -> None:
        self._store_files = store_files
        self._clock = clock
        self._slots_total = settings.max_hash_slot_num
        self._units_total = settings.max_index_num
        self._mutex = threading.Lock()
        self._files: list[IndexFile] = []
        self._end: Callable[[], int] = lambda: 0
        self._wake: Callable[[], None] = lambda: None
        self._due_ms: int | None = None
        self._seen_end = 0
        self._rest: KeyRows | None = None
        self.flushed_timestamp = 0

    # --- life ----------------------------------------------------------------------------------

    def load(self, log: CommitLog, end: Callable[[], int], durable_timestamp: int, *, was_clean: bool) -> None:
        """Open the files, and find out how far they tell of the log.

        Args:
            end: Physical offset behind the last whole record of the log.
            durable_timestamp: ``index_msg_timestamp`` of the checkpoint: files that end there or before were flushed.
            was_clean: The last owner closed the store. Else the files are looked through, and what is not sound is
                made again.

        Raises:
            StoreFormatError: They have another size than the settings say.
        """
        self._log = log
        self._end = end
        self._reader = KeyReader(log)
        self._open_files(was_clean=was_clean)
        self._mend(durable_timestamp, was_clean=was_clean)
        self._reader.go_to(self._position_of_files(was_clean=was_clean))
        self._seen_end = end()
        if self._reader.position < self._seen_end:
            self.changed()

    def _open_files(self, *, was_clean: bool) -> None:
        size = index_file_size(self._slots_total, self._units_total)
        sizes = {name: length for name, length in self._store_files.file_sizes(_FOLDER).items() if _is_file_name(name)}
        for name, length in sizes.items():
            if length in (0, size):
                self._files.append(self._open_file(name))
            elif length < size and not was_clean and name == max(sizes):
                _log.warning("store.index_file_torn", file=name, size=length)
                self._store_files.delete(f"{_FOLDER}/{name}")
            else:
                raise StoreFormatError(self._wrong_size(name, length, size))

    def _wrong_size(self, name: str, length: int, size: int) -> str:
        known = " (RocketMQ's own: 5000000 and 20000000)" if length == index_file_size(5_000_000, 20_000_000) else ""
        return (
            f"{_FOLDER}/{name} has {length} bytes, but max-hash-slot-num {self._slots_total} and max-index-num "
            f"{self._units_total} make {size} (40 + 4 x slots + 20 x keys); set both as they were when the folder was "
            f"made{known}, or delete the folder {_FOLDER}: it is made again from the log"
        )

    def _open_file(self, name: str) -> IndexFile:
        file = self._store_files.open_mapped(f"{_FOLDER}/{name}", index_file_size(self._slots_total, self._units_total))
        return IndexFile(file, name, self._slots_total, self._units_total)

    def _mend(self, durable_timestamp: int, *, was_clean: bool) -> None:
        """Drop what points behind the log's end, and what is not sound; it is read from the log again."""
        log_end = self._end()
        for at, file in enumerate(self._files):
            header, is_last = file.header, at == len(self._files) - 1
            is_durable = was_clean or (header.end_timestamp <= durable_timestamp and not is_last)
            if is_durable and header.end_physical_offset < log_end and (not is_last or self._agrees(file)):
                continue
            gone = file.keep_before(log_end)
            is_sound = self._agrees(file)
            if is_sound:
                file.flush()
            if gone or not is_sound:
                _log.warning("store.index_mended", file=file.name, dropped_keys=gone, is_dropped=not is_sound)
                self._drop_files(at + is_sound)
                break
        self.flushed_timestamp = self._files[-1].header.end_timestamp if self._files else 0

    def _agrees(self, file: IndexFile) -> bool:
        """Whether its first and its last record are in the log, as the header says; deleted ones may have been."""
        header = file.header
        ends = (
            (header.begin_physical_offset, header.begin_timestamp),
            (header.end_physical_offset, header.end_timestamp),
        )
        for physical_offset, timestamp in ends:
            if physical_offset >= self._log.begin:
                head = record_head(self._log, physical_offset)
                if head is None or not 0 <= head.store_timestamp - timestamp < 1_000:  # `keep_before` knows seconds
                    return False
        return 1 < header.index_count <= self._units_total and ends[0][0] <= ends[1][0]

    def _drop_files(self, kept: int) -> None:
        while len(self._files) > kept:
            self._files.pop().delete()

    def _position_of_files(self, *, was_clean: bool) -> int:
        """Where to read on. The last record is read again if a file or a process may have ended amid its keys."""
        position = 0
        if self._files:
            last = self._files[-1]
            position = last.header.end_physical_offset
            if was_clean and not last.is_full and (head := record_head(self._log, position)) is not None:
                position += head.total_size
        return max(position, self._log.begin)

    def close(self) -> None:
        """Let go of the files as they are."""
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
        """The log has grown, after a while in which it had not."""
        if self._due_ms is None:
            self._due_ms = self._clock.now_ms() + _INTERVAL_MS
            self._wake()

    def step(self) -> int | None:
        now = self._clock.now_ms()
        if self._due_ms is None or self._due_ms > now:
            return self._due_ms
        end = self._end()
        is_growing, self._seen_end = end != self._seen_end, end
        with self._mutex:
            behind = self._index(end, _STEP_RECORDS)
            if self._files and self._files[-1].unflushed >= max(_FLUSH_UNITS, self._units_total // 10):
                self._flush()
        if behind > 0:
            self._due_ms = now + (_BUSY_PAUSE_MS if is_growing and behind < _FAR_BEHIND_BYTES else _PAUSE_MS)
        else:
            self._due_ms = now + _INTERVAL_MS if is_growing else None
        return self._due_ms

    def catch_up(self) -> None:
        """Return when every record that is in the log by now is in the index.

        Raises:
            StoreFullError: There is no room for another file.
        """
        end = self._end()
        with self._mutex:
            while self._index(end, _CATCH_UP_RECORDS) > 0:
                pass

    def _index(self, end: int, count: int) -> int:
        """Take in up to *count* records; gives how many bytes of the log are left."""
        self._write_rest()
        reader = self._reader
        if reader.position < self._log.begin:
            reader.go_to(self._log.begin)  # older ones were deleted
        if reader.position < end:
            self._rest = reader.read(end, count)
            self._write_rest()
        return end - reader.position

    def _write_rest(self) -> None:
        """Write what was read; what there was no room for stays."""
        while self._rest is not None and len(self._rest.key_hashes):
            taken = self._file_with_room().append(self._rest)
            self._rest = self._rest.part(taken)
        self._rest = None

    def _file_with_room(self) -> IndexFile:
        if self._files and not self._files[-1].is_full:
            return self._files[-1]
        self._flush()
        file = self._open_file(self._next_name())
        file.begin_behind(self._files[-1].header if self._files else IndexHeader())
        self._files = [*self._files, file]
        return file

    def _next_name(self) -> str:
        """Local time, as upstream names them; behind the last file's name, whatever the clock does."""
        now_ms = self._clock.now_ms()
        name = f"{time.strftime('%Y%m%d%H%M%S', time.localtime(now_ms // 1_000))}{now_ms % 1_000:03d}"
        return max(name, f"{int(self._files[-1].name) + 1:017d}") if self._files else name

    def flush(self) -> None:
        """Return when everything the index knows is on the disk; `flushed_timestamp` tells how far that is."""
        with self._mutex:
            self._flush()

    def _flush(self) -> None:
        if self._files:
            self._files[-1].flush()  # those before it were flushed when they were full
            self.flushed_timestamp = self._files[-1].header.end_timestamp

    # --- finding -------------------------------------------------------------------------------

    def find(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _END_OF_TIME_MS, max_count: int = 64
    ) -> list[int]:
        """The first *max_count* of `candidates`."""
        return list(islice(self.candidates(topic, key, begin_ms, end_ms), max_count))

    def candidates(self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _END_OF_TIME_MS) -> Iterator[int]:
        """Physical offsets of all records in the log that may have *key*, stored about ``begin_ms..end_ms``.

        The newest come first, and memory does not grow with their number. Some may be other records, whose keys
        have the same hash, or lie seconds outside the span: look at the record.

        Args:
            topic: That of the stored record: the system topic of one that waits.
            key: An id, a business key, or ``T#`` and tags.
        """
        self.catch_up()
        [key_hash] = index_key_hashes([f"{topic}#{key}"]).tolist()
        last = -1
        for file in reversed(self._files):
            for physical_offset in self._of_file(file, key_hash, begin_ms, end_ms):
                if physical_offset != last:
                    yield physical_offset
                last = physical_offset

    def _of_file(self, file: IndexFile, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        unit: int | None = None
        while unit != 0:
            with self._mutex:
                if file.is_closed or not file.may_hold(begin_ms, end_ms):
                    return
                unit = file.newest_unit(key_hash) if unit is None else unit
                found, unit = file.walk(key_hash, unit, begin_ms, end_ms, _HOPS)
            yield from found

    # --- cleaning ------------------------------------------------------------------------------

    def delete_before(self, physical_begin: int) -> int:
        """Delete the files whose records all begin before *physical_begin*, but never the last one; gives how many."""
        count = 0
        with self._mutex:
            while len(self._files) > 1 and self._files[0].header.end_physical_offset < physical_begin:
                file, self._files = self._files[0], self._files[1:]
                file.delete()
                count += 1
        return count


def _is_file_name(name: str) -> bool:
    return len(name) == _NAME_LENGTH and name.isdecimal()
