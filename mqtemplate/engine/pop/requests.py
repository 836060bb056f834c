"""Requests and results of POP, and the reads of records for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mqtemplate.broker import InFlightMessage
from mqtemplate.engine.pop.progress import InFlight
from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.errors import CorruptRecordError, DeletedRecordError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import MessageQueue, Property
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import TAGS, decode_properties, find_property
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import RETRY_TOPIC_PREFIX

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

_UNITS_PER_PAGE = 1_024
_MAX_KEPT_LENGTH = 64
MAX_SCANNED_UNITS = 4_096
"""Most consume queue units that one pop looks at in a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PopRequest:
    """A pop: a request for messages of a topic, from any of its queues.

    Attributes:
        queue_id: The queue; -1 for all.
        max_bytes: Size of all records together, unless the first one is larger.
        invisible_ms: Time until the messages are delivered again, if they are not acknowledged.
        selector: None for all messages. The others are done for the group.
        is_ordered: Deliver the messages of a message group one pop after the other, in their order.
        attempt_id: Id of an ordered pop that the client may repeat: it gets the same messages again.
        from_last: A group without an offset starts at the last message of a queue; False: at the first one.
        max_attempts: Deliveries of a message before it is a dead letter.
        priority_factor: Share of the pops, in percent, that read a topic with priorities from its last queue on, which
            has the most urgent messages. The others start at a random queue, so that no queue starves.
        client: Client that gets the messages, for operators.
        session: Id of a client whose deliveries are renewed until its session ends; empty for a fixed time.
        awaits_receipt: The session renews no delivery before `PopService.received`, since the client may not get the
            response. Until then the delivery has its *invisible_ms*.
        key_limits: The keys of the messages take turns within these limits, over all clients of the group.
    """

    group: str
    topic: str
    queue_id: int = -1
    max_count: int = 32
    max_bytes: int = 256 << 10
    invisible_ms: int = 60_000
    selector: Selector | None = None
    is_ordered: bool = False
    attempt_id: str = ""
    from_last: bool = True
    max_attempts: int = 17
    priority_factor: int = 100
    client: str = ""
    session: str = ""
    awaits_receipt: bool = False
    key_limits: KeyLimits | None = None


class PoppedMessage(NamedTuple):
    """A message that was delivered. The topic of its record may be a retry topic.

    Attributes:
        attempt: Number of this delivery, from 1 on.
    """

    record: StoredRecord
    handle: ReceiptHandle
    attempt: int


@dataclass(frozen=True, slots=True)
class PopResult:
    """Result of a pop.

    Attributes:
        rest: Number of messages that the group has not read, about.
        is_full: The pop does not wait, since too many do.
    """

    messages: Sequence[PoppedMessage]
    rest: int = 0
    is_full: bool = False


class PopBatch:
    """The messages of one pop so far, from all queues."""

    def __init__(self, request: PopRequest) -> None:
        self.messages: list[PoppedMessage] = []
        self._max_count = request.max_count
        self._max_bytes = request.max_bytes
        self._bytes = 0

    @property
    def room(self) -> int:
        """Number of messages that may follow; 0 if the size is reached."""
        return self._max_count - len(self.messages) if self._bytes < self._max_bytes else 0

    def takes(self, record: StoredRecord) -> bool:
        """Count the size of a record, and return True; return False if it is too large after the others."""
        if self._bytes and self._bytes + record.total_size > self._max_bytes:
            self._bytes = self._max_bytes
            return False
        self._bytes += record.total_size
        return True


class PopInFlight(NamedTuple):
    """Deliveries of a group in one queue.

    Attributes:
        base: The committed offset: all messages before it are done.
        next: Next queue offset to deliver.
        in_flight: Number of messages that are delivered and not done.
        expired: Number of deliveries that expired since the start of the broker.
        oldest_pop_ms: Time of the oldest delivery; None without one.
    """

    queue: MessageQueue
    base: int
    next: int
    in_flight: int
    expired: int
    oldest_pop_ms: int | None


