"""The replay of a start: which delayed records the commit log shows as released.

Copies that RocketMQ released do not name the record they were copied from.

Copies of this package do, see `copies.released_source`. RocketMQ writes its progress every ten seconds (levels) or
every second (timers). After a kill of RocketMQ, or without its progress file, only the copies in the log show what it
released.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mqtemplate.delay.copies import released_source
from mqtemplate.delay.level_queue import is_marked, unit_pieces
from mqtemplate.delay.pending_rows import OffsetSet, contains
from mqtemplate.errors import CorruptRecordError
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import (
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    REPLACED_LEVEL,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
    find_property,
    may_have_property,
)
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import TIMER_TOPIC, UNDELIVERABLE_TOPIC

_KEPT_PROPERTIES = (UNIQ_KEY, REAL_TOPIC, REAL_QID, DELAY, TIMER_OUT_MS)
"""Properties that RocketMQ copies unchanged, and that distinguish one delayed message from another."""


class ForeignCopies:
    """Recognises delayed records that RocketMQ released, by what a record and its copy have in common.

    - A copy is a record under its real topic that had a delay, without our link to a source; or a rolled timer.
    - Each copy is kept as a hash of 64 bits. Two messages with one hash are one producer's message stored twice;
      one copy counts for both.
    - `replay` gets every record of the log first; `contains` is called afterwards.

    Attributes:
        last_timestamp: Store timestamp of the newest copy under a real topic (ms); -1 without one.
        rolls_end: Physical offset after the last rolled timer.
    """

    def __init__(self) -> None:
        self._hashes = OffsetSet()
        self.last_timestamp = -1
        self.rolls_end = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def replay(self, record: StoredRecord) -> bool:
        """Add *record* if it is such a copy. Return True if it is. The same record may be replayed twice."""
        properties = record.properties_bytes
        if not may_have_property(properties, REAL_TOPIC) or record.prepared_transaction_offset > 0:
            return False
        if record.topic == TIMER_TOPIC and (roll_count := _roll_count(record)):
            self._hashes.add(_hash_of(record, roll_count - 1))  # it replaced the record with one roll less
            self.rolls_end = record.physical_offset + 1
            return True
        if find_property(properties, REAL_TOPIC) != record.topic:
            return False
        if not may_have_property(properties, DELAY) and not may_have_property(properties, TIMER_OUT_MS):
            return False
        self._hashes.add(_hash_of(record))
        self.last_timestamp = max(self.last_timestamp, record.store_timestamp)
        return True

    def contains(self, record: StoredRecord) -> bool:
        """Return True if a copy of *record*, a record of a system topic, was replayed."""
        hashes = [_hash_of(record)]
        if record.physical_offset < self.rolls_end:
            hashes.append(_hash_of(record, _roll_count(record)))
        return bool(self._hashes.contains(np.array(hashes)).any())

    def contains_at(self, store: MessageStore, physical_offset: int, size: int) -> bool:
        """Return True if a copy of this record was replayed; False if it is unreadable: its release reports that."""
        try:
            return self.contains(store.read(physical_offset, size))
        except CorruptRecordError:
            return False


def _roll_count(record: StoredRecord) -> int:
    return max(parse_number(find_property(record.properties_bytes, TIMER_ROLL_TIMES)) or 0, 0)


def _hash_of(record: StoredRecord, roll_count: int = -1) -> int:
    """Hash what a delayed record and its copy share: properties, body, times of birth and of reconsumption.

    Args:
        roll_count: Distinguishes the rolls of one timer; -1 for a copy under the real topic.
    """
    times = record.reconsume_times if roll_count < 0 else -1 - roll_count
    parts = [find_property(record.properties_bytes, name) or "" for name in _KEPT_PROPERTIES]
    parts += [str(times), str(record.born_timestamp), str(record.body_crc)]
    return int.from_bytes(blake2b("\x02".join(parts).encode(), digest_size=8).digest(), "big", signed=True)


class LevelReplay:
    """Collects the records that replaced delayed ones, then marks each level's queue accordingly.

    It stores eight bytes for each such record in the replayed part of the log, also for timers. A source has
    an effect only if a unit of the queue points at exactly that physical offset.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._sources = OffsetSet()
        self._foreign = ForeignCopies()

    def __len__(self) -> int:
        return len(self._sources) + len(self._foreign)

    def replay(self, record: StoredRecord) -> None:
        """Note a record of the log. The same record may be replayed twice."""
        if record.prepared_transaction_offset <= 0:
            if record.topic != TIMER_TOPIC:
                self._foreign.replay(record)
            return
        source = released_source(record)
        if source is None or (
            record.topic == TIMER_TOPIC and not may_have_property(record.properties_bytes, REPLACED_LEVEL)
        ):
            return  # not a copy, or a rolled timer
        self._sources.add(source)

    def mark_released(self, queue: ConsumeQueue, position: int) -> int:
        """Mark the units of a level that were released. Return the queue offset of the first pending unit.

        A mark is durable after the queue's next flush. It may be: the replayed part of the log is on disk already.

        Args:
            position: All units before it are done.
        """
        sources = self._sources.values()
        if len(self._foreign):
            sources = np.union1d(sources, self._foreign_sources(queue, position, sources))
        for start, units in unit_pieces(queue, position):
            marked = is_marked(units)
            done = marked | contains(sources, units["physical_offset"])
            if start == position:
                position += len(done) if done.all() else int(np.argmin(done))
            for index in np.flatnonzero(done & ~marked).tolist():
                if start + index >= position:
                    queue.mark_done(start + index)
        return position

    def _foreign_sources(self, queue: ConsumeQueue, position: int, sources: np.ndarray) -> np.ndarray:
        """Return the physical offsets of messages that RocketMQ released."""
        found: list[int] = []
        for _, units in unit_pieces(queue, position):
            is_open = ~(is_marked(units) | contains(sources, units["physical_offset"]))
            for physical_offset, size, due_ms in units[is_open].tolist():
                if self._foreign.contains_at(self._store, physical_offset, size):
                    found.append(physical_offset)
                elif due_ms > self._foreign.last_timestamp:
                    # RocketMQ releases in queue order, and stops at the first unit that is not due.
                    return np.array(found, np.int64)
        return np.array(found, np.int64)


