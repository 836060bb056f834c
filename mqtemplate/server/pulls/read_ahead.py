"""Read-ahead: a pull that continues the one before it reads more records than it returns, for the next pulls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.record import layout
from mqtemplate.record.codec import read_without_check
from mqtemplate.record.columns import Rows, count_equal, count_leading, count_verified
from mqtemplate.record.layout import BODY_AT, CHECK_SIZE, HEADER, MAGIC_V1, SMALLEST_RECORD, read_size_and_magic
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import CQ_UNIT_SIZE
from mqtemplate.store.log_reader import read_records
from mqtemplate.store.message_store import MessageStore

_MAX_UNITS = 256
_MAX_BYTES = 256 << 10
"""Records that are read together, at most: they are verified in 0.1 to 0.2 ms, for which other requests wait."""


_Position = tuple[str, int, int]
"""Topic, queue ID and queue offset."""


class RecordsAhead(NamedTuple):
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

    def split(self, count: int) -> tuple[RecordsAhead, RecordsAhead]:
        """Return the first *count* records and those after them."""
        if not self.record_count:
            return self, self
        units_end, end = count * CQ_UNIT_SIZE, count * (len(self.records) // self.record_count)
        return (
            RecordsAhead(count, self.units[:units_end], self.size, self.records[:end]),
            RecordsAhead(self.record_count - count, self.units[units_end:], self.size, self.records[end:]),
        )


class ReadAhead:
    """Reads records of one size together: verified as rows of an array, each costs a third of its time alone.

    The more of them, the less each costs. So where a pull ended because it had as many messages as it may have, the
    records that were read and not returned are kept, even if there are none. The pull that continues there returns
    them, or reads the next ones together with those of some pulls after it. Consumers that wait for each new message,
    or that start somewhere, read only what they return. Thread-safe.

    Args:
        fewest: Fewer records are read faster one by one.
        max_entries: Positions with records in memory: 64 are 16 MiB, for as many queues that are read at the same time.
    """

    def __init__(self, store: MessageStore, *, fewest: int = 8, max_entries: int = 64) -> None:
        self._store = store
        self._fewest = fewest
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._ahead: dict[_Position, RecordsAhead] = {}  # by the position of the first record; the oldest first
        store.metrics.gauge("server.read_ahead", self.__len__)

    def __len__(self) -> int:
        """Return the number of records that were read and not returned."""
        with self._lock:
            return sum(each.record_count for each in self._ahead.values())

    def read(
        self, topic: str, queue_id: int, queue_offset: int, end: int, max_count: int, max_bytes: int
    ) -> RecordsAhead:
        """Return the records from *queue_offset* on, each as `without_check` returns it.

        Returns none if they have to be read one by one: they are few or large, of several sizes, or not ordinary.

        Args:
            end: Queue offset up to which records may be read.
            max_bytes: Maximum size of the returned records.
        """
        position = (topic, queue_id, queue_offset)
        queue = self._store.consume_queue(topic, queue_id)
        with self._lock:
            ahead = self._ahead.pop(position, None)
        if ahead is None or not ahead.is_in(queue, queue_offset, max_count):
            units = queue.units(queue_offset, min(end - queue_offset, max(max_count, _MAX_UNITS)))
            ahead = self._read(position, units, max_count, continues=ahead is not None)
        count = min(max_count, ahead.record_count, max(max_bytes, 0) // max(ahead.size, 1))
        found, rest = ahead.split(count)
        if rest.record_count or count == max_count:
            self._keep((topic, queue_id, queue_offset + count), rest)
        return found

    def _keep(self, position: _Position, rest: RecordsAhead) -> None:
        with self._lock:
            self._ahead[position] = rest
            if len(self._ahead) > self._max_entries:
                del self._ahead[next(iter(self._ahead))]

    def _read(self, position: _Position, units: NDArray[np.void], max_count: int, *, continues: bool) -> RecordsAhead:
        """Read the records of the first *max_count* units, or of those for several pulls. See `read`."""
        size = int(units["size"][0]) if len(units) else 0
        if size <= SMALLEST_RECORD:
            return RecordsAhead()
        most = min(_MAX_UNITS, _MAX_BYTES // size) // max_count * max_count if continues else 0
        count = count_leading(units["size"][: max(max_count, most)] == size)
        if count < self._fewest:
            return RecordsAhead()
        offsets = units["physical_offset"][:count].tolist()
        data = read_records(self._store.read_bytes, offsets, size)
        if data is None:  # at the end of a file, or deleted by retention
            return RecordsAhead()
        records, count = rows_without_check(data, *position, offsets)
        return RecordsAhead(count, units[:count].tobytes(), size, records)


# --- records as rows --------------------------------------------------------------------------------


def rows_without_check(
    data: bytes, topic: str, queue_id: int, queue_offset: int, physical_offsets: Sequence[int]
) -> tuple[memoryview, int]:
    """Return what `read_without_check` returns for each record in *data*, up to the first that differs in more.

    The records are joined, as in a response. The second value is their number.

    Args:
        data: As many records as there are physical offsets, all of one size, one after the other.
        queue_offset: Of the first record.
    """
    count = len(physical_offsets)
    size = len(data) // count
    first = read_without_check(data[:size], topic, queue_id, queue_offset, physical_offsets[0])
    if first is None or read_size_and_magic(data) != (size, MAGIC_V1):
        return memoryview(b""), 0
    # The first record determines where the fields are. The others are verified if they have the same lengths.
    rows, numbers = np.frombuffer(data, np.uint8).reshape(count, size), np.empty((count, 2), ">i8")
    numbers[:, 0], numbers[:, 1] = queue_offset + np.arange(count), physical_offsets
    body_end, check_at = BODY_AT + HEADER.unpack_from(data)[14], size - CHECK_SIZE
    length_at = body_end + 1 + data[body_end]
    fixed = _fixed_columns(rows, slice(body_end, length_at + 2))
    good = min(
        count_equal(fixed, fixed[:1]),
        count_equal(rows[:, layout.QUEUE_OFFSET_AT : layout.SYS_FLAG_AT], numbers.view(np.uint8)),
        count_verified(rows, body_end, numbers[:, 1]),
    )
    plain = rows[:good, :check_at].copy()
    for columns in (slice(4), slice(length_at, length_at + 2)):  # both lengths are smaller without the check
        plain[:, columns] = np.frombuffer(first[columns], np.uint8)
    return plain.reshape(-1).data, good


def _fixed_columns(rows: Rows, names: slice) -> Rows:
    """Return the columns that must equal those of the first record, which was verified alone.

    Size and magic, queue ID, flags and body length, then *names*: the topic, and the lengths of topic and properties.
    """
    columns = (
        slice(layout.BODY_CRC_AT),
        slice(layout.QUEUE_ID_AT, layout.FLAG_AT),
        slice(layout.SYS_FLAG_AT, layout.BORN_TIMESTAMP_AT),
        slice(layout.BODY_LENGTH_AT, BODY_AT),
        names,
    )
    return np.concatenate([rows[:, each] for each in columns], axis=1)
