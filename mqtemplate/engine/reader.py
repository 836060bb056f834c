"""Reads of messages: by queue and queue offset, by id, and by key."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from mqtemplate.broker import BrokerLifecycle
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError, OffsetOutOfRangeError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress, MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.record.codec import StoredRecord, pack_host, to_message_ext
from mqtemplate.record.compression import MAX_BODY_BYTES
from mqtemplate.results import PullResult, PullStatus
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import WakeEvent
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.broker")

_NO_LIMIT = 1 << 62
_YOUNG_QUEUE_BYTES = 1 << 30
_UNITS_PER_PAGE = 1_024
_MAX_SCANNED_UNITS = 4_096
"""Most consume queue units that one read with a selector looks at, if it finds no message."""


class QueueReader:
    """Reads messages by queue offset. It returns only messages that are as durable as the flush mode guarantees.

    Args:
        max_body_bytes: Largest body that is decompressed.
    """

    def __init__(self, store: MessageStore, broker_name: str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._store = store
        self._broker_name = broker_name
        self._max_body_bytes = max_body_bytes

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the first queue offset that exists; 0 for a queue without messages, which is not opened for that."""
        return self._queue(queue).min_offset if self._is_stored(queue) else 0

    def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the last queue offset that is visible."""
        if not self._is_stored(queue):
            return 0
        consume_queue = self._queue(queue)
        confirm = self._store.confirm_offset
        if confirm >= self._store.end_offset:
            return consume_queue.max_offset
        return consume_queue.end_before(confirm)

    def read(
        self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector | None
    ) -> tuple[list[MessageExt], int]:
        """Return messages from *queue_offset* on that *selector* matches, and the offset of the next read.

        Raises:
            CorruptRecordError: The first message is corrupt, or its unit refers to another message. A corrupt message
                after valid ones only ends the list.
            DeletedRecordError: Retention deleted the first message during this call; `first_readable_offset` is the
                next offset.
        """
        consume_queue = self._queue(queue)
        messages: list[MessageExt] = []
        at = queue_offset
        if selector is None:
            return messages, self._read_units(queue, at, consume_queue.unit_tuples(at, max_count), None, messages)
        end = at + max(max_count, _MAX_SCANNED_UNITS)
        while at < end and len(messages) < max_count:
            units = consume_queue.unit_tuples(at, min(end - at, _UNITS_PER_PAGE))
            next_offset = self._read_units(queue, at, units, selector, messages, max_count)
            is_complete = next_offset == at + len(units)
            at = next_offset
            if not units or not is_complete:
                break
        return messages, at

    def _read_units(
        self,
        queue: MessageQueue,
        at: int,
        units: Sequence[tuple[int, int, int]],
        selector: Selector | None,
        messages: list[MessageExt],
        max_count: int = _NO_LIMIT,
    ) -> int:
        """Append the messages of *units*, which start at queue offset *at*, and return the offset of the next read."""
        confirm = self._store.confirm_offset
        read, name, max_bytes = self._store.read, self._broker_name, self._max_body_bytes
        topic, queue_id = queue.topic, queue.queue_id
        codes = None if selector is None else selector.codes
        for physical_offset, size, tags_code in units:
            if confirm < physical_offset + size <= self._store.end_offset:  # in the log, but not flushed yet
                break
            if codes is None or tags_code in codes:
                try:
                    record = read(physical_offset, size)
                    # A unit has no checksum: only its record shows whether it refers to the right message.
                    if record.queue_offset != at or record.queue_id != queue_id or record.topic != topic:
                        raise _wrong_unit(queue, at, record)
                    message = to_message_ext(record, name, max_bytes)
                except CorruptRecordError as exc:
                    if messages:
                        break
                    exc.queue_offset = at
                    raise
                if selector is None or selector.matches(message.properties):  # tags may share a hash code
                    messages.append(message)
            at += 1
            if len(messages) == max_count:
                break
        return at

    def pull(self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector | None) -> PullResult:
        """Read messages as `MessageReader.pull` does, without waiting.

        Raises:
            OffsetOutOfRangeError: *queue_offset* is below the minimum or above the maximum of the queue.
        """
        low, high = self.min_offset(queue), self.max_offset(queue)
        if not low <= queue_offset <= high:
            raise _out_of_range(queue, queue_offset, low, high)
        try:
            messages, next_offset = self.read(queue, queue_offset, max_count, selector)
        except DeletedRecordError as exc:
            raise _out_of_range(queue, queue_offset, self.first_readable_offset(queue), high) from exc
        if messages:
            status = PullStatus.FOUND
        else:
            status = PullStatus.NO_MATCHED_MSG if next_offset > queue_offset else PullStatus.NO_NEW_MSG
        return PullResult(status, next_offset, low, high, messages)

    def first_readable_offset(self, queue: MessageQueue) -> int:
        """Return the first queue offset whose record exists, also while retention deletes older ones."""
        return self._queue(queue).first_at("physical_offset", self._store.start_offset)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the first queue offset stored at *timestamp* (epoch ms) or later; the maximum if all are older."""
        consume_queue = self._queue(queue)
        offsets = range(consume_queue.min_offset, self.max_offset(queue))
        time_at = partial(self._store_timestamp, consume_queue)
        first_from = partial(consume_queue.first_at, "physical_offset")
        return self._store.clock_steps.search(offsets, timestamp, self._store.clock.now_ms(), time_at, first_from)

    def _store_timestamp(self, consume_queue: ConsumeQueue, queue_offset: int) -> int:
        try:
            unit = consume_queue.unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size).store_timestamp
        except (DeletedRecordError, IndexError):  # retention deleted it during the search: it is older
            return -_NO_LIMIT
        except CorruptRecordError:
            return _NO_LIMIT  # as if it were newer, so that the search does not skip messages

    def is_young(self, queue: MessageQueue) -> bool:
        """Return True if a queue has its first message, near the end of the log: a new group reads the whole queue.

        RocketMQ: ``ConsumerManageProcessor.queryConsumerOffset`` checks whether the message is still in memory.
        """
        consume_queue = self._queue(queue)
        if consume_queue.min_offset > 0:
            return False
        units = consume_queue.unit_tuples(0, 1)
        return not units or self._store.end_offset - units[0][0] <= _YOUNG_QUEUE_BYTES

    def _is_stored(self, queue: MessageQueue) -> bool:
        return self._store.has_queue(queue.topic, queue.queue_id)

    def _queue(self, queue: MessageQueue) -> ConsumeQueue:
        return self._store.consume_queue(queue.topic, queue.queue_id)


