"""Control over the pending messages of servers of this library, with requests that RocketMQ does not have.

The codes are 500,001 to 500,004, and 500,006 for a change together with sends.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypedDict

from mqtemplate.broker import Capability, DelayedMessages, QueuedMessage
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.delayed.backlog import decode_cursor, encode_cursor
from mqtemplate.brokers.remote.producing.send_request import SendRequestFactory
from mqtemplate.clock import Clock
from mqtemplate.delay.recall_handle import check_selection, decode_handle
from mqtemplate.durations import format_ms
from mqtemplate.errors import (
    DelayError,
    MessageError,
    MQTemplateError,
    RemoteProtocolError,
    RemoteTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import MessageQueue
from mqtemplate.pending import (
    ConditionalSend,
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    PendingState,
    ScheduleChange,
    ScheduleChangeStatus,
    check_page_size,
    total_change,
)
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_HANDLES,
    CancelDelayedMessageRequestHeader,
    ChangeAction,
    ChangeAndSendData,
    ChangeAndSendRequestHeader,
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
    StoredMessageData,
    checked_answer,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.results import SendResult, SendStatus

MOST_INFORMATIVE = (
    ScheduleChangeStatus.CANCELLED,
    ScheduleChangeStatus.RESCHEDULED,
    ScheduleChangeStatus.MOVED,
    ScheduleChangeStatus.ALREADY_DELIVERED,
    ScheduleChangeStatus.UNKNOWN,
)
"""Order of the statuses where nothing was changed: only one of several servers has stored the message."""

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
    factory: SendRequestFactory

    # --- changes -------------------------------------------------------------------------------

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        selected = self._named(handle, key, topic)
        header = CancelDelayedMessageRequestHeader
        if then:
            together = partial(ChangeAndSendRequestHeader, action=ChangeAction.CANCEL.value)
            return self._change_and_send(RequestCode.CANCEL_DELAYED_MESSAGE, header, together, selected, then)
        return self._change("cancel", RequestCode.CANCEL_DELAYED_MESSAGE, header, selected)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        then: Sequence[QueuedMessage] = (),
    ) -> ScheduleChange:
        selected = self._named(handle, key, topic)
        header = partial(RescheduleDelayedMessageRequestHeader, deliver_time=deliver_ms)
        if then:
            action = ChangeAction.RESCHEDULE.value
            together = partial(ChangeAndSendRequestHeader, action=action, deliver_time=deliver_ms)
            return self._change_and_send(RequestCode.RESCHEDULE_DELAYED_MESSAGE, header, together, selected, then)
        return self._change("reschedule", RequestCode.RESCHEDULE_DELAYED_MESSAGE, header, selected)

    def send_if(
        self,
        messages: Sequence[QueuedMessage],
        state: PendingState,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
    ) -> ConditionalSend:
        selected = self._named(handle, key, topic)
        if len(selected) > 1:
            raise UnsupportedError(
                f"send_if: {len(selected)} requests would decide, and one must; with several servers, pass the "
                "handle of one message"
            )
        [only] = selected
        header = partial(ChangeAndSendRequestHeader, action=ChangeAction.SEND_IF.value, state=state.name)
        data, sent = self._request_together(only, header, messages)
        found = PendingState.__members__.get(data.status)
        if found is None:
            raise RemoteProtocolError(f"send_if: broker {only.broker_name!r} answered with state {data.status!r}")
        return ConditionalSend(found, sent)

    def _change_and_send(
        self,
        code: int,
        create_header: Callable[..., CommandHeader],
        create_together: Callable[..., ChangeAndSendRequestHeader],
        selected: list[_Selected],
        then: Sequence[QueuedMessage],
    ) -> ScheduleChange:
        """Change messages and store others on the server that has changed one; by key only the first such server."""
        if selected[0].handle is not None and len(selected) > 1:
            raise MessageError(
                f"a change with then= goes to one server and has at most {MAX_HANDLES} handles, these need "
                f"{len(selected)} requests; change them one by one"
            )
        changes: list[ScheduleChange] = []
        for number, each in enumerate(selected):
            data, sent = self._request_together(each, create_together, then)
            status = _status(data.status, each.broker_name)
            changes.append(ScheduleChange(status, data.count, tuple(data.handles)))
            if sent:
                others = selected[number + 1 :]
                changes += [self._change("change", code, create_header, [other]) for other in others]
                return replace(total_change(changes, MOST_INFORMATIVE), sent=sent)
        return total_change(changes, MOST_INFORMATIVE)

    def _request_together(
        self,
        selected: _Selected,
        create_header: Callable[..., ChangeAndSendRequestHeader],
        messages: Sequence[QueuedMessage],
    ) -> tuple[ChangeAndSendData, tuple[SendResult, ...]]:
        context, name = self.context, selected.broker_name
        operation = "change pending messages and send others"
        address = context.routes.address(name)
        context.instance.register_at([address])
        if Capability.PENDING_KEYS not in context.instance.announced.get(address, ()):
            raise UnsupportedError(
                f"{operation}: broker {name!r} at {address} does not do both at once; update it, or call without then= "
                "and send the messages if the result has a count above 0"
            )
        topics = {message.topic for message, _ in messages}
        body = encode_queue_batches(
            ((self.factory.complete(message), _queue_id(queue, name)) for message, queue in messages),
            {topic: context.namespace.wrap(topic) for topic in topics},
        )
        header = create_header(**selected._asdict(), born_timestamp=context.clock.now_ms())
        response = self._call(name, RequestCode.CHANGE_AND_SEND, header, operation, body=body)
        data = ChangeAndSendData.decode(response.body)
        for topic in topics if data.sent else ():
            context.routes.forget_default(topic)  # the server may have just created it
        return data, tuple(self._sent(each, name, is_flushed=data.is_flushed) for each in data.sent)

    def _sent(self, data: StoredMessageData, broker_name: str, *, is_flushed: bool) -> SendResult:
        return SendResult(
            SendStatus.SEND_OK if is_flushed else SendStatus.FLUSH_DISK_TIMEOUT,
            data.msg_id,
            data.offset_msg_id,
            MessageQueue(self.context.namespace.unwrap(data.topic), broker_name, data.queue_id),
            data.queue_offset,
            handle=data.handle,
        )

    def _change(
        self, verb: str, code: int, create_header: Callable[..., CommandHeader], selected: list[_Selected]
    ) -> ScheduleChange:
        operation, changes = f"{verb} pending messages", []
        for each in selected:
            response = self._call(each.broker_name, code, create_header(**each._asdict()), operation)
            data = ScheduleChangeData.decode(response.body)
            changes.append(ScheduleChange(_status(data.status, each.broker_name), data.count, tuple(data.handles)))
        return total_change(changes, MOST_INFORMATIVE)

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
            pending_key=data.pending_key,
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
        self,
        broker_name: str,
        code: int,
        header: CommandHeader,
        operation: str,
        timeout_ms: int | None = None,
        *,
        body: bytes = b"",
    ) -> RemotingCommand:
        address = self.context.routes.address(broker_name)
        response = self.context.instance.invoke(address, RemotingCommand.request(code, header, body), timeout_ms)
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


def _status(name: str, broker_name: str) -> ScheduleChangeStatus:
    status = ScheduleChangeStatus.__members__.get(name)
    if status is None:
        raise RemoteProtocolError(f"broker {broker_name!r} answered to a change with the unknown status {name!r}")
    return status


def _queue_id(queue: MessageQueue | None, broker_name: str) -> int:
    """Return the queue ID of a message that is stored with a change; negative: the server chooses it.

    Raises:
        MessageError: The queue is on another broker.
    """
    if queue is not None and queue.broker_name != broker_name:
        raise MessageError(
            f"{queue} is on broker {queue.broker_name!r}, and the pending message on {broker_name!r}: one server "
            "stores the change and the messages; leave out queue and hash_key"
        )
    return -1 if queue is None else queue.queue_id
