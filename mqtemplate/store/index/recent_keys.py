"""Topics and properties of the newest records, kept in memory so that the index need not read them from the log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.arrays import count_leading
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.layout import SysFlag

_MAX_BYTES = 8 << 20
_MANY_BYTES = 1 << 20
_RECORD_BYTES = 200
"""Memory that a record takes beside its properties."""


class RecentRecords(NamedTuple):
    """Columns of records in the order of the log, not all adjacent.

    Attributes:
        offsets, ends: Physical offsets of each record and after it.
        timestamps: Store timestamps.
        properties: Encoded properties; empty for a record that is not indexed.
    """

    offsets: NDArray[np.int64] = np.array([], np.int64)
    ends: NDArray[np.int64] = np.array([], np.int64)
    timestamps: NDArray[np.int64] = np.array([], np.int64)
    topics: Sequence[str] = ()
    properties: Sequence[bytes] = ()

    @property
    def last(self) -> int:
        """Physical offset of the last record; -1 if there is none."""
        return int(self.offsets[-1]) if len(self.offsets) else -1

    def part(self, physical_offset: int, count: int) -> RecentRecords:
        """Return the first record that does not start before *physical_offset*, and those that follow it in the log.

        They are adjacent and have one topic. There is at least one, since *physical_offset* is not after `last`.

        Args:
            count: Maximum number of records.
        """
        first = int(np.searchsorted(self.offsets, physical_offset))
        last = min(first + count, len(self.offsets))
        number = 1 + count_leading(self.offsets[first + 1 : last] == self.ends[first : last - 1])
        topics = self.topics[first : first + number]
        if topics.count(topics[0]) < number:
            number = next(at for at, topic in enumerate(topics) if topic != topics[0])
        rows = slice(first, first + number)
        return RecentRecords(
            self.offsets[rows], self.ends[rows], self.timestamps[rows], self.topics[rows], self.properties[rows]
        )


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
        self._sizes: list[int] = []
        self._timestamps: list[int] = []
        self._topics: list[str] = []
        self._properties: list[bytes] = []

    def add(self, draft: RecordDraft, offset: int, size: int, timestamp: int) -> None:
        """Add a record that was written."""
        if self._bytes < _MAX_BYTES:
            properties = _indexed_properties(draft)
            self._offsets.append(offset)
            self._sizes.append(size)
            self._timestamps.append(timestamp)
            self._topics.append(draft.topic)
            self._properties.append(properties)
            self._count(len(properties) + _RECORD_BYTES)

    def add_drafts(
        self, drafts: Sequence[RecordDraft], offsets: Sequence[int], sizes: Sequence[int], timestamp: int
    ) -> None:
        """Add records that were written together."""
        if self._bytes < _MAX_BYTES:
            properties = [_indexed_properties(draft) for draft in drafts]
            self._add([draft.topic for draft in drafts], properties, offsets, sizes, timestamp)

    def add_similar(
        self,
        first: RecordDraft,
        properties: Callable[[], Sequence[bytes]],
        offsets: Sequence[int],
        sizes: Sequence[int],
        timestamp: int,
    ) -> None:
        """Add records that were written together and have the topic and the flags of *first*.

        Args:
            properties: Returns those of each record.
        """
        if self._bytes < _MAX_BYTES:
            count = len(sizes)
            encoded = properties() if _indexed_properties(first) else [b""] * count
            self._add([first.topic] * count, encoded, offsets, sizes, timestamp)

    def _add(
        self,
        topics: Sequence[str],
        properties: Sequence[bytes],
        offsets: Sequence[int],
        sizes: Sequence[int],
        timestamp: int,
    ) -> None:
        self._offsets.extend(offsets)
        self._sizes.extend(sizes)
        self._timestamps.extend([timestamp] * len(topics))
        self._topics.extend(topics)
        self._properties.extend(properties)
        self._count(sum(map(len, properties)) + _RECORD_BYTES * len(topics))

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _MANY_BYTES and not self._was_reported:
            self._was_reported = True
            self._on_many()

    def take(self) -> RecentRecords:
        """Return the records, and forget them here."""
        with self._lock:
            columns = self._offsets, self._sizes, self._timestamps
            topics, properties = self._topics, self._properties
            self._clear()
        offsets, sizes, timestamps = (np.array(column, np.int64) for column in columns)
        return RecentRecords(offsets, offsets + sizes, timestamps, topics, properties)


def _indexed_properties(draft: RecordDraft) -> bytes:
    is_rolled_back = draft.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK
    return b"" if is_rolled_back else draft.properties