class RecordReader:
    """Reads the records of a queue for pops. A record that cannot be read counts as done, and is logged."""

    def __init__(self, store: MessageStore, log: LimitedLog) -> None:
        self._store = store
        self._log = log

    def record(self, topic: str, queue_id: int, queue_offset: int, selector: Selector | None) -> StoredRecord | None:
        """Return one record; None if it is gone, corrupt or not selected."""
        for _, record in self.records(topic, queue_id, queue_offset, 1, selector):
            return record
        self._log.warning("pop.message_deleted", topic=topic, queue=queue_id, queue_offset=queue_offset)
        return None

    def in_flight(self, found: InFlight) -> InFlightMessage:
        """Return a delivery with its message, for operators."""
        queue, at, delivery, blocked = found
        record = self.record(queue.topic, queue.queue_id, at, None)
        properties = {} if record is None else decode_properties(record.properties_bytes)
        is_retry = queue.topic.startswith(RETRY_TOPIC_PREFIX)
        return InFlightMessage(
            queue,
            at,
            properties.get(Property.RETRY_TOPIC, queue.topic) if is_retry else queue.topic,
            properties.get(Property.UNIQ_KEY, ""),
            properties.get(Property.KEYS, ""),
            delivery.client,
            found.since_ms,
            delivery.visible_ms,
            bool(delivery.session) and delivery.is_received,
            (0 if record is None else record.reconsume_times) + delivery.earlier + 1,
            delivery.group,
            blocked,
        )

    def records(
        self, topic: str, queue_id: int, queue_offset: int, count: int, selector: Selector | None
    ) -> Iterator[tuple[int, StoredRecord | None]]:
        """Yield each queue offset with its record, or None if that is gone, corrupt or not selected.

        Args:
            count: Number of messages that are likely to be read; the iterator may yield more.
        """
        store = self._store
        queue = store.consume_queue(topic, queue_id)
        at, page = queue_offset, count if selector is None else _UNITS_PER_PAGE
        end = at + MAX_SCANNED_UNITS
        codes = None if selector is None else selector.codes
        while at < end:
            units = queue.unit_tuples(at, page)
            confirm = store.confirm_offset
            for physical_offset, size, tags_code in units:
                if confirm < physical_offset + size <= store.end_offset:  # in the log, but not flushed yet
                    return
                record = None
                if codes is None or tags_code in codes:
                    record = self._read(topic, queue_id, at, physical_offset, size)
                    if record is not None and selector is not None and not is_selected(selector, record):
                        record = None
                yield at, record
                at += 1
            if not units:
                return

    def _read(
        self, topic: str, queue_id: int, queue_offset: int, physical_offset: int, size: int
    ) -> StoredRecord | None:
        try:
            record = self._store.read(physical_offset, size)
        except DeletedRecordError:
            self._log.warning("pop.message_deleted", topic=topic, queue=queue_id, queue_offset=queue_offset)
            return None
        except CorruptRecordError as exc:
            self._skip(topic, queue_id, queue_offset, exc.reason)
            return None
        if record.queue_offset != queue_offset or record.queue_id != queue_id or record.topic != topic:
            self._skip(topic, queue_id, queue_offset, "the unit of the consume queue refers to another message")
            return None
        return record

    def _skip(self, topic: str, queue_id: int, queue_offset: int, reason: str) -> None:
        self._log.warning("pop.message_skipped", topic=topic, queue=queue_id, queue_offset=queue_offset, reason=reason)


def bounded(text: str) -> str:
    """Return a text of a client that is kept for each delivery: itself, or its digest if it is long."""
    if len(text) <= _MAX_KEPT_LENGTH:
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_selected(selector: Selector, record: StoredRecord) -> bool:
    """Return True if *selector* selects a record."""
    if isinstance(selector, TagSelector):
        tag = find_property(record.properties_bytes, TAGS)
        return selector.matches({} if tag is None else {Property.TAGS: tag})
    return selector.matches(decode_properties(record.properties_bytes))
