"""Which half messages are done: reading the marks, and knowing from which mark on a restart has to read them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import structlog

from mqtemplate.brokers.embedded.transactions.records import follows, is_announced, offsets_in
from mqtemplate.errors import CorruptRecordError
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import REAL_TOPIC, UNIQ_KEY, find_property
from mqtemplate.store import MessageStore
from mqtemplate.topics import OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_MOST_SPANS = 4_096


class OpProgress:
    """From which mark on a restart must read, given the first half message that is not done.

    Keeps spans of marks, each with the highest half message that it names. A transaction that stays open for days holds
    everything behind it back; then spans become longer, so that memory stays small and a restart reads a few more.
    """

    def __init__(self, next_offset: int = 0) -> None:
        self._spans: deque[tuple[int, int]] = deque()  # first mark's queue offset, highest half queue offset
        self._next = next_offset
        self._length = 1  # marks in a span

    def note(self, op_offset: int, highest_half: int) -> None:
        """A mark was written, or read; they come in their order."""
        self._next = op_offset + 1
        if self._spans and op_offset < self._spans[-1][0] + self._length:
            first, highest = self._spans.pop()
            self._spans.append((first, max(highest, highest_half)))
            return
        self._spans.append((op_offset, highest_half))
        if len(self._spans) > _MOST_SPANS:
            self._length *= 2
            old, self._spans = self._spans, deque()
            for first, highest in old:
                self.note(first, highest)
            self._next = op_offset + 1

    def first_needed(self, half_offset: int) -> int:
        """The queue offset of the first mark that may name a half message at *half_offset* or behind it."""
        while self._spans and self._spans[0][1] < half_offset:
            self._spans.popleft()
        if not self._spans:
            self._length = 1
            return self._next
        return self._spans[0][0]


@dataclass(slots=True)
class Marks:
    """What the marks say.

    Attributes:
        done: Queue offsets of half messages that are done.
        torn: Of those whose mark is there, and what should follow it is not.
    """

    progress: OpProgress
    done: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)


def read_marks(store: MessageStore, op_offset: int, half_offset: int) -> Marks:
    """Read the marks from *op_offset* on, as far as they name half messages at *half_offset* or behind it."""
    queue = store.consume_queue(OP_TOPIC, 0)
    at = max(op_offset, queue.min_offset)
    marks = Marks(OpProgress(at))
    while at < queue.max_offset:
        units = queue.unit_tuples(at, 1_024)
        if not units:
            break
        for physical_offset, size, _ in units:
            _read_mark(store, physical_offset, size, at, half_offset, marks)
            at += 1
    return marks


def _read_mark(
    store: MessageStore, physical_offset: int, size: int, op_offset: int, half_offset: int, marks: Marks
) -> None:
    try:
        op = store.read(physical_offset, size)
    except CorruptRecordError as exc:
        _log.error("transaction.mark_lost", physical_offset=physical_offset, reason=exc.reason)
        return
    named = [offset for offset in offsets_in(op) if offset >= half_offset]
    marks.progress.note(op_offset, max(named, default=-1))
    (marks.done if _is_whole(store, op) else marks.torn).update(named)


def _is_whole(store: MessageStore, op: StoredRecord) -> bool:
    """Whether what a mark announces lies behind it."""
    if not is_announced(op):
        return True
    try:
        successor = store.read_at(op.physical_offset + op.total_size)
    except CorruptRecordError:
        return False
    return successor is not None and follows(op, successor)


def was_committed(store: MessageStore, half: StoredRecord) -> bool:
    """Whether the log has the message that a half message became, delivered or waiting, though no mark tells."""
    unique_id = find_property(half.properties_bytes, UNIQ_KEY)
    real_topic = find_property(half.properties_bytes, REAL_TOPIC)
    if unique_id is None or real_topic is None:
        return False
    for topic in (real_topic, SCHEDULE_TOPIC, TIMER_TOPIC):
        for physical_offset in store.index.candidates(topic, unique_id, half.store_timestamp):
            try:
                record = store.read_at(physical_offset)
            except CorruptRecordError:
                continue
            if record is not None and _became(record, half):
                return True
    return False


def _became(record: StoredRecord, half: StoredRecord) -> bool:
    is_commit = record.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT
    return is_commit and record.prepared_transaction_offset == half.physical_offset
