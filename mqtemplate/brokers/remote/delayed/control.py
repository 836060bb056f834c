"""Control over the pending messages of a RocketMQ cluster: recalls, and sends under a pending key in two steps.

`RocketMQCluster` reads the state of a message before it changes it. `PendingKeySends` looks up what is pending under a
key, sends, and recalls.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``, ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mqtemplate.broker import DelayedMessages, QueuedMessage, refuse_then
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.delayed.backlog import (
    Backlog,
    DelayConfigs,
    MessageState,
    Recalls,
    TimerId,
    TimerRecords,
    parse_cursor,
    position_of,
    sent_again,
    timer_handle,
    timer_id,
)
from mqtemplate.brokers.remote.delayed.index_reader import IndexReader, index_answers
from mqtemplate.brokers.remote.delayed.our_server import MOST_INFORMATIVE
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle
from mqtemplate.errors import BrokerError, MessageError, PendingKeyError, UnsupportedError
from mqtemplate.message import (
    KEY_SEPARATOR,
    Message,
    MessageExt,
    MessageQueue,
    Property,
    create_unique_id,
    split_keys,
)
from mqtemplate.numbers import parse_number
from mqtemplate.pending import (
    OnPending,
    PendingCounts,
    PendingDecision,
    PendingMessage,
    PendingOutcome,
    PendingPage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
    check_page_size,
    total_change,
)
from mqtemplate.results import SendResult, SendStatus

_CANCELLED, _RESCHEDULED = ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED
_DELIVERED, _UNKNOWN = ScheduleChangeStatus.ALREADY_DELIVERED, ScheduleChangeStatus.UNKNOWN
_SEND_TIMEOUT_MS = 3_000


class RocketMQCluster(DelayedMessages):
    """Lists the pending messages of a RocketMQ cluster, and cancels and reschedules its timers.

    - RocketMQ has no requests for this: its system topics are read, by each query or into an index.
    - A cancel is a recall of RocketMQ. It cannot recall messages with a delay level.
    - A reschedule sends the message again and then recalls the old one. If the client stops in between, both are
      pending, with equal ids; the next change of the message changes both.
    """

    def __init__(
        self,
        context: ClientContext,
        queries: Queries,
        producer: Producer,
        recalls: Recalls,
        configs: DelayConfigs,
        index: IndexReader | None,
    ) -> None:
        self._context = context
        self._queries = queries
        self._producer = producer
        self._recalls = recalls
        self._configs = configs
        self._backlog = Backlog(context, queries, configs)
        self._index = index

    # --- queries -------------------------------------------------------------------------------

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """See `DelayedMessages.pending`. Without an index each page reads all pending messages."""
        check_page_size(max_count)
        after = parse_cursor(cursor)
        if self._index is not None and index_answers(query):
            self._index.update(on_compared)
            return self._index.page(query, after, max_count, self._recalls.is_recent)
        rows = ((position_of(timer), message) for timer, message in self._rows(query, on_compared))
        found = heapq.nsmallest(max_count + 1, (row for row in rows if row[0] > after), key=lambda row: row[0])
        cursor = "/".join(map(str, found[max_count - 1][0])) if len(found) > max_count else None
        return PendingPage(tuple(message for _, message in found[:max_count]), cursor)

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        if bucket_ms < 1:
            raise MessageError(f"the span to count by must be 1 ms or more, got {bucket_ms}")
        if self._index is not None and index_answers(query):
            self._index.update(on_compared)
            return self._index.counts(query, bucket_ms)
        counts = Counter(timer.slot_ms // bucket_ms * bucket_ms for timer, _ in self._rows(query, on_compared))
        return PendingCounts(counts.total(), dict(sorted(counts.items())))

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        raise UnsupportedError("a RocketMQ cluster does not say where its pending messages are; request pages of them")

    def _rows(
        self, query: PendingQuery, on_compared: Callable[[int], None] | None
    ) -> Iterator[tuple[TimerId, PendingMessage]]:
        for row in self._backlog.pending(query):
            if on_compared is not None:
                on_compared(1)
            if not self._recalls.is_recent(row[0]):
                yield row

    # --- state of messages -----------------------------------------------------------------------

    def _find(self, handle: str | None, key: str | None, topic: str | None) -> list[MessageState]:
        """Return the messages that the arguments of `DelayedMessages.cancel` name.

        Raises:
            MessageError: As `DelayedMessages.cancel`.
            UnsupportedError: One of the messages has a delay level, or no broker recalls messages.
        """
        key = check_selection(handle, key)
        if handle is not None:
            return [self._by_handle(decode_handle(text)) for text in handle.split(",")]
        assert key is not None
        self._recalls.check_versions()
        wire_topic = None if topic is None else self._context.namespace.wrap(topic)
        ids = self._backlog.ids_with_key(key)
        if ids is None:
            ids = [message.msg_id for _, message in self._backlog.pending(PendingQuery(key=key, topic=topic))]
        states = [self._by_id(msg_id, wire_topic) for msg_id in ids]
        return [state for state in states if state is not None]

    def _by_handle(self, handle: RecallHandle) -> MessageState:
        state = self._by_id(handle.msg_id, handle.topic)
        if state is not None:
            return state
        if handle.deliver_ms <= self._context.clock.now_ms():
            return MessageState(status=_DELIVERED)
        # The broker has no index, or has not yet added the message to it. A recall needs no index.
        return MessageState(status=_UNKNOWN, handles=(handle,))

    def _by_id(self, msg_id: str, wire_topic: str | None) -> MessageState | None:
        """Return the state of a message; None if the index has no delayed message with this id and real topic."""
        records = [record for record in self._backlog.timers_of(msg_id) if _is_for(record, wire_topic)]
        if not records:
            return self._level(msg_id, wire_topic)
        timers = TimerRecords[MessageExt](lambda record: record)
        for record in records:
            timers.add(record)
        now_ms = self._context.clock.now_ms()
        remaining = {
            timer: record for timer, record in timers.remaining().items() if not self._recalls.is_recent(timer)
        }
        pending = {timer: record for timer, record in remaining.items() if timer.slot_ms > now_ms}
        is_delivered = bool(remaining) or self._is_stored(records[0], msg_id)
        return MessageState(
            status=_DELIVERED if is_delivered else _CANCELLED,
            pending=pending,
            handles=tuple(decode_handle(timer_handle(record)) for record in pending.values()),
            deleted=frozenset(timers.deleted),
        )

    def _is_stored(self, record: MessageExt, msg_id: str) -> bool:
        """Return True if the message is in its real topic."""
        real_topic = record.properties[Property.REAL_TOPIC]
        return bool(self._queries.messages_by_key(self._context.namespace.unwrap(real_topic), msg_id, 1, unique=True))

    def _level(self, msg_id: str, wire_topic: str | None) -> MessageState | None:
        found = [(record, due_ms) for record, due_ms in self._backlog.levels_of(msg_id) if _is_for(record, wire_topic)]
        if not found:
            return None
        now_ms = self._context.clock.now_ms()
        levels = [record.queue_id + 1 for record, due_ms in found if due_ms > now_ms]
        if levels:
            raise UnsupportedError(
                f"message {msg_id} has delay level {levels[0]}, and RocketMQ recalls only messages with a timer; send "
                "it with delay= or deliver_at=, or use the embedded broker or our server"
            )
        return MessageState(status=_DELIVERED)

    # --- by pending key ------------------------------------------------------------------------

    def pending_with_key(self, topic: str, key: str, text: str, max_count: int) -> list[MessageState]:
        """Return the messages of a topic that are pending under a pending key, the newest first.

        Args:
            text: The text that stands for the key among the ``KEYS`` of the messages.
            max_count: Messages to look at, the newest ones that are not due.
        """
        wire_topic, now_ms = self._context.namespace.wrap(topic), self._context.clock.now_ms()
        records = [
            record
            for record in self._backlog.newest_timers(text)
            if _is_for(record, wire_topic)
            and record.properties.get(Property.PENDING_KEY) == key
            and timer_id(record).slot_ms > now_ms
        ]
        newest = sorted(records, key=lambda record: record.store_timestamp, reverse=True)
        ids = list(dict.fromkeys(record.msg_id for record in newest))[:max_count]
        states = [self._by_id(msg_id, wire_topic) for msg_id in ids]
        return [state for state in states if state is not None and state.pending]

    def is_indexed(self, text: str, msg_id: str) -> bool:
        """Return True if the index of the brokers has a message under a text."""
        return any(record.msg_id == msg_id for record in self._backlog.newest_timers(text))

    # --- changes -------------------------------------------------------------------------------

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """See `DelayedMessages.cancel`.

        RocketMQ answers a recall before it has found the message. A message that is due within the next second may be
        delivered although the status is ``CANCELLED``.
        """
        refuse_then(then, "RocketMQ")
        return total_change([self._cancel(state) for state in self._find(handle, key, topic)], MOST_INFORMATIVE)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        """See `DelayedMessages.reschedule`; the class describes its steps."""
        refuse_then(then, "RocketMQ")
        return total_change(
            [self._reschedule(state, deliver_ms) for state in self._find(handle, key, topic)], MOST_INFORMATIVE
        )

    def _cancel(self, state: MessageState) -> ScheduleChange:
        if not state.handles:
            return ScheduleChange(state.status)
        statuses = [self._recalls.recall(handle) for handle in state.handles]
        return ScheduleChange(_CANCELLED, 1) if _CANCELLED in statuses else ScheduleChange(_DELIVERED)

    def _reschedule(self, state: MessageState, deliver_ms: int) -> ScheduleChange:
        if (record := state.newest) is None:
            return ScheduleChange(_UNKNOWN if state.handles else state.status)
        current = timer_id(record)
        slot_ms = self._free_slot(current, deliver_ms, state.deleted)
        if slot_ms == current.slot_ms:  # the recall of this slot would delete the message that is sent again, too
            return self._replace(state, timer_handle(record), kept=current)
        self._recalls.check_enabled(record.broker_name)
        return self._replace(state, self._send_again(record, slot_ms))

    def _replace(self, state: MessageState, new: str | None, kept: TimerId | None = None) -> ScheduleChange:
        """Recall the old timers of a message; recall the new one instead if they are delivered already.

        Args:
            new: Handle of the new timer; None if the message was sent without a delay.
            kept: The old timer that is the new one as well.
        """
        old = [handle for timer, handle in zip(state.pending, state.handles, strict=True) if timer != kept]
        try:
            statuses = [self._recalls.recall(handle) for handle in old]
        except BrokerError as exc:
            raise BrokerError(
                f"the message was sent again with its new time, but the old one could not be recalled ({exc}), so both "
                "would be delivered; reschedule or cancel it once more, which changes both"
            ) from exc
        if _DELIVERED not in statuses:
            return ScheduleChange(_RESCHEDULED, 1, () if new is None else (new,))
        if new is not None:
            self._recalls.recall(decode_handle(new))
        return ScheduleChange(_DELIVERED)

    def _free_slot(self, timer: TimerId, deliver_ms: int, deleted: frozenset[TimerId]) -> int:
        """Return the slot for a new time; 0 for now.

        A message that was moved away from a slot cannot return to it: the mark in that slot would delete it. It gets
        the next slot.
        """
        if deliver_ms <= self._context.clock.now_ms():
            return 0
        length_ms = self._configs.of(timer.broker_name).slot_ms or 1_000
        slot_ms = (deliver_ms - 1) // length_ms * length_ms  # RocketMQ: a time on the border is in the slot before it
        while (other := timer._replace(slot_ms=slot_ms)) in deleted or self._recalls.is_recent(other):
            slot_ms += length_ms
        return slot_ms

    def _send_again(self, record: MessageExt, slot_ms: int) -> str | None:
        """Send a delayed message again, with its id and to its queue if that still exists; return its new handle."""
        topic = self._context.namespace.unwrap(record.properties[Property.REAL_TOPIC])
        queue = MessageQueue(topic, record.broker_name, parse_number(record.properties.get(Property.REAL_QID)) or 0)
        is_writable = queue in self._context.routes.publish_route(topic).write_queues
        message = sent_again(record, topic, slot_ms)
        return self._producer.send_as_it_is(message, queue if is_writable else None, _SEND_TIMEOUT_MS).handle


def _is_for(record: MessageExt, wire_topic: str | None) -> bool:
    return wire_topic is None or record.properties.get(Property.REAL_TOPIC) == wire_topic


# --- one pending message by key ---------------------------------------------------------------------


_MOST_PENDING = 4
"""Messages under a key that are looked at, the newest first. There are two if two processes have sent at once."""
_INDEX_WAIT_S = 2.0
"""Longest time to wait until the index has a message that this client has just sent."""
_INDEX_POLL_S = 0.02
_STRIPES = 64


class _Sent(NamedTuple):
    """The last message that this client has sent under a key."""

    msg_id: str
    sent_s: float


class PendingKeySends:
    """Sends under a pending key to brokers of RocketMQ 5, in two steps: look up, then send and recall.

    - The key is one of the message's ``KEYS`` as well, as `pending_key_text`: RocketMQ's index finds it.
    - To replace, the new message is sent first, and then the old one is recalled. If the client stops in between, both
      are pending; the next send under the key recalls both.
    - Sends of this client under one key are executed one after the other. Two clients that send under one key at the
      same time, or within the milliseconds that the index of a broker needs, may both store a message.
    - As for any recall, the broker answers before it has found the message: one that is due within the next second
      may be delivered although it is reported as replaced.
    """

    def __init__(self, context: ClientContext, cluster: RocketMQCluster, producer: Producer, recalls: Recalls) -> None:
        self._context = context
        self._cluster = cluster
        self._producer = producer
        self._recalls = recalls
        self._locks = [threading.Lock() for _ in range(_STRIPES)]
        self._sent: dict[str, _Sent] = {}

    def send(self, message: Message, queue: MessageQueue | None, timeout_ms: int) -> SendResult | None:
        """Send a message that has a pending key and a delay; None if its brokers decide about the key themselves.

        Raises:
            PendingKeyError: A message is pending under the key, and the message is to be refused then.
            UnsupportedError: The message has a level or is strict, or a broker has no timers or no recalls.
        """
        masters = self._producer.route(message.topic).masters()
        instance = self._context.instance
        instance.register_at(masters)
        if any(instance.announced.get(address) for address in masters):  # a server of this library
            return None
        key = message.properties[Property.PENDING_KEY]
        text = pending_key_text(self._context.namespace.wrap(message.topic), key)
        if Property.HAND_OVER in message.properties:  # the old broker has decided about it; later sends find it
            return self._store(message, queue, timeout_ms, text)
        self._check(message)
        if instance.remoting.loop.is_current_thread:
            raise UnsupportedError(
                "a pending_key on a RocketMQ cluster needs several requests, and this is the thread that receives "
                "their responses; send from another thread"
            )
        with self._locks[hash(text) % _STRIPES]:
            return self._send(message, queue, timeout_ms, text)

    def _check(self, message: Message) -> None:
        properties = message.properties
        if properties.get(Property.ON_PENDING_STRICT) == "true":
            raise UnsupportedError(
                f"on_pending_strict=True for pending_key={properties[Property.PENDING_KEY]!r} on {message.topic!r}: a "
                "RocketMQ cluster decides in two steps, a look-up and a send, so two messages may be pending for a "
                "while, or be delivered; leave on_pending_strict out to accept that, or use an embedded broker or a "
                "server of this library"
            )
        self._recalls.check_versions()
        if properties.get(Property.DELAY, "0") != "0":
            raise UnsupportedError(
                f"pending_key on a message for {message.topic!r} with a delay level: RocketMQ recalls only messages "
                "with a timer; pass delay= or deliver_at=, or use an embedded broker or a server of this library"
            )
        for name in self._context.routes.master_names():
            self._recalls.check_enabled(name)

    def _send(self, message: Message, queue: MessageQueue | None, timeout_ms: int, text: str) -> SendResult:
        action = OnPending(message.properties.get(Property.ON_PENDING, OnPending.REPLACE))
        found = self._pending(message.topic, message.properties[Property.PENDING_KEY], text)
        newest = found[0] if found else None
        if newest is not None and action is OnPending.REFUSE:
            handle = newest.handles[0]
            key = message.properties[Property.PENDING_KEY]
            raise PendingKeyError(key, message.topic, timer_handle(_newest(newest)), handle.msg_id, handle.deliver_ms)
        if newest is not None and action is OnPending.KEEP:
            return _result_of(_newest(newest), message.topic, PendingOutcome(PendingDecision.KEPT))
        if newest is not None and action is OnPending.POSTPONE:
            return self._postpone(message, _newest(newest), text)
        result = self._store(message, queue, timeout_ms, text)
        replaced = [self._recall(state) for state in found]
        handles = tuple(handle for each in replaced for handle in each)
        decision = PendingDecision.REPLACED if handles else PendingDecision.STORED
        is_late = bool(found) and not handles
        return replace(result, pending=PendingOutcome(decision, handles, is_late))

    def _recall(self, state: MessageState) -> list[str]:
        """Recall the timers of a message; return the handles of those that were pending."""
        recalled = []
        for record, handle in zip(state.pending.values(), state.handles, strict=True):
            if self._recalls.recall(handle) is _CANCELLED:
                recalled.append(timer_handle(record))
        return recalled

    def _store(self, message: Message, queue: MessageQueue | None, timeout_ms: int, text: str) -> SendResult:
        properties = dict(message.properties)
        keys = dict.fromkeys([*split_keys(properties.get(Property.KEYS)), text])  # a copy of such a message has it
        properties[Property.KEYS] = KEY_SEPARATOR.join(keys)
        properties[Property.UNIQ_KEY] = properties.get(Property.UNIQ_KEY) or create_unique_id()
        properties.setdefault(Property.PENDING_SINCE, str(self._context.clock.now_ms()))
        sent = Message(message.topic, message.body, properties, message.flag)
        result = self._producer.send_as_it_is(sent, queue, timeout_ms)
        self._remember(text, result.msg_id)
        return result

    def _postpone(self, message: Message, record: MessageExt, text: str) -> SendResult:
        """Give a pending message the due time of a new one, at most its limit after the first send."""
        properties, now_ms = message.properties, self._context.clock.now_ms()
        due_ms = _due_ms(properties, now_ms)
        limit_ms = parse_number(properties.get(Property.NO_LATER_THAN))
        since_ms = parse_number(record.properties.get(Property.PENDING_SINCE)) or record.born_timestamp
        if limit_ms is not None:
            due_ms = min(due_ms, since_ms + limit_ms)
        change = self._cluster.reschedule(timer_handle(record), due_ms)
        if change.status is _DELIVERED:  # released meanwhile: the new message is the only one
            stored = self._store(message, None, _SEND_TIMEOUT_MS, text)
            return replace(stored, pending=PendingOutcome(PendingDecision.STORED, already_delivered=True))
        self._remember(text, record.msg_id)
        result = _result_of(record, message.topic, PendingOutcome(PendingDecision.POSTPONED))
        return replace(result, handle=change.handles[0] if change.handles else result.handle)

    # --- the look-up ---------------------------------------------------------------------------

    def _pending(self, topic: str, key: str, text: str) -> list[MessageState]:
        """Return the messages that are pending under a key, the newest first."""
        self._await_index(text)
        return self._cluster.pending_with_key(topic, key, text, _MOST_PENDING)

    def _remember(self, text: str, msg_id: str) -> None:
        now_s = time.monotonic()
        for old in [each for each, sent in self._sent.items() if now_s - sent.sent_s > _INDEX_WAIT_S]:
            self._sent.pop(old, None)
        self._sent[text] = _Sent(msg_id, now_s)

    def _await_index(self, text: str) -> None:
        """Wait until the index has what this client has just sent under a key."""
        sent = self._sent.get(text)
        while sent is not None and time.monotonic() - sent.sent_s < _INDEX_WAIT_S:
            if self._cluster.is_indexed(text, sent.msg_id):
                return
            threading.Event().wait(_INDEX_POLL_S)


def pending_key_text(wire_topic: str, key: str) -> str:
    """Return the text that stands for a pending key among the ``KEYS``, by which RocketMQ finds a message."""
    return f"pending:{hashlib.sha256(f'{wire_topic} {key}'.encode()).hexdigest()[:24]}"


def _newest(state: MessageState) -> MessageExt:
    record = state.newest
    assert record is not None  # of a message that is pending
    return record


def _due_ms(properties: dict[str, str], now_ms: int) -> int:
    for name, unit_ms in ((Property.TIMER_DELAY_MS, 1), (Property.TIMER_DELAY_SEC, 1_000)):
        if (delay := parse_number(properties.get(name))) is not None:
            return now_ms + delay * unit_ms
    at_ms = properties.get(Property.TIMER_DELIVER_MS) or properties.get(Property.START_DELIVER_TIME)
    return parse_number(at_ms) or now_ms


def _result_of(record: MessageExt, topic: str, outcome: PendingOutcome) -> SendResult:
    """Return a result that names a message which is pending."""
    queue_id = parse_number(record.properties.get(Property.REAL_QID)) or 0
    queue = MessageQueue(topic, record.broker_name, queue_id)
    return SendResult(
        SendStatus.SEND_OK,
        record.msg_id,
        record.offset_msg_id,
        queue,
        record.queue_offset,
        handle=timer_handle(record),
        pending=outcome,
    )
