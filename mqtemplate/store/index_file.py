"""One index file, a hash table from keys to records, and the newest records in memory until the files have them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.appends import NewRecords, PutBatch, PutResult
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import count_leading
from mqtemplate.record.properties import PENDING_KEY, REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property
from mqtemplate.store.files import layout
from mqtemplate.store.files.layout import (
    INDEX_UNIT_DTYPE,
    INDEX_UNIT_SIZE,
    IndexHeader,
)
from mqtemplate.store.files.mapped_files import MappedFile
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_MAX_SECONDS = 0x7FFF_FFFF
_CLOCK_STEP_MS = 3_600_000
"""Largest step back of the clock, in ms, that is assumed where RocketMQ wrote. Those of our own clock are noted."""


class KeyRows(NamedTuple):
    """Keys of records in the order of the log: three arrays of one length."""

    key_hashes: NDArray[np.int32]
    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]

    def part(self, start: int, end: int | None = None) -> KeyRows:
        """Return some of the rows."""
        key_hashes, physical_offsets, timestamps = self
        return KeyRows(key_hashes[start:end], physical_offsets[start:end], timestamps[start:end])


class IndexFile:
    """A hash table in a file: a header, slots, and units. The units of a slot form a chain, newest first.

    - Units are written at once. Header and slots of the current file are in memory. `flush` writes them after the
      units, so the header on the disk never counts units that are not there.
    - Units are in the order of the log. A chain only leads to units with smaller numbers, so it ends, whatever the file
      contains.
    - Not thread-safe: the `IndexService` owns it.

    Args:
        file: `layout.index_file_size` bytes.
        name: Local time of its creation, 17 digits.
        slots_total: ``max_hash_slot_num``.
        units_total: ``max_index_num``. Unit 0 is never used, so there is room for one key less.

    Attributes:
        flushed: The header on the disk.
    """

    def __init__(self, file: MappedFile, name: str, slots_total: int, units_total: int) -> None:
        assert file.size == layout.index_file_size(slots_total, units_total)
        self._file = file
        self.name = name
        self._slots_total = slots_total
        self._units_total = units_total
        self._units_at = layout.index_file_size(slots_total, 0)
        self._slots: NDArray[np.int32] | None = None
        self._filter: _KeyFilter | None = None
        self.header = layout.unpack_index_header(file.view)
        self.flushed = self.header
        self.is_closed = False

    def start_after(self, previous: IndexHeader) -> None:
        """Start empty, at the end of the previous file."""
        timestamp, physical_offset = previous.end_timestamp, previous.end_physical_offset
        self._slots = np.zeros(self._slots_total, np.int32)
        self.header = IndexHeader(timestamp, timestamp, physical_offset, physical_offset)
        self._file.allocate(self._units_at)
        self._file.write(0, layout.pack_index_header(self.header))

    @property
    def is_full(self) -> bool:
        """True if no key fits any more."""
        return self.header.index_count >= self._units_total

    @property
    def unflushed(self) -> int:
        """Number of units that a power failure may remove."""
        return self.header.index_count - self.flushed.index_count

    # --- writing -------------------------------------------------------------------------------

    def append(self, rows: KeyRows) -> int:
        """Write as many rows as fit. Return their number.

        The times in the file count from its first record. (RocketMQ counts the seconds of the first unit from the end
        of the previous file. That is too late by the pause between the two.)
        """
        first = self.header.index_count
        count = min(len(rows.key_hashes), self._units_total - first)
        if count <= 0:
            return 0
        rows = rows.part(0, count)
        begin_ms, begin_offset = self.header.begin_timestamp, self.header.begin_physical_offset
        if first == 1:
            begin_ms, begin_offset = int(rows.timestamps[0]), int(rows.physical_offsets[0])
        slots = rows.key_hashes % self._slots_total
        order = np.argsort(slots, kind="stable")
        numbers = np.arange(first, first + count, dtype=np.int32)
        units = np.empty(count, layout.INDEX_UNIT_DTYPE)
        units["key_hash"] = rows.key_hashes
        units["physical_offset"] = rows.physical_offsets
        units["seconds"] = np.clip((rows.timestamps - begin_ms) // 1_000, 0, _MAX_SECONDS)
        starts, previous = self._chain(slots[order], numbers[order])
        units["previous"][order] = previous
        self._file.write(self._units_at + first * INDEX_UNIT_SIZE, units.tobytes())

        ends = np.append(starts[1:], count) - 1
        self._slot_table()[slots[order][ends]] = numbers[order][ends]
        self.header = IndexHeader(
            begin_ms,
            int(rows.timestamps[-1]),
            begin_offset,
            int(rows.physical_offsets[-1]),
            self.header.hash_slot_count + int(np.count_nonzero(previous[starts] == 0)),
            first + count,
        )
        return count

    def _chain(
        self, slots: NDArray[np.int32], numbers: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Return where the units of each slot start, and the previous unit of each. The units are sorted by slot."""
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        previous = np.empty_like(numbers)
        previous[1:] = numbers[:-1]
        newest = self._slot_table()[slots[starts]]
        previous[starts] = np.where((newest > 0) & (newest < self.header.index_count), newest, 0)
        return starts, previous

    def _slot_table(self) -> NDArray[np.int32]:
        """Return the slots, in memory: keys fall into any slot, and writing to a mapped page may block on the disk."""
        if self._slots is None:
            stored = np.frombuffer(self._file.view[layout.INDEX_HEADER_SIZE : self._units_at], layout.INDEX_SLOT_DTYPE)
            self._slots = stored.astype(np.int32)
        return self._slots

    def keep_before(self, physical_end: int) -> int:
        """Keep the leading units that are valid and whose records start before *physical_end*.

        Slots and chains are rebuilt from these units. The time of the last one is then known to the second only.

        Returns:
            The number of removed units.
        """
        header = self.header
        kept = self._valid_rows(physical_end)
        removed = header.index_count - 1 - len(kept.key_hashes)
        self._slots = np.zeros(self._slots_total, np.int32)
        begin_ms, begin_offset = header.begin_timestamp, header.begin_physical_offset
        self.header = IndexHeader(begin_ms, begin_ms, begin_offset, begin_offset)
        self.append(kept)
        if removed == 0:  # then the header has the exact time
            self.header = self.header._replace(end_timestamp=header.end_timestamp)
        self.flushed = IndexHeader()
        return removed

    def _valid_rows(self, physical_end: int) -> KeyRows:
        count = min(self.header.index_count, self._units_total)
        at = self._units_at + INDEX_UNIT_SIZE
        units = np.frombuffer(self._file.view[at : at + max(0, count - 1) * INDEX_UNIT_SIZE], layout.INDEX_UNIT_DTYPE)
        offsets = units["physical_offset"].astype(np.int64)
        is_valid = (units["key_hash"] >= 0) & (units["seconds"] >= 0) & (offsets < physical_end)
        is_valid &= offsets >= np.append(self.header.begin_physical_offset, offsets[:-1])[: len(offsets)]
        valid = count_leading(is_valid)
        seconds = units["seconds"][:valid].astype(np.int64)
        seconds[:1] = 0  # in RocketMQ's files it counts from another start, see `append`
        return KeyRows(
            units["key_hash"][:valid].astype(np.int32),
            offsets[:valid],
            self.header.begin_timestamp + seconds * 1_000,
        )

    def flush(self) -> None:
        """Return when units, header and slots are on the disk."""
        if self.header == self.flushed:
            return
        self._file.flush()  # the units first
        self._file.write(0, layout.pack_index_header(self.header))
        if self._slots is not None:
            self._file.write(layout.INDEX_HEADER_SIZE, self._slots.astype(layout.INDEX_SLOT_DTYPE).tobytes())
        self._file.flush()
        self.flushed = self.header
        if self.is_full:
            self._slots = None

    # --- reading -------------------------------------------------------------------------------

    def may_contain(self, begin_ms: int, end_ms: int) -> bool:
        """Return True if records of this span may be in the file."""
        header = self.header
        return header.begin_timestamp - _CLOCK_STEP_MS <= end_ms and begin_ms <= header.end_timestamp + _CLOCK_STEP_MS

    def newest_unit(self, key_hash: int) -> int:
        """Return the first unit of the chain of a key; 0 for none."""
        if self._filter is not None and not self._filter.may_have(key_hash):
            return 0
        slot = key_hash % self._slots_total
        if self._slots is not None:
            return int(self._slots[slot])
        at = layout.INDEX_HEADER_SIZE + slot * layout.INDEX_SLOT_DTYPE.itemsize
        return int.from_bytes(self._file.view[at : at + layout.INDEX_SLOT_DTYPE.itemsize], "big", signed=True)

    def follow(self, key_hash: int, unit: int, begin_ms: int, end_ms: int, max_units: int) -> tuple[list[int], int]:
        """Follow a chain, and return the physical offsets of the units with this hash, newest first.

        Units that were certainly stored outside ``begin_ms..end_ms`` are left out.

        Args:
            unit: First unit: `newest_unit`, or the result of the previous call.
            max_units: Number of units to inspect.

        Returns:
            The offsets, and the unit to continue with; 0 at the end of the chain.
        """
        found: list[int] = []
        view, units_at = self._file.view, self._units_at
        file_begin_ms = self.header.begin_timestamp
        limit = self._units_total
        while max_units > 0 and 0 < unit < limit:
            max_units -= 1
            stored_hash, physical_offset, seconds, previous = layout.unpack_index_unit(
                view, units_at + unit * INDEX_UNIT_SIZE
            )
            # Second 0 also has the records of a clock that was set back, and unit 1 counts from another start.
            at_ms = file_begin_ms + seconds * 1_000
            has_time = unit > 1 and 0 < seconds < _MAX_SECONDS
            if stored_hash == key_hash and (not has_time or begin_ms - 1_000 < at_ms <= end_ms):
                found.append(physical_offset)
            if has_time and at_ms + _CLOCK_STEP_MS < begin_ms:
                return found, 0
            unit, limit = previous, unit
        return found, unit if 0 < unit < limit else 0

    def extend_filter(self, max_units: int) -> bool:
        """Read more units of a full file into its filter. Return True if it is complete: then look-ups use it.

        Most chains of a full file are not empty, so without a filter a key that it does not have costs several reads.
        """
        if self._filter is None:
            self._filter = _KeyFilter(self._units_total)
        units = self._filter.missing
        if units:
            at = self._units_at + units.start * INDEX_UNIT_SIZE
            data = self._file.read(at, min(len(units), max_units) * INDEX_UNIT_SIZE)
            self._filter.add(np.frombuffer(data, INDEX_UNIT_DTYPE)["key_hash"])
        return not self._filter.missing

    def drop_filter(self) -> None:
        """Free the memory of the filter."""
        self._filter = None

    def close(self) -> None:
        """Unmap the file."""
        self.is_closed = True
        self._file.close()

    def delete(self) -> None:
        """Unmap and remove the file."""
        self.is_closed = True
        self._file.delete()


