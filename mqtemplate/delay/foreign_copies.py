"""Copies that RocketMQ released while the folder was its own: they do not say which record they were copied from.

Ours do (`release.released_source`). RocketMQ writes down how far it is every ten seconds (levels) or every second
(timers), so after a kill of it, or without that file, only its copies in the log tell what it handed over.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np

from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import (
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    TIMER_OUT_MS,
    UNIQ_KEY,
    find_property,
    may_have_property,
)

_KEPT_PROPERTIES = (UNIQ_KEY, REAL_TOPIC, REAL_QID, DELAY, TIMER_OUT_MS)
"""What RocketMQ leaves on a copy as it was on the record that waited, and what tells one message from another."""


class ForeignCopies:
    """Recognises a waiting record that RocketMQ handed over, by what its copy has in common with it.

    - A copy is a record under its real topic that asked for a level or a time, without our link to a source.
    - Kept is a number of 64 bits for each copy. Two messages of equal number are one sender's message stored twice;
      one copy counts for both.
    - First every record of the log is shown to `replay`, then `contains` is asked.

    Attributes:
        last_timestamp: Store timestamp of the newest copy (ms); -1 without one.
    """

    def __init__(self) -> None:
        self._hashes: array[int] = array("q")
        self._sorted: np.ndarray | None = None
        self.last_timestamp = -1

    def __len__(self) -> int:
        return len(self._hashes)

    def replay(self, record: StoredRecord) -> None:
        """Take *record* in if it is such a copy; the same one may come twice."""
        properties = record.properties_bytes
        if not may_have_property(properties, REAL_TOPIC) or record.prepared_transaction_offset > 0:
            return
        if find_property(properties, REAL_TOPIC) != record.topic:
            return
        if may_have_property(properties, DELAY) or may_have_property(properties, TIMER_OUT_MS):
            self._hashes.append(_hash_of(record))
            self._sorted = None
            self.last_timestamp = max(self.last_timestamp, record.store_timestamp)

    def contains(self, record: StoredRecord) -> bool:
        """Whether a copy of *record*, which lies in a system topic, was seen."""
        if not self._hashes:
            return False
        if self._sorted is None:
            self._sorted = np.unique(np.frombuffer(self._hashes, np.int64))
            self._hashes = array("q", self._sorted.tobytes())
        wanted = _hash_of(record)
        place = int(np.searchsorted(self._sorted, wanted))
        return place < len(self._sorted) and int(self._sorted[place]) == wanted


def _hash_of(record: StoredRecord) -> int:
    """What a waiting record and its copy agree in: properties, body, and when and how often it was sent."""
    parts = [find_property(record.properties_bytes, name) or "" for name in _KEPT_PROPERTIES]
    parts += [str(record.reconsume_times), str(record.born_timestamp), str(record.body_crc)]
    return int.from_bytes(blake2b("\x02".join(parts).encode(), digest_size=8).digest(), "big", signed=True)
