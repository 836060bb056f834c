"""What the commit log tells, at a start, about the messages of a level: which are handed over already."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from mqtemplate.delay.foreign_copies import ForeignCopies
from mqtemplate.delay.levels.level_queue import is_marked
from mqtemplate.delay.release import released_source
from mqtemplate.delay.timers.slot_reader import contains
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REPLACED_LEVEL, may_have_property
from mqtemplate.store import MessageStore
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.topics import TIMER_TOPIC

_CHUNK = 65_536


class LevelReplay:
    """Collects the records that took a waiting one's place, then settles each queue by them.

    Kept are eight bytes for each such record in the part of the log that is replayed, whatever it took the place of:
    a source counts only where a unit of the queue points at exactly that place.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._seen: array[int] = array("q")
        self._sources: np.ndarray | None = None
        self._foreign = ForeignCopies()

    def __len__(self) -> int:
        return len(self._seen) + len(self._foreign)

    def replay(self, record: StoredRecord) -> None:
        """Take a record of the log in; the same one may come twice."""
        if record.prepared_transaction_offset <= 0:
            self._foreign.replay(record)
            return
        source = released_source(record)
        if source is None or (
            record.topic == TIMER_TOPIC and not may_have_property(record.properties_bytes, REPLACED_LEVEL)
        ):
            return  # no copy, or one of a timer on its way
        self._seen.append(source)

    def confirm(self, queue: ConsumeQueue, position: int) -> int:
        """Mark the units of a level that are done; gives the first place that is not.

        What is marked lasts with the queue's next flush; all of the log that was replayed is on the disk by now.

        Args:
            position: Everything before it is done.
        """
        if self._sources is None:
            self._sources = np.unique(np.frombuffer(self._seen, np.int64))
        sources = self._sources
        if len(self._foreign):
            sources = np.union1d(sources, self._foreign_sources(queue, position, sources))
        for place, units in _pieces(queue, position):
            marked = is_marked(units)
            done = marked | contains(sources, units["physical_offset"])
            if place == position:
                position += len(done) if done.all() else int(np.argmin(done))
            for index in np.flatnonzero(done & ~marked).tolist():
                if place + index >= position:
                    queue.mark_done(place + index)
        return position

    def _foreign_sources(self, queue: ConsumeQueue, position: int, sources: np.ndarray) -> np.ndarray:
        """Physical offsets of what RocketMQ handed over. It goes by place, so nothing behind what is not due yet."""
        found: list[int] = []
        for _, units in _pieces(queue, position):
            is_open = ~(is_marked(units) | contains(sources, units["physical_offset"]))
            for physical_offset, size, due_ms in units[is_open].tolist():
                if self._was_copied(physical_offset, size):
                    found.append(physical_offset)
                elif due_ms > self._foreign.last_timestamp:
                    return np.array(found, np.int64)
        return np.array(found, np.int64)

    def _was_copied(self, physical_offset: int, size: int) -> bool:
        try:
            return self._foreign.contains(self._store.read(physical_offset, size))
        except CorruptRecordError:
            return False  # it is reported when it is due


def _pieces(queue: ConsumeQueue, begin: int) -> Iterator[tuple[int, np.ndarray]]:
    """The queue's units from *begin* on, and the place of each piece's first."""
    while len(units := queue.units(begin, _CHUNK)):
        yield begin, units
        begin += len(units)
