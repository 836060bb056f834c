"""Reading of op messages at the start, and the offset from which the next start must read them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mqtemplate.engine.half_messages import follows, half_offsets, has_successor
from mqtemplate.errors import CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import REAL_TOPIC, UNIQ_KEY, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

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