class MessageFinder:
    """Finds messages by id or key. It finds only messages that are as durable as the flush mode guarantees.

    A delayed message is found under the system topic that it is stored in. It is found under its real topic once it is
    delivered.

    Args:
        host: The address in the message ids of this broker.
        max_body_bytes: Largest body that is decompressed.
    """

    def __init__(self, store: MessageStore, broker_name: str, host: HostAddress, max_body_bytes: int) -> None:
        self._store = store
        self._broker_name = broker_name
        self.host = host
        self._max_body_bytes = max_body_bytes
        self._limited_log = LimitedLog(_log, store.clock.now_ms)  # a client may repeat a query

    def by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `MessageReader.message_by_id`. Ids from before a change of the broker's address are found too."""
        host, physical_offset = parse_offset_msg_id(offset_msg_id)
        record = self._store.read_at(physical_offset)
        if pack_host(host) != (pack_host(self.host) if record is None else record.store_host):
            raise MessageError(
                f"message id {offset_msg_id} was created by the broker at {host}; this broker is at {self.host}, so "
                "ask the other one"
            )
        record = self._durable(record)
        return None if record is None else to_message_ext(record, self._broker_name, self._max_body_bytes)

    def by_key(self, query: KeyQuery) -> list[MessageExt]:
        """See `MessageReader.messages_by_key`. A corrupt message is logged with file and offset, and skipped."""
        return [to_message_ext(record, self._broker_name, self._max_body_bytes) for record in self.records(query)]

    def records(self, query: KeyQuery) -> Iterator[StoredRecord]:
        """Return the records of the same messages, each read when it is requested. No body is decompressed."""
        found: set[int] = set()
        for physical_offset in self._store.index.candidates(query.topic, query.key, query.begin_ms, query.last_ms):
            record = None if physical_offset in found else self._read(physical_offset)
            if record is not None and query.matches_record(record):
                found.add(physical_offset)
                yield record
                if len(found) == query.max_count:
                    return

    def _read(self, physical_offset: int) -> StoredRecord | None:
        try:
            record = self._store.read_at(physical_offset)
        except DeletedRecordError:
            return None
        except CorruptRecordError as exc:
            self._limited_log.warning(
                "broker.record_skipped", file=exc.path.name, physical_offset=physical_offset, reason=exc.reason
            )
            return None
        return self._durable(record)

    def _durable(self, record: StoredRecord | None) -> StoredRecord | None:
        """Return *record*; None if a crash could still lose it."""
        if record is None or record.physical_offset + record.total_size > self._store.confirm_offset:
            return None
        return record


