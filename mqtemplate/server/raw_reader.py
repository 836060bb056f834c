"""Reading for the server: records as bytes, as a pull's answer carries them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

import structlog

from mqtemplate.brokers.embedded.queue_reader import QueueReader
from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import BadRecordError, StoredRecord, parse_record, without_check
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.record.properties import decode_properties
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.store import MessageStore

_log = structlog.stdlib.get_logger("mqtemplate.server")

_MOST_UNITS = 4_096
"""So many units of the consume queue one pull looks at."""
_MOST_RECORDS = 128
"""So many records one pull reads to see whether they are wanted."""


class RawStatus(Enum):
    """What a pull came to."""

    FOUND = "FOUND"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    NO_NEW_MSG = "NO_NEW_MSG"
    OFFSET_MOVED = "OFFSET_MOVED"


@dataclass(slots=True)
class RawPull:
    """Records of one queue.

    Attributes:
        next_begin_offset: Where to pull next.
        min_offset: The first queue offset that is still there.
        max_offset: One past the last that can be seen.
        records: Their bytes, one each.
    """

    status: RawStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    records: list[bytes] = field(default_factory=list)


class RawReader:
    """Reads as `QueueReader` does, without making messages of the bytes.

    - Every record is checked; one that is damaged is logged and passed over, since its bytes would spoil the whole
      answer for its reader.
    - The check that our records end with stays here: other brokers' records have none, and applications would see a
      property that they did not send.
    - One pull looks at a limited number of records, however few of them are wanted.
    """

    def __init__(self, store: MessageStore, reader: QueueReader) -> None:
        self._store = store
        self._reader = reader
        self._count_lock = threading.Lock()
        self._pulled = store.metrics.counter("server.pulled")

    def pull(
        self, queue: MessageQueue, queue_offset: int, max_count: int, max_bytes: int, selector: Selector | None
    ) -> RawPull:
        """What a pull finds now.

        Args:
            max_bytes: No further record is added once there are so many.
            selector: None for all.
        """
        low, high = self._reader.min_offset(queue), self._reader.max_offset(queue)
        if not low <= queue_offset <= high:
            return RawPull(RawStatus.OFFSET_MOVED, low if queue_offset < low else high, low, high)
        if queue_offset == high:
            return RawPull(RawStatus.NO_NEW_MSG, queue_offset, low, high)
        records, at = self._read(queue, queue_offset, high, max_count, max_bytes, selector)
        if not records and at == queue_offset:  # deleted at this moment
            return RawPull(RawStatus.OFFSET_MOVED, max(self._reader.first_readable_offset(queue), at), low, high)
        with self._count_lock:
            self._pulled.add(len(records))
        return RawPull(RawStatus.FOUND if records else RawStatus.NO_MATCHED_MSG, at, low, high, records)

    def _read(
        self,
        queue: MessageQueue,
        queue_offset: int,
        end: int,
        max_count: int,
        max_bytes: int,
        selector: Selector | None,
    ) -> tuple[list[bytes], int]:
        """Records from *queue_offset* on, and the offset behind the last one looked at."""
        consume_queue = self._store.consume_queue(queue.topic, queue.queue_id)
        codes = None if selector is None else selector.codes
        records: list[bytes] = []
        at, byte_count, looked_at = queue_offset, 0, 0
        end = min(end, queue_offset + _MOST_UNITS)
        while at < end:
            units = consume_queue.unit_tuples(at, min(end - at, max_count if codes is None else _MOST_UNITS))
            if not units:
                break
            for physical_offset, size, tags_code in units:
                if size > SMALLEST_RECORD and (codes is None or tags_code in codes):  # else a mark, and no message
                    if len(records) >= max_count or looked_at >= _MOST_RECORDS:
                        return records, at
                    if byte_count + size > max_bytes and records:
                        return records, at
                    data = self._store.read_bytes(physical_offset, size)
                    if not data and physical_offset < self._store.start_offset:
                        return records, at
                    looked_at += 1
                    record = _check(data, queue, at, physical_offset, size)
                    if record is not None and (selector is None or _wants(selector, record)):
                        records.append(without_check(data, record))
                        byte_count += size
                at += 1
        return records, at

    def store_time(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """When (ms) the message at *queue_offset* was stored; None where none is, or none that can be read."""
        try:
            unit = self._store.consume_queue(queue.topic, queue.queue_id).unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size).store_timestamp
        except (CorruptRecordError, IndexError):
            return None


def _check(data: bytes, queue: MessageQueue, queue_offset: int, physical_offset: int, size: int) -> StoredRecord | None:
    """The record in *data*; None, and a word in the log, if it is not the one that the queue means."""
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
        reason = (
            f"it is the message with queue offset {record.queue_offset} of queue {record.queue_id} of {record.topic}"
        )
    except BadRecordError as exc:
        reason = str(exc)
    _log.error(
        "pull.record_damaged",
        topic=queue.topic,
        queue=queue.queue_id,
        offset=queue_offset,
        physical_offset=physical_offset,
        reason=reason,
    )
    return None


def _wants(selector: Selector, record: StoredRecord) -> bool:
    if isinstance(selector, TagSelector) and selector.selects_all:
        return True
    return selector.matches(decode_properties(record.properties_bytes))
