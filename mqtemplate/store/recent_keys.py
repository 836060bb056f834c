"""The newest records in memory: keys until the index has read them, and pending keys until it has written them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.appends import NewRecords, PutBatch, PutResult
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import count_leading
from mqtemplate.record.properties import PENDING_KEY, REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_MAX_BYTES = 8 << 20
_MANY_BYTES = 1 << 20
_SOME_BYTES = 256 << 10
"""Some hundred records, or some thousand of batches. With fewer the calls of numpy take most of the time."""
_ENTRY_BYTES = 200
"""Memory that an entry takes beside its properties."""
_HAS_PENDING_KEY = PENDING_KEY + b"\x01"


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
        """Physical offset of the last entry; -1 without entries."""
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


_RecentEntry = tuple[int, int, int, int, str, bytes]
"""A row of `RecentRecords`."""


class KeyedRecord(NamedTuple):
    """A record with a pending key.

    Attributes:
        topic: Topic in which it is stored.
    """

    topic: str
    physical_offset: int


class _KeyedRecords:
    """Records with pending keys, of one span of the log.

    Attributes:
        newest: Real topic and key -> the newest record with it, delayed or delivered; delete markers do not count.
        last: Physical offset of the last record; -1 without records.
    """

    __slots__ = ("last", "newest")

    def __init__(self) -> None:
        self.newest: dict[tuple[str, str], KeyedRecord] = {}
        self.last = -1

    def add(self, topic: str, properties: bytes, physical_offset: int) -> None:
        """Add a record that has the property of a pending key."""
        key, real_topic = find_property(properties, PENDING_KEY), find_property(properties, REAL_TOPIC)
        self.last = physical_offset
        is_message = find_property(properties, TIMER_DEL_UNIQKEY) is None
        if is_message and key and real_topic and topic in (SCHEDULE_TOPIC, TIMER_TOPIC, real_topic):
            self.newest[real_topic, key] = KeyedRecord(topic, physical_offset)


class RecentKeys:
    """The newest records that the index has not taken yet. Above a limit of memory the next ones are left out.

    Those with pending keys are found here, too, until the index has written them.

    Args:
        lock: The store's lock, under which records are added.
        on_many: Called under the lock when there are so many that they should be taken soon.

    Attributes:
        complete_from: Physical offset from which on no record was left out.
    """

    def __init__(self, lock: threading.Lock, on_many: Callable[[], None]) -> None:
        self.complete_from = 0
        self._keyed = [_KeyedRecords()]  # the last one is of the records that were not taken
        self._lock = lock
        self._on_many = on_many
        self._entries: list[_RecentEntry] = []
        self._bytes = 0
        self._was_reported = False

    @property
    def has_some(self) -> bool:
        """True if there are enough to be indexed together."""
        return self._bytes >= _SOME_BYTES

    def add_one(self, draft: RecordDraft, put: PutResult) -> None:
        """Add a record that was written."""
        if self._bytes < _MAX_BYTES:
            offset, size, _, timestamp = put
            properties = draft.indexed_properties
            self._entries.append((offset, offset + size, 1, timestamp, draft.topic, properties))
            if _HAS_PENDING_KEY in properties:
                self._keyed[-1].add(draft.topic, properties, offset)
            self._count(len(properties) + _ENTRY_BYTES)
        else:
            self.complete_from = put.physical_offset + put.size

    def add(self, records: NewRecords, puts: PutBatch) -> None:
        """Add records that were written together."""
        entries = records.index_entries(puts) if self._bytes < _MAX_BYTES else None
        if entries is None:
            self.complete_from = puts.end
        else:
            before = len(self._entries)
            self._entries += zip(
                entries.offsets,
                entries.ends,
                entries.counts,
                repeat(puts.store_timestamp, len(entries.topics)),
                entries.topics,
                entries.properties,
                strict=True,
            )
            for entry in self._entries[before:]:
                if _HAS_PENDING_KEY in entry[-1]:
                    self._add_keyed(*entry)
            self._count(sum(map(len, entries.properties)) + _ENTRY_BYTES * len(entries.topics))

    def _add_keyed(
        self, physical_offset: int, end: int, count: int, timestamp: int, topic: str, properties: bytes
    ) -> None:
        size, length = (end - physical_offset) // count, len(properties) // count
        for number in range(count):
            encoded = properties[number * length : (number + 1) * length]
            self._keyed[-1].add(topic, encoded, physical_offset + number * size)

    def newest_keyed(self, topic: str, key: str) -> KeyedRecord | None:
        """Return the newest record with a pending key for a topic that is in memory. Any thread may call it."""
        for records in reversed(self._keyed):
            found = records.newest.get((topic, key))
            if found is not None:
                return found
        return None

    def forget_keyed(self, physical_offset: int) -> None:
        """Forget taken records that start before this offset. Called by the thread that takes records."""
        if len(self._keyed) > 1:
            with self._lock:
                self._keyed = [*(each for each in self._keyed[:-1] if each.last >= physical_offset), self._keyed[-1]]

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _MANY_BYTES and not self._was_reported:
            self._was_reported = True
            self._on_many()

    def take(self) -> RecentRecords:
        """Return the records, and forget them here."""
        with self._lock:
            entries, self._entries = self._entries, []
            self._bytes, self._was_reported = 0, False
            if self._keyed[-1].newest:
                self._keyed = [*self._keyed, _KeyedRecords()]
        if not entries:
            return RecentRecords()
        *numbers, topics, properties = zip(*entries, strict=True)
        offsets, ends, counts, timestamps = (np.array(column, np.int64) for column in numbers)
        return RecentRecords(offsets, ends, counts, timestamps, topics, properties)
