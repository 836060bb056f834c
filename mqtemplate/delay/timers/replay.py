"""Recovery of timers: which messages the commit log shows as released, cancelled or moved."""

from __future__ import annotations

import numpy as np

from mqtemplate.delay.foreign_copies import ForeignCopies
from mqtemplate.delay.offset_set import OffsetSet
from mqtemplate.delay.release import DEAD_LETTER_TOPIC, released_source
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import TIMER_TOPIC


class TimerReplay:
    """Collects the records that replaced timers, and answers for each timer whether one did.

    It stores eight bytes for each such record in the replayed part of the log, until `forget`. A source has an effect
    only on the record at exactly that physical offset.

    Attributes:
        first_offset: Physical offset of the first of these records; None without one.
        last_timestamp: Their newest store timestamp (ms); -1 without one.
        changed: Sources of cancelled and rescheduled messages. Their slots may be far away, so their units must be
            marked.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.forget()

    def __len__(self) -> int:
        return len(self._sources) + len(self._foreign) + len(self._foreign_rolls)

    def forget(self) -> None:
        """Forget all records: no pending message is among their sources any more."""
        self._sources = OffsetSet()
        self.changed = OffsetSet()
        self._foreign = ForeignCopies()
        self._foreign_rolls = ForeignCopies()
        self._foreign_rolls_end = 0  # physical offset after the last of those
        self.first_offset: int | None = None
        self.last_timestamp = -1

    def replay(self, record: StoredRecord) -> None:
        """Note a record of the log. The same record may be replayed twice."""
        source = released_source(record)
        if source is None:
            if b"TIMER_OUT_MS\x01" in record.properties_bytes:
                self._replay_foreign(record)
            return
        properties = record.properties_bytes
        is_change = find_property(properties, b"__STEERED") is not None
        if is_change:
            self.changed.add(source)
        if is_change or record.topic in (TIMER_TOPIC, DEAD_LETTER_TOPIC) or b"TIMER_OUT_MS\x01" in properties:
            self._sources.add(source)
            self._note(record)

    def _replay_foreign(self, record: StoredRecord) -> None:
        roll_count = _roll_count(record)
        if record.topic == TIMER_TOPIC and roll_count:  # it replaced the record with one roll less
            if self._foreign_rolls.replay(_as_copy(record, roll_count - 1)):
                self._note(record)
            self._foreign_rolls_end = record.physical_offset + 1
        elif self._foreign.replay(record):
            self._note(record)

    def _note(self, record: StoredRecord) -> None:
        if self.first_offset is None or record.physical_offset < self.first_offset:
            self.first_offset = record.physical_offset
        self.last_timestamp = max(self.last_timestamp, record.store_timestamp)

    def is_linked(self, physical_offsets: np.ndarray) -> np.ndarray:
        """Return for each of these records whether a record that names it replaced it."""
        return self._sources.contains(physical_offsets)

    def is_replaced(self, physical_offsets: np.ndarray, sizes: np.ndarray, slots_ms: np.ndarray) -> np.ndarray:
        """Return for each of these records whether a record replaced it.

        Args:
            slots_ms: The slot of each record. RocketMQ releases no message before its slot.
        """
        done = self.is_linked(physical_offsets)
        may_be_copied = ~done & (
            (slots_ms <= self._foreign.last_timestamp) | (physical_offsets < self._foreign_rolls_end)
        )
        for index in np.flatnonzero(may_be_copied).tolist():
            done[index] = self._was_copied(int(physical_offsets[index]), int(sizes[index]))
        return done

    def _was_copied(self, physical_offset: int, size: int) -> bool:
        try:
            record = self._store.read(physical_offset, size)
        except CorruptRecordError:
            return False  # the release reports it when it is due
        was_rolled = physical_offset < self._foreign_rolls_end and self._foreign_rolls.contains(
            _as_copy(record, _roll_count(record))
        )
        return was_rolled or self._foreign.contains(record)


def _roll_count(record: StoredRecord) -> int:
    text = find_property(record.properties_bytes, b"TIMER_ROLL_TIMES") or "0"
    return int(text) if text.isascii() and text.isdecimal() else 0


def _as_copy(record: StoredRecord, roll_count: int) -> StoredRecord:
    """Return a rolled record in a form that `ForeignCopies` accepts as a copy: in its real topic.

    The number of rolls, as a negative ``reconsume_times``, distinguishes the rolls of one message.
    """
    topic = find_property(record.properties_bytes, b"REAL_TOPIC") or ""
    return record._replace(topic=topic, reconsume_times=-1 - roll_count)
