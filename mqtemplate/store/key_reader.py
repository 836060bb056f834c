"""Reading the keys of the records in the commit log, from record to record by their sizes, without checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.event_log import get_logger
from mqtemplate.record.appends import NewRecords, PutBatch, PutResult
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import count_leading, read_column
from mqtemplate.record.layout import (
    BODY_AT,
    BODY_CRC_AT,
    BODY_LENGTH_AT,
    BORN_TIMESTAMP_AT,
    HEAD,
    HOST_FLAGS,
    MAGIC_V1,
    PHYSICAL_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    SysFlag,
    read_size_and_magic,
)
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.store.index_file import KeyRows
from mqtemplate.store.key_reader import PropertiesShape, hash_keys, hash_similar, hash_topics
from mqtemplate.store.log_reader import LogReader, is_blank, whole_record_at

_MAX_BYTES = 8 << 20
_MANY_BYTES = 1 << 20
_SOME_BYTES = 256 << 10
"""Some hundred records, or some thousand of batches. With fewer the calls of numpy take most of the time."""
_ENTRY_BYTES = 200
"""Memory that an entry takes beside its properties."""


class RecentRecords(NamedTuple):
    """Entries in the order of the log, not all adjacent: a record, or records of one batch, as columns.

    The records of an entry are adjacent, have one topic, one size, and encoded properties of one length.

    Attributes:
        offsets, ends: Physical offsets of the first record of each entry and after its last one.
        counts: Numbers of records.
        timestamps: Store timestamps.
        properties: Encoded properties of all records of each entry, joined; empty if they are not indexed.
    """

    offsets: NDArray[np.int64] = np.array([], np.int64)
    ends: NDArray[np.int64] = np.array([], np.int64)
    counts: NDArray[np.int64] = np.array([], np.int64)
    timestamps: NDArray[np.int64] = np.array([], np.int64)
    topics: Sequence[str] = ()
    properties: Sequence[bytes] = ()

    @property
    def last(self) -> int:
        """Physical offset of the last entry; -1 if there is none."""
        return int(self.offsets[-1]) if len(self.offsets) else -1

    def part(self, physical_offset: int, count: int) -> RecentRecords:
        """Return the first entry that does not start before *physical_offset*, and those that follow it in the log.

        They are adjacent. There is at least one, since *physical_offset* is not after `last`.

        Args:
            count: Maximum number of records, if the first entry does not have more.
        """
        first = int(np.searchsorted(self.offsets, physical_offset))
        last = first + max(1, int(np.searchsorted(np.cumsum(self.counts[first : first + count]), count, "right")))
        number = 1 + count_leading(self.offsets[first + 1 : last] == self.ends[first : last - 1])
        rows = slice(first, first + number)
        columns = self.offsets[rows], self.ends[rows], self.counts[rows], self.timestamps[rows]
        return RecentRecords(*columns, self.topics[rows], self.properties[rows])

    def record_offsets(self) -> NDArray[np.int64]:
        """Return the physical offset of each record."""
        starts = np.cumsum(self.counts) - self.counts
        numbers = np.arange(self.counts.sum()) - np.repeat(starts, self.counts)
        sizes = (self.ends - self.offsets) // self.counts
        offsets: NDArray[np.int64] = np.repeat(self.offsets, self.counts) + np.repeat(sizes, self.counts) * numbers
        return offsets


class RecentKeys:
    """The newest records that the index has not taken yet. Above a limit of memory the next ones are left out.

    Args:
        lock: The store's lock, under which records are added.
        on_many: Called under the lock when there are so many that they should be taken soon.
    """

    def __init__(self, lock: threading.Lock, on_many: Callable[[], None]) -> None:
        self._lock = lock
        self._on_many = on_many
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0
        self._was_reported = False
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._counts: list[int] = []
        self._timestamps: list[int] = []
        self._topics: list[str] = []
        self._properties: list[bytes] = []

    @property
    def has_some(self) -> bool:
        """True if there are enough to be indexed together."""
        return self._bytes >= _SOME_BYTES

    def add_one(self, draft: RecordDraft, put: PutResult) -> None:
        """Add a record that was written."""
        if self._bytes < _MAX_BYTES:
            offset, size, _, timestamp = put
            properties = draft.indexed_properties
            self._offsets.append(offset)
            self._ends.append(offset + size)
            self._counts.append(1)
            self._timestamps.append(timestamp)
            self._topics.append(draft.topic)
            self._properties.append(properties)
            self._count(len(properties) + _ENTRY_BYTES)

    def add(self, records: NewRecords, puts: PutBatch) -> None:
        """Add records that were written together."""
        entries = records.index_entries(puts) if self._bytes < _MAX_BYTES else None
        if entries is not None:
            self._offsets += entries.offsets
            self._ends += entries.ends
            self._counts += entries.counts
            self._timestamps += repeat(puts.store_timestamp, len(entries.topics))
            self._topics += entries.topics
            self._properties += entries.properties
            self._count(sum(map(len, entries.properties)) + _ENTRY_BYTES * len(entries.topics))

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _MANY_BYTES and not self._was_reported:
            self._was_reported = True
            self._on_many()

    def take(self) -> RecentRecords:
        """Return the records, and forget them here."""
        with self._lock:
            numbers = self._offsets, self._ends, self._counts, self._timestamps
            topics, properties = self._topics, self._properties
            self._clear()
        offsets, ends, counts, timestamps = (np.array(column, np.int64) for column in numbers)
        return RecentRecords(offsets, ends, counts, timestamps, topics, properties)


_log = get_logger("mqtemplate.store")

_RECENT_SHARE = 8
"""So many records in memory take the time of one that is read from the log, or less."""
_FEWEST_ALIKE = 8
"""Fewer records are faster one by one."""
_MOST_BYTES = 512 << 10
"""Of large records it is faster to read the keys only, one by one."""
# Columns that are equal in records of one shape: size and magic, flags, body length.
_FIXED = np.r_[0:BODY_CRC_AT, SYS_FLAG_AT:BORN_TIMESTAMP_AT, BODY_LENGTH_AT:BODY_AT]

_Keyed = tuple[bytes, bytes, int, int]
"""Topic and encoded properties of a record, its physical offset and its store timestamp."""


class KeyReader:
    """Reader of the keys of all records in order. Damaged bytes before other records are logged and skipped.

    Attributes:
        position: Physical offset of the next record.
    """

    def __init__(self, log: LogReader, recent_keys: RecentKeys) -> None:
        self._log = log
        self._recent_keys = recent_keys
        self._recent = RecentRecords()  # those that were taken
        self.position = 0
        self._last_start = -1  # of the record before `position`; -1 if unknown

    def move_to(self, physical_offset: int) -> None:
        """Continue at another record."""
        self.position, self._last_start = physical_offset, -1

    @property
    def has_recent(self) -> bool:
        """True if records that were taken from memory remain."""
        return self.position <= self._recent.last

    def read(self, end: int, count: int) -> KeyRows:
        """Return the keys of records before *end*, which is the end of a record.

        Args:
            count: Maximum number of records. Those in memory count less, since they take less time.
        """
        parts: list[KeyRows] = []
        while count > 0 and self.position < end:
            recent = self._next_recent(count * _RECENT_SHARE)
            if recent is not None and recent.offsets[0] == self.position:
                parts.append(self._read_recent(recent))
                count -= -(-int(recent.counts.sum()) // _RECENT_SHARE)
            else:
                done, rows = self._read_log(end if recent is None else min(int(recent.offsets[0]), end), count)
                parts.append(rows)
                count -= done
        return _join(parts)

    def read_recent(self, count: int) -> KeyRows | None:
        """Return the keys of up to *count* records, the next ones, if the first is in memory; else None."""
        recent = self._next_recent(count)
        return self._read_recent(recent) if recent is not None and recent.offsets[0] == self.position else None

    def _next_recent(self, count: int) -> RecentRecords | None:
        """Return the next records that are in memory, adjacent ones; None if there are none."""
        if not self.has_recent:
            self._recent = self._recent_keys.take()
        return self._recent.part(self.position, count) if self.has_recent else None

    def _read_recent(self, recent: RecentRecords) -> KeyRows:
        self._last_start, self.position = recent.last, int(recent.ends[-1])
        hashes, keys = hash_similar(recent.topics, recent.properties, recent.counts)
        times = np.repeat(recent.timestamps, recent.counts)
        return KeyRows(hashes, np.repeat(recent.record_offsets(), keys), np.repeat(times, keys))

    def _read_log(self, end: int, count: int) -> tuple[int, KeyRows]:
        """Read records before *end* from the log. Return their number and their keys."""
        records: list[_Keyed] = []
        parts: list[KeyRows] = []
        left = count
        while left > 0 and self.position < end:
            found = self._log.find(self.position)
            if found is None:  # its file was deleted meanwhile
                self.move_to(max(self.position, min(self._log.start, end)))
                break
            file, file_start = found
            limit = min(end - file_start, file.size)
            alike = self._read_alike(file, file_start, limit, left)
            if alike is not None:
                done, rows = alike
                left -= done
                parts += [*_key_rows(records), rows]
                records.clear()
                continue
            left -= self._read_plain(file, file_start, limit, left, records)
            if left > 0 and self.position < end:
                left -= self._read_other(file, file_start, end, records)
        return count - left, _join([*parts, *_key_rows(records)])

    def _read_alike(self, file: MappedFile, file_start: int, limit: int, count: int) -> tuple[int, KeyRows] | None:
        """Read the next records together, if several have one size and one shape, as those of a producer often do.

        Returns:
            Their number and their keys; None if they are not alike.
        """
        at = self.position - file_start
        size, magic = read_size_and_magic(file.view, at) if at + HEAD.size < limit else (0, 0)
        count = min(count, (limit - at) // size, _MOST_BYTES // size) if size > HEAD.size else 0
        if count < _FEWEST_ALIKE or read_size_and_magic(file.view, at + (_FEWEST_ALIKE - 1) * size) != (size, magic):
            return None
        data = file.read(at, count * size)
        _, _, _, sys_flag, _, _, body_length = HEAD.unpack_from(data)
        tail_at = HEAD.size + body_length
        is_plain = magic == MAGIC_V1 and not sys_flag & HOST_FLAGS and body_length >= 0 and tail_at + 3 < size
        if not is_plain or sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK:
            return None
        topic_end = tail_at + 1 + data[tail_at]
        if topic_end + 2 > size or topic_end + 2 + int.from_bytes(data[topic_end : topic_end + 2], "big") != size:
            return None
        rows = np.frombuffer(data, np.uint8).reshape(count, size)
        properties = rows[:, topic_end + 2 :]
        shape = PropertiesShape(data[topic_end + 2 : size])
        offsets = self.position + size * np.arange(count)
        fixed = np.r_[_FIXED, tail_at : topic_end + 2]
        is_alike = shape.matches(properties) & (rows[:, fixed] == rows[0, fixed]).all(axis=1)
        is_alike &= read_column(rows, PHYSICAL_OFFSET_AT, ">i8") == offsets
        done = count_leading(is_alike)
        if done < _FEWEST_ALIKE:
            return None
        self._last_start = self.position + (done - 1) * size
        self.position += done * size
        topic = data[tail_at + 1 : topic_end].decode("utf-8", "replace")
        hashes = shape.hashes(properties[:done], hash_topics([topic]))
        keys = hashes.shape[1]
        times = read_column(rows[:done], STORE_TIMESTAMP_AT, ">i8")
        return done, KeyRows(hashes.ravel(), np.repeat(offsets[:done], keys), np.repeat(times, keys))

    def _read_plain(self, file: MappedFile, file_start: int, limit: int, count: int, records: list[_Keyed]) -> int:
        """Read on in one file while the records are V1 with IPv4 hosts. Return their number."""
        view = file.view
        at, last_start, done = self.position - file_start, self._last_start, 0
        last_head, unpack, add = limit - HEAD.size, HEAD.unpack_from, records.append
        while done < count and at <= last_head:
            size, magic, physical_offset, sys_flag, timestamp, _, body_length = unpack(view, at)
            topic_at = at + HEAD.size + 1 + body_length
            end = at + size
            is_plain = magic == MAGIC_V1 and not sys_flag & HOST_FLAGS and physical_offset == file_start + at
            if not is_plain or body_length < 0 or topic_at >= end or end > limit:
                break
            topic_end = topic_at + view[topic_at - 1]
            if topic_end + 2 > end or topic_end + 2 + (view[topic_end] << 8 | view[topic_end + 1]) != end:
                break
            if sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
                add((view[topic_at:topic_end], view[topic_end + 2 : end], physical_offset, timestamp))
            last_start, at = physical_offset, end
            done += 1
        self.position, self._last_start = file_start + at, last_start
        return done

    def _read_other(self, file: MappedFile, file_start: int, end: int, records: list[_Keyed]) -> int:
        """Read a blank, a record with IPv6 hosts or a long topic, or damage. Return the number of records."""
        at = self.position - file_start
        if is_blank(file, at):
            self.position = file_start + file.size
            return 0
        record = whole_record_at(file, at, file_start)
        if record is None:
            self._skip_damage(end)
            return 0
        if record.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
            records.append((record.topic.encode(), record.properties_bytes, self.position, record.store_timestamp))
        self._last_start = self.position
        self.position += record.total_size
        return 1

    def _skip_damage(self, end: int) -> None:
        """Continue with the next whole record.

        It may be before `position`, if the size of the last record is damaged.
        """
        damaged = self.position
        following = self._log.find_record_after(damaged if self._last_start < 0 else self._last_start)
        self.move_to(end if following is None else min(following, end))
        _log.warning(
            "store.index_damage_skipped",
            file=self._log.path_of(damaged).name,
            physical_offset=damaged,
            continued_at=self.position,
        )


def _join(parts: Sequence[KeyRows]) -> KeyRows:
    if len(parts) == 1:
        return parts[0]
    columns = (np.concatenate(each) for each in zip(*parts, strict=True)) if parts else (np.array([], np.int64),) * 3
    return KeyRows(*columns)


def _key_rows(records: Sequence[_Keyed]) -> list[KeyRows]:
    """Return the keys of records one by one; an empty list for none."""
    if not records:
        return []
    topics, properties, physical_offsets, timestamps = zip(*records, strict=True)
    hashes, counts = hash_keys([topic.decode("utf-8", "replace") for topic in topics], properties)
    offsets = np.repeat(np.array(physical_offsets, np.int64), counts)
    return [KeyRows(hashes, offsets, np.repeat(np.array(timestamps, np.int64), counts))]
