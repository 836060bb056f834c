"""Control over the pending messages of a cluster: one implementation of `DelayedMessages` for each kind of broker.

- `OurServer` sends requests that RocketMQ does not have: 500,001 to 500,004.
- `RocketMQCluster` uses recalls, and reads the state of a message before it changes it.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``, ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypedDict

from mqtemplate.broker import DelayedMessages, QueuedMessage, refuse_then
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.delayed.backlog import (
    Backlog,
    DelayConfigs,
    MessageState,
    Recalls,
    TimerId,
    TimerRecords,
    decode_cursor,
    encode_cursor,
    parse_cursor,
    position_of,
    timer_handle,
    timer_id,
)
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.clock import Clock
from mqtemplate.delay.recall_handle import RecallHandle, check_selection, decode_handle
from mqtemplate.durations import format_ms
from mqtemplate.errors import (
    BrokerError,
    DelayError,
    MessageError,
    MQTemplateError,
    RemoteProtocolError,
    RemoteTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import BROKER_PROPERTIES, DELAY_PROPERTIES, Message, MessageExt, MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import (
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
    check_page_size,
    total_change,
)
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_HANDLES,
    CancelDelayedMessageRequestHeader,
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    GetPendingPositionsRequestHeader,
    PendingCountsData,
    PendingMessageData,
    PendingMessagesData,
    Refusal,
    RefusalHeader,
    RescheduleDelayedMessageRequestHeader,
    ScheduleChangeData,
    checked_answer,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader

# --- results, pages and cursors -------------------------------------------------------------------


_CANCELLED, _RESCHEDULED = ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED
_DELIVERED, _UNKNOWN = ScheduleChangeStatus.ALREADY_DELIVERED, ScheduleChangeStatus.UNKNOWN
_MOST_INFORMATIVE = (_CANCELLED, _RESCHEDULED, ScheduleChangeStatus.MOVED, _DELIVERED, _UNKNOWN)
"""Order of the statuses where nothing was changed: only one of several servers has stored the message."""


# --- servers of this library ----------------------------------------------------------------------


_MAX_PAGE = 1_000
_STEP = 2_000
"""Most messages that a server compares for one request, so that it answers others meanwhile. It may choose fewer."""


class _Selected(NamedTuple):
    """Pending messages of one server: by handles, or by key."""

    broker_name: str
    handle: str | None = None
    key: str | None = None
    topic: str | None = None
    namespace: str | None = None


class _Conditions(TypedDict):
    """The conditions of a query as header fields."""

    topic: str | None
    key: str | None
    tag: str | None
    compared_property: str | None
    before_time: int | None
    after_time: int | None
    newest: int | None
    namespace: str | None


class _Listed(NamedTuple):
    """One message of a page, and the cursor after it on its server."""

    broker_name: str
    message: PendingMessage
    cursor: str


class _SteppedQuery:
    """One query of the pending messages of all servers, in steps of bounded work.

    Args:
        timeout_ms: Most time for all steps, without *on_compared*.
        on_compared: See `DelayedMessages.pending`. Then there is no limit for all steps, only one for each.
    """

    def __init__(self, clock: Clock, timeout_ms: int, on_compared: Callable[[int], None] | None) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._on_compared = on_compared
        self._start_ms = clock.steady_ms()
        self._steps = 0

    def step_done(self, operation: str) -> None:
        """Count a step that was not the last.

        Raises:
            RemoteTimeoutError: There is no time for another step.
        """
        self._steps += 1
        if self._on_compared is not None:
            self._on_compared(_STEP)
        elif self._clock.steady_ms() - self._start_ms >= self._timeout_ms:
            raise RemoteTimeoutError(
                f"{operation}: not finished after {format_ms(self._timeout_ms)}, in which up to "
                f"{self._steps * _STEP:,} messages were compared; filter by time or by key, or pass on_compared, which "
                "is called with the progress and has no time limit"
            )


@dataclass(frozen=True, slots=True)
class OurServer(DelayedMessages):
    """Control over the pending messages of all servers of a cluster.

    A handle names its server. A key and a query go to all servers.
    """

    context: ClientContext

    # --- changes -------------------------------------------------------------------------------

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        refuse_then(then, "this client")
        selected = self._named(handle, key, topic)
        return self._change("cancel", RequestCode.CANCEL_DELAYED_MESSAGE, CancelDelayedMessageRequestHeader, selected)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        refuse_then(then, "this client")
        selected = self._named(handle, key, topic)
        header = partial(RescheduleDelayedMessageRequestHeader, deliver_time=deliver_ms)
        return self._change("reschedule", RequestCode.RESCHEDULE_DELAYED_MESSAGE, header, selected)

    def _change(
        self, verb: str, code: int, create_header: Callable[..., CommandHeader], selected: list[_Selected]
    ) -> ScheduleChange:
        operation, changes = f"{verb} pending messages", []
        for each in selected:
            response = self._call(each.broker_name, code, create_header(**each._asdict()), operation)
            data = ScheduleChangeData.decode(response.body)
            status = ScheduleChangeStatus.__members__.get(data.status)
            if status is None:
                raise RemoteProtocolError(
                    f"{operation}: broker {each.broker_name!r} answered with unknown status {data.status!r}"
                )
            changes.append(ScheduleChange(status, data.count, tuple(data.handles)))
        return total_change(changes, _MOST_INFORMATIVE)

    def _named(self, handle: str | None, key: str | None, topic: str | None) -> list[_Selected]:
        """Return one request for each server; several for many handles."""
        key = check_selection(handle, key)
        if handle is None:
            wire_topic = None if topic is None else self.context.namespace.wrap(topic)
            namespace = self.context.settings.namespace or None
            return [
                _Selected(name, key=key, topic=wire_topic, namespace=namespace)
                for name in self.context.routes.master_names()
            ]
        by_broker: dict[str, list[str]] = {}
        for text in handle.split(","):
            named = decode_handle(text)
            self.context.routes.existing(self.context.namespace.unwrap(named.topic))  # has the address of the broker
            by_broker.setdefault(named.broker_name, []).append(text)
        return [
            _Selected(name, ",".join(handles[start : start + MAX_HANDLES]))
            for name, handles in by_broker.items()
            for start in range(0, len(handles), MAX_HANDLES)
        ]

    # --- queries -------------------------------------------------------------------------------

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        check_page_size(max_count)
        cursors = {} if cursor is None else decode_cursor(cursor)
        scan = self._scan(on_compared)
        lists = [
            self._listed(name, query, max_count + 1, cursors.get(name), scan)
            for name in self.context.routes.master_names()
        ]
        in_order = heapq.merge(*lists, key=lambda listed: listed.message.deliver_ms)
        page = list(islice(in_order, max_count))
        has_more = next(in_order, None) is not None
        cursors |= {listed.broker_name: listed.cursor for listed in page}
        if on_compared is not None and page:
            on_compared(len(page))  # of the last step; without this a list of all messages would show no progress
        return PendingPage(tuple(listed.message for listed in page), encode_cursor(cursors) if has_more else None)

    def _scan(self, on_compared: Callable[[int], None] | None) -> _SteppedQuery:
        return _SteppedQuery(self.context.clock, self.context.settings.pull_timeout_ms, on_compared)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return positions of a `LocalServer`, which runs on this machine."""
        (name,) = self.context.routes.master_names()
        header = GetPendingPositionsRequestHeader(
            **self._conditions(query), after_due=after[0], after_offset=after[1], max_count=max_count
        )
        return self._query(name, RequestCode.GET_PENDING_POSITIONS, header, "list pending messages", query).body

    def _listed(
        self, broker_name: str, query: PendingQuery, count: int, cursor: str | None, scan: _SteppedQuery
    ) -> Iterator[_Listed]:
        """Yield the messages of one server, in order; request the next page when it is needed."""
        operation = "list pending messages"
        while True:
            header = GetPendingMessagesRequestHeader(
                **self._conditions(query),
                max_count=min(count, _MAX_PAGE),
                cursor=cursor,
                max_records=_STEP,
                broker_name=broker_name,
            )
            response = self._query(broker_name, RequestCode.GET_PENDING_MESSAGES, header, operation, query)
            page = checked_answer(header, PendingMessagesData.decode(response.body))
            for data in page.messages:
                cursor = data.cursor
                yield _Listed(broker_name, self._message(data), cursor)
            if not page.has_more or (page.cursor is None and not page.messages):
                return
            cursor = page.cursor or cursor
            scan.step_done(operation)

    def _message(self, data: PendingMessageData) -> PendingMessage:
        return PendingMessage(
            topic=self.context.namespace.unwrap(data.topic),
            msg_id=data.msg_id,
            tags=data.tags,
            keys=data.keys,
            deliver_ms=data.deliver_time,
            delay_level=data.delay_level,
            roll_count=data.roll_count,
            born_timestamp=data.born_timestamp,
            store_timestamp=data.store_timestamp,
            body_size=data.body_size,
            handle=data.handle,
        )

    def count_pending(
        self,
        query: PendingQuery,
        bucket_ms: int = 60_000,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingCounts:
        buckets: Counter[int] = Counter()
        scan = self._scan(on_compared)
        for name in self.context.routes.master_names():
            for data in self._counted(name, query, bucket_ms, scan):
                buckets.update(data.buckets)
        return PendingCounts(buckets.total(), dict(sorted(buckets.items())))

    def _counted(
        self, broker_name: str, query: PendingQuery, bucket_ms: int, scan: _SteppedQuery
    ) -> Iterator[PendingCountsData]:
        """Yield the counts of one server, step by step."""
        operation, cursor = "count pending messages", None
        while True:
            header = CountPendingMessagesRequestHeader(
                **self._conditions(query),
                bucket_millis=bucket_ms,
                cursor=cursor,
                max_records=_STEP,
                broker_name=broker_name,
            )
            response = self._query(broker_name, RequestCode.COUNT_PENDING_MESSAGES, header, operation, query)
            data = checked_answer(header, PendingCountsData.decode(response.body))
            yield data
            cursor = data.cursor
            if cursor is None:
                return
            scan.step_done(operation)

    def _conditions(self, query: PendingQuery) -> _Conditions:
        return {
            "topic": None if query.topic is None else self.context.namespace.wrap(query.topic),
            "key": query.key,
            "tag": query.tag,
            "compared_property": None if query.with_property is None else "=".join(query.with_property),
            "before_time": query.before_ms,
            "after_time": query.after_ms,
            "newest": query.newest,
            "namespace": self.context.settings.namespace or None,
        }

    # --- requests ------------------------------------------------------------------------------

    def _query(
        self, broker_name: str, code: int, header: CommandHeader, operation: str, query: PendingQuery
    ) -> RemotingCommand:
        """Send a query. Without a key an older server may read all its pending messages, which takes seconds."""
        timeout_ms = self.context.settings.pull_timeout_ms if query.key is None else None
        return self._call(broker_name, code, header, operation, timeout_ms)

    def _call(
        self, broker_name: str, code: int, header: CommandHeader, operation: str, timeout_ms: int | None = None
    ) -> RemotingCommand:
        address = self.context.routes.address(broker_name)
        response = self.context.instance.invoke(address, RemotingCommand.request(code, header), timeout_ms)
        if response.code != ResponseCode.SUCCESS:
            raise _error(response, operation, address)
        return response


def _error(response: RemotingCommand, operation: str, address: str) -> MQTemplateError:
    problem = response_error(response, operation, address)
    if response.code == ResponseCode.MESSAGE_ILLEGAL:
        return DelayError(str(problem))
    if response.code == ResponseCode.INVALID_PARAMETER:
        return MessageError(str(problem))
    if response.header(RefusalHeader).refusal == Refusal.RECALL_DISABLED:
        return UnsupportedError(f"{operation}: {address} answered: {response.remark}")
    return problem


# --- brokers of RocketMQ ----------------------------------------------------------------------------


_SEND_TIMEOUT_MS = 3_000
_NOT_SENT_AGAIN = BROKER_PROPERTIES.union(DELAY_PROPERTIES)


class RocketMQCluster(DelayedMessages):
    """Lists the pending messages of a RocketMQ cluster, and cancels and reschedules its timers.

    - RocketMQ has no requests for this. Pending messages are read from its system topics; see `Backlog`.
    - A cancel is a recall of RocketMQ. It cannot recall messages with a delay level.
    - A reschedule sends the message again and then recalls the old one. If the client stops in between, both are
      pending, with equal ids; the next change of the message changes both.
    """

    def __init__(
        self, context: ClientContext, queries: Queries, producer: Producer, recalls: Recalls, configs: DelayConfigs
    ) -> None:
        self._context = context
        self._queries = queries
        self._producer = producer
        self._recalls = recalls
        self._configs = configs
        self._backlog = Backlog(context, queries, configs)

    # --- queries -------------------------------------------------------------------------------

    def pending(
        self,
        query: PendingQuery,
        max_count: int = 100,
        cursor: str | None = None,
        *,
        on_compared: Callable[[int], None] | None = None,
    ) -> PendingPage:
        """See `DelayedMessages.pending`. Each page reads all pending messages."""
        check_page_size(max_count)
        after = parse_cursor(cursor)
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
        return MessageState(status=_DELIVERED)

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
        return total_change([self._cancel(state) for state in self._find(handle, key, topic)], _MOST_INFORMATIVE)

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
            [self._reschedule(state, deliver_ms) for state in self._find(handle, key, topic)], _MOST_INFORMATIVE
        )

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


def _is_for(record: MessageExt, wire_topic: str | None) -> bool:
    return wire_topic is None or record.properties.get(Property.REAL_TOPIC) == wire_topic
