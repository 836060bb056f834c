"""Copies that RocketMQ released while it used the store directory: they do not name the record they were copied from.

Copies of this package do, see `release.released_source`. RocketMQ writes its progress every ten seconds (levels) or
every second (timers). After a kill of RocketMQ, or without its progress file, only the copies in the log show what it
released.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mqtemplate.delay.offset_set import OffsetSet
from mqtemplate.errors import CorruptRecordError
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import (
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
    find_property,
    may_have_property,
)
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import TIMER_TOPIC

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
    return parse_number(find_property(record.properties_bytes, TIMER_ROLL_TIMES)) or 0


def _hash_of(record: StoredRecord, roll_count: int = -1) -> int:
    """Hash what a delayed record and its copy share: properties, body, times of birth and of reconsumption.

    Args:
        roll_count: Distinguishes the rolls of one timer; -1 for a copy under the real topic.
    """
    times = record.reconsume_times if roll_count < 0 else -1 - roll_count
    parts = [find_property(record.properties_bytes, name) or "" for name in _KEPT_PROPERTIES]
    parts += [str(times), str(record.born_timestamp), str(record.body_crc)]
    return int.from_bytes(blake2b("\x02".join(parts).encode(), digest_size=8).digest(), "big", signed=True)
