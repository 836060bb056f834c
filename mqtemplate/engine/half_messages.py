"""Half messages: the records of transactions, and the table of the open ones in memory.

The records have RocketMQ's form, so RocketMQ can continue with our store directory, and we with RocketMQ's. A half
message is in ``RMQ_SYS_TRANS_HALF_TOPIC``, with its real topic as a property. An op message is in
``RMQ_SYS_TRANS_OP_HALF_TOPIC``. Its body has the queue offsets of half messages that are done, separated by commas.

There is one addition. The op message and the record that replaces the half message are one append, the op message
first. A process that is killed may leave only the op message. So the op message has, in ``__FOLLOWED``, the id of the
message that must be next in the log.

Source: ``TransactionalMessageBridge``, ``TransactionalMessageUtil``, ``EndTransactionProcessor``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.delay.copies import copy_of
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import tags_code
from mqtemplate.message import Property, copy_properties, create_unique_id
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import (
    TAGS,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
    find_property,
)
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

_log = get_logger("mqtemplate.broker")

TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
"""Consumer group under which RocketMQ stores the progress in both topics."""

_REMOVE_TAG = "d"
_MAX_STALE_ENTRIES = 1_000
_MAX_SPANS = 4_096


class CheckProperties(NamedTuple):
    """Properties of a half message that its transaction checks use.

    Attributes:
        checks: Number of checks that were sent.
        immunity_ms: Age before which there is no check; 0 for the setting of the broker.
        first_offset: Queue offset that the half message was stored at first; None if it was not stored again.
    """

    checks: int
    immunity_ms: int
    first_offset: int | None


def half_properties(properties: Mapping[str, str], unique_id: str, group: str) -> dict[str, str]:
    """Return the properties of a half message, without its real topic and queue."""
    half = {
        **properties,
        Property.UNIQ_KEY: unique_id,
        Property.TRANSACTION_PREPARED: "true",
        Property.PRODUCER_GROUP: group,
        Property.TRANSACTION_ID: unique_id,
    }
    for name in (Property.TRANSACTION_CHECK_TIMES, Property.TRANSACTION_PREPARED_QUEUE_OFFSET):
        half.pop(name, None)
    return {name: value for name, value in half.items() if name and value}


def committed_properties(half: StoredRecord) -> dict[str, str]:
    """Return the properties that a half message is delivered with."""
    return copy_properties(
        decode_properties(half.properties_bytes),
        Property.REAL_TOPIC,
        Property.REAL_QID,
        Property.TRANSACTION_PREPARED_QUEUE_OFFSET,
    )


def check_properties(properties: bytes) -> CheckProperties:
    """Return the check properties among the encoded properties of a half message; an invalid number is ignored."""

    def number(name: str) -> int | None:
        found = parse_number(find_property(properties, name.encode()))
        return None if found is None or found < 0 else found

    return CheckProperties(
        number(Property.TRANSACTION_CHECK_TIMES) or 0,
        (number(Property.CHECK_IMMUNITY_TIME) or 0) * 1_000,
        number(Property.TRANSACTION_PREPARED_QUEUE_OFFSET),
    )


# --- op messages ------------------------------------------------------------------------------------


def op_draft(half_offset: int, successor: RecordDraft | None, now_ms: int) -> RecordDraft:
    """Return the op message for one half message that is done.

    Args:
        successor: The record that replaces the half message; it is stored right after the op message.
    """
    properties = {Property.TAGS: _REMOVE_TAG, Property.UNIQ_KEY: create_unique_id()}
    if successor is not None and (unique_id := find_property(successor.properties, UNIQ_KEY)) is not None:
        properties[Property.FOLLOWED] = unique_id
    body = b"%d," % half_offset
    return RecordDraft(
        OP_TOPIC, 0, body, encode_properties(properties), tags_code=tags_code(_REMOVE_TAG), born_timestamp=now_ms
    )


def is_op_message(record: StoredRecord) -> bool:
    """Return True for an op message. Another record of the op topic marks no half message as done."""
    return find_property(record.properties_bytes, TAGS) == _REMOVE_TAG


# --- records that replace a half message ------------------------------------------------------------


def renewed_draft(half: StoredRecord, checks: int) -> RecordDraft:
    """Return the half message with another number of checks. It is stored at the end of the half topic."""
    properties = decode_properties(half.properties_bytes) | {Property.TRANSACTION_CHECK_TIMES: str(checks)}
    properties.setdefault(Property.TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
    return copy_half(half, HALF_TOPIC, 0, encode_properties(properties))


def discarded_draft(half: StoredRecord) -> RecordDraft:
    """Return the half message for ``TRANS_CHECK_MAX_TIME_TOPIC``."""
    return copy_half(half, TRANS_CHECK_MAX_TIME_TOPIC, 0, encode_properties(decode_properties(half.properties_bytes)))


def copy_half(
    half: StoredRecord, topic: str, queue_id: int, properties: bytes, transaction_flag: int = 0
) -> RecordDraft:
    """Return a record with the body of a half message, which names the half message by its physical offset."""
    draft = copy_of(half, topic, queue_id, properties)
    draft.sys_flag |= transaction_flag
    draft.prepared_transaction_offset = half.physical_offset
    return draft


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """A half message whose transaction has no end.

    Attributes:
        due_ms: Time of the next transaction check, of `Clock.steady_ms`.
        earlier: Queue offsets at which the half message was stored before.
    """

    queue_offset: int
    physical_offset: int
    size: int
    due_ms: int
    earlier: tuple[int, ...] = ()


class OpenTransactions:
    """The open transactions, by the queue offset of their half message. Not thread-safe.

    - A half message that was stored again is also found by its earlier queue offsets: producers may know only those.
    - The heap of due times may have stale entries; an entry counts only if it has the due time of the transaction.
    """

    def __init__(self) -> None:
        self._by_offset: dict[int, OpenTransaction] = {}  # ascending
        self._by_earlier_offset: dict[int, OpenTransaction] = {}
        self._due: list[tuple[int, int]] = []  # due time, queue offset
        self._deferred: set[int] = set()

    def __len__(self) -> int:
        """Return the number of open transactions."""
        return len(self._by_offset)

    def __iter__(self) -> Iterator[int]:
        """Return the queue offsets, ascending."""
        return iter(self._by_offset)

    def add(self, half: OpenTransaction) -> None:
        """Add a transaction. Its queue offset must be above all others."""
        self._by_offset[half.queue_offset] = half
        self._by_earlier_offset.update(dict.fromkeys(half.earlier, half))
        heapq.heappush(self._due, (half.due_ms, half.queue_offset))

    def find(self, queue_offset: int) -> OpenTransaction | None:
        """Return the transaction that has, or had, this queue offset; None if it has ended."""
        return self._by_offset.get(queue_offset) or self._by_earlier_offset.get(queue_offset)

    def remove(self, half: OpenTransaction) -> None:
        """Remove a transaction that has ended."""
        del self._by_offset[half.queue_offset]
        self._deferred.discard(half.queue_offset)
        for offset in half.earlier:
            del self._by_earlier_offset[offset]

    def schedule(self, half: OpenTransaction, due_ms: int) -> None:
        """Set the time of the next check."""
        half.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, half.queue_offset))

    def defer(self, half: OpenTransaction, due_ms: int) -> None:
        """Set the time of the next check, unless a producer of the group connects before."""
        self.schedule(half, due_ms)
        self._deferred.add(half.queue_offset)

    def schedule_deferred(self, now_ms: int) -> None:
        """Make all deferred transactions due now."""
        for queue_offset in self._deferred:
            self.schedule(self._by_offset[queue_offset], now_ms)
        self._deferred.clear()

    def take_due(self, now_ms: int) -> OpenTransaction | None:
        """Remove and return the next due entry; None if no check is due."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, queue_offset = heapq.heappop(self._due)
            half = self._by_offset.get(queue_offset)
            if half is not None and half.due_ms == due_ms:
                return half
        return None

    def next_due_ms(self) -> int | None:
        """Return the time of the next check; it may belong to a stale entry."""
        if len(self._due) > 2 * len(self._by_offset) + _MAX_STALE_ENTRIES:
            self._due = sorted((half.due_ms, half.queue_offset) for half in self._by_offset.values())
        return self._due[0][0] if self._due else None


