"""Reader of records as bytes: a pull response contains records as they are stored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mqtemplate.engine.reader import QueueReader
from mqtemplate.errors import CorruptRecordError, DeletedRecordError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record, read_without_check, without_check
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.server.pulls.read_ahead import ReadAhead
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.server")

_MAX_UNITS = 4_096
"""Maximum number of consume queue units that one pull reads."""
_MAX_RECORDS = 128
"""Maximum number of records that one pull reads to check them against the selector."""


_MASTER_ID = 0


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

    def response_to(self, request: RemotingCommand) -> RemotingCommand:
        """Return the response to a pull. Java's consumers fail if one of its four numbers is missing."""
        header = PullMessageResponseHeader(
            suggest_which_broker_id=_MASTER_ID,
            next_begin_offset=self.next_begin_offset,
            min_offset=self.min_offset,
            max_offset=self.max_offset,
        )
        return request.response(self.status.value, header, self.body, remark=self.status.name)


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
    - The checksum property of the embedded broker is removed. Records of other brokers have none, and applications
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
                # A smaller unit is a mark without a message. Hash codes of tags may collide, so `_matches` follows.
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
        if self._read_ahead is not None and (selector is None or _selects_all(selector)):
            plain = read_without_check(data, queue.topic, queue.queue_id, at, physical_offset)
            if plain is not None:
                return plain
        record = _validated(data, queue, at, physical_offset, size, self._limited_log)
        if record is None or not (selector is None or _matches(selector, record)):
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
        """Return when (ms) the message at *queue_offset* was stored, or None if there is no readable message."""
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


def _selects_all(selector: Selector) -> bool:
    return isinstance(selector, TagSelector) and selector.selects_all


def _matches(selector: Selector, record: StoredRecord) -> bool:
    return _selects_all(selector) or selector.matches(decode_properties(record.properties_bytes))
