"""One pending message by key, and changes of pending messages together with sends: each is one append.

A send with a pending key decides under the locks of both delay stores: it looks up the newest record of the key, and
appends the new message together with the delete marker of the one it replaces. A release needs the same lock. So
exactly one of them is first. A key whose newest record is no delayed one needs only the lock of such sends: a thread
that puts many messages on the wheel then does not hold them up.

- The newest record with the key decides: each send with a key replaces, keeps or moves the message before it. So that
  record is pending, or was delivered, or no message of the key is either. The newest records of all keys are in memory
  until the index has them, and then some thousand of them; the index finds the others, and mostly knows without a
  search that there is none. Memory is bounded.
- A timer in memory with its properties is pending: a release and a move append another record with the key, and a
  cancel makes memory forget the properties, all under the lock of the timers. So a send that replaces it needs neither
  its record nor its unit in the timer log, unless it is parked or due within a slot.
- All records of an append but the last have `SysFlag.CONTINUED`. A recovery cuts them off if the last one is missing.
  The delete markers are last. So a kill leaves all of the change or nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from mqtemplate.delay.delay_store import DelayStore, RecordLookup, is_marker
from mqtemplate.delay.pending_rows import PendingEntry
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle, handle_of, new_handle
from mqtemplate.errors import PendingKeyError, PendingKeyUnknownError
from mqtemplate.pending import OnPending, PendingDecision, PendingOutcome, ScheduleChange
from mqtemplate.record.appends import PutBatch, PutResult
from mqtemplate.record.codec import DraftPair, Drafts, PendingRequest, RecordDraft, StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import (
    KEYS,
    PENDING_KEY,
    PENDING_SINCE,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    UNIQ_KEY,
    find_property,
    property_format,
)
from mqtemplate.store.index_file import KeyedRecord
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

_REPLACE = OnPending.REPLACE.value
_STORED = PendingOutcome(PendingDecision.STORED)


def put_together(store: MessageStore, drafts: Sequence[RecordDraft], *, though_full: bool = False) -> PutBatch:
    """Append records: a kill leaves all of them or none. Those that replace pending messages must be the last."""
    for draft in drafts[:-1]:
        draft.sys_flag |= SysFlag.CONTINUED
    return store.put(Drafts(drafts), though_full=though_full)


class PendingRecord(NamedTuple):
    """A pending message."""

    record: StoredRecord
    entry: PendingEntry


class WaitingTimer(NamedTuple):
    """A pending timer whose properties are in memory, and whose slot is not read yet.

    Attributes:
        keys, times_and_target: Encoded properties: the business keys, or nothing; the due time, the slot, and the real
            topic and queue.
    """

    physical_offset: int
    msg_id: bytes
    keys: bytes
    times_and_target: bytes
    slot_ms: int

    @classmethod
    def of(cls, record: KeyedRecord, window_ms: int) -> WaitingTimer | None:
        """Return what the record of a timer has; None if its properties have another form, or it may be parked.

        Args:
            window_ms: A message that is due so long after its send may be parked.
        """
        found = _TIMER.search(record.properties)
        if found is None:
            return None
        msg_id, since_ms, times_and_target, slot_ms = found.groups()
        if int(slot_ms) - int(since_ms) >= window_ms:
            return None
        keys = find_property(record.properties, KEYS) if KEYS in record.properties else None
        encoded = b"" if keys is None else property_format(KEYS, keys.encode())
        return cls(record.physical_offset, msg_id, encoded, times_and_target, int(slot_ms))


_NUMBER, _TEXT = rb"(\d{1,18})", rb"[^\x02]+"
_TIMER = re.compile(
    rb"(?s)(?:\A|\x02)"
    + property_format(UNIQ_KEY, b"(" + _TEXT + b")")
    + rb"(?:.*\x02)?"
    + property_format(PENDING_SINCE, _NUMBER)
    + b"("
    + property_format(TIMER_DELIVER_MS, rb"\d{1,18}")
    + property_format(TIMER_OUT_MS, _NUMBER)
    + property_format(REAL_TOPIC, _TEXT)
    + property_format(REAL_QID, rb"\d{1,10}")
    + rb")\Z"
)
"""The properties as `divert_to_timer` ends them."""


class Replacements(Protocol):
    """Creates the records that replace a pending message; see `DelayController`."""

    def cancelled_waiting(self, waiting: WaitingTimer, new: RecordDraft) -> RecordDraft:
        """Return the delete marker of a pending message that *new* replaces."""

    def cancelled(self, pending: PendingRecord) -> list[RecordDraft]:
        """Return its delete marker."""

    def rescheduled(self, pending: PendingRecord, deliver_ms: int) -> list[RecordDraft]:
        """Return its copy with another due time, and the delete marker."""


class KeyedSend(NamedTuple):
    """Outcome of one message of a send with pending keys, and where its record is.

    Attributes:
        outcome: None for a message without a pending key.
        physical_offset: Of the stored or pending record.
        queue_id: Queue that receives the message when it is due; None for the queue that the send selected.
        handle: None if the message is not delayed.
    """

    outcome: PendingOutcome | None
    msg_id: str
    physical_offset: int
    queue_offset: int
    queue_id: int | None
    handle: str | None


class KeyedPut(NamedTuple):
    """A send with pending keys.

    Attributes:
        end: Physical offset that must be durable.
        topics: Topics whose readers must be woken then.
    """

    sends: list[KeyedSend]
    end: int
    topics: tuple[str, ...]


class ChangedTogether(NamedTuple):
    """A change that was stored together with messages.

    Attributes:
        puts: The records, those of the messages first; None if nothing is pending, so that nothing was stored.
        topics: Topics of the records, for `MessageStore.confirm`.
    """

    change: ScheduleChange
    puts: PutBatch | None = None
    topics: frozenset[str] = frozenset()


class MessageChanges(Protocol):
    """Changes of delayed messages together with other records; `DelayController` does them."""

    @property
    def pending_keys(self) -> PendingKeys:
        """Stores messages with pending keys."""

    def change_together(
        self,
        handle: str | None,
        key: str | None,
        topic: str | None,
        namespace: str | None,
        then: Sequence[RecordDraft],
        deliver_ms: int | None,
    ) -> ChangedTogether:
        """See `DelayController.change_together`."""


class _KeyedAppend:
    """The records of one append, and how to read the results from it."""

    def __init__(self) -> None:
        self.news: list[RecordDraft] = []
        self.markers: list[RecordDraft] = []
        self.gone: list[StoredRecord] = []
        self.results: list[Callable[[Sequence[PutResult] | None, int], KeyedSend]] = []

    def add(self, draft: RecordDraft) -> int:
        """Add a record, and return its number."""
        self.news.append(draft)
        return len(self.news) - 1


class PendingKeys:
    """Stores messages with pending keys.

    Args:
        delay_stores: The two delay services by their topics.

    Attributes:
        refusal: Returns why this broker cannot decide about a pending key now; None if it can. None if it always can.
    """

    def __init__(
        self, store: MessageStore, delay_stores: Mapping[str, DelayStore], replacements: Replacements, broker_name: str
    ) -> None:
        self._store = store
        self._delay_stores = delay_stores
        self._timers = delay_stores[TIMER_TOPIC]
        self._replacements = replacements
        self._lookup = RecordLookup(store)
        self._broker_name = broker_name
        self._lock = threading.Lock()  # of `put`; taken before the locks of the delay stores
        self.refusal: Callable[[], str | None] | None = None
        self._counts = {
            decision: store.metrics.counter("delay.pending_keys", decision=decision.value)
            for decision in PendingDecision
        }

    # --- pending messages ----------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of both delay stores, which have read all messages: nothing is released or changed."""
        with self._both_locks():
            for delay_store in self._delay_stores.values():
                delay_store.catch_up()
            yield

    @contextmanager
    def _both_locks(self) -> Iterator[None]:
        with ExitStack() as locks:
            for delay_store in self._delay_stores.values():
                locks.enter_context(delay_store.lock)
            yield

    def pending_of(self, records: Iterable[StoredRecord]) -> list[PendingRecord]:
        """With the locks: return the pending ones of delayed records, each once."""
        found: dict[int, PendingRecord] = {}
        for record in records:
            entry = self._delay_stores[record.topic].find(record)
            if entry is not None:
                found[record.physical_offset] = PendingRecord(record, entry)
        return list(found.values())

    def remove(self, records: Iterable[StoredRecord]) -> None:
        """With the locks, after the append of what replaces them: never release these records."""
        for record in records:
            self._delay_stores[record.topic].remove(record)

    def _newest(self, topic: str, key: str) -> KeyedRecord | None:
        """Return the newest record with a pending key: a delayed one for *topic*, or one that was delivered there."""
        found = self._store.index.newest_keyed(topic, key)
        if isinstance(found, KeyedRecord):
            return found
        for physical_offset in found:
            record = self._lookup.at(physical_offset)
            if record is None or (record.topic != topic and record.topic not in self._delay_stores):
                continue
            if _has_pending_key(record, topic, key):
                return KeyedRecord(record.topic, physical_offset)
        return None

    # --- sends ---------------------------------------------------------------------------------

    def check(self, key: str, topic: str) -> None:
        """Refuse a new message with a pending key that this broker cannot decide about.

        Raises:
            PendingKeyUnknownError: It cannot now; nothing was stored.
        """
        if self.refusal is not None and (reason := self.refusal()) is not None:
            raise PendingKeyUnknownError(f"pending_key={key!r} of a message for {topic!r}: {reason}")

    def put(
        self,
        drafts: Sequence[tuple[RecordDraft, str]],
        topic: str,
        before: Callable[[RecordDraft | None], RecordDraft] | None = None,
    ) -> tuple[KeyedPut, Sequence[PutResult] | None]:
        """Store messages of one topic, some with pending keys, as their rules say.

        Args:
            drafts: Records with their message ids.
            before: Of a commit: returns a record that is stored right before the first record, which it gets; None if
                no new message is stored. A commit cannot be refused: it is decided by what is pending here.

        Returns:
            The results, and the positions of the appended records; None if nothing was appended.

        Raises:
            PendingKeyError: A message is pending under one of the keys, and must not be replaced. Nothing was stored.
            PendingKeyUnknownError: This broker cannot decide about pending keys now. Nothing was stored.
        """
        with self._lock:
            return self._put(drafts, topic, before)

    def put_one(self, draft: RecordDraft, msg_id: str, topic: str) -> tuple[KeyedSend, int, tuple[str, ...]]:
        """Store one message with a pending key as its rule says. Most sends need less than `put` does for them.

        Returns:
            The result; the end and the topics as in `KeyedPut`. Errors as in `put`.
        """
        request = draft.pending
        assert request is not None, "the message has a pending key"
        with self._lock:
            newest = self._newest(topic, request.key)
            puts: Sequence[PutResult] | None = None
            replaced: tuple[str, ...] = ()
            if newest is None:
                self.check(request.key, topic)
                puts = (self._store.put(draft),)
            elif newest.properties and newest.topic == draft.topic == TIMER_TOPIC and request.on_pending == _REPLACE:
                puts, replaced = self._replace_waiting(draft, topic, request.key)
            if puts is None:
                put, _ = self._put([(draft, msg_id)], topic)
                return put.sends[0], put.end, put.topics
        decision = PendingDecision.REPLACED if replaced else PendingDecision.STORED
        self._counts[decision].add()
        outcome = PendingOutcome(decision, replaced) if replaced else _STORED
        offset, _, queue_offset, _ = first = puts[0]
        handle = new_handle(topic, self._broker_name, draft, first)
        return KeyedSend(outcome, msg_id, offset, queue_offset, None, handle), puts[-1].end, (draft.topic,)

    def _replace_waiting(
        self, draft: RecordDraft, topic: str, key: str
    ) -> tuple[Sequence[PutResult] | None, tuple[str, ...]]:
        """Replace the pending timer under a key if its properties are in memory and its slot is not read yet.

        Returns:
            The positions of both records, and the handle of the timer that was replaced; None if it is no such timer.
        """
        timers = self._timers
        with timers.lock:  # nothing is released or changed now, and what was is not in memory any more
            newest = self._store.index.recent_keys.newest_keyed(topic, key)
            waiting = None
            if newest is not None and newest.properties and newest.topic == TIMER_TOPIC:
                waiting = WaitingTimer.of(newest, timers.window_ms)
            if waiting is None or not timers.may_wait(waiting.slot_ms):
                return None, ()
            self.check(key, topic)
            draft.sys_flag |= SysFlag.CONTINUED
            puts = self._store.put(DraftPair(draft, self._replacements.cancelled_waiting(waiting, draft)))
            timers.remove_waiting(waiting.physical_offset, topic)
        name = RecallHandle(
            topic, self._broker_name, waiting.slot_ms + 1, waiting.msg_id.decode(), waiting.physical_offset
        )
        return puts, (encode_handle(name),)

    def _put(
        self,
        drafts: Sequence[tuple[RecordDraft, str]],
        topic: str,
        before: Callable[[RecordDraft | None], RecordDraft] | None = None,
    ) -> tuple[KeyedPut, Sequence[PutResult] | None]:
        """With the lock: see `put`."""
        with ExitStack() as locks:
            keys = [draft.pending.key for draft, _ in drafts if draft.pending is not None]
            newest = {key: self._newest(topic, key) for key in keys}
            pending: dict[str, PendingRecord | None] = {}
            if any(record is not None and record.topic in self._delay_stores for record in newest.values()):
                locks.enter_context(self._both_locks())
                for key in keys:
                    pending[key] = self._pending_at(newest[key])
                    if pending[key] is None:  # it may have been released or moved before the locks were taken
                        newest[key] = self._newest(topic, key)
                        pending[key] = self._pending_at(newest[key])
            if before is None:  # with the locks: from here on none of these messages moves to another broker
                for key in keys:
                    self.check(key, topic)
            plan = _KeyedAppend()
            for draft, msg_id in drafts:
                name = "" if draft.pending is None else draft.pending.key
                self._decide(plan, draft, msg_id, topic, newest.get(name), pending.get(name))
            records = [*plan.news, *plan.markers]
            if before is not None:
                records.insert(0, before(plan.news[0] if plan.news else None))
            puts = self._append(records)
            self.remove(plan.gone)
        first = 0 if before is None else 1
        sends = [result(puts, first) for result in plan.results]
        for each in sends:
            if each.outcome is not None:
                self._counts[each.outcome.decision].add()
        # The message that is kept may not be durable yet, so its send waits for the disk, too.
        end = self._store.end_offset if puts is None else puts[-1].end
        return KeyedPut(sends, end, tuple({each.topic for each in records})), puts

    def _append(self, records: list[RecordDraft]) -> Sequence[PutResult] | None:
        if len(records) > 1:
            return put_together(self._store, records)
        return (self._store.put(records[0]),) if records else None  # takes half the time

    def _decide(
        self,
        plan: _KeyedAppend,
        draft: RecordDraft,
        msg_id: str,
        topic: str,
        newest: KeyedRecord | None,
        first: PendingRecord | None,
    ) -> None:
        """Add the records of one message.

        Args:
            newest: The newest record with its pending key.
            first: The same, if it is pending; then the caller holds the locks.
        """
        request = draft.pending
        if request is None:
            plan.results.append(self._stored(plan.add(draft), draft, msg_id, topic, None))
            return
        if first is None:
            is_delivered = newest is not None and newest.topic not in self._delay_stores
            outcome = PendingOutcome(PendingDecision.STORED, already_delivered=is_delivered)
            plan.results.append(self._stored(plan.add(draft), draft, msg_id, topic, outcome))
            return
        rule = OnPending(request.on_pending)
        if rule is OnPending.REPLACE:
            outcome = PendingOutcome(PendingDecision.REPLACED, (self._handle_of(first),))
            plan.markers += self._replacements.cancelled(first)
            plan.gone.append(first.record)
            plan.results.append(self._stored(plan.add(draft), draft, msg_id, topic, outcome))
        elif rule is OnPending.KEEP:
            kept = self._named(first, PendingOutcome(PendingDecision.KEPT))
            plan.results.append(lambda puts, at: kept)
        elif rule is OnPending.POSTPONE:
            self._postpone(plan, first, self._deliver_ms(draft), request)
        else:
            record = first.record
            raise PendingKeyError(
                *(request.key, topic, self._handle_of(first)),
                find_property(record.properties_bytes, UNIQ_KEY) or "",
                first.entry.due_ms,
            )

    def _pending_at(self, newest: KeyedRecord | None) -> PendingRecord | None:
        """With the locks: return a record if it is pending."""
        delay_store = None if newest is None else self._delay_stores.get(newest.topic)
        record = None if newest is None or delay_store is None else self._lookup.at(newest.physical_offset)
        if delay_store is None or record is None:
            return None
        entry = delay_store.find_now(record)
        return None if entry is None else PendingRecord(record, entry)

    def _postpone(self, plan: _KeyedAppend, pending: PendingRecord, deliver_ms: int, request: PendingRequest) -> None:
        record = pending.record
        if request.no_later_ms is not None:
            since = find_property(record.properties_bytes, PENDING_SINCE)
            since_ms = record.store_timestamp if since is None else int(since)
            deliver_ms = min(deliver_ms, since_ms + request.no_later_ms)
        copy, marker = self._replacements.rescheduled(pending, deliver_ms)
        plan.markers.append(marker)
        plan.gone.append(record)
        number = plan.add(copy)
        msg_id = find_property(record.properties_bytes, UNIQ_KEY) or ""
        topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
        plan.results.append(self._stored(number, copy, msg_id, topic, PendingOutcome(PendingDecision.POSTPONED)))

    def _deliver_ms(self, draft: RecordDraft) -> int:
        """Return the time at which the message of a record is to be delivered."""
        now_ms = self._store.clock.now_ms()
        if draft.topic == SCHEDULE_TOPIC:
            return now_ms + draft.delay_ms
        deliver = find_property(draft.properties, TIMER_DELIVER_MS) if draft.topic == TIMER_TOPIC else None
        return now_ms if deliver is None else int(deliver)

    # --- results -------------------------------------------------------------------------------

    def _stored(
        self, number: int, draft: RecordDraft, msg_id: str, topic: str, outcome: PendingOutcome | None
    ) -> Callable[[Sequence[PutResult] | None, int], KeyedSend]:
        """Return the function that returns the result of a new record from the positions of the append."""
        real_queue = find_property(draft.properties, REAL_QID)
        queue_id = draft.queue_id if draft.topic == topic or real_queue is None else int(real_queue)

        def result(puts: Sequence[PutResult] | None, first: int) -> KeyedSend:
            assert puts is not None
            put = puts[first + number]
            handle = None
            if draft.topic != topic:
                due = find_property(draft.properties, TIMER_DELIVER_MS) if draft.topic == TIMER_TOPIC else None
                due_ms = put.store_timestamp + draft.delay_ms if due is None else int(due)
                handle = handle_of(topic, self._broker_name, draft.properties, due_ms, put.physical_offset)
            return KeyedSend(outcome, msg_id, put.physical_offset, put.queue_offset, queue_id, handle)

        return result

    def _named(self, pending: PendingRecord, outcome: PendingOutcome) -> KeyedSend:
        record = pending.record
        return KeyedSend(
            outcome,
            find_property(record.properties_bytes, UNIQ_KEY) or "",
            record.physical_offset,
            record.queue_offset,
            int(find_property(record.properties_bytes, REAL_QID) or 0),
            self._handle_of(pending),
        )

    def _handle_of(self, pending: PendingRecord) -> str:
        record, entry = pending
        topic = find_property(record.properties_bytes, REAL_TOPIC) or ""
        return handle_of(topic, self._broker_name, record.properties_bytes, entry.due_ms, record.physical_offset)


