"""Recovery of delay levels: which messages the commit log shows as released."""

from __future__ import annotations

import numpy as np

from mqtemplate.delay.foreign_copies import ForeignCopies
from mqtemplate.delay.levels.level_queue import is_marked, unit_pieces
from mqtemplate.delay.offset_set import OffsetSet, contains
from mqtemplate.delay.release import released_source
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REPLACED_LEVEL, may_have_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.queues.consume_queue import ConsumeQueue
from mqtemplate.topics import TIMER_TOPIC


class LevelReplay:
    """Collects the records that replaced delayed ones, then marks each level's queue accordingly.

    It stores eight bytes for each such record in the replayed part of the log, also for those of timers. A source has
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