_FILTER_BITS = 8
"""Bits of a filter for each unit, or up to twice as many: an eighth or less of the keys that are not there pass it."""
_GOLDEN_RATIO = 0x9E37_79B1
"""Spreads hashes: those of similar keys have similar bits."""


class _KeyFilter:
    """The keys that a full index file may have: one bit for each of their hashes, in memory.

    Until all units are read, it may have any key.
    """

    def __init__(self, units_total: int) -> None:
        self.missing = range(1, units_total)  # units that are not read yet
        self._shift = 32 - _filter_width(units_total)
        self._bytes = bytearray(filter_bytes(units_total))

    def add(self, key_hashes: NDArray[np.int32]) -> None:
        """Add the hashes of the next units."""
        self.missing = self.missing[len(key_hashes) :]
        bits = key_hashes.astype(np.uint32) * np.uint32(_GOLDEN_RATIO) >> np.uint32(self._shift)
        at, masks = bits >> np.uint32(3), np.uint8(1) << (bits & np.uint32(7)).astype(np.uint8)
        np.bitwise_or.at(np.frombuffer(self._bytes, np.uint8), at, masks)

    def may_have(self, key_hash: int) -> bool:
        """Return False if no unit has this hash."""
        bit = (key_hash * _GOLDEN_RATIO & 0xFFFF_FFFF) >> self._shift
        return bool(self.missing) or bool(self._bytes[bit >> 3] >> (bit & 7) & 1)


