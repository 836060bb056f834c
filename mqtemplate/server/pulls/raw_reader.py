"""Reader of records as bytes: a pull response contains records as they are stored.

A pull that continues the one before it reads more records than it returns, for the next pulls (`ReadAhead`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqtemplate.engine.reader import QueueReader
from mqtemplate.errors import CorruptRecordError, DeletedRecordError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record, read_without_check, without_check
from mqtemplate.record.columns import Rows, count_equal, count_leading, count_verified
from mqtemplate.record.layout import BODY_AT, CHECK_SIZE, HEADER, MAGIC_V1, SMALLEST_RECORD, read_size_and_magic
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.selectors.tags import Selector
from mqtemplate.store.commit_log import read_records
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import CQ_UNIT_SIZE
from mqtemplate.store.message_store import MessageStore

_MAX_AHEAD = 256
_MAX_AHEAD_BYTES = 256 << 10
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
        """Return the first *count* records, and the others."""
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
    records that were read and not returned are kept, even if the list is empty. The pull that continues there returns
    them, or reads the next ones together with the records for some pulls after it. Consumers that wait for each new
    message, or that start somewhere, read only what they return. Thread-safe.

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
            units = queue.units(queue_offset, min(end - queue_offset, max(max_count, _MAX_AHEAD)))
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
        """Read the records of the first *max_count* units, or of the units for several pulls. See `read`."""
        size = int(units["size"][0]) if len(units) else 0
        if size <= SMALLEST_RECORD:
            return RecordsAhead()
        most = min(_MAX_AHEAD, _MAX_AHEAD_BYTES // size) // max_count * max_count if continues else 0
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
    """Return the columns that must be the same in the first record, which was verified alone.

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


_log = get_logger("mqtemplate.server")

_MAX_UNITS = 4_096
"""Maximum number of consume queue units that one pull reads."""
_MAX_RECORDS = 128
"""Maximum number of records that one pull reads to check them against the selector."""


class RawStatus(Enum):
    """Result of a pull: RocketMQ's name, which a response has as its remark, and the code of the response."""

    FOUND = ResponseCode.SUCCESS
    NO_MATCHED_MSG = ResponseCode.PULL_RETRY_IMMEDIATELY
    NO_NEW_MSG = ResponseCode.PULL_NOT_FOUND
    OFFSET_MOVED = ResponseCode.PULL_OFFSET_MOVED


class RawQuery(NamedTuple):
    """The messages that a pull requests from one queue.

    Attributes:
        max_bytes: Maximum size of all records. The first record is returned whatever its size.
        selector: None selects all messages.
    """

    queue: MessageQueue
    max_count: int
    max_bytes: int
    selector: Selector | None


@dataclass(slots=True)
class RawPull:
    """Records of one queue.

    Attributes:
        next_begin_offset: Queue offset for the next pull.
        min_offset: First queue offset that is still stored.
        max_offset: One past the last readable queue offset.
        count: Number of the records.
        parts: The records; each part has some of them.
    """

    status: RawStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    count: int = 0
    parts: Sequence[bytes | memoryview] = ()

    @property
    def body(self) -> bytes:
        """The records, joined."""
        return b"".join(self.parts)


@dataclass(slots=True, eq=False)
class _Found:
    """The records that a pull has found so far, and the position after them.

    Attributes:
        at: Queue offset after the last record that was read.
        end: Queue offset up to which records may be read.
        count: Number of the records in *parts*, each of which has some of them.
        byte_count: Their size in the log.
    """

    query: RawQuery
    at: int
    end: int
    count: int = 0
    byte_count: int = 0
    parts: list[bytes | memoryview] = field(default_factory=list)

    def add(self, records: bytes | memoryview, count: int, byte_count: int) -> None:
        """Add records that match."""
        self.parts.append(records)
        self.count += count
        self.byte_count += byte_count


