"""What of a queue can be seen, and reading it: the pulling half of an embedded broker."""

from __future__ import annotations

from collections.abc import Sequence

from mqtemplate.errors import CorruptRecordError, DeletedRecordError, OffsetOutOfRangeError
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.results import PullResult, PullStatus
from mqtemplate.selectors.tags import Selector
from mqtemplate.store import ConsumeQueue, MessageStore

_NO_LIMIT = 1 << 62
_UNITS_AT_ONCE = 1_024
_SCANNED_UNITS = 4_096
"""Where a selector leaves much out, one read goes past so many units at most."""


class QueueReader:
    """Reads messages by queue and offset; nothing is seen before it is as safe as the flush mode promises."""

    def __init__(self, store: MessageStore, broker_name: str) -> None:
        self._store = store
        self._broker_name = broker_name

    def min_offset(self, queue: MessageQueue) -> int:
        return self._queue(queue).min_offset

    def max_offset(self, queue: MessageQueue) -> int:
        """One past the last message that can be seen."""
        consume_queue = self._queue(queue)
        confirm = self._store.confirm_offset
        if confirm >= self._store.end_offset:
            return consume_queue.max_offset
        return consume_queue.end_before(confirm)

    def read(
        self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector | None
    ) -> tuple[list[MessageExt], int]:
        """Messages from *queue_offset* on that *selector* matches, and the offset to go on from.

        Raises:
            CorruptRecordError: The first message there is damaged, or its unit is, so that it leads elsewhere. One that
                others come before ends the list.
            DeletedRecordError: The first message there was deleted at this moment; go on at `first_readable_offset`.
        """
        consume_queue = self._queue(queue)
        messages: list[MessageExt] = []
        at = queue_offset
        if selector is None:
            return messages, self._read_units(queue, at, consume_queue.unit_tuples(at, max_count), None, messages)
        end = at + max(max_count, _SCANNED_UNITS)
        while at < end and len(messages) < max_count:
            units = consume_queue.unit_tuples(at, min(end - at, _UNITS_AT_ONCE))
            read_to = self._read_units(queue, at, units, selector, messages, max_count)
            has_stopped = read_to < at + len(units)
            at = read_to
            if has_stopped or not units:
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
        """Add the messages of *units*, which begin at queue offset *at*, to *messages*; gives where to go on."""
        confirm = self._store.confirm_offset
        read, name = self._store.read, self._broker_name
        topic, queue_id = queue.topic, queue.queue_id
        codes = None if selector is None else selector.codes
        for physical_offset, size, tags_code in units:
            if confirm < physical_offset + size <= self._store.end_offset:
                break
            if codes is None or tags_code in codes:
                try:
                    record = read(physical_offset, size)
                    if record.queue_offset != at or record.queue_id != queue_id or record.topic != topic:
                        raise _misplaced(queue, at, record)
                    message = to_message_ext(record, name)
                except CorruptRecordError as exc:
                    if messages:
                        break
                    exc.queue_offset = at
                    raise
                if selector is None or selector.matches(message.properties):
                    messages.append(message)
            at += 1
            if len(messages) == max_count:
                break
        return at

    def pull(self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector | None) -> PullResult:
        """`read`, as a pull answers it.

        Raises:
            OffsetOutOfRangeError: *queue_offset* is not between the queue's ends.
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
        """The first queue offset whose message the log still has, even while older ones are being deleted."""
        return self._queue(queue).first_at("physical_offset", self._store.start_offset)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """The first queue offset stored at *timestamp* (epoch ms) or later; the maximum if none is."""
        consume_queue = self._queue(queue)
        low, high = consume_queue.min_offset, self.max_offset(queue)
        while low < high:
            middle = (low + high) // 2
            if self._is_older(consume_queue, middle, timestamp):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_older(self, consume_queue: ConsumeQueue, queue_offset: int, timestamp: int) -> bool:
        try:
            unit = consume_queue.unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size).store_timestamp < timestamp
        except (DeletedRecordError, IndexError):  # deleted since the search began
            return True
        except CorruptRecordError:
            return False  # then none that was asked for is passed over

    def bytes_after(self, queue: MessageQueue, queue_offset: int) -> int:
        """How far behind the log's end a message lies; 0 if there is none at *queue_offset*."""
        units = self._queue(queue).unit_tuples(queue_offset, 1)
        return self._store.end_offset - units[0][0] if units else 0

    def _queue(self, queue: MessageQueue) -> ConsumeQueue:
        return self._store.consume_queue(queue.topic, queue.queue_id)


def _out_of_range(queue: MessageQueue, queue_offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    is_deleted = queue_offset < low
    next_offset = low if is_deleted else high
    return OffsetOutOfRangeError(
        f"queue {queue.queue_id} of {queue.topic} holds offsets {low}..{high - 1}, asked was {queue_offset}"
        f"{', which was deleted by retention' if is_deleted else ''}; go on from {next_offset}",
        next_offset,
    )


def _misplaced(queue: MessageQueue, queue_offset: int, record: StoredRecord) -> CorruptRecordError:
    return CorruptRecordError(
        f"consumequeue/{queue.topic}/{queue.queue_id}",
        record.physical_offset,
        f"the unit of queue offset {queue_offset} points at the message with queue offset {record.queue_offset} of "
        f"queue {record.queue_id} of {record.topic}",
    )