class Reader:
    """Reads for the users of this broker.

    Raises:
        BrokerClosedError: The broker is not running.
        ForkedError: The parent process has started it.
    """

    def __init__(
        self, store: MessageStore, queues: QueueReader, finder: MessageFinder, lifecycle: BrokerLifecycle
    ) -> None:
        self._store = store
        self._queues = queues
        self._finder = finder
        self._lifecycle = lifecycle

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        """See `MessageReader.pull`."""
        self._lifecycle.check()
        if selector is not None and selector.selects_all:
            selector = None
        result = self._queues.pull(queue, queue_offset, max_count, selector)
        if result.messages or wait_ms <= 0 or self._store.clock.is_virtual:
            return result
        return self._wait_and_pull(queue, result, max_count, wait_ms, selector)

    def _wait_and_pull(
        self, queue: MessageQueue, result: PullResult, max_count: int, wait_ms: int, selector: Selector | None
    ) -> PullResult:
        wake_event = WakeEvent()
        deadline = time.monotonic() + wait_ms / 1_000
        self._store.watch(queue.topic, wake_event.set)
        try:
            while True:
                result = self._queues.pull(queue, result.next_begin_offset, max_count, selector)
                left = deadline - time.monotonic()
                if result.messages or left <= 0 or not self._lifecycle.is_open:
                    return result
                if result.pull_status is PullStatus.NO_NEW_MSG:  # otherwise more messages may follow the skipped ones
                    wake_event.wait(left)
        finally:
            self._store.unwatch(queue.topic, wake_event.set)

    def min_offset(self, queue: MessageQueue) -> int:
        """See `MessageReader.min_offset`."""
        self._lifecycle.check()
        return self._queues.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        """See `MessageReader.max_offset`."""
        self._lifecycle.check()
        return self._queues.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """See `MessageReader.search_offset`."""
        self._lifecycle.check()
        return self._queues.search_offset(queue, timestamp)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `MessageReader.message_by_id`."""
        self._lifecycle.check()
        return self._finder.by_id(offset_msg_id)

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        """See `MessageReader.messages_by_key`."""
        self._lifecycle.check()
        return self._finder.by_key(KeyQuery(topic, key, max_count, begin_ms, end_ms, unique))


def _out_of_range(queue: MessageQueue, queue_offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    is_deleted = queue_offset < low
    next_offset = low if is_deleted else high
    return OffsetOutOfRangeError(
        f"queue {queue.queue_id} of {queue.topic} has offsets {low}..{high - 1}, got {queue_offset}"
        f"{', which retention deleted' if is_deleted else ''}; continue at {next_offset}",
        next_offset,
    )


def _wrong_unit(queue: MessageQueue, queue_offset: int, record: StoredRecord) -> CorruptRecordError:
    return CorruptRecordError(
        f"consumequeue/{queue.topic}/{queue.queue_id}",
        record.physical_offset,
        f"the unit of queue offset {queue_offset} refers to the message with queue offset {record.queue_offset} of "
        f"queue {record.queue_id} of {record.topic}",
    )
