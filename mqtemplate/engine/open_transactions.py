"""The open transactions: their table in memory, and what the op messages of the log say about them at the start."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mqtemplate.engine.half_messages import follows, half_offsets, has_successor
from mqtemplate.errors import CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import REAL_TOPIC, UNIQ_KEY, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

_MAX_STALE_ENTRIES = 1_000


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
        """Return the time of the next check; it may be that of a stale entry."""
        if len(self._due) > 2 * len(self._by_offset) + _MAX_STALE_ENTRIES:
            self._due = sorted((half.due_ms, half.queue_offset) for half in self._by_offset.values())
        return self._due[0][0] if self._due else None


_log = get_logger("mqtemplate.broker")

_MAX_SPANS = 4_096


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


@dataclass(slots=True)
class OpMessages:
    """Contents of the op messages.

    Attributes:
        done: Queue offsets of half messages that are done.
        incomplete: Queue offsets of half messages whose op message exists, but not the record that must follow it.
    """

    progress: OpProgress
    done: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)


def read_op_messages(store: MessageStore, op_offset: int, half_offset: int) -> OpMessages:
    """Read the op messages from *op_offset* on; half messages before *half_offset* are ignored."""
    queue = store.consume_queue(OP_TOPIC, 0)
    at = max(op_offset, queue.min_offset)
    found = OpMessages(OpProgress(at))
    while units := queue.unit_tuples(at, 1_024):
        for physical_offset, size, _ in units:
            _read_op_message(store, physical_offset, size, at, half_offset, found)
            at += 1
    return found


def _read_op_message(
    store: MessageStore, physical_offset: int, size: int, op_offset: int, half_offset: int, found: OpMessages
) -> None:
    try:
        op = store.read(physical_offset, size)
    except CorruptRecordError as exc:
        _log.error("transaction.op_lost", physical_offset=physical_offset, reason=exc.reason)
        return
    named = [offset for offset in half_offsets(op) if offset >= half_offset]
    found.progress.add(op_offset, max(named, default=-1))
    (found.done if _is_complete(store, op) else found.incomplete).update(named)


def _is_complete(store: MessageStore, op: StoredRecord) -> bool:
    """Return True if the record that must follow an op message exists."""
    if not has_successor(op):
        return True
    try:
        successor = store.read_at(op.physical_offset + op.total_size)
    except CorruptRecordError:
        return False
    return successor is not None and follows(op, successor)


def was_committed(store: MessageStore, half: StoredRecord) -> bool:
    """Return True if the log has the committed message of a half message, also if there is no op message."""
    unique_id = find_property(half.properties_bytes, UNIQ_KEY)
    real_topic = find_property(half.properties_bytes, REAL_TOPIC)
    if unique_id is None or real_topic is None:
        return False
    for topic in (real_topic, SCHEDULE_TOPIC, TIMER_TOPIC):  # a delayed message is in a system topic
        for physical_offset in store.index.candidates(topic, unique_id, half.store_timestamp):
            try:
                record = store.read_at(physical_offset)
            except CorruptRecordError:
                continue
            if record is not None and _is_commit_of(record, half):
                return True
    return False


def _is_commit_of(record: StoredRecord, half: StoredRecord) -> bool:
    is_commit = record.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT
    return is_commit and record.prepared_transaction_offset == half.physical_offset
