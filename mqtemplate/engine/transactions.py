"""The service of transactions: it stores half messages, ends transactions, and checks those that were not ended.

Source: ``TransactionalMessageServiceImpl``, ``EndTransactionProcessor``. There are two improvements. A transaction has
one end, also after a crash and if a producer ends it late or twice. And a check counts only if it was sent to a
producer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from typing import NamedTuple

from mqtemplate.broker import BrokerLifecycle, CheckTransaction, Registration
from mqtemplate.delay.pending_keys import MessageChanges
from mqtemplate.engine.checkers import LocalCheckers, TransactionCheck, TransactionChecker
from mqtemplate.engine.drafts import DraftMaker
from mqtemplate.engine.half_messages import (
    TRANSACTION_GROUP,
    OpenTransaction,
    OpenTransactions,
    OpProgress,
    check_properties,
    discarded_draft,
    is_op_message,
    op_draft,
    renewed_draft,
)
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import (
    CorruptRecordError,
    DeletedRecordError,
    MessageError,
    PendingKeyError,
    SendError,
    SendTimeoutError,
    StoreError,
)
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import parse_offset_msg_id
from mqtemplate.numbers import parse_number
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import Drafts, RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import (
    CANCELS,
    FOLLOWED,
    PENDING_KEY,
    PRODUCER_GROUP,
    REAL_QID,
    REAL_TOPIC,
    UNIQ_KEY,
    find_property,
)
from mqtemplate.results import HalfMessage, TransactionState
from mqtemplate.services import wall_time
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets, TopicTable
from mqtemplate.topics import (
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
    check_topic,
)

_log = get_logger("mqtemplate.broker")

_MESSAGE_IDENTITY = (UNIQ_KEY, REAL_TOPIC, PRODUCER_GROUP)
_PROGRESS_MS = 1_000
_MAX_CHECKS_PER_STEP = 100


class TransactionEnd(NamedTuple):
    """The records of an end.

    Attributes:
        physical_end: Physical offset after the records; the end is durable once the log is flushed up to it.
        topics: Topics whose readers must be woken then.
    """

    physical_end: int
    topics: tuple[str, ...]


class TransactionService:
    """Stores half messages, ends transactions, and checks open transactions. A `Service`.

    - The log has the whole state. The progress in both topics is stored with the consumer offsets, as by RocketMQ. It
      only saves reading at the start, and it is never ahead of the durable log.
    - An end is one append: the op message, and the record that replaces the half message.
    - Each open transaction takes some hundred bytes of memory.

    Args:
        drafts: Creates the committed message; its delay counts from the commit.
        delays: Stores a committed message that has a pending key, or cancels another one.

    Attributes:
        local_checkers: The checkers of this process.
    """

    name = "broker.transactions"

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        drafts: DraftMaker,
        settings: EmbeddedSettings,
        lifecycle: BrokerLifecycle,
        delays: MessageChanges,
    ) -> None:
        self._store = store
        self._delays = delays
        self._pending_keys = delays.pending_keys
        self._topics = topics
        self._offsets = offsets
        self._drafts = drafts
        self._settings = settings
        self._max_age_ms = settings.file_reserved_time * 3_600_000  # retention may delete an older half message
        self._lifecycle = lifecycle
        self.local_checkers = LocalCheckers(
            *(settings.broker_name, self._end_and_wait, self.producer_connected),
            has_threads=not store.clock.is_virtual,
            max_body_bytes=settings.max_body_bytes(),
        )
        self._checkers: list[TransactionChecker] = [self.local_checkers]
        self._peer_log = LimitedLog(_log, store.clock.steady_ms)
        self._lock = threading.Lock()
        self._open = OpenTransactions()
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
        self._checked = metrics.counter("transaction.checked")
        self._discarded = metrics.counter("transaction.discarded")

    @property
    def open_count(self) -> int:
        """Number of open transactions."""
        with self._lock:  # a half message that is stored may not be noted yet
            return len(self._open)

    def add_checker(self, checker: TransactionChecker) -> None:
        """Send checks through *checker* too. The first checker that has a producer of the group sends a check."""
        if checker not in self._checkers:
            self._checkers = [*self._checkers, checker]

    def remove_checker(self, checker: TransactionChecker) -> None:
        """Send no more checks through *checker*."""
        self._checkers = [other for other in self._checkers if other is not checker]

    # --- start ---------------------------------------------------------------------------------

    def load(self, *, was_clean: bool) -> None:
        """Find the open transactions, after the store was loaded.

        Args:
            was_clean: True if the last process closed the store. Otherwise a transaction may have ended although its
                op message is missing: the process was killed during the end, or RocketMQ was, which writes op messages
                seconds after the committed message.
        """
        queue = self._store.consume_queue(HALF_TOPIC, 0)
        first = max(self._offsets.offset(TRANSACTION_GROUP, HALF_TOPIC, 0) or 0, queue.min_offset)
        ops = read_op_messages(self._store, self._offsets.offset(TRANSACTION_GROUP, OP_TOPIC, 0) or 0, first)
        self._ops, self._end_offset = ops.progress, queue.max_offset
        newest: dict[tuple[str | None, ...], OpenTransaction] = {}
        for queue_offset in range(first, queue.max_offset):
            if queue_offset not in ops.done and (record := self._read(queue_offset)) is not None:
                self._restore(record, newest, was_clean=was_clean)
        for queue_offset in sorted(ops.incomplete.intersection(self._open)):
            self._reopen(queue_offset)
        if self._open:
            _log.debug("transaction.restored", count=len(self._open))

    def _restore(
        self, record: StoredRecord, newest: dict[tuple[str | None, ...], OpenTransaction], *, was_clean: bool
    ) -> None:
        """Add the transaction of a half message that has no op message.

        Args:
            newest: The newest half message of each message so far. If a message was sent twice, or its op message is
                missing, the newer half message replaces the older one.
        """
        if not was_clean and was_committed(self._store, record):
            _log.warning("transaction.op_missing", physical_offset=record.physical_offset)
            self._append_end(record.queue_offset, None)
            return
        first_offset = check_properties(record.properties_bytes).first_offset
        earlier: tuple[int, ...] = () if first_offset is None else (first_offset,)
        message = tuple(find_property(record.properties_bytes, name) for name in _MESSAGE_IDENTITY)
        if (older := newest.get(message)) is not None:
            self._replace(older, None)
            earlier = (*older.earlier, older.queue_offset)
        due_ms = self._due_ms(record)
        newest[message] = half = OpenTransaction(
            record.queue_offset, record.physical_offset, record.total_size, due_ms, earlier
        )
        self._open.add(half)

    def _reopen(self, queue_offset: int) -> None:
        """Store a half message again, since its op message exists but not the record that must follow it."""
        half, record = self._open.find(queue_offset), self._read(queue_offset)
        if half is not None and record is not None:
            _log.warning("transaction.reopened", physical_offset=record.physical_offset)
            self._replace(half, renewed_draft(record, check_properties(record.properties_bytes).checks))

    def _read(self, queue_offset: int) -> StoredRecord | None:
        """Return the half message at a queue offset; None, and a log event, if it cannot be read."""
        try:
            unit = self._store.consume_queue(HALF_TOPIC, 0).unit(queue_offset)
            return self._store.read(unit.physical_offset, unit.size)
        except (IndexError, CorruptRecordError) as exc:
            _log.error("transaction.half_lost", queue_offset=queue_offset, reason=str(exc))
            return None

    def _due_ms(self, record: StoredRecord) -> int:
        """Return the steady time of the next check of a half message from an earlier run."""
        wait_ms, clock = self._wait_ms(record.properties_bytes), self._store.clock
        # A half message of the future was stored while the clock was ahead: it waits no longer than a new one.
        left_ms = min(record.store_timestamp + wait_ms - clock.now_ms(), wait_ms)
        return clock.steady_ms() + left_ms

    def _wait_ms(self, properties: bytes) -> int:
        """Return the time from the store timestamp of a half message to its next check."""
        check = check_properties(properties)
        if check.checks:
            return self._settings.transaction_check_interval_ms
        return max(self._settings.transaction_timeout_ms, check.immunity_ms)

    # --- requests of producers -----------------------------------------------------------------

    def prepare(self, draft: RecordDraft) -> PutResult:
        """Store a half message that `DraftMaker.make_half` created. `MessageStore.confirm` makes it durable.

        Raises:
            MessageError: The half message is too large.
            PendingKeyUnknownError: It has a pending key, and this broker cannot decide about pending keys now.
            StoreError: The half message was not stored.
        """
        if (key := find_property(draft.properties, PENDING_KEY)) is not None:
            self._pending_keys.check(key, find_property(draft.properties, REAL_TOPIC) or "")
        draft.sys_flag &= ~SysFlag.TRANSACTION_MASK
        if not self._end_offset:
            self._topics.create(HALF_TOPIC, 1)
            self._topics.create(OP_TOPIC, 1)
        with self._lock:  # also for the put: transactions must be added in the order of their queue offsets
            put = self._store.put(draft)
            due_ms = self._add(put, draft.properties, ())
        self._wake_before(due_ms)
        return put

    def _add(self, put: PutResult, properties: bytes, earlier: tuple[int, ...]) -> int:
        """Add the transaction of a half message that was just stored, and return the time of its next check."""
        due_ms = self._store.clock.steady_ms() + self._wait_ms(properties)
        self._open.add(OpenTransaction(put.queue_offset, put.physical_offset, put.size, due_ms, earlier))
        self._end_offset = put.queue_offset + 1
        return due_ms

    def end(
        self,
        half_offset: int,
        physical_offset: int,
        group: str,
        state: TransactionState,
        *,
        remark: str | None = None,
        check_right: Callable[[str], object] = lambda topic: None,
    ) -> TransactionEnd | None:
        """End a transaction. `MessageStore.confirm` makes the end durable.

        Args:
            half_offset: Queue offset of the half message, as in the send result or in the transaction check.
            physical_offset: Physical offset of the same half message.
            check_right: Called with the real topic before anything is stored. It raises an error if the caller may not
                end transactions of that topic.

        Returns:
            None if nothing was stored: the state is unknown, or the transaction has ended already.

        Raises:
            MessageError: There is no such half message, it belongs to another group, or its delay is not supported.
            StoreError: The end was not stored; the transaction stays open.
        """
        if state is TransactionState.UNKNOWN:
            self._peer_log.log(INFO, "transaction.left_open", group=group, half_offset=half_offset, remark=remark)
            return None
        with self._lock:
            if not 0 <= half_offset < self._end_offset:
                raise MessageError(f"there is no half message {half_offset}; this broker has 0..{self._end_offset - 1}")
            half = self._open.find(half_offset)
            if half is None:
                self._peer_log.log(
                    INFO, "transaction.already_ended", group=group, half_offset=half_offset, state=state.value
                )
                return None
            record = self._store.read(half.physical_offset, half.size)
            check_right(_destination(record)[0])
            _check_owner(record, half, half_offset, physical_offset, group)
            end = self._end(half, record, state)
            self._ends[state].add()
        self._wake_before(self._store.clock.steady_ms() + _PROGRESS_MS)
        return end

    def _end(self, half: OpenTransaction, record: StoredRecord, state: TransactionState) -> TransactionEnd:
        if state is TransactionState.ROLLBACK:
            return TransactionEnd(self._replace(half, None)[-1].end, ())
        draft = self._drafts.make_committed(record, self._store.clock.now_ms())
        real_topic, real_queue = _destination(record)
        if draft.topic != real_topic:
            self._store.prepare(real_topic, real_queue)  # creates its file now, so that the delivery need not wait
        if draft.pending is not None:
            return self._end_keyed(half, draft, real_topic)
        if (cancels := find_property(record.properties_bytes, CANCELS)) is not None:
            return self._end_with_cancel(half, draft, cancels)
        return TransactionEnd(self._replace(half, draft)[-1].end, (draft.topic,))

    def _end_keyed(self, half: OpenTransaction, draft: RecordDraft, topic: str) -> TransactionEnd:
        """Commit a message with a pending key: its rule decides now. With ``refuse`` the transaction just ends."""

        def op_before(successor: RecordDraft | None) -> RecordDraft:
            return op_draft(half.queue_offset, successor, self._store.clock.now_ms())

        msg_id = find_property(draft.properties, UNIQ_KEY) or ""
        try:
            keyed, puts = self._pending_keys.put([(draft, msg_id)], topic, op_before)
        except PendingKeyError as exc:
            self._peer_log.log(WARNING, "transaction.refused", topic=topic, msg_id=msg_id, reason=str(exc))
            return TransactionEnd(self._replace(half, None)[-1].end, ())
        assert puts is not None  # the op message
        self._note_end(half.queue_offset, puts[0])
        self._open.remove(half)
        return TransactionEnd(keyed.end, keyed.topics)

    def _end_with_cancel(self, half: OpenTransaction, draft: RecordDraft, handles: str) -> TransactionEnd:
        """Commit a message, and cancel pending ones in the same append. If none is pending, it is dropped."""
        op = op_draft(half.queue_offset, draft, self._store.clock.now_ms())
        change, puts, topics = self._delays.change_together(handles, None, None, None, [op, draft], None)
        if puts is None:
            msg_id = find_property(draft.properties, UNIQ_KEY) or ""
            self._peer_log.log(
                WARNING, "transaction.refused", topic=draft.topic, msg_id=msg_id, reason=change.status.value
            )
            return TransactionEnd(self._replace(half, None)[-1].end, ())
        self._note_end(half.queue_offset, puts[0])
        self._open.remove(half)
        return TransactionEnd(puts.end, tuple(topics))

    def _replace(self, half: OpenTransaction, successor: RecordDraft | None) -> Sequence[PutResult]:
        """End a transaction by one append: its op message and *successor*. The caller holds the lock."""
        puts = self._append_end(half.queue_offset, successor)
        self._open.remove(half)
        if successor is not None and successor.topic == HALF_TOPIC:
            self._add(puts[1], successor.properties, (*half.earlier, half.queue_offset))
        return puts

    def _append_end(self, half_offset: int, successor: RecordDraft | None) -> Sequence[PutResult]:
        now_ms = self._store.clock.now_ms()
        op = op_draft(half_offset, successor, now_ms)
        puts = self._store.put(Drafts([op] if successor is None else [op, successor]))
        self._note_end(half_offset, puts[0])
        return puts

    def _note_end(self, half_offset: int, op: PutResult) -> None:
        self._ops.add(op.queue_offset, half_offset)
        if self._progress_due_ms is None:
            self._progress_due_ms = self._store.clock.steady_ms() + _PROGRESS_MS

    # --- requests of this process --------------------------------------------------------------

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """See `Transactions.end_transaction`."""
        sent = half.send_result
        _, physical_offset = parse_offset_msg_id(sent.offset_msg_id)
        self._end_and_wait(sent.queue_offset, physical_offset, half.group, state, remark)

    def _end_and_wait(
        self, half_offset: int, physical_offset: int, group: str, state: TransactionState, remark: str | None
    ) -> None:
        self._lifecycle.check()
        try:
            end = self.end(half_offset, physical_offset, group, state, remark=remark)
            is_safe = end is None or self._store.confirm(end.physical_end, end.topics)
        except StoreError as exc:
            raise SendError(f"the end of the transaction was not stored, or is not durable yet: {exc}") from exc
        if not is_safe:
            raise SendTimeoutError("the end of the transaction is stored, but was not flushed in time")

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        """See `Transactions.check_transactions`."""
        self._lifecycle.check()
        return self.local_checkers.register(check_topic(group), check, threads, max_waiting)

    # --- checks --------------------------------------------------------------------------------

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _wake_before(self, due_ms: int) -> None:
        """Wake the thread that steps this service, unless its next step is before *due_ms*."""
        if self._next_step_ms is None or due_ms < self._next_step_ms:
            self._wake()

    def producer_connected(self) -> None:
        """A producer connected: check the transactions now whose group had no producer."""
        with self._lock:
            self._open.schedule_deferred(self._store.clock.steady_ms())
        self._wake()

    def step(self) -> int | None:
        now_ms = self._store.clock.steady_ms()
        self._peer_log.summarize()
        for _ in range(_MAX_CHECKS_PER_STEP):
            with self._lock:
                half = self._open.take_due(now_ms)
                if half is None:
                    break
                prepared = self._prepare_check(half, now_ms)
            if prepared is not None:  # without the lock: on a virtual clock the checker ends the transaction here
                checker, check = prepared
                checker.send_check(check)
        if self._progress_due_ms is not None and self._progress_due_ms <= now_ms:
            self.save_progress()
        with self._lock:
            due = [due_ms for due_ms in (self._open.next_due_ms(), self._progress_due_ms) if due_ms is not None]
            self._next_step_ms = min(due, default=None)
        return wall_time(self._store.clock, self._next_step_ms)

    def _prepare_check(self, half: OpenTransaction, now_ms: int) -> tuple[TransactionChecker, TransactionCheck] | None:
        """Store the half message with one more check, and return the check; or discard it after the last check."""
        settings = self._settings
        try:
            record = self._store.read(half.physical_offset, half.size)
            checks = check_properties(record.properties_bytes).checks
            group = find_property(record.properties_bytes, PRODUCER_GROUP) or ""
            topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
            checker = next((checker for checker in self._checkers if checker.can_check(group, topic)), None)
            if checks >= settings.transaction_check_max:
                self._discard(half, record, f"no answer to {checks} transaction checks")
            elif checker is not None:
                return checker, self._renew(half, record, group, checks + 1)
            elif self._store.clock.now_ms() - record.store_timestamp >= self._max_age_ms:
                self._discard(half, record, "no producer of its group was connected for too long")
            else:
                self._peer_log.log(WARNING, "transaction.check_deferred", group=group, half_offset=half.queue_offset)
                self._open.defer(half, now_ms + settings.transaction_check_interval_ms)
        except DeletedRecordError as exc:
            _log.error("transaction.half_lost", queue_offset=half.queue_offset, reason=str(exc))
            self._open.remove(half)
        except (StoreError, MessageError) as exc:
            self._peer_log.log(ERROR, "transaction.check_failed", half_offset=half.queue_offset, reason=str(exc))
            self._open.schedule(half, now_ms + settings.transaction_check_interval_ms)
        return None

    def _renew(self, half: OpenTransaction, record: StoredRecord, group: str, checks: int) -> TransactionCheck:
        topic, queue_id = _destination(record)
        put = self._replace(half, renewed_draft(record, checks))[-1]
        self._checked.add()
        self._store.confirm_async(put.end, ())
        self._peer_log.log(
            INFO, "transaction.checked", group=group, topic=topic, half_offset=put.queue_offset, checks=checks
        )
        return TransactionCheck(group, topic, queue_id, self._store.read(put.physical_offset, put.size))

    def _discard(self, half: OpenTransaction, record: StoredRecord, reason: str) -> None:
        self._topics.create(TRANS_CHECK_MAX_TIME_TOPIC, 1)
        put = self._replace(half, discarded_draft(record))[-1]
        self._discarded.add()
        self._store.confirm_async(put.end, (TRANS_CHECK_MAX_TIME_TOPIC,))
        self._peer_log.log(
            ERROR,
            "transaction.discarded",
            topic=_destination(record)[0],
            msg_id=find_property(record.properties_bytes, UNIQ_KEY),
            moved_to=TRANS_CHECK_MAX_TIME_TOPIC,
            reason=reason,
        )

    def save_progress(self) -> None:
        """Commit the progress in both topics; it is written with the next consumer offsets."""
        if not self._end_offset:
            return  # this broker never had a transaction
        with self._lock:
            self._progress_due_ms = None
            half_offset = next(iter(self._open), self._end_offset)
            op_offset = self._ops.first_needed(half_offset)
        self._offsets.commit(TRANSACTION_GROUP, HALF_TOPIC, 0, half_offset)
        self._offsets.commit(TRANSACTION_GROUP, OP_TOPIC, 0, op_offset)


# --- the log at the start -------------------------------------------------------------------------


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
    offsets = map(parse_number, op.body.decode("ascii", "replace").split(",") if is_op_message(op) else ())
    named = [offset for offset in offsets if offset is not None and offset >= half_offset]
    found.progress.add(op_offset, max(named, default=-1))
    (found.done if _is_complete(store, op) else found.incomplete).update(named)


def _is_complete(store: MessageStore, op: StoredRecord) -> bool:
    """Return True if the record that must follow an op message exists."""
    expected = find_property(op.properties_bytes, FOLLOWED)
    if expected is None:
        return True
    try:
        successor = store.read_at(op.physical_offset + op.total_size)
    except CorruptRecordError:
        return False
    if successor is None or successor.topic == OP_TOPIC:
        return False
    return find_property(successor.properties_bytes, UNIQ_KEY) == expected


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
            if record is None or record.prepared_transaction_offset != half.physical_offset:
                continue
            if record.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT:
                return True
    return False


def _destination(half: StoredRecord) -> tuple[str, int]:
    """Return the real topic and the real queue id of a half message."""
    topic = find_property(half.properties_bytes, REAL_TOPIC)
    queue_id = parse_number(find_property(half.properties_bytes, REAL_QID))
    if topic is None or queue_id is None or not 0 <= queue_id < 1 << 31:
        raise MessageError(f"the half message at physical offset {half.physical_offset} has no real topic and queue")
    return check_topic(topic), queue_id


def _check_owner(
    record: StoredRecord, half: OpenTransaction, half_offset: int, physical_offset: int, group: str
) -> None:
    """Check that an end names this half message. The offsets from before a renewal are valid too."""
    owner = find_property(record.properties_bytes, PRODUCER_GROUP)
    if owner != group:
        raise MessageError(f"half message {half_offset} belongs to producer group {owner!r}, {group!r} cannot end it")
    if half_offset == half.queue_offset and physical_offset != half.physical_offset:
        raise MessageError(
            f"half message {half_offset} is at physical offset {half.physical_offset}, not at {physical_offset}"
        )