def filter_bytes(units_total: int) -> int:
    """Return the memory of the filter of an index file."""
    return 1 << _filter_width(units_total) - 3


def _filter_width(units_total: int) -> int:
    """Return the number of bits that tell the place of a hash in a filter."""
    return min((_FILTER_BITS * units_total - 1).bit_length(), 32)


# --- the newest records -----------------------------------------------------------------------------

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
        properties: Its encoded properties, if they are in memory. Then it is delayed, and no cancel or move has
            replaced it. Else they are empty.
    """

    topic: str
    physical_offset: int
    properties: bytes = b""


_MOST_KEYED = 20_000
"""Keys in memory beside those that are not indexed yet: about 10 MB."""
_MOST_KEYED_BYTES = 384
"""Properties of this length are in memory. Those that are longer are read from the log."""


class RecentKeys:
    """The newest records that the index has not taken yet. Above a limit of memory the next ones are left out.

    The newest record of each pending key is found here, too: until the index has written it, and after that as one of
    the newest `_MOST_KEYED`. A record counts that is delayed or was delivered; a delete marker does not.

    Args:
        lock: The store's lock, under which records are added.
        on_many: Called under the lock when there are so many that they should be taken soon.

    Attributes:
        complete_from: Physical offset from which on no record was left out.
    """

    def __init__(self, lock: threading.Lock, on_many: Callable[[], None]) -> None:
        self.complete_from = 0
        self._keyed: OrderedDict[tuple[str, str], KeyedRecord] = OrderedDict()  # in the order of the log
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
            if draft.pending is not None and draft.topic != draft.pending.topic:
                self._keep(draft.pending.topic, draft.pending.key, draft.topic, properties, offset)
            elif _HAS_PENDING_KEY in properties:
                self._add_keyed(draft.topic, properties, offset)
            self._count(len(properties) + _ENTRY_BYTES)
        else:
            self._leave_out(put.physical_offset + put.size)

    def add(self, records: NewRecords, puts: PutBatch) -> None:
        """Add records that were written together."""
        entries = records.index_entries(puts) if self._bytes < _MAX_BYTES else None
        if entries is None:
            self._leave_out(puts.end)
            return
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
                self._add_all_keyed(*entry)
        self._count(sum(map(len, entries.properties)) + _ENTRY_BYTES * len(entries.topics))

    def _leave_out(self, physical_end: int) -> None:
        """Leave out the records before this offset. A key may have a newer record now than the one in memory."""
        self.complete_from = physical_end
        self._keyed.clear()

    # --- pending keys --------------------------------------------------------------------------

    def _add_all_keyed(
        self, physical_offset: int, end: int, count: int, timestamp: int, topic: str, properties: bytes
    ) -> None:
        size, length = (end - physical_offset) // count, len(properties) // count
        for number in range(count):
            encoded = properties[number * length : (number + 1) * length]
            self._add_keyed(topic, encoded, physical_offset + number * size)

    def _add_keyed(self, topic: str, properties: bytes, physical_offset: int) -> None:
        key, real_topic = find_property(properties, PENDING_KEY), find_property(properties, REAL_TOPIC)
        is_message = find_property(properties, TIMER_DEL_UNIQKEY) is None
        if is_message and key and real_topic:
            self._keep(real_topic, key, topic, properties, physical_offset)

    def _keep(self, real_topic: str, key: str, topic: str, properties: bytes, physical_offset: int) -> None:
        if topic in (SCHEDULE_TOPIC, TIMER_TOPIC, real_topic):
            kept = properties if topic != real_topic and len(properties) <= _MOST_KEYED_BYTES else b""
            self._keyed[real_topic, key] = KeyedRecord(topic, physical_offset, kept)
            self._keyed.move_to_end((real_topic, key))

    def newest_keyed(self, topic: str, key: str) -> KeyedRecord | None:
        """Return the newest record with a pending key for a topic that is in memory. Any thread may call it."""
        return self._keyed.get((topic, key))

    def forget_properties(self, topic: str, key: str, physical_offset: int) -> None:
        """Forget the properties of a record: it was replaced, so they do not describe a pending message any more."""
        with self._lock:
            known = self._keyed.get((topic, key))
            if known is not None and known.physical_offset == physical_offset:
                self._keyed[topic, key] = KeyedRecord(known.topic, physical_offset)

    def forget_keyed(self, physical_end: int) -> None:
        """Forget the oldest keys, down to the limit. Those of records from *physical_end* on are not indexed yet."""
        keyed = self._keyed
        if len(keyed) > _MOST_KEYED:
            with self._lock:
                while len(keyed) > _MOST_KEYED and next(iter(keyed.values())).physical_offset < physical_end:
                    keyed.popitem(last=False)

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
        if not entries:
            return RecentRecords()
        *numbers, topics, properties = zip(*entries, strict=True)
        offsets, ends, counts, timestamps = (np.array(column, np.int64) for column in numbers)
        return RecentRecords(offsets, ends, counts, timestamps, topics, properties)
