"""What the commit log tells, at a start, about timers: which are handed over already."""

from __future__ import annotations

from array import array

import numpy as np

from mqtemplate.delay.foreign_copies import ForeignCopies
from mqtemplate.delay.release import DEAD_LETTER_TOPIC, released_source
from mqtemplate.delay.timers.slot_reader import contains
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import (
    REAL_TOPIC,
    REPLACED_LEVEL,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    find_property,
    may_have_property,
)
from mqtemplate.store import MessageStore
from mqtemplate.topics import TIMER_TOPIC


class TimerReplay:
    """Collects the records that took a waiting one's place, and then tells of each waiting one whether it has gone.

    Kept are eight bytes for each such record in the part of the log that is replayed, until `forget`. A source counts
    only for the record that lies at exactly that place.

    Attributes:
        first_offset: Where the first of them lies; None without one.
        last_timestamp: The newest store timestamp among them (ms).
        steered: Sources of cancelled and rescheduled messages, whose slots may be far away: their units must be marked.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._seen: array[int] = array("q")
        self._sources = np.empty(0, np.int64)
        self._foreign = ForeignCopies()
        self._foreign_rolls = ForeignCopies()
        self._rolls_end = 0  # physical offset behind the last of those
        self._seen_steered: array[int] = array("q")
        self.steered = np.empty(0, np.int64)
        self.first_offset: int | None = None
        self.last_timestamp = -1

    def __len__(self) -> int:
        return len(self._sources) + len(self._foreign) + len(self._foreign_rolls)

    def replay(self, record: StoredRecord) -> None:
        """Take a record of the log in; the same one may come twice."""
        source = released_source(record)
        if source is None:
            if may_have_property(record.properties_bytes, TIMER_OUT_MS):
                self._replay_foreign(record)
            return
        properties = record.properties_bytes
        is_steered = find_property(properties, REPLACED_LEVEL) is not None
        if is_steered:
            self._seen_steered.append(source)
        if (
            is_steered
            or record.topic in (TIMER_TOPIC, DEAD_LETTER_TOPIC)
            or may_have_property(properties, TIMER_OUT_MS)
        ):
            self._seen.append(source)
            self._note(record)

    def _replay_foreign(self, record: StoredRecord) -> None:
        count = len(self)
        roll_count = _roll_count(record)
        if record.topic == TIMER_TOPIC and roll_count:  # it took the place of the one that had been rolled once less
            self._foreign_rolls.replay(_in_real_topic(record, roll_count - 1))
            self._rolls_end = record.physical_offset + 1
        else:
            self._foreign.replay(record)
        if len(self) > count:
            self._note(record)

    def _note(self, record: StoredRecord) -> None:
        if self.first_offset is None or record.physical_offset < self.first_offset:
            self.first_offset = record.physical_offset
        self.last_timestamp = max(self.last_timestamp, record.store_timestamp)

    def finish(self) -> None:
        """All records of the log have been shown."""
        self._sources = np.unique(np.frombuffer(self._seen, np.int64))
        self.steered = np.unique(np.frombuffer(self._seen_steered, np.int64))
        self._seen, self._seen_steered = array("q"), array("q")

    def forget(self) -> None:
        """Nothing that waits is among those that have gone any more."""
        self._sources = self.steered = np.empty(0, np.int64)
        self._foreign, self._foreign_rolls = ForeignCopies(), ForeignCopies()
        self.first_offset, self.last_timestamp = None, -1

    def is_linked(self, physical_offsets: np.ndarray) -> np.ndarray:
        """For each of these places, whether a record took the place of the one there, and says so itself."""
        return contains(self._sources, physical_offsets)

    def is_done(self, physical_offsets: np.ndarray, sizes: np.ndarray, slots_ms: np.ndarray) -> np.ndarray:
        """For each of these waiting records, whether something took its place.

        Args:
            slots_ms: The slot each stands in. RocketMQ handed nothing over before its slot.
        """
        done = self.is_linked(physical_offsets)
        may_be_copied = ~done & ((slots_ms <= self._foreign.last_timestamp) | (physical_offsets < self._rolls_end))
        for index in np.flatnonzero(may_be_copied).tolist():
            done[index] = self._was_copied(int(physical_offsets[index]), int(sizes[index]))
        return done

    def _was_copied(self, physical_offset: int, size: int) -> bool:
        try:
            record = self._store.read(physical_offset, size)
        except CorruptRecordError:
            return False  # it is reported when it is due
        if physical_offset < self._rolls_end and self._foreign_rolls.contains(
            _in_real_topic(record, _roll_count(record))
        ):
            return True
        return self._foreign.contains(record)


def _roll_count(record: StoredRecord) -> int:
    text = find_property(record.properties_bytes, TIMER_ROLL_TIMES) or "0"
    return int(text) if text.isascii() and text.isdecimal() else 0


def _in_real_topic(record: StoredRecord, roll_count: int) -> StoredRecord:
    """A record in the form that `ForeignCopies` takes for a copy, told apart by how often it was rolled."""
    topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
    return record._replace(topic=topic, reconsume_times=-1 - roll_count)