class OpProgress:
    """The op messages that a start must read, given the first half message that is not done.

    It stores spans of op messages, each with the highest half message that the span names. A transaction that is open
    for days keeps all later op messages needed. Then spans become longer: memory is bounded, and a start reads a few
    more op messages.
    """

    def __init__(self, next_offset: int = 0) -> None:
        self._spans: deque[tuple[int, int]] = deque()  # queue offset of the first op message, highest half offset
        self._next = next_offset
        self._span_length = 1  # in op messages

    def add(self, op_offset: int, highest_half: int) -> None:
        """Add an op message, in the order of their queue offsets."""
        self._next = op_offset + 1
        if self._spans and op_offset < self._spans[-1][0] + self._span_length:
            first, highest = self._spans.pop()
            self._spans.append((first, max(highest, highest_half)))
            return
        self._spans.append((op_offset, highest_half))
        if len(self._spans) > _MAX_SPANS:
            self._span_length *= 2
            spans, self._spans = self._spans, deque()
            for first, highest in spans:
                self.add(first, highest)
            self._next = op_offset + 1

    def first_needed(self, half_offset: int) -> int:
        """Return the queue offset of the first op message that may name a half message at *half_offset* or later."""
        while self._spans and self._spans[0][1] < half_offset:
            self._spans.popleft()
        if not self._spans:
            self._span_length = 1
            return self._next
        return self._spans[0][0]
