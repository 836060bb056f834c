"""Recovery of timers: which messages the commit log shows as released, cancelled or moved."""

from __future__ import annotations

import numpy as np

from mqtemplate.delay.foreign_copies import ForeignCopies
from mqtemplate.delay.offset_set import OffsetSet
from mqtemplate.delay.release import DEAD_LETTER_TOPIC, released_source
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REPLACED_LEVEL, TIMER_OUT_MS, find_property, may_have_property
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
        return len(self._sources) + len(self._foreign)

    def forget(self) -> None:
        """Forget all records: no pending message is among their sources any more."""
        self._sources = OffsetSet()
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
        if is_change or record.topic in (TIMER_TOPIC, DEAD_LETTER_TOPIC) or may_have_property(properties, TIMER_OUT_MS):
            self._sources.add(source)
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
        foreign = self._foreign
        may_be_copied = ~done & ((slots_ms <= foreign.last_timestamp) | (physical_offsets < foreign.rolls_end))
        for index in np.flatnonzero(may_be_copied).tolist():
            done[index] = foreign.contains_at(self._store, int(physical_offsets[index]), int(sizes[index]))
        return done
