"""Topics and properties of the newest records, kept in memory so that the index need not read them from the log."""

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