class RawReader:
    """Reads what `QueueReader` reads, as bytes instead of messages.

    - Every record is validated. A corrupt record is logged and skipped: a Java client could not decode what follows.
    - The checksum property of the embedded broker is removed. Records of other brokers do not have it, and applications
      would see a property that the producer did not send.
    - One pull reads a limited number of records, however few of them match the selector.

    Args:
        read_ahead: Reads records of one size together. None: each record is read and parsed alone.
    """

    def __init__(self, store: MessageStore, reader: QueueReader, read_ahead: ReadAhead | None) -> None:
        self.store = store
        self.reader = reader
        self._read_ahead = read_ahead
        self._limited_log = LimitedLog(_log, store.clock.now_ms)  # a client may pull a corrupt record again and again
        self._count_lock = threading.Lock()
        self._pulled = store.metrics.counter("server.pulled")

    def pull(self, query: RawQuery, queue_offset: int) -> RawPull:
        """Return the matching messages from *queue_offset* on."""
        queue = query.queue
        low, high = self.reader.min_offset(queue), self.reader.max_offset(queue)
        if not low <= queue_offset <= high:
            return RawPull(RawStatus.OFFSET_MOVED, low if queue_offset < low else high, low, high)
        if queue_offset == high:
            return RawPull(RawStatus.NO_NEW_MSG, queue_offset, low, high)
        found = _Found(query, queue_offset, min(high, queue_offset + _MAX_UNITS))
        self._read(found)
        if not found.count and found.at == queue_offset:  # Retention deleted the record after the check above.
            at = max(self.reader.first_readable_offset(queue), queue_offset)
            return RawPull(RawStatus.OFFSET_MOVED, at, low, high)
        with self._count_lock:
            self._pulled.add(found.count)
        status = RawStatus.FOUND if found.count else RawStatus.NO_MATCHED_MSG
        return RawPull(status, found.at, low, high, found.count, found.parts)

    def _read(self, found: _Found) -> None:
        """Add the matching records."""
        query = found.query
        if query.selector is None and self._read_ahead is not None:
            self._read_together(found, self._read_ahead)
        if found.count < query.max_count:
            self._read_singly(found)

    def _read_together(self, found: _Found, read_ahead: ReadAhead) -> None:
        """Add the first records, as far as they can be read together."""
        query = found.query
        topic, queue_id = query.queue.topic, query.queue.queue_id
        most = min(query.max_count, _MAX_RECORDS, found.end - found.at)
        while found.count < most:
            max_bytes = query.max_bytes - found.byte_count
            part = read_ahead.read(topic, queue_id, found.at, found.end, most - found.count, max_bytes)
            count = part.record_count
            if not count:
                break
            found.add(part.records, count, count * part.size)
            found.at += count

    def _read_singly(self, found: _Found) -> None:
        queue, max_count, max_bytes, selector = found.query
        consume_queue = self.store.consume_queue(queue.topic, queue.queue_id)
        codes = None if selector is None else selector.codes
        read_count = found.count
        while found.at < found.end:
            most = min(found.end - found.at, max_count if codes is None else _MAX_UNITS)
            units = consume_queue.unit_tuples(found.at, most)
            if not units:
                break
            for physical_offset, size, tags_code in units:
                # A smaller unit is a mark without a message. Hash codes of tags may collide: `_find` compares the tags.
                if size > SMALLEST_RECORD and (codes is None or tags_code in codes):
                    if found.count >= max_count or read_count >= _MAX_RECORDS:
                        return
                    if found.byte_count + size > max_bytes and found.count:
                        return
                    data = self.store.read_bytes(physical_offset, size)
                    if not data and physical_offset < self.store.start_offset:  # deleted by retention
                        return
                    read_count += 1
                    record = self._find(data, queue, found.at, physical_offset, size, selector)
                    if record is not None:
                        found.add(record, 1, size)
                found.at += 1

    def _find(
        self, data: bytes, queue: MessageQueue, at: int, physical_offset: int, size: int, selector: Selector | None
    ) -> bytes | None:
        """Return the record in *data*; None if it does not match, or is not the valid record of that queue offset."""
        if self._read_ahead is not None and selector is None:
            plain = read_without_check(data, queue.topic, queue.queue_id, at, physical_offset)
            if plain is not None:
                return plain
        record = _validated(data, queue, at, physical_offset, size, self._limited_log)
        if record is None or not (selector is None or selector.matches(decode_properties(record.properties_bytes))):
            return None
        return without_check(data, record)

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the record that starts at *physical_offset*, or None if no durable record starts there.

        Raises:
            CorruptRecordError: The record is corrupt.
        """
        store = self.store
        if not 0 <= physical_offset < store.confirm_offset:
            return None
        try:
            record = store.read_at(physical_offset)
        except DeletedRecordError:
            return None
        if record is None or physical_offset + record.total_size > store.confirm_offset:
            return None
        return without_check(store.read_bytes(physical_offset, record.total_size), record)

    def store_time(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return when (ms) the message at *queue_offset* was stored, or None if it is not readable."""
        try:
            unit = self.store.consume_queue(queue.topic, queue.queue_id).unit(queue_offset)
            return self.store.read(unit.physical_offset, unit.size).store_timestamp
        except (CorruptRecordError, IndexError):
            return None


def _validated(
    data: bytes, queue: MessageQueue, queue_offset: int, physical_offset: int, size: int, log: LimitedLog
) -> StoredRecord | None:
    """Return the record in *data*, or log it and return None if it is not the record of that queue offset."""
    try:
        record = parse_record(data)
        if (
            record.queue_offset == queue_offset
            and record.physical_offset == physical_offset
            and record.total_size == size
            and record.queue_id == queue.queue_id
            and record.topic == queue.topic
        ):
            return record
        reason = f"it is the record of queue offset {record.queue_offset} of queue {record.queue_id} of {record.topic}"
    except BadRecordError as exc:
        reason = str(exc)
    log.log(
        logging.ERROR,
        "pull.record_corrupt",
        topic=queue.topic,
        queue=queue.queue_id,
        offset=queue_offset,
        physical_offset=physical_offset,
        reason=reason,
    )
    return None
