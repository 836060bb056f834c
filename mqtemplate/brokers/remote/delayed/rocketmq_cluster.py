"""Control over the pending messages of a RocketMQ cluster: the state of a message, recalls, and new deliver times.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``, ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.broker import DelayedMessages
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.delayed.backlog import (
    Backlog,
    DelayConfigs,
    TimerId,
    TimerRecords,
    timer_handle,
    timer_id,
)
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle, encode_handle
from mqtemplate.errors import BrokerError, MessageError, UnsupportedError
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
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC
from mqtemplate.user_code import shown

# --- recalls --------------------------------------------------------------------------------------


_RECENT_MS = 5_000  # a mark is in the timer topic and in the index some milliseconds after the response
_REFUSED = (ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
_TOO_OLD = "brokers can cancel from RocketMQ 5.3 on"


class Recalls:
    """Sends recalls, and remembers them for some seconds."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._recent: dict[TimerId, int] = {}

    def is_recent(self, timer: TimerId) -> bool:
        """Return True if this object has recalled a timer, and its mark may not be readable yet."""
        return timer in self._recent

    def recall(self, handle: RecallHandle) -> ScheduleChangeStatus:
        """Recall a timer; the broker accepts a recall without a check that the message is pending.

        Raises:
            UnsupportedError: The broker's ``recallMessageEnable`` is off, or it is too old.
        """
        now_ms = self._context.clock.now_ms()
        if handle.deliver_ms <= now_ms:
            return ScheduleChangeStatus.ALREADY_DELIVERED
        topic = self._context.namespace.unwrap(handle.topic)
        self._context.routes.existing(topic)  # its route has the address of the broker
        response, address = self._request(handle.broker_name, self._context.namespace.wrap(topic), handle)
        if response.code == ResponseCode.SUCCESS:
            self._remember(TimerId(handle.broker_name, handle.msg_id, handle.deliver_ms - 1), now_ms)
            return ScheduleChangeStatus.CANCELLED
        if response.code == ResponseCode.ILLEGAL_OPERATION and handle.deliver_ms <= self._context.clock.now_ms():
            return ScheduleChangeStatus.ALREADY_DELIVERED
        raise _error(response, f"cancel message {handle.msg_id} of {handle.topic!r}", address)

    def _remember(self, timer: TimerId, now_ms: int) -> None:
        for old in [each for each, since_ms in self._recent.items() if now_ms - since_ms > _RECENT_MS]:
            self._recent.pop(old, None)
        self._recent[timer] = now_ms

    # --- support -------------------------------------------------------------------------------

    def check_versions(self) -> None:
        """Raise `UnsupportedError` if all brokers are older than RocketMQ 5."""
        context = self._context
        if all(
            context.instance.is_before_5(context.routes.address(name)) for name in self._context.routes.master_names()
        ):
            raise UnsupportedError(
                f"this RocketMQ cluster has no timers and cancels no message; {_TOO_OLD}, and only messages with a "
                "timer, or use the embedded broker or our server"
            )

    def are_enabled(self) -> bool:
        """Return True if all brokers recall timers."""
        try:
            for name in self._context.routes.master_names():
                self.check_enabled(name)
        except BrokerError:
            return False
        return bool(self._context.routes.master_names())

    def check_enabled(self, broker_name: str) -> None:
        """Raise `UnsupportedError` if a broker refuses recalls. It gets a recall that has no effect."""
        over = RecallHandle(AUTO_CREATE_TOPIC, broker_name, 1, "0")  # the broker refuses its time, after other checks
        response, address = self._request(broker_name, AUTO_CREATE_TOPIC, over)
        if response.code in _REFUSED:
            raise _error(response, "recall messages", address)

    def _request(self, broker_name: str, wire_topic: str, handle: RecallHandle) -> tuple[RemotingCommand, str]:
        header = RecallMessageRequestHeader(
            producer_group=self._context.namespace.wrap(self._context.settings.producer_group),
            topic=wire_topic,
            recall_handle=encode_handle(handle),
            broker_name=broker_name,
        )
        address = self._context.routes.address(broker_name)
        request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, header)
        return self._context.instance.invoke(address, request, self._context.settings.request_timeout_ms), address


def _error(response: RemotingCommand, operation: str, address: str) -> BrokerError:
    problem = response_error(response, operation, address)
    # RocketMQ: RecallMessageProcessor. Access control answers with the same code.
    if response.code == ResponseCode.NO_PERMISSION and "recall" in (response.remark or "").lower():
        return UnsupportedError(f"{problem}; set recallMessageEnable=true on the broker")
    if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return UnsupportedError(f"{problem}; {_TOO_OLD}")
    return problem


