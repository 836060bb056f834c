"""Part of an engine in a hand-over to another broker: its state, the lock of the mover, and the messages in transit.

The state is the file ``config/handOver.json``. The messages are records of two topics: in one the reserved ones, in the
other how the transit of each ended. The committed offset of `HAND_OVER_GROUP` is the first one that is not settled.

A kill between two appends leaves a message in exactly one state, since each change is one append:

- `DelayController.reserve` appends the copy in the transit topic and the marker that ends the pending message.
- `settle` appends the end of the transit, and for a returned message the copy that is pending again.

The committed offset only shortens the search: a message after it that has an end is settled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from secrets import token_hex
from typing import Protocol

import numpy as np

from mqtemplate.broker import BrokerLifecycle
from mqtemplate.broker.hand_over import (
    HandOverCounts,
    HandOverError,
    HandOverPhase,
    HandOverState,
    MovedMessage,
    ReserveFilter,
    TransitEnd,
    TransitMessage,
)
from mqtemplate.converters.readable import count_text
from mqtemplate.delay.control import DelayController
from mqtemplate.delay.delay_store import is_marker
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.engine.reader import MessageFinder
from mqtemplate.engine.transactions import TransactionService
from mqtemplate.errors import StoreFormatError
from mqtemplate.event_log import get_logger
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    Message,
    Property,
)
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingQuery
from mqtemplate.record.codec import RecordDraft, StoredRecord, pack_host, to_message_ext
from mqtemplate.record.properties import (
    HAND_OVER_STAYS,
    REAL_TOPIC,
    UNIQ_KEY,
    encode_properties,
    find_property,
    may_have_property,
)
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import HAND_OVER_FILE, ConsumerOffsets, TopicTable
from mqtemplate.topics import (
    HAND_OVER_GROUP,
    HAND_OVER_MOVED_TOPIC,
    HAND_OVER_TOPIC,
    RETRY_TOPIC_PREFIX,
    is_in_namespace,
    is_system_group,
)

_log = get_logger("mqtemplate.hand_over")

_EXAMINED = 4_096
"""Most pending messages that one reservation examines: many may be such that cannot move."""
_LISTED = 512
"""Pending messages that are listed at one time, for several reservations. A longer list would delay the sends."""
_START = (-1, -1)
_MAX_TRANSIT_BYTES = 4 << 20
"""Records of one response. A single larger one is returned all the same."""
MAX_IN_TRANSIT = 4_096
"""Most messages that are in transit at one time."""
_NOT_SENT = BROKER_PROPERTIES.union(DELAY_PROPERTIES, INTERNAL_PROPERTIES) - {Property.PENDING_SINCE}
_FIRST_LEASE_MS = 15_000
"""After a start, the owner of the lock before the start may still be at work for this long."""


class MovableMessages(Protocol):
    """The delayed messages of an engine, as a hand-over moves them; `LocalDelayedMessages` are these."""

    @property
    def control(self) -> DelayController:
        """Reserves messages for a transit, and settles it."""

    def waiting_count(self) -> int:
        """Return the number of pending messages."""

    def positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> np.ndarray:
        """Return where the records of pending messages are."""


class LocalHandOver:
    """The part of an engine in a hand-over. Implements `mqtemplate.broker.hand_over.OldBroker`."""

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        delayed: MovableMessages,
        transactions: TransactionService,
        finder: MessageFinder,
        lifecycle: BrokerLifecycle,
    ) -> None:
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._delayed = delayed
        self._transactions = transactions
        self._finder = finder
        self._lifecycle = lifecycle
        self._lock = threading.RLock()
        self._lease_ends_ms = 0  # steady time
        self._changed: Callable[[], None] = lambda: None
        self._listed: list[tuple[int, int]] = []  # due time and physical offset of the next ones to examine, in order
        self._after = _START  # position of the last pending message that was listed
        self._recalled: set[int] = set()  # offsets of messages that come back, and may have been recalled
        self._settled: set[int] = set()  # offsets after the committed one whose transit ended
        self._state = self._load()
        delayed.control.pending_keys.refusal = self._refuse_pending_keys
        self._committed = self._offsets.offset(HAND_OVER_GROUP, HAND_OVER_TOPIC, 0) or 0
        if self._state is not None:
            self._topics.create(HAND_OVER_TOPIC, 1)
            self._topics.create(HAND_OVER_MOVED_TOPIC, 1)
            self._lease_ends_ms = store.clock.steady_ms() + _FIRST_LEASE_MS if self._state.owner else 0
            self._seal()
            self._find_settled()
            self._keep_ends()

    # --- state ---------------------------------------------------------------------------------

    def _load(self) -> HandOverState | None:
        data = self._store.store_files.read_bytes(HAND_OVER_FILE)
        if not data:
            return None
        try:
            return HandOverState.from_json(data.decode())
        except ValueError as exc:
            raise StoreFormatError(
                f"{HAND_OVER_FILE} cannot be read ({exc}); restore it from a backup: without it the messages in "
                "transit to the other broker stay where they are"
            ) from exc

    def _save(self, state: HandOverState) -> HandOverState:
        state = replace(state, changed_ms=self._store.clock.now_ms())
        self._store.store_files.write_bytes(HAND_OVER_FILE, state.to_json().encode())
        self._state = state
        return state

    def _keep_ends(self) -> None:
        """Let retention keep the ends of transits while the hand-over is at work: old ids are looked up there."""
        is_over = self._state is None or self._state.phase in (HandOverPhase.CONFIRMED, HandOverPhase.ABORTED)
        queue = self._store.consume_queue(HAND_OVER_MOVED_TOPIC, 0)
        kept = queue.max_offset if is_over else queue.min_offset
        self._offsets.commit(HAND_OVER_GROUP, HAND_OVER_MOVED_TOPIC, 0, kept)

    def _seal(self) -> None:
        """Refuse messages from now on, if the hand-over is confirmed."""
        if self._state is not None and self._state.phase is HandOverPhase.CONFIRMED:
            self._refuse_messages(self._state.target)

    def _refuse_messages(self, target: str) -> None:
        reason = (
            f"this broker has moved to {target}, and takes no messages any more; send them "
            "there, and remove mqtemplate.hand-over from the settings"
        )
        self._store.fence = lambda: reason

    @contextmanager
    def _confirming(self, state: HandOverState) -> Iterator[None]:
        """Refuse messages before the last look: one that was stored after it would stay here for ever.

        Raises:
            HandOverError: There is something left here; then messages are stored as before.
        """
        fence = self._store.fence
        self._check_nothing_remains()  # the usual error, for which no message is refused
        self._refuse_messages(state.target)
        try:
            self._store.written_end()  # waits for the last append
            self._check_nothing_remains()
            yield
        except BaseException:
            self._store.fence = fence
            raise

    def _check_nothing_remains(self) -> None:
        if remaining := self.remaining():
            raise HandOverError(f"the hand-over cannot be confirmed yet: {'; '.join(remaining)}")

    def _refuse_pending_keys(self) -> str | None:
        """Return why this broker cannot decide about a pending key; None without messages that may be elsewhere."""
        state = self._state
        if state is None or state.phase is HandOverPhase.ABORTED:
            return None
        return (
            f"this broker hands its pending messages over to {state.target} ({state.phase.value}), so the message that "
            "is pending under the key may be there; send it without the key, or to that broker after the hand-over is "
            "confirmed"
        )

    def state(self) -> HandOverState | None:
        """See `OldBroker.state`."""
        self._lifecycle.check()
        return self._state

    def begin(self, target: str, topics: Collection[str] = (), groups: Collection[str] = ()) -> HandOverState:
        """See `OldBroker.begin`."""
        self._lifecycle.check()
        with self._lock:
            state, now_ms = self._state, self._store.clock.now_ms()
            if state is not None and state.target == target and state.phase is not HandOverPhase.ABORTED:
                return state
            if state is not None and state.phase is not HandOverPhase.ABORTED:
                raise HandOverError(
                    f"a hand-over to {state.target} is {state.phase.value}, so none to {target} can start; abort that "
                    "one first (mqtemplate hand-over abort), or give its address"
                )
            self._topics.create(HAND_OVER_TOPIC, 1)
            self._topics.create(HAND_OVER_MOVED_TOPIC, 1)
            names = topics or self._topics.application_topics()
            members = groups or [name for name in self._offsets.groups() if not is_system_group(name)]
            _log.info("hand_over.started", target=target)
            started = self._save(
                HandOverState(
                    hand_over_id=token_hex(8),
                    target=target,
                    phase=HandOverPhase.RUNNING,
                    started_ms=now_ms,
                    changed_ms=now_ms,
                    topics=tuple(sorted(names)),
                    groups=tuple(sorted(members)),
                    first_offset=self._store.consume_queue(HAND_OVER_TOPIC, 0).max_offset,
                    switches_ms=(
                        (now_ms,)
                        if state is None or state.target != target
                        else state.switched(HandOverPhase.RUNNING, now_ms)
                    ),
                )
            )
            self._keep_ends()
            self._changed()
            return started

    def _existing(self) -> HandOverState:
        self._lifecycle.check()
        if self._state is None:
            raise HandOverError(
                "this broker has no hand-over; start one with mqtemplate.hand-over.from in the settings of the "
                "application, or with: mqtemplate hand-over start"
            )
        return self._state

    def change(self, phase: HandOverPhase) -> HandOverState:
        """See `OldBroker.change`."""
        with self._lock:
            state = self._existing()
            state.check_next(phase)
            if phase is state.phase:
                return state
            with self._confirming(state) if phase is HandOverPhase.CONFIRMED else nullcontext():
                _log.info("hand_over.changed", target=state.target, phase=phase.value, phase_before=state.phase.value)
                switches_ms = state.switched(phase, self._store.clock.now_ms())
                saved = self._save(replace(state, phase=phase, last_error=None, switches_ms=switches_ms))
            self._keep_ends()
            self._changed()
            return saved

    def on_change(self, wake: Callable[[], None]) -> bool:
        """See `OldBroker.on_change`."""
        self._changed = wake
        return True

    def note_error(self, owner: str, error: str | None) -> None:
        """See `OldBroker.note_error`."""
        with self._lock:
            state = self._owned(owner)
            if state.last_error != error:
                self._save(replace(state, last_error=error))

    def note_brokers(self, owner: str, names: Collection[str]) -> None:
        """See `OldBroker.note_brokers`."""
        with self._lock:
            state = self._owned(owner)
            known = set(state.brokers)
            if not known.issuperset(names):
                self._save(replace(state, brokers=tuple(sorted(known.union(names)))))

    def remaining(self) -> list[str]:
        """See `OldBroker.remaining`."""
        self._existing()
        found = []
        counts = self.counts()
        if counts.pending:
            found.append(f"{count_text(counts.pending, 'message is', 'messages are')} pending here")
        if counts.in_transit:
            found.append(f"{count_text(counts.in_transit, 'message is', 'messages are')} in transit")
        if self._transactions.open_count:
            found.append(f"{count_text(self._transactions.open_count, 'transaction is', 'transactions are')} open")
        for (group, topic), offsets in sorted(self._offsets.all().items()):
            if is_system_group(group):
                continue
            queues = ((offset, self._store.consume_queue(topic, queue_id)) for queue_id, offset in offsets.items())
            unread = sum(max(queue.max_offset - max(offset, queue.min_offset), 0) for offset, queue in queues)
            if unread:
                found.append(f"group {group} has not consumed {count_text(unread, 'message')} of {topic}")
        return found

    def counts(self) -> HandOverCounts:
        """See `OldBroker.counts`."""
        self._lifecycle.check()
        with self._lock:
            reserved, in_transit = self._store.consume_queue(HAND_OVER_TOPIC, 0).max_offset, self._in_transit()
            moved, state = 0, self._state
            if state is not None and (state.phase is not HandOverPhase.ABORTED or state.taken_back):
                # Messages are in transit in one direction at a time. Those on their way back are in the new broker too.
                leaving = 0 if reserved == state.back_offset else in_transit
                moved = reserved - state.first_offset - state.taken_back - leaving - state.returned
            return HandOverCounts(
                pending=self._delayed.waiting_count(),
                reserved=reserved,
                in_transit=in_transit,
                moved=moved,
                returned=0 if state is None else state.returned,
            )

    def _in_transit(self) -> int:
        """Return the number of messages in transit, without a count of the pending ones, which takes longer."""
        return self._store.consume_queue(HAND_OVER_TOPIC, 0).max_offset - self._committed - len(self._settled)

    # --- lock ----------------------------------------------------------------------------------

    def lock(self, owner: str, lease_ms: int) -> bool:
        """See `OldBroker.lock`."""
        with self._lock:
            state, now_ms = self._existing(), self._store.clock.steady_ms()
            if state.owner not in (None, owner) and now_ms < self._lease_ends_ms:
                return False
            if state.owner != owner:
                self._save(replace(state, owner=owner))
            self._lease_ends_ms = now_ms + lease_ms
            return True

    def unlock(self, owner: str) -> None:
        """See `OldBroker.unlock`."""
        with self._lock:
            state = self._existing()
            if state.owner == owner:
                self._save(replace(state, owner=None))
                self._lease_ends_ms = 0

    def _owned(self, owner: str) -> HandOverState:
        state = self._existing()
        if state.owner != owner or self._store.clock.steady_ms() >= self._lease_ends_ms:
            raise HandOverError(
                f"{owner} does not have the lock of the hand-over (its last owner: {state.owner or 'none'}); "
                "take it first"
            )
        return state

    # --- reserving -----------------------------------------------------------------------------

    def reserve(self, owner: str, max_count: int, chosen: ReserveFilter) -> int:
        """See `OldBroker.reserve`."""
        with self._lock:
            state = self._owned(owner)
            if state.phase is not HandOverPhase.RUNNING:
                raise HandOverError(f"the hand-over is {state.phase.value}; only one that is RUNNING reserves messages")
            max_count = min(max_count, MAX_IN_TRANSIT - self._in_transit())
            next_ms = self._listed[0][0] if self._listed else self._after[0]
            if not chosen.after_ms <= next_ms < chosen.before_ms:
                self._listed, self._after = [], _START
            count = examined = 0
            while count < max_count and examined < _EXAMINED:
                if not self._listed and not self._list_pending(chosen):
                    break
                part = self._listed[: max_count - count]
                del self._listed[: len(part)]
                examined += len(part)
                offsets = [offset for due_ms, offset in part if chosen.after_ms <= due_ms < chosen.before_ms]
                count += self._delayed.control.reserve(offsets, lambda record: _may_move(record, chosen))
            return count

    def _list_pending(self, chosen: ReserveFilter) -> bool:
        """List the next pending messages. Return False at the end: the next list starts with the first one again."""
        query = PendingQuery(after_ms=chosen.after_ms, before_ms=chosen.before_ms)
        rows = self._delayed.positions(query, self._after, _LISTED)
        self._listed = list(zip(rows["due_ms"].tolist(), rows["physical_offset"].tolist(), strict=True))
        self._after = self._listed[-1] if self._listed else _START
        return bool(self._listed)

    # --- messages in transit -------------------------------------------------------------------

    def _find_settled(self) -> None:
        """Find what ended after the committed offset: a kill came between the two."""
        queue = self._store.consume_queue(HAND_OVER_MOVED_TOPIC, 0)
        unsettled = self._store.consume_queue(HAND_OVER_TOPIC, 0).max_offset - self._committed
        # Each message has one end, and possibly a recall. Between those of messages after the committed offset may be
        # others of messages before it, if both were in transit at one time.
        first = max(queue.max_offset - 2 * (unsettled + MAX_IN_TRANSIT), queue.min_offset)
        for unit in queue.unit_tuples(first, queue.max_offset - first):
            ended = MovedMessage.from_json(self._store.read(unit[0], unit[1]).body)
            if ended.offset >= self._committed:
                (self._recalled if ended.end is TransitEnd.RECALLED else self._settled).add(ended.offset)
        self._advance()

    def _advance(self) -> None:
        """Commit the offset of the first message that is not settled."""
        while self._committed in self._settled:
            self._settled.discard(self._committed)
            self._recalled.discard(self._committed)
            self._committed += 1
        self._offsets.commit(HAND_OVER_GROUP, HAND_OVER_TOPIC, 0, self._committed)

    def _records(self, max_count: int) -> Iterator[StoredRecord]:
        queue = self._store.consume_queue(HAND_OVER_TOPIC, 0)
        count, offset = 0, self._committed
        while offset < queue.max_offset and count < max_count:
            if offset not in self._settled:
                unit = queue.unit(offset)
                yield self._store.read(unit.physical_offset, unit.size)
                count += 1
            offset += 1

    def transit(self, max_count: int = 1_000) -> list[TransitMessage]:
        """See `OldBroker.transit`."""
        with self._lock:
            state = self._existing()
            found: list[TransitMessage] = []
            size = 0
            for record in self._records(max_count):
                size += record.total_size
                if found and size > _MAX_TRANSIT_BYTES:
                    break
                is_recalled = record.queue_offset in self._recalled
                found.append(_transit_message(record, state.hand_over_id, is_recalled=is_recalled))
            return found

    def settle(self, owner: str, ended: Sequence[MovedMessage]) -> None:
        """See `OldBroker.settle`."""
        with self._lock:
            state = self._owned(owner)
            fresh = [each for each in ended if each.offset >= self._committed and each.offset not in self._settled]
            if not fresh:
                return
            queue = self._store.consume_queue(HAND_OVER_TOPIC, 0)
            returned = [
                (self._store.read(unit.physical_offset, unit.size), each.may_move_again)
                for each in fresh
                if each.end is TransitEnd.RETURNED
                for unit in [queue.unit(each.offset)]
            ]
            self._delayed.control.settle([self._end_of(each) for each in fresh], returned)
            self._recalled.update(each.offset for each in fresh if each.end is TransitEnd.RECALLED)
            self._settled.update(each.offset for each in fresh if each.end is not TransitEnd.RECALLED)
            self._advance()
            if returned:
                self._save(replace(state, returned=state.returned + len(returned)))

    def take_back(self, owner: str, messages: Sequence[Message]) -> None:
        """See `OldBroker.take_back`."""
        with self._lock:
            state = self._owned(owner)
            self._delayed.control.settle([self._back(each) for each in messages], [])
            end = self._store.consume_queue(HAND_OVER_TOPIC, 0).max_offset
            self._save(replace(state, taken_back=state.taken_back + len(messages), back_offset=end))

    def _back(self, message: Message) -> RecordDraft:
        stored = {
            Property.REAL_TOPIC: message.topic,
            Property.REAL_QID: str(parse_number(message.properties.get(Property.REAL_QID)) or 0),
            Property.REPLACED_LEVEL: "0",
            Property.HAND_OVER_BACK: "1",
        }
        internal = INTERNAL_PROPERTIES - {Property.PENDING_SINCE}
        kept = {name: value for name, value in message.properties.items() if name not in internal}
        return RecordDraft(
            HAND_OVER_TOPIC,
            0,
            message.body,
            encode_properties(kept | stored),
            flag=message.flag,
            born_timestamp=self._store.clock.now_ms(),
            born_host=pack_host(self._finder.host),
        )

    def _end_of(self, ended: MovedMessage) -> RecordDraft:
        return RecordDraft(
            HAND_OVER_MOVED_TOPIC,
            0,
            ended.to_json().encode(),
            encode_properties({Property.UNIQ_KEY: ended.msg_id}),
            born_timestamp=self._store.clock.now_ms(),
            born_host=pack_host(self._finder.host),
        )

    def moved(self, msg_id: str, topic: str | None = None) -> MovedMessage | None:
        """See `OldBroker.moved`."""
        self._lifecycle.check()
        for record in self._finder.records(KeyQuery(HAND_OVER_MOVED_TOPIC, msg_id, 64, 0, None, unique=True)):
            ended = MovedMessage.from_json(record.body)
            if ended.end is not TransitEnd.RECALLED and topic in (None, ended.topic):
                return None if self.is_reserved(msg_id, topic) else ended
        return None

    def is_reserved(self, msg_id: str, topic: str | None = None) -> bool:
        """See `OldBroker.is_reserved`."""
        self._lifecycle.check()
        with self._lock:
            return any(
                record.queue_offset >= self._committed
                and record.queue_offset not in self._settled
                and topic in (None, find_property(record.properties_bytes, REAL_TOPIC))
                for record in self._finder.records(KeyQuery(HAND_OVER_TOPIC, msg_id, 64, 0, None, unique=True))
            )


def _may_move(record: StoredRecord, chosen: ReserveFilter) -> bool:
    properties = record.properties_bytes
    topic = find_property(properties, REAL_TOPIC) or ""
    if not topic or find_property(properties, UNIQ_KEY) is None:
        return False
    if topic.startswith(RETRY_TOPIC_PREFIX) and not chosen.with_retries:
        return False
    if topic in chosen.without_topics or (chosen.topics is not None and topic not in chosen.topics):
        return False
    if chosen.namespace is not None and not is_in_namespace(topic, chosen.namespace):
        return False
    return not is_marker(record) and not may_have_property(properties, HAND_OVER_STAYS)


def _transit_message(record: StoredRecord, hand_over_id: str, *, is_recalled: bool) -> TransitMessage:
    stored = to_message_ext(record, "")
    properties = {name: value for name, value in stored.properties.items() if name not in _NOT_SENT}
    move_id = f"{hand_over_id}-{record.queue_offset}"
    properties[Property.HAND_OVER] = move_id
    topic = stored.properties[Property.REAL_TOPIC]
    if topic.startswith(RETRY_TOPIC_PREFIX):
        properties[Property.RECONSUME_TIME] = str(stored.reconsume_times)
        properties[Property.MAX_RECONSUME_TIMES] = str(stored.reconsume_times + 1)
    return TransitMessage(
        offset=record.queue_offset,
        msg_id=stored.msg_id,
        deliver_ms=parse_number(stored.properties.get(Property.TIMER_DELIVER_MS)) or 0,
        queue_id=parse_number(stored.properties.get(Property.REAL_QID)) or 0,
        delay_level=parse_number(stored.properties.get(Property.REPLACED_LEVEL)) or 0,
        move_id=move_id,
        message=Message(topic, stored.body, properties, stored.flag),
        is_back=Property.HAND_OVER_BACK in stored.properties,
        is_recalled=is_recalled,
        recalled_ms=parse_number(stored.properties.get(Property.HAND_OVER_RECALLED)),
    )
