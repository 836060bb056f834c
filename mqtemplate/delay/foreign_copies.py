"""Copies that RocketMQ released while it used the store directory: they do not name the record they were copied from.

Copies of this package do, see `release.released_source`. RocketMQ writes its progress every ten seconds (levels) or
every second (timers). After a kill of RocketMQ, or without its progress file, only the copies in the log show what it
released.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mqtemplate.delay.offset_set import OffsetSet
from mqtemplate.record.codec import StoredRecord, find_property

_KEPT_PROPERTIES = (b"UNIQ_KEY", b"REAL_TOPIC", b"REAL_QID", b"DELAY", b"TIMER_OUT_MS")
"""Properties that RocketMQ copies unchanged, and that distinguish one delayed message from another."""


class ForeignCopies:
    """Recognises delayed records that RocketMQ released, by what a record and its copy have in common.

    - A copy is a record under its real topic that had a delay, without our link to a source.
    - Each copy is kept as a hash of 64 bits. Two messages with one hash are one producer's message stored twice;
      one copy counts for both.
    - `replay` gets every record of the log first; `contains` is called afterwards.

    Attributes:
        last_timestamp: Store timestamp of the newest copy (ms); -1 without one.
    """

    def __init__(self) -> None:
        self._hashes = OffsetSet()
        self.last_timestamp = -1

    def __len__(self) -> int:
        return len(self._hashes)

    def replay(self, record: StoredRecord) -> bool:
        """Add *record* if it is such a copy. Return True if it is. The same record may be replayed twice."""
        properties = record.properties_bytes
        if b"REAL_TOPIC\x01" not in properties or record.prepared_transaction_offset > 0:
            return False
        if find_property(properties, b"REAL_TOPIC") != record.topic:
            return False
        if b"DELAY\x01" not in properties and b"TIMER_OUT_MS\x01" not in properties:
            return False
        self._hashes.add(_hash_of(record))
        self.last_timestamp = max(self.last_timestamp, record.store_timestamp)
        return True

    def contains(self, record: StoredRecord) -> bool:
        """Return True if a copy of *record*, a record of a system topic, was replayed."""
        return bool(len(self._hashes)) and bool(self._hashes.contains(np.array([_hash_of(record)]))[0])


def _hash_of(record: StoredRecord) -> int:
    """Hash what a delayed record and its copy share: properties, body, times of birth and of reconsumption."""
    parts = [find_property(record.properties_bytes, name) or "" for name in _KEPT_PROPERTIES]
    parts += [str(record.reconsume_times), str(record.born_timestamp), str(record.body_crc)]
    return int.from_bytes(blake2b("\x02".join(parts).encode(), digest_size=8).digest(), "big", signed=True)