# --- state of messages ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageState:
    """State of one message.

    Attributes:
        status: Result of a change if no timer of the message is pending.
        pending: Its pending timers with their records. There are two if a client stopped during a reschedule.
        handles: Handles of the pending timers. A message that is not in the index may have one without a record.
        deleted: Its timers that were recalled.
    """

    status: ScheduleChangeStatus
    pending: dict[TimerId, MessageExt] = field(default_factory=dict)
    handles: tuple[RecallHandle, ...] = ()
    deleted: frozenset[TimerId] = frozenset()

    @property
    def newest(self) -> MessageExt | None:
        """The record of the pending timer that was stored last."""
        return max(self.pending.values(), key=lambda record: record.store_timestamp, default=None)


class MessageStates:
    """Finds delayed messages by handle or key."""

    def __init__(self, context: ClientContext, queries: Queries, backlog: Backlog, recalls: Recalls) -> None:
        self._context = context
        self._queries = queries
        self._backlog = backlog
        self._recalls = recalls

    def find(self, handle: str | None, key: str | None, topic: str | None) -> list[MessageState]:
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
            return MessageState(status=ScheduleChangeStatus.ALREADY_DELIVERED)
        # The broker has no index, or has not yet added the message to it. A recall needs no index.
        return MessageState(status=ScheduleChangeStatus.UNKNOWN, handles=(handle,))

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
            status=ScheduleChangeStatus.ALREADY_DELIVERED if is_delivered else ScheduleChangeStatus.CANCELLED,
            pending=pending,
            handles=tuple(decode_handle(timer_handle(record)) for record in pending.values()),
            deleted=frozenset(timers.deleted),
        )

    def _is_stored(self, record: MessageExt, msg_id: str) -> bool:
        """Return True if the message is in its real topic."""
        topic = self._context.namespace.unwrap(record.properties[Property.REAL_TOPIC])
        return bool(self._queries.messages_by_key(topic, msg_id, 1, unique=True))

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
        return MessageState(status=ScheduleChangeStatus.ALREADY_DELIVERED)


def _is_for(record: MessageExt, wire_topic: str | None) -> bool:
    return wire_topic is None or record.properties.get(Property.REAL_TOPIC) == wire_topic


# --- control --------------------------------------------------------------------------------------


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
        self.recalls = Recalls(context)
        self._states = MessageStates(context, queries, self._backlog, self.recalls)

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

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        raise UnsupportedError("a RocketMQ cluster does not say where its pending messages are; request pages of them")

    def _rows(self, query: PendingQuery) -> Iterator[tuple[TimerId, PendingMessage]]:
        return (row for row in self._backlog.pending(query) if not self.recalls.is_recent(row[0]))

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
        statuses = [self.recalls.recall(handle) for handle in state.handles]
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
        self.recalls.check_enabled(record.broker_name)
        return self._replace(state, self._send_again(record, slot_ms))

    def _replace(self, state: MessageState, new: str | None, kept: TimerId | None = None) -> ScheduleChange:
        """Recall the old timers of a message; recall the new one instead if they are delivered already.

        Args:
            new: Handle of the new timer; None if the message was sent without a delay.
            kept: The old timer that is the new one as well.
        """
        old = [handle for timer, handle in zip(state.pending, state.handles, strict=True) if timer != kept]
        try:
            statuses = [self.recalls.recall(handle) for handle in old]
        except BrokerError as exc:
            raise BrokerError(
                f"the message was sent again with its new time, but the old one could not be recalled ({exc}), so both "
                "would be delivered; reschedule or cancel it once more, which changes both"
            ) from exc
        if _DELIVERED not in statuses:
            return ScheduleChange(_RESCHEDULED, 1, () if new is None else (new,))
        if new is not None:
            self.recalls.recall(decode_handle(new))
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
        while (other := timer._replace(slot_ms=slot_ms)) in deleted or self.recalls.is_recent(other):
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


class _ClusterPosition(NamedTuple):
    """Position of a message in the order of the pages."""

    due_ms: int
    broker_name: str
    msg_id: str


def _position(timer: TimerId) -> _ClusterPosition:
    return _ClusterPosition(timer.slot_ms, timer.broker_name, timer.msg_id)


def _cursor(position: _ClusterPosition) -> str:
    return "/".join(map(str, position))


def _parse_cursor(cursor: str | None) -> _ClusterPosition:
    if cursor is None:
        return _ClusterPosition(-1, "", "")
    due_ms, *names = cursor.split("/", 2)
    due = parse_number(due_ms)
    if due is None or len(names) != 2:
        raise MessageError(f"{shown(cursor)} is not a cursor; pass PendingPage.cursor unchanged")
    return _ClusterPosition(due, *names)
