"""Read-ahead: a pull that continues the one before it reads more records than it returns, for the next pulls."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record.columns import count_leading
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.server.pulls.raw_rows import rows_without_check
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import CQ_UNIT_SIZE
from mqtemplate.store.message_store import MessageStore, read_records

_MAX_UNITS = 256
_MAX_BYTES = 256 << 10
"""Records that are read together, at most: they are verified in 0.1 to 0.2 ms, for which other requests wait."""
_MAX_PARTS = 64
"""Parts in memory: 16 MiB, for as many queues that are read at the same time."""
_FEWEST = 8
"""Fewer records are read faster one by one."""


_Position = tuple[str, int, int]
"""Topic, queue ID and queue offset."""


class Part(NamedTuple):
    """Successive records of a queue, of one size, verified and without their checks.

    Attributes:
        record_count: Number of the records.
        units: Their consume queue units.
        size: Bytes of each in the log.
        records: The records, joined.
    """

    record_count: int = 0
    units: bytes = b""
    size: int = 0
    records: memoryview = memoryview(b"")

    def is_in(self, queue: ConsumeQueue, queue_offset: int, count: int) -> bool:
        """Return True if *queue* still has the first *count* records at *queue_offset*.

        The unit of a delayed message changes when the message is cancelled. A physical offset occurs only once in a
        log, so equal units refer to equal records.
        """
        units = self.units[: count * CQ_UNIT_SIZE]
        return bool(units) and queue.unit_bytes(queue_offset, len(units) // CQ_UNIT_SIZE) == units

    def split(self, count: int) -> tuple[Part, Part]:
        """Return the first *count* records and those after them."""
        if not self.record_count:
            return self, self
        units_end, end = count * CQ_UNIT_SIZE, count * (len(self.records) // self.record_count)
        return (
            Part(count, self.units[:units_end], self.size, self.records[:end]),
            Part(self.record_count - count, self.units[units_end:], self.size, self.records[end:]),
        )


class ReadAhead:
    """Reads records of one size together: verified as rows of an array, each costs a third of what it costs alone.

    The more of them, the less each costs. So where a pull ended because it had as many messages as it may have, a
    *part* begins: the records that were read and not returned, or none. The pull that continues there returns them, or
    reads the next ones together with those of some pulls after it. Consumers that wait for each new message, or that
    start somewhere, read only what they return. Thread-safe.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._parts: dict[_Position, Part] = {}  # by the position of the first record; the oldest part first
        store.metrics.gauge("server.read_ahead", self.__len__)

    def __len__(self) -> int:
        """Return the number of records that were read and not returned."""
        with self._lock:
            return sum(part.record_count for part in self._parts.values())

    def read(self, topic: str, queue_id: int, queue_offset: int, end: int, max_count: int, max_bytes: int) -> Part:
        """Return the records from *queue_offset* on, each as `without_check` returns it.

        Returns none if they have to be read one by one: they are few or large, of several sizes, or not ordinary.

        Args:
            end: Queue offset up to which records may be read.
            max_bytes: Maximum size of the returned records.
        """
        position = (topic, queue_id, queue_offset)
        queue = self._store.consume_queue(topic, queue_id)
        with self._lock:
            part = self._parts.pop(position, None)
        if part is None or not part.is_in(queue, queue_offset, max_count):
            units = queue.units(queue_offset, min(end - queue_offset, max(max_count, _MAX_UNITS)))
            part = self._read(position, units, max_count, continues=part is not None)
        count = min(max_count, part.record_count, max(max_bytes, 0) // max(part.size, 1))
        found, rest = part.split(count)
        if rest.record_count or count == max_count:
            self._keep((topic, queue_id, queue_offset + count), rest)
        return found

    def _keep(self, position: _Position, part: Part) -> None:
        with self._lock:
            self._parts[position] = part
            if len(self._parts) > _MAX_PARTS:
                del self._parts[next(iter(self._parts))]

    def _read(self, position: _Position, units: NDArray[np.void], max_count: int, *, continues: bool) -> Part:
        """Read the records of the first *max_count* units, or of those for several pulls. See `read`."""
        size = int(units["size"][0]) if len(units) else 0
        if size <= SMALLEST_RECORD:
            return Part()
        most = min(_MAX_UNITS, _MAX_BYTES // size) // max_count * max_count if continues else 0
        count = count_leading(units["size"][: max(max_count, most)] == size)
        if count < _FEWEST:
            return Part()
        offsets = units["physical_offset"][:count].tolist()
        data = read_records(self._store, offsets, size)
        if data is None:  # at the end of a file, or deleted by retention
            return Part()
        records, count = rows_without_check(data, *position, offsets)
        return Part(count, units[:count].tobytes(), size, records)
