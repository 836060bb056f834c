"""Transactions of a broker over a store: half messages that wait for their end, and asking for it where it never comes.

Source: ``TransactionalMessageServiceImpl``, ``EndTransactionProcessor``. Better here: a half message has one end, also
across a crash, also if the producer answers late and twice; and a question that could be put to nobody does not count.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from mqtemplate.brokers.embedded.draft import DraftMaker
from mqtemplate.brokers.embedded.settings import TransactionLimits
from mqtemplate.brokers.embedded.transactions.progress import OpProgress, read_marks, was_committed
from mqtemplate.brokers.embedded.transactions.records import (
    CHECK_MAX_TOPIC,
    TRANSACTION_GROUP,
    discarded_draft,
    half_draft,
    half_times,
    op_draft,
    renewed_draft,
)
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError, StoreError
from mqtemplate.message import Property
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import PRODUCER_GROUP, REAL_QID, REAL_TOPIC, UNIQ_KEY, find_property
from mqtemplate.results import TransactionState
from mqtemplate.store import ConsumerOffsets, MessageStore, PutResult, TopicTable
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_WHICH_MESSAGE = tuple(name.encode() for name in (Property.UNIQ_KEY, Property.REAL_TOPIC, Property.PRODUCER_GROUP))
_PROGRESS_MS = 1_000
_QUESTIONS_A_STEP = 100
_MOST_PAST_DUES = 1_000


class TransactionCheck(NamedTuple):
    """A question to a producer group.

    Attributes:
        half: The half message as it is stored now; its queue offset and its physical offset name it in the answer.
        topic: The topic it is for.
        queue_id: The queue there.
    """

    group: str
    topic: str
    queue_id: int
    half: StoredRecord


class TransactionChecker(Protocol):
    """Somebody who can ask producers."""

    def can_ask(self, group: str) -> bool:
        """Whether anybody of *group* is there."""

    def ask(self, check: TransactionCheck) -> None:
        """Ask, and do not wait: the answer comes to `TransactionService.end`, or never."""


class TransactionEnd(NamedTuple):
    """What an end wrote.

    Attributes:
        physical_end: What lies before it is to be flushed, and the end lasts.
        topics: Whose readers are to be woken then.
    """

    physical_end: int
    topics: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Half:
    """A half message that is open.

    Attributes:
        due_ms: When it is asked for next.
        earlier: Queue offsets that it had before it was renewed.
    """

    queue_offset: int
    physical_offset: int
    size: int
    due_ms: int
    earlier: tuple[int, ...] = ()


class TransactionService:
    """Keeps half messages, ends them, asks for those that were not ended. A `Service`.

    - The log is the truth. How far both topics are done is kept with the consumers' offsets, as RocketMQ does; it only
      saves reading, and is never ahead of what is durable.
    - An end is one append: the mark that the half message is done, and what takes its place.
    - Memory holds some hundred bytes for each transaction that is open.

    Args:
        drafts: Makes the message that is delivered; its delay counts from there.

    Attributes:
        checkers: Who can ask producers; the first that knows somebody of the group does.
    """

    name = "broker.transactions"

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        drafts: DraftMaker,
        limits: TransactionLimits,
    ) -> None:
        self.checkers: list[TransactionChecker] = []
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._drafts = drafts
        self._limits = limits
        self._lock = threading.Lock()
        self._open: dict[int, _Half] = {}  # by queue offset, ascending
        self._renewed: dict[int, _Half] = {}  # by each queue offset that it had before
        self._due: list[tuple[int, int]] = []  # when, and the queue offset; one that does not agree any more is passed
        self._unasked: set[int] = set()
        self._end_offset = 0  # one past the last half message
        self._ops = OpProgress()
        self._progress_due_ms: int | None = None
        self._next_step_ms: int | None = None
        self._wake: Callable[[], None] = lambda: None
        metrics = store.metrics
        metrics.gauge("transaction.open", lambda: len(self._open))
        self._ends = {
            TransactionState.COMMIT: metrics.counter("transaction.committed"),
            TransactionState.ROLLBACK: metrics.counter("transaction.rolled_back"),
        }
        self._asked = metrics.counter("transaction.asked")
        self._discarded = metrics.counter("transaction.discarded")

    @property
    def open_count(self) -> int:
        """Transactions without an end."""
        return len(self._open)

    # --- life ----------------------------------------------------------------------------------

    def load(self, *, was_clean: bool) -> None:
        """Find the transactions that are open, after the store was loaded.

        Args:
            was_clean: The last owner closed the store. Else a half message may be open by its marks alone: the process
                died over its end, or RocketMQ did, which writes marks seconds after the message.
        """
        queue = self._store.consume_queue(HALF_TOPIC, 0)
        first = max(self._offsets.offset(TRANSACTION_GROUP, HALF_TOPIC, 0) or 0, queue.min_offset)
        marks = read_marks(self._store, self._offsets.offset(TRANSACTION_GROUP, OP_TOPIC, 0) or 0, first)
        self._ops, self._end_offset = marks.progress, queue.max_offset
        newest: dict[tuple[str | None, ...], _Half] = {}
        for queue_offset in range(first, queue.max_offset):
            if queue_offset not in marks.done and (record := self._read_unit(queue_offset)) is not None:
                self._open_again(record, newest, was_clean=was_clean)
        for queue_offset in sorted(marks.torn & self._open.keys()):
            self._write_again(self._open[queue_offset])
        if self._open:
            _log.info("transaction.open", count=len(self._open))

    def _open_again(
        self, record: StoredRecord, newest: dict[tuple[str | None, ...], _Half], *, was_clean: bool
    ) -> None:
        """Take in a half message that has no end.

        Args:
            newest: The open one of each message so far. If this is the same message again, the other is done.
        """
        half = self._keep(record.queue_offset, record.physical_offset, record.total_size, self._due_ms(record))
        if not was_clean and was_committed(self._store, record):
            _log.warning("transaction.mark_missing", physical_offset=record.physical_offset)
            self._replace(half, None)
            return
        first_offset = half_times(record.properties_bytes).first_offset
        earlier: tuple[int, ...] = () if first_offset is None else (first_offset,)
        message = tuple(find_property(record.properties_bytes, name) for name in _WHICH_MESSAGE)
        before = newest.get(message)
        if before is not None:
            self._replace(before, None)
            earlier = (*before.earlier, before.queue_offset)
        self._rename(half, earlier)
        newest[message] = half

    def _write_again(self, half: _Half) -> None:
        """Open a half message anew whose mark is all there is of its end."""
        record = self._read_unit(half.queue_offset)
        if record is not None:
            _log.warning("transaction.end_torn", physical_offset=record.physical_offset)
            self._replace(half, renewed_draft(record, half_times(record.properties_bytes).checks))

    def _read_unit(self, queue_offset: int) -> StoredRecord | None:
        """The half message at a place of its queue; None, with a log line, if it is lost."""
        try:
            unit = self._store.consume_queue(HALF_TOPIC, 0).unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size)
        except (IndexError, CorruptRecordError) as exc:
            _log.error("transaction.half_lost", queue_offset=queue_offset, reason=str(exc))
            return None

    def _due_ms(self, half: StoredRecord) -> int:
        return half.store_timestamp + self._wait_ms(half.properties_bytes)

    def _wait_ms(self, properties: bytes) -> int:
        """How long after it was stored a half message is asked for."""
        times = half_times(properties)
        if times.checks:
            return self._limits.check_interval_ms
        return max(self._limits.timeout_ms, times.immunity_ms)

    def _keep(self, queue_offset: int, physical_offset: int, size: int, due_ms: int) -> _Half:
        half = self._open[queue_offset] = _Half(queue_offset, physical_offset, size, due_ms)
        self._end_offset = max(self._end_offset, queue_offset + 1)
        heapq.heappush(self._due, (due_ms, queue_offset))
        return half

    def _rename(self, half: _Half, earlier: tuple[int, ...]) -> None:
        half.earlier = earlier
        self._renewed.update(dict.fromkeys(earlier, half))

    # --- what producers do ---------------------------------------------------------------------

    def prepare(self, draft: RecordDraft) -> PutResult:
        """Store the half message for *draft*, which is on its way to its real topic, with all its properties.

        It is not promised to be safe before `MessageStore.confirm` returned.

        Raises:
            MessageError: It names no producer group; or it is too large.
            StoreError: Not stored.
        """
        if find_property(draft.properties, PRODUCER_GROUP) is None:
            raise MessageError(
                f"a message in a transaction names its producer group in the property {Property.PRODUCER_GROUP}, so "
                "that the group can be asked what became of the transaction; this one names none"
            )
        half = half_draft(draft)
        if not self._end_offset:
            self._topics.create(HALF_TOPIC, 1)
            self._topics.create(OP_TOPIC, 1)
        with self._lock:  # no later one may be noted before this one
            put = self._store.put(half)
            due_ms = put.store_timestamp + self._wait_ms(half.properties)
            self._keep(put.queue_offset, put.physical_offset, put.size, due_ms)
        self._wake_for(due_ms)
        return put

    def end(
        self,
        half_offset: int,
        physical_offset: int,
        group: str,
        state: TransactionState,
        *,
        remark: str | None = None,
    ) -> TransactionEnd | None:
        """End a transaction. What this writes is not promised to be safe before `MessageStore.confirm` returned.

        Args:
            half_offset: Queue offset of the half message, as the producer or its checker was told.
            physical_offset: Of the same half message.

        Returns:
            None if nothing was written: the state is unknown, or the transaction has its end.

        Raises:
            MessageError: There is no such half message, or it is another group's. Or the delay cannot be kept.
            StoreError: Not stored; the transaction stays open.
        """
        if state is TransactionState.UNKNOWN:
            _log.info("transaction.unknown", group=group, half_offset=half_offset, remark=remark)
            return None
        with self._lock:
            half = self._find(half_offset)
            if half is None:
                _log.info("transaction.has_ended", group=group, half_offset=half_offset, state=state.value)
                return None
            record = self._store.read(half.physical_offset, half.size)
            _check_owner(record, half, half_offset, physical_offset, group)
            end = self._end(half, record, state)
            self._ends[state].add()
        self._wake_for(self._store.clock.now_ms() + _PROGRESS_MS)
        return end

    def _find(self, half_offset: int) -> _Half | None:
        """The half message that has, or had, this queue offset; None if it has its end."""
        if not 0 <= half_offset < self._end_offset:
            raise MessageError(f"there is no half message {half_offset}; this broker has 0..{self._end_offset - 1}")
        return self._open.get(half_offset) or self._renewed.get(half_offset)

    def _end(self, half: _Half, record: StoredRecord, state: TransactionState) -> TransactionEnd:
        if state is TransactionState.ROLLBACK:
            return TransactionEnd(self._replace(half, None)[-1].end, ())
        draft = self._drafts.make_committed(record, self._store.clock.now_ms())
        real_topic, real_queue = _destination(record)
        if draft.topic != real_topic:
            self._store.prepare(real_topic, real_queue)  # when it is due, there should be no file to make
        return TransactionEnd(self._replace(half, draft)[-1].end, (draft.topic,))

    def _replace(self, half: _Half, successor: RecordDraft | None) -> list[PutResult]:
        """Mark a half message as done, and put *successor* in its place: one append. The lock is held."""
        now_ms = self._store.clock.now_ms()
        op = op_draft(half.queue_offset, successor, now_ms)
        puts = self._store.put_all([op] if successor is None else [op, successor])
        self._ops.note(puts[0].queue_offset, half.queue_offset)
        self._forget(half)
        if successor is not None and successor.topic == HALF_TOPIC:
            put = puts[1]
            due_ms = put.store_timestamp + self._wait_ms(successor.properties)
            renewed = self._keep(put.queue_offset, put.physical_offset, put.size, due_ms)
            self._rename(renewed, (*half.earlier, half.queue_offset))
        if self._progress_due_ms is None:
            self._progress_due_ms = now_ms + _PROGRESS_MS
        return puts

    def _forget(self, half: _Half) -> None:
        del self._open[half.queue_offset]
        self._unasked.discard(half.queue_offset)
        for offset in half.earlier:
            del self._renewed[offset]

    # --- asking --------------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _wake_for(self, due_ms: int) -> None:
        """Wake the thread that steps this, unless it comes early enough by itself."""
        if self._next_step_ms is None or due_ms < self._next_step_ms:
            self._wake()

    def producer_connected(self) -> None:
        """Somebody who can be asked is there now: what nobody could be asked about is asked for at once."""
        with self._lock:
            now_ms = self._store.clock.now_ms()
            for queue_offset in self._unasked:
                self._postpone(self._open[queue_offset], now_ms)
            self._unasked.clear()
        self._wake()

    def _postpone(self, half: _Half, due_ms: int) -> None:
        half.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, half.queue_offset))

    def step(self) -> int | None:
        now_ms = self._store.clock.now_ms()
        for _ in range(_QUESTIONS_A_STEP):
            with self._lock:
                half = self._take_due(now_ms)
                if half is None:
                    break
                question = self._handle_due(half, now_ms)
            if question is not None:
                checker, check = question
                checker.ask(check)
        if self._progress_due_ms is not None and self._progress_due_ms <= now_ms:
            self.note_progress()
        with self._lock:
            if len(self._due) > 2 * len(self._open) + _MOST_PAST_DUES:
                self._due = sorted((half.due_ms, half.queue_offset) for half in self._open.values())
            dues = [
                *([self._due[0][0]] if self._due else []),
                *([self._progress_due_ms] if self._progress_due_ms else []),
            ]
            self._next_step_ms = min(dues, default=None)
        return self._next_step_ms

    def _take_due(self, now_ms: int) -> _Half | None:
        """The next half message that is to be asked for."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, queue_offset = heapq.heappop(self._due)
            half = self._open.get(queue_offset)
            if half is not None and half.due_ms == due_ms:
                return half
        return None

    def _handle_due(self, half: _Half, now_ms: int) -> tuple[TransactionChecker, TransactionCheck] | None:
        """Count the question where it lasts, and give it; or take the half message out, if it had its chances."""
        try:
            record = self._store.read(half.physical_offset, half.size)
            checks = half_times(record.properties_bytes).checks
            group = find_property(record.properties_bytes, PRODUCER_GROUP) or ""
            checker = next((checker for checker in self.checkers if checker.can_ask(group)), None)
            if checks >= self._limits.check_max:
                self._discard(half, record, f"{checks} questions stayed without an answer")
            elif checker is not None:
                return checker, self._renew(half, record, group, checks + 1)
            elif now_ms - record.store_timestamp >= self._limits.longest_wait_ms:
                self._discard(half, record, "nobody of its producer group could be asked for too long")
            else:
                _log.warning("transaction.nobody_to_ask", group=group, half_offset=half.queue_offset)
                self._postpone(half, now_ms + self._limits.check_interval_ms)
                self._unasked.add(half.queue_offset)
        except DeletedRecordError as exc:
            _log.error("transaction.half_lost", queue_offset=half.queue_offset, reason=str(exc))
            self._forget(half)
        except (StoreError, MessageError) as exc:
            _log.error("transaction.check_failed", half_offset=half.queue_offset, reason=str(exc))
            self._postpone(half, now_ms + self._limits.check_interval_ms)
        return None

    def _renew(self, half: _Half, record: StoredRecord, group: str, checks: int) -> TransactionCheck:
        topic, queue_id = _destination(record)
        put = self._replace(half, renewed_draft(record, checks))[-1]
        self._asked.add()
        self._store.confirm_async(put.end, ())
        _log.info("transaction.check", group=group, topic=topic, half_offset=put.queue_offset, checks=checks)
        return TransactionCheck(group, topic, queue_id, self._store.read(put.physical_offset, put.size))

    def _discard(self, half: _Half, record: StoredRecord, reason: str) -> None:
        self._topics.create(CHECK_MAX_TOPIC, 1)
        put = self._replace(half, discarded_draft(record))[-1]
        self._discarded.add()
        self._store.confirm_async(put.end, (CHECK_MAX_TOPIC,))
        _log.error(
            "transaction.discarded",
            topic=_destination(record)[0],
            msg_id=find_property(record.properties_bytes, UNIQ_KEY),
            moved_to=CHECK_MAX_TOPIC,
            reason=reason,
        )

    def note_progress(self) -> None:
        """Say how far both topics are done, for the next time the offsets are written."""
        if not self._end_offset:
            return  # there never was a transaction
        with self._lock:
            self._progress_due_ms = None
            half_offset = next(iter(self._open), self._end_offset)
            op_offset = self._ops.first_needed(half_offset)
        self._offsets.commit(TRANSACTION_GROUP, HALF_TOPIC, 0, half_offset)
        self._offsets.commit(TRANSACTION_GROUP, OP_TOPIC, 0, op_offset)


def _destination(half: StoredRecord) -> tuple[str, int]:
    """Topic and queue that a half message is for."""
    topic = find_property(half.properties_bytes, REAL_TOPIC)
    queue_id = find_property(half.properties_bytes, REAL_QID)
    if topic is None or queue_id is None or not queue_id.isdecimal():
        raise MessageError(f"the half message at physical offset {half.physical_offset} does not say where it goes")
    return topic, int(queue_id)


def _check_owner(record: StoredRecord, half: _Half, half_offset: int, physical_offset: int, group: str) -> None:
    """Refuse an end that is another half message's; what the producer was told before a renewal is good, too."""
    owner = find_property(record.properties_bytes, PRODUCER_GROUP)
    if owner != group:
        raise MessageError(f"half message {half_offset} belongs to producer group {owner!r}, {group!r} cannot end it")
    if half_offset == half.queue_offset and physical_offset != half.physical_offset:
        raise MessageError(
            f"half message {half_offset} lies at physical offset {half.physical_offset}, not at {physical_offset}"
        )
