"""Pending messages of a RocketMQ cluster."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mqtemplate.broker import DelayedMessages
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.delayed.backlog import Backlog, timer_handle
from mqtemplate.brokers.remote.delayed.delay_config import DelayConfigs
from mqtemplate.brokers.remote.delayed.message_state import MessageState, MessageStates
from mqtemplate.brokers.remote.delayed.recall import Recalls
from mqtemplate.brokers.remote.delayed.timer_records import TimerId, timer_id
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.brokers.remote.queries import Queries
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import BrokerError, MessageError
from mqtemplate.message import BROKER_PROPERTIES, DELAY_PROPERTIES, Message, MessageExt, MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import (
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
)
from mqtemplate.user_code import shown

_SEND_TIMEOUT_MS = 3_000
_CANCELLED, _RESCHEDULED = ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED
_NOT_SENT_AGAIN = BROKER_PROPERTIES.union(DELAY_PROPERTIES)
_DELIVERED, _UNKNOWN = ScheduleChangeStatus.ALREADY_DELIVERED, ScheduleChangeStatus.UNKNOWN


class RocketMQCluster(DelayedMessages):
    """Lists the pending messages of a RocketMQ cluster, and cancels and reschedules its timers.

    - RocketMQ has no requests for this. Pending messages are read from its system topics; see `Backlog`.
    - A cancel is a recall of RocketMQ. It cannot recall messages with a delay level.
    - A reschedule sends the message again and then recalls the old one. If the client stops in between, both are
      pending, with equal ids; the next change of the message changes both.
    """

    def __init__(self, context: ClientContext, queries: Queries, producer: Producer) -> None:
        self._context = context
        self._producer = producer
        self._configs = DelayConfigs(context)
        self._backlog = Backlog(context, queries, self._configs)
        self._recalls = Recalls(context)
        self._states = MessageStates(context, queries, self._backlog, self._recalls)

    def can_recall(self) -> bool:
        """Return True if all brokers recall timers."""
        return self._recalls.are_enabled()

    # --- queries -------------------------------------------------------------------------------

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        """See `DelayedMessages.pending`. Each page reads all pending messages."""
        if max_count < 1:
            raise MessageError(f"max_count must be 1 or more, got {max_count}")
        after = _parse_cursor(cursor)
        rows = ((_position(timer), message) for timer, message in self._rows(query))
        found = heapq.nsmallest(max_count + 1, (row for row in rows if row[0] > after), key=lambda row: row[0])
        has_more, shown = len(found) > max_count, found[:max_count]
        return PendingPage(tuple(message for _, message in shown), _cursor(shown[-1][0]) if has_more else None)

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        if bucket_ms < 1:
            raise MessageError(f"the span to count by must be 1 ms or more, got {bucket_ms}")
        counts = Counter(timer.slot_ms // bucket_ms * bucket_ms for timer, _ in self._rows(query))
        return PendingCounts(counts.total(), dict(sorted(counts.items())))

    def _rows(self, query: PendingQuery) -> Iterator[tuple[TimerId, PendingMessage]]:
        return (row for row in self._backlog.pending(query) if not self._recalls.is_recent(row[0]))

    # --- changes -------------------------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """See `DelayedMessages.cancel`.

        RocketMQ answers a recall before it has found the message. A message that is due within the next second may be
        delivered although the status is ``CANCELLED``.
        """
        return _total([self._cancel(state) for state in self._states.find(handle, key, topic)])

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        """See `DelayedMessages.reschedule`; the class describes its steps."""
        return _total([self._reschedule(state, deliver_ms) for state in self._states.find(handle, key, topic)])

    def _cancel(self, state: MessageState) -> ScheduleChange:
        if not state.handles:
            return ScheduleChange(state.status)
        statuses = [self._recalls.recall(handle) for handle in state.handles]
        status = _CANCELLED if _CANCELLED in statuses else _DELIVERED
        return ScheduleChange(status, int(status is _CANCELLED))

    def _reschedule(self, state: MessageState, deliver_ms: int) -> ScheduleChange:
        record = state.newest
        if record is None:
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
        properties = {name: value for name, value in record.properties.items() if name not in _NOT_SENT_AGAIN}
        if slot_ms:
            properties[Property.TIMER_DELIVER_MS] = str(slot_ms + 1)
        queue = MessageQueue(topic, record.broker_name, parse_number(record.properties.get(Property.REAL_QID)) or 0)
        is_writable = queue in self._context.routes.publish_route(topic).write_queues
        message = Message(topic, record.body, properties, record.flag)
        return self._producer.send(message, queue if is_writable else None, _SEND_TIMEOUT_MS).handle


def _total(changes: list[ScheduleChange]) -> ScheduleChange:
    """Return one result for the changes of several messages."""
    done = [change for change in changes if change.count]
    status = (done or changes or [ScheduleChange(_UNKNOWN)])[0].status
    return ScheduleChange(status, len(done), tuple(handle for change in done for handle in change.handles))


class _Position(NamedTuple):
    """Position of a message in the order of the pages."""

    due_ms: int
    broker_name: str
    msg_id: str


def _position(timer: TimerId) -> _Position:
    return _Position(timer.slot_ms, timer.broker_name, timer.msg_id)


def _cursor(position: _Position) -> str:
    return "/".join(map(str, position))


def _parse_cursor(cursor: str | None) -> _Position:
    if cursor is None:
        return _Position(-1, "", "")
    due_ms, *names = cursor.split("/", 2)
    due = parse_number(due_ms)
    if due is None or len(names) != 2:
        raise MessageError(f"{shown(cursor)} is not a cursor; pass PendingPage.cursor unchanged")
    return _Position(due, *names)