def _has_pending_key(record: StoredRecord, topic: str, key: str) -> bool:
    """Return True if a record has the pending key for a topic, and is no delete marker."""
    properties = record.properties_bytes
    is_same = find_property(properties, PENDING_KEY) == key and find_property(properties, REAL_TOPIC) == topic
    return is_same and not is_marker(record)


def total_outcome(outcomes: Sequence[PendingOutcome | None]) -> PendingOutcome | None:
    """Return the outcome of a batch; None if no message of it has a pending key."""
    known = [each for each in outcomes if each is not None]
    if not known:
        return None
    if len(outcomes) == 1:
        return known[0]
    decisions = {each.decision for each in known}
    order = (PendingDecision.REPLACED, PendingDecision.POSTPONED, PendingDecision.KEPT, PendingDecision.STORED)
    return PendingOutcome(
        next(each for each in order if each in decisions),
        tuple(handle for each in known for handle in each.replaced),
        any(each.already_delivered for each in known),
        tuple(outcomes),
    )


def unique_parts(drafts: Sequence[tuple[RecordDraft, str]]) -> Iterator[list[tuple[RecordDraft, str]]]:
    """Divide a batch into parts in which each pending key occurs once: a message sees the decision before it."""
    part: list[tuple[RecordDraft, str]] = []
    keys: set[str] = set()
    for draft, msg_id in drafts:
        key = None if draft.pending is None else draft.pending.key
        if key is not None and key in keys:
            yield part
            part, keys = [], set()
        if key is not None:
            keys.add(key)
        part.append((draft, msg_id))
    if part:
        yield part