class TimerReplay:
    """Collects the records that replaced timers, and answers for each timer whether one did.

    It stores eight bytes for each such record in the replayed part of the log, until `forget`. A source has an effect
    only on the record at exactly that physical offset.

    Attributes:
        sources: Physical offsets of the replaced records that the replacing ones name.
        first_offset: Physical offset of the first of these records; None without one.
        last_timestamp: Their newest store timestamp (ms); -1 without one.
        changed: Sources of cancelled and rescheduled messages. Their slots may be far away, so their units must be
            marked.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.forget()

    def __len__(self) -> int:
        return len(self.sources) + len(self._foreign)

    def forget(self) -> None:
        """Forget all records: no pending message is among their sources any more."""
        self.sources = OffsetSet()
        self.changed = OffsetSet()
        self._foreign = ForeignCopies()
        self.first_offset: int | None = None
        self.last_timestamp = -1

    def replay(self, record: StoredRecord) -> None:
        """Note a record of the log. The same record may be replayed twice."""
        source = released_source(record)
        if source is None:
            if may_have_property(record.properties_bytes, TIMER_OUT_MS) and self._foreign.replay(record):
                self._note(record)
            return
        properties = record.properties_bytes
        is_change = find_property(properties, REPLACED_LEVEL) is not None
        if is_change:
            self.changed.add(source)
        if (
            is_change
            or record.topic in (TIMER_TOPIC, UNDELIVERABLE_TOPIC)
            or may_have_property(properties, TIMER_OUT_MS)
        ):
            self.sources.add(source)
            self._note(record)

    def _note(self, record: StoredRecord) -> None:
        if self.first_offset is None or record.physical_offset < self.first_offset:
            self.first_offset = record.physical_offset
        self.last_timestamp = max(self.last_timestamp, record.store_timestamp)

    def is_replaced(self, physical_offsets: np.ndarray, sizes: np.ndarray, slots_ms: np.ndarray) -> np.ndarray:
        """Return for each of these records whether a record replaced it.

        Args:
            slots_ms: The slot of each record. RocketMQ releases no message before its slot.
        """
        done = self.sources.contains(physical_offsets)
        foreign = self._foreign
        may_be_copied = ~done & ((slots_ms <= foreign.last_timestamp) | (physical_offsets < foreign.rolls_end))
        for index in np.flatnonzero(may_be_copied).tolist():
            done[index] = foreign.contains_at(self._store, int(physical_offsets[index]), int(sizes[index]))
        return done
