"""Search for stored messages: by id, by key, by time, from the end of a topic on; positions in lists of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from mqtemplate.broker import Broker, unknown_name
from mqtemplate.errors import CorruptRecordError, MessageError, OffsetOutOfRangeError, UnknownNameError
from mqtemplate.message import SPECIAL_PROPERTIES, MessageExt, MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.results import PullResult
from mqtemplate.selectors.tags import Selector

_PAGE = 32


def read_queue(
    broker: Broker, queue: MessageQueue, start: int, end: int, selector: Selector | None = None
) -> Iterator[MessageExt]:
    """Yield the messages ``start <= queue offset < end``. Deleted and corrupt messages are skipped."""
    at = start
    while at < end:
        result, at = read_page(broker, queue, at, selector)
        yield from (message for message in result.messages if message.queue_offset < end) if result else ()
        if result is not None and not result.messages and at >= result.max_offset:
            return


def read_page(
    broker: Broker, queue: MessageQueue, at: int, selector: Selector | None = None
) -> tuple[PullResult | None, int]:
    """Return the result of a pull and the queue offset of the next one.

    Without a result retention has deleted the message at *at*, or it is corrupt.
    """
    try:
        result = broker.reader.pull(queue, at, _PAGE, 0, selector)
    except OffsetOutOfRangeError as exc:
        return None, max(exc.next_offset, at + 1)
    except CorruptRecordError as exc:
        return None, (at if exc.queue_offset is None else exc.queue_offset) + 1
    return result, max(result.next_begin_offset, at)


@dataclass(frozen=True, slots=True)
class MessageSearch:
    """Finds messages of one broker or cluster."""

    access: BrokerAccess

    def by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """Return the message with an id: of its producer, or of the broker (`SendResult.offset_msg_id`).

        Args:
            topic: The topic of the message. Without it, an id of a producer is looked up in all topics.

        Raises:
            UnknownNameError: No message has the id, or it is in another topic.
        """
        topics = [topic] if topic is not None else self.access.admin.readable_topics()
        for name in topics:
            found = self.access.broker.reader.messages_by_key(name, msg_id, 1, unique=True)
            if found:
                return found[0]
        message = self._by_offset_id(msg_id)
        if message is None or topic not in (None, message.topic):
            place = "any topic" if topic is None else f"topic {topic!r}"
            raise UnknownNameError(f"message {msg_id!r} is not in {place}; it was deleted, or the id is another one")
        return message

    def _by_offset_id(self, msg_id: str) -> MessageExt | None:
        try:
            return self.access.broker.reader.message_by_id(msg_id)
        except MessageError:  # an id of a producer, or of another broker
            return None

    def by_key(
        self, topic: str, key: str, max_count: int = 64, begin_ms: int = 0, end_ms: int | None = None
    ) -> list[MessageExt]:
        """Return the messages of *topic* with a key, the newest first.

        Raises:
            UnknownNameError: There is no such topic.
        """
        if topic not in (names := self.access.admin.topic_names()):
            raise unknown_name("topic", topic, names)
        return self.access.broker.reader.messages_by_key(topic, key, max_count, begin_ms=begin_ms, end_ms=end_ms)

    def by_time(
        self, topic: str, begin_ms: int = 0, end_ms: int | None = None, selector: Selector | None = None
    ) -> Iterator[MessageExt]:
        """Yield the messages of *topic* that were stored from *begin_ms* to *end_ms* (epoch ms), the oldest first.

        Raises:
            UnknownNameError: There is no such topic.
        """
        queues = []
        for span in self.access.admin.queue_spans(topic):
            start = self.access.broker.reader.search_offset(span.queue, begin_ms) if begin_ms > 0 else span.min_offset
            queues.append(read_queue(self.access.broker, span.queue, start, span.max_offset, selector))
        for message in heapq.merge(*queues, key=_stored):
            if end_ms is not None and message.store_timestamp > end_ms:
                return
            yield message

    def newest(self, topic: str, count: int, selector: Selector | None = None) -> list[MessageExt]:
        """Return the last *count* messages of *topic*, the oldest first. Filtered ones count for each queue."""
        found: list[MessageExt] = []
        for span in self.access.admin.queue_spans(topic):
            start = max(span.min_offset, span.max_offset - count)
            found += read_queue(self.access.broker, span.queue, start, span.max_offset, selector)
        found.sort(key=_stored)
        return found[-count:] if count else []


@dataclass(slots=True)
class Tail:
    """Reader of a topic that continues with new messages. It joins no group, so it takes no message from a consumer.

    Args:
        positions: Queue offset of the next message of each queue; a queue that is missing starts at its first one.
    """

    access: BrokerAccess
    topic: str
    selector: Selector | None = None
    positions: dict[MessageQueue, int] = field(default_factory=dict)

    @classmethod
    def from_end(cls, access: BrokerAccess, topic: str, selector: Selector | None = None) -> Tail:
        """Return a reader of messages that are stored from now on.

        Raises:
            UnknownNameError: There is no such topic.
        """
        return cls(access, topic, selector, {span.queue: span.max_offset for span in access.admin.queue_spans(topic)})

    @classmethod
    def from_time(cls, access: BrokerAccess, topic: str, time_ms: int, selector: Selector | None = None) -> Tail:
        """Return a reader of messages that were stored at *time_ms* (epoch ms) or later."""
        search = access.broker.reader.search_offset
        return cls(
            access,
            topic,
            selector,
            {span.queue: search(span.queue, time_ms) for span in access.admin.queue_spans(topic)},
        )

    def end_of(self, message: MessageExt) -> int:
        """Return the position of the queue of *message*: later messages come from `poll`."""
        return self.positions.get(message.message_queue, 0)

    def poll(self) -> list[MessageExt]:
        """Return the messages that were stored since the last call, by store time. It does not wait."""
        self.access.refresh()
        found: list[MessageExt] = []
        for span in self.access.admin.queue_spans(self.topic):
            at = self.positions.get(span.queue, span.min_offset)
            found += read_queue(self.access.broker, span.queue, at, span.max_offset, self.selector)
            self.positions[span.queue] = max(at, span.max_offset)
        found.sort(key=_stored)
        return found


def _stored(message: MessageExt) -> tuple[int, int]:
    """Return the sort key of the order in which messages were stored."""
    return message.store_timestamp, message.physical_offset


_NOT_SENT_AGAIN = SPECIAL_PROPERTIES.union(
    {
        Property.ORIGIN_GROUP,
        Property.RECONSUME_TIME,
        Property.MAX_RECONSUME_TIMES,
        Property.CONSUME_START_TIME,
        Property.TRANSACTION_PREPARED,
        Property.PRODUCER_GROUP,
        Property.MSG_REGION,
        Property.TRACE_ON,
        Property.MIN_OFFSET,
        Property.MAX_OFFSET,
        Property.CLUSTER,
    }
)
"""Properties of one delivery, of a delay, or that the broker sets again."""


def sent_again_properties(message: MessageExt) -> dict[str, str]:
    """Return the properties of a stored message that a copy of it keeps: id, keys, tags, and those of applications."""
    return {name: value for name, value in message.properties.items() if name not in _NOT_SENT_AGAIN}


def property_differences(
    before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the properties that differ: name -> values on both sides, None where it is missing."""
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


T = TypeVar("T")


def cursor_of(message: MessageExt) -> str:
    """Return the cursor of the page after *message*."""
    return f"{message.store_timestamp}-{message.physical_offset}"


def parse_cursor(text: str | None) -> tuple[int, int]:
    """Return store time and physical offset of a cursor; (0, -1) for the first page.

    Raises:
        MessageError: The text is not a cursor.
    """
    if text is None:
        return 0, -1
    store_ms, offset = map(parse_number, text.partition("-")[::2])
    if store_ms is None or offset is None:
        raise MessageError(f"{text!r:.64} is not a cursor; go back to the first page")
    return store_ms, offset


def is_after(message: MessageExt, cursor: tuple[int, int]) -> bool:
    """Return True if a message is after the position of a cursor."""
    return (message.store_timestamp, message.physical_offset) > cursor


def first_of(items: Iterable[T], count: int) -> tuple[list[T], bool]:
    """Return the first items, and True if there are more."""
    found = list(islice(items, count + 1))
    return found[:count], len(found) > count
