"""What of a queue can be seen, and reading it: the pulling half of an embedded broker."""

from __future__ import annotations

from mqtemplate.errors import CorruptRecordError, OffsetOutOfRangeError
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.record import to_message_ext
from mqtemplate.results import PullResult, PullStatus
from mqtemplate.selector import TagSelector
from mqtemplate.store import ConsumeQueue, MessageStore

__all__ = ["QueueReader"]


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
        return consume_queue.first_at("physical_offset", confirm)

    def read(
        self, queue: MessageQueue, queue_offset: int, max_count: int, selector: TagSelector | None
    ) -> tuple[list[MessageExt], int]:
        """Messages from *queue_offset* on that *selector* wants, and the offset to go on from.

        Raises:
            CorruptRecordError: The first message there is damaged. One that others come before ends the list.
        """
        consume_queue = self._queue(queue)
        messages: list[MessageExt] = []
        at = queue_offset
        if at >= consume_queue.max_offset:
            return messages, at
        confirm = self._store.confirm_offset
        read, name = self._store.read, self._broker_name
        codes = None if selector is None else selector.codes
        for physical_offset, size, tags_code in consume_queue.unit_tuples(at, max_count):
            if physical_offset + size > confirm:
                break
            if codes is None or tags_code in codes:
                try:
                    message = to_message_ext(read(physical_offset, size), name)
                except CorruptRecordError:
                    if messages:
                        break
                    raise
                if selector is None or selector.matches(message.tags):
                    messages.append(message)
            at += 1
        return messages, at

    def pull(self, queue: MessageQueue, queue_offset: int, max_count: int, selector: TagSelector | None) -> PullResult:
        """`read`, as a pull answers it.

        Raises:
            OffsetOutOfRangeError: *queue_offset* is not between the queue's ends.
        """
        low, high = self.min_offset(queue), self.max_offset(queue)
        if not low <= queue_offset <= high:
            raise OffsetOutOfRangeError(
                f"queue {queue.queue_id} of {queue.topic} holds offsets {low}..{high - 1}, asked was {queue_offset}; "
                f"go on from {low if queue_offset < low else high}",
                low if queue_offset < low else high,
            )
        messages, next_offset = self.read(queue, queue_offset, max_count, selector)
        if messages:
            status = PullStatus.FOUND
        else:
            status = PullStatus.NO_MATCHED_MSG if next_offset > queue_offset else PullStatus.NO_NEW_MSG
        return PullResult(status, next_offset, low, high, messages)

    def offset_behind(self, queue: MessageQueue, physical_offset: int) -> int:
        """The first queue offset whose message lies behind the record at *physical_offset*."""
        return self._queue(queue).first_at("physical_offset", physical_offset + 1)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """The first queue offset stored at *timestamp* (epoch ms) or later; the maximum if none is."""
        consume_queue = self._queue(queue)
        low, high = consume_queue.min_offset, self.max_offset(queue)
        while low < high:
            middle = (low + high) // 2
            unit = consume_queue.unit(middle)
            if self._store.read(unit.physical_offset, unit.size).store_timestamp < timestamp:
                low = middle + 1
            else:
                high = middle
        return low

    def bytes_behind(self, queue: MessageQueue, queue_offset: int) -> int:
        """How far behind the log's end a message lies; 0 if there is none at *queue_offset*."""
        consume_queue = self._queue(queue)
        if queue_offset >= consume_queue.max_offset:
            return 0
        return self._store.end_offset - consume_queue.unit(queue_offset).physical_offset

    def _queue(self, queue: MessageQueue) -> ConsumeQueue:
        return self._store.consume_queue(queue.topic, queue.queue_id)
