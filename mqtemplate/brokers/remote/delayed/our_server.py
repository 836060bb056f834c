"""Pending messages of our own servers, by requests that RocketMQ does not have: 500,001 to 500,004."""

from __future__ import annotations

import base64
import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypedDict

from mqtemplate.broker import DelayedMessages
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.delay.recall_handle import check_selection, decode_handle
from mqtemplate.errors import DelayError, MessageError, MQTemplateError, RemoteProtocolError, UnsupportedError
from mqtemplate.pending import (
    PendingCounts,
    PendingMessage,
    PendingPage,
    PendingQuery,
    ScheduleChange,
    ScheduleChangeStatus,
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
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.user_code import shown

_MAX_PAGE = 1_000
_MOST_INFORMATIVE = (
    ScheduleChangeStatus.CANCELLED,
    ScheduleChangeStatus.RESCHEDULED,
    ScheduleChangeStatus.ALREADY_DELIVERED,
    ScheduleChangeStatus.UNKNOWN,
)
"""Order of the statuses of several servers that changed nothing. Only one of them has stored the message."""


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
    before_time: int | None
    after_time: int | None
    namespace: str | None


class _Listed(NamedTuple):
    """One message of a page, and the cursor after it on its server."""

    broker_name: str
    message: PendingMessage
    cursor: str


@dataclass(frozen=True, slots=True)
class OurServer(DelayedMessages):
    """Control over the pending messages of all servers of a cluster.

    A handle names its server. A key and a query go to all servers.
    """

    context: ClientContext

    # --- changes -------------------------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        selected = self._named(handle, key, topic)
        return self._change("cancel", RequestCode.CANCEL_DELAYED_MESSAGE, CancelDelayedMessageRequestHeader, selected)

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
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
        return _merged(changes)

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

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        if max_count < 1:
            raise MessageError(f"max_count must be 1 or more, got {max_count}")
        cursors = {} if cursor is None else _decode_cursor(cursor)
        lists = [
            self._listed(name, query, max_count + 1, cursors.get(name)) for name in self.context.routes.master_names()
        ]
        in_order = heapq.merge(*lists, key=lambda listed: listed.message.deliver_ms)
        shown = list(islice(in_order, max_count))
        has_more = next(in_order, None) is not None
        cursors |= {listed.broker_name: listed.cursor for listed in shown}
        return PendingPage(tuple(listed.message for listed in shown), _encode_cursor(cursors) if has_more else None)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return positions of a `LocalServer`, which runs on this machine."""
        (name,) = self.context.routes.master_names()
        header = GetPendingPositionsRequestHeader(
            **self._conditions(query), after_due=after[0], after_offset=after[1], max_count=max_count
        )
        return self._call(name, RequestCode.GET_PENDING_POSITIONS, header, "list pending messages").body

    def _listed(self, broker_name: str, query: PendingQuery, count: int, cursor: str | None) -> Iterator[_Listed]:
        """Yield the messages of one server, in order; request the next page when it is needed."""
        has_more = True
        while has_more:
            header = GetPendingMessagesRequestHeader(
                **self._conditions(query), max_count=min(count, _MAX_PAGE), cursor=cursor, broker_name=broker_name
            )
            response = self._call(broker_name, RequestCode.GET_PENDING_MESSAGES, header, "list pending messages")
            page = PendingMessagesData.decode(response.body)
            for data in page.messages:
                cursor = data.cursor
                yield _Listed(broker_name, self._message(data), cursor)
            has_more = page.has_more and bool(page.messages)

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

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        buckets: Counter[int] = Counter()
        for name in self.context.routes.master_names():
            header = CountPendingMessagesRequestHeader(
                **self._conditions(query), bucket_millis=bucket_ms, broker_name=name
            )
            response = self._call(name, RequestCode.COUNT_PENDING_MESSAGES, header, "count pending messages")
            buckets.update(PendingCountsData.decode(response.body).buckets)
        return PendingCounts(buckets.total(), dict(sorted(buckets.items())))

    def _conditions(self, query: PendingQuery) -> _Conditions:
        return {
            "topic": None if query.topic is None else self.context.namespace.wrap(query.topic),
            "key": query.key,
            "tag": query.tag,
            "before_time": query.before_ms,
            "after_time": query.after_ms,
            "namespace": self.context.settings.namespace or None,
        }

    # --- requests ------------------------------------------------------------------------------

    def _call(self, broker_name: str, code: int, header: CommandHeader, operation: str) -> RemotingCommand:
        context = self.context
        address = context.routes.address(broker_name)
        request = RemotingCommand.request(code, header)
        response = context.instance.invoke(address, request, context.settings.request_timeout_ms)
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


def _merged(changes: Sequence[ScheduleChange]) -> ScheduleChange:
    """Return the result of all requests. If a request changed a message, its status counts."""
    done = [change for change in changes if change.count]
    statuses = {change.status for change in done or changes}
    status = next(status for status in _MOST_INFORMATIVE if status in statuses)
    handles = tuple(handle for change in done for handle in change.handles)
    return ScheduleChange(status, sum(change.count for change in done), handles)


def _encode_cursor(cursors: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode()


def _decode_cursor(text: str) -> dict[str, str]:
    """Return the cursor on each server.

    Raises:
        MessageError: *text* is not a cursor.
    """
    try:
        cursors = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (ValueError, RecursionError):  # includes the errors of Base64 and JSON
        cursors = None
    if not isinstance(cursors, dict) or not all(isinstance(cursor, str) for cursor in cursors.values()):
        raise MessageError(f"{shown(text)} is not a cursor; pass PendingPage.cursor unchanged")
    return cursors
