"""Reads outside of consumer groups: pulls, offsets, messages by id and by key.

Source: RocketMQ ``client: MQAdminImpl``, ``DefaultMQPullConsumerImpl``, ``PullAPIWrapper``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import lru_cache
from typing import NamedTuple

from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.errors import BrokerError, MessageError, OffsetOutOfRangeError, RemoteProtocolError, UnsupportedError
from mqtemplate.message import HostAddress, MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.numbers import LONG_MAX
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import (
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.results import PullResult, PullStatus
from mqtemplate.selectors.tags import Selector, TagSelector

# --- subscriptions --------------------------------------------------------------------------------


class MemberSubscription(NamedTuple):
    """A selector, and the same as heartbeats contain it."""

    selector: Selector
    data: SubscriptionData


PULL_RESPONSES = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
"""Responses to a pull that have a `PullMessageResponseHeader`."""


def subscription_data(wire_topic: str, selector: Selector, version: int) -> SubscriptionData:
    """Return a subscription as heartbeats contain it.

    Args:
        version: Time of the subscription in ms; a broker keeps the latest one of a group.
    """
    if isinstance(selector, TagSelector):
        tags = sorted(selector.tags)
        expression = " || ".join(tags) or "*"
        return SubscriptionData(
            topic=wire_topic, sub_string=expression, tags_set=tags, code_set=sorted(selector.codes), sub_version=version
        )
    return SubscriptionData(
        topic=wire_topic, sub_string=selector.expression, sub_version=version, expression_type="SQL92"
    )


def matching_messages(messages: list[MessageExt], selector: Selector) -> list[MessageExt]:
    """Return the messages that match *selector*: a broker compares only the hashes of tags."""
    if isinstance(selector, TagSelector) and not selector.selects_all:
        return [message for message in messages if selector.matches(message.properties)]
    return messages


# --- queries --------------------------------------------------------------------------------------


_MAX_SUSPEND_MS = 20_000
_SETTLE_S = 1.0
_REPEAT_S = 0.002  # a broker needs a millisecond or two from its commit log to its consume queues and index
_INT_MAX = (1 << 31) - 1
_INDEX_PAGE = 32
_INDEX_LAG_MS = 100
_INDEX_PRECISION_MS = 1_000  # index files store times in seconds, rounded down
_INDEX_RESPONSES = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)


class _Read(NamedTuple):
    """Arguments of a pull."""

    queue: MessageQueue
    queue_offset: int
    max_count: int
    selector: Selector
    broker_id: int = MASTER_ID


class Queries:
    """Reads from brokers. The results include all messages that this client has sent.

    A broker acknowledges a message before its reads return it, so a read whose result lacks a sent message is repeated
    for up to a second.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context

    # --- pull ----------------------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
        *,
        broker_id: int = MASTER_ID,
    ) -> PullResult:
        """See `MessageReader.pull`.

        Args:
            broker_id: The replica to read from, which must have ``slaveReadEnable``; the master by default.
        """
        deadline = time.monotonic() + wait_ms / 1_000
        read = _Read(queue, queue_offset, max_count, selector or TagSelector(), broker_id)
        result = self._pull_now(read)
        while not result.messages and (left_s := deadline - time.monotonic()) > 0:
            later = self._pull_suspended(read._replace(queue_offset=result.next_begin_offset), left_s)
            if later is None:
                break
            result = later
        return result

    def _pull_now(self, read: _Read) -> PullResult:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            response = self._invoke_pull(read)
            header = response.header(PullMessageResponseHeader)
            is_settled = header.max_offset >= self._context.sent.queue_end(read.queue)
            if is_settled or time.monotonic() > deadline:
                return _pull_result(read, response, header, self._context.settings.max_body_bytes)
            _pause()

    def _pull_suspended(self, read: _Read, left_s: float) -> PullResult | None:
        """Wait for messages; return None after *left_s*, since a broker ends a suspended pull seconds late."""
        address = self._context.routes.address(read.queue.broker_name)
        request = self._pull_request(read, suspend_ms=min(int(left_s * 1_000) + 1, _MAX_SUSPEND_MS))
        future: Future[RemotingCommand | BrokerError] = Future()
        timeout_ms = self._context.settings.pull_timeout_ms
        self._context.instance.invoke_async(address, request, timeout_ms, future.set_result)
        try:
            response = future.result(left_s)
        except FutureTimeoutError:
            return None
        if isinstance(response, BrokerError):
            raise response
        _check_pull(read, response, address)
        header = response.header(PullMessageResponseHeader)
        return _pull_result(read, response, header, self._context.settings.max_body_bytes)

    def create_group(self, wire_group: str, queue: MessageQueue) -> None:
        """Pull for a group, which makes the broker create the group if it may."""
        self._invoke_pull(_Read(queue, 0, 1, TagSelector()), wire_group)

    def _invoke_pull(self, read: _Read, wire_group: str | None = None) -> RemotingCommand:
        address = self._context.routes.address(read.queue.broker_name, read.broker_id)
        request = self._pull_request(read, wire_group)
        response = self._context.instance.invoke(address, request, self._context.settings.pull_timeout_ms)
        _check_pull(read, response, address)
        return response

    def _pull_request(self, read: _Read, wire_group: str | None = None, suspend_ms: int = 0) -> RemotingCommand:
        wire_topic = self._context.namespace.wrap(read.queue.topic)
        subscription = subscription_data(wire_topic, read.selector, 0)
        header = PullMessageRequestHeader(
            **self._context.namespace.queue_fields(read.queue),
            consumer_group=wire_group or self._context.settings.tools_group,
            queue_offset=read.queue_offset,
            max_msg_nums=read.max_count,
            sys_flag=PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if suspend_ms else 0),
            commit_offset=0,
            suspend_timeout_millis=suspend_ms,
            subscription=subscription.sub_string,
            sub_version=subscription.sub_version,
            expression_type=subscription.expression_type,
            max_msg_bytes=_INT_MAX,
        )
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, header)

    # --- offsets -------------------------------------------------------------------------------

    def min_offset(self, queue: MessageQueue) -> int:
        """See `MessageReader.min_offset`."""
        header = TopicQueueRequestHeader(**self._context.namespace.queue_fields(queue))
        return self._offset(RequestCode.GET_MIN_OFFSET, header, queue, "the first offset")

    def max_offset(self, queue: MessageQueue) -> int:
        """See `MessageReader.max_offset`."""
        header = GetMaxOffsetRequestHeader(**self._context.namespace.queue_fields(queue))
        deadline = time.monotonic() + _SETTLE_S
        while True:
            end = self._offset(RequestCode.GET_MAX_OFFSET, header, queue, "the end")
            if end >= self._context.sent.queue_end(queue) or time.monotonic() > deadline:
                return end
            _pause()

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """See `MessageReader.search_offset`."""
        context = self._context
        header = SearchOffsetRequestHeader(**context.namespace.queue_fields(queue), timestamp=timestamp)
        end = self.max_offset(queue)
        found = self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, queue, f"the offset at {timestamp}")
        if 0 <= found == end - 1 and context.instance.is_before_5(context.routes.address(queue.broker_name)):
            last = self.pull(queue, found, 1, 0, None).messages  # 4.x returns the last message if all are older
            return end if last and last[0].store_timestamp < timestamp else found
        return found

    def _offset(self, code: int, header: TopicQueueRequestHeader, queue: MessageQueue, what: str) -> int:
        address = self._context.routes.address(queue.broker_name)
        response = self._context.call(address, RemotingCommand.request(code, header), f"get {what} of {queue}")
        return response.header(OffsetResponseHeader).offset

    # --- messages ------------------------------------------------------------------------------

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `MessageReader.message_by_id`."""
        host, physical_offset = parse_offset_msg_id(offset_msg_id)
        own = self._brokers_at(host)
        for broker_name, address in own or self._context.routes.registered_masters().items():
            found = self._message_at(broker_name, address, offset_msg_id, physical_offset)
            if own or (found is not None and found.store_host == host):
                return found
        raise MessageError(
            f"message id {offset_msg_id} was given by the broker at {host}; this cluster has brokers at "
            f"{', '.join(self._context.routes.addresses()) or 'no address'}; send the query to that broker's cluster"
        )

    def _message_at(
        self, broker_name: str, address: str, offset_msg_id: str, physical_offset: int
    ) -> MessageExt | None:
        """Return the message that a broker has at an offset of its commit log; None if none begins there."""
        request = RemotingCommand.request(
            RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset)
        )
        missing = (ResponseCode.SYSTEM_ERROR, ResponseCode.QUERY_NOT_FOUND)
        operation = f"read the message {offset_msg_id}"
        response = self._context.call(address, request, operation, accept=(ResponseCode.SUCCESS, *missing))
        if response.code in missing:
            return None
        try:
            found = decode_messages(response.body, broker_name, self._context.settings.max_body_bytes)
        except RemoteProtocolError:
            return None  # the offset is inside of a message
        if len(found) != 1 or found[0].physical_offset != physical_offset:
            return None
        found[0].topic = self._context.namespace.unwrap(found[0].topic)
        return found[0]

    def _brokers_at(self, host: HostAddress) -> list[tuple[str, str]]:
        """Return the name and address of the broker that is reached at a host of message ids; none if it has another.

        A broker behind NAT, or with a host name as its address, writes another one into message ids.
        """
        for name, by_id in self._context.routes.brokers().items():
            for address in by_id.values():
                if host in _hosts_of(address):
                    return [(name, address)]
        return []

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        """See `MessageReader.messages_by_key`.

        Raises:
            MessageError: *key* is not a key, or *max_count* is not a number of messages.
        """
        query = KeyQuery(topic, key, max_count, begin_ms, end_ms, unique)
        route = self._context.routes.existing(topic)
        if route is None:
            return []
        header = QueryMessageRequestHeader(
            topic=self._context.namespace.wrap(topic),
            key=query.key,
            max_num=max(max_count, _INDEX_PAGE),
            begin_timestamp=max(0, begin_ms - _INDEX_PRECISION_MS),
            end_timestamp=query.last_ms,
            unique=unique,
        )
        masters = {name: by_id[MASTER_ID] for name, by_id in route.addresses.items() if MASTER_ID in by_id}
        found = [message for name, address in masters.items() for message in self._query_index(name, address, header)]
        for message in found:
            message.topic = self._context.namespace.unwrap(message.topic)
        return query.merge(found)

    def records_of(self, topics: Sequence[str], msg_id: str) -> tuple[set[str], list[MessageExt]]:
        """Return the brokers that the name servers know now, and their records; see `Broker.find_records`."""
        self._context.routes.load_cluster()
        masters = self._context.routes.registered_masters()
        found: list[MessageExt] = []
        for topic in topics:
            header = QueryMessageRequestHeader(
                topic=self._context.namespace.wrap(topic),
                key=msg_id,
                max_num=_INDEX_PAGE,
                begin_timestamp=0,
                end_timestamp=LONG_MAX,
                unique=True,
            )
            for name, address in masters.items():
                found += [each for each in self._query_index(name, address, header) if each.msg_id == msg_id]
        return set(masters), found

    def _query_index(self, broker_name: str, address: str, header: QueryMessageRequestHeader) -> list[MessageExt]:
        """Return the messages of a broker's index, once it includes the last message this client has seen.

        A broker adds a message's id to the index before its keys. So when the index has reached that last message, only
        the next response is sure to include it. A broker that finds nothing does not report how far its index is; its
        response counts when the last message is old enough.
        """
        deadline = time.monotonic() + _SETTLE_S
        operation = f"query messages of {header.topic!r} with key {header.key!r}"
        last_seen, was_reached = self._context.sent.physical_offset(broker_name), False
        while True:
            request = RemotingCommand.request(RequestCode.QUERY_MESSAGE, header)
            response = self._context.call(address, request, operation, accept=_INDEX_RESPONSES)
            if response.code == ResponseCode.QUERY_NOT_FOUND:
                if self._context.sent.age_ms(broker_name) > _INDEX_LAG_MS or time.monotonic() > deadline:
                    return []
            else:
                reached = response.header(QueryMessageResponseHeader).index_last_update_phyoffset
                if reached > last_seen or was_reached or time.monotonic() > deadline:
                    return decode_messages(response.body, broker_name, self._context.settings.max_body_bytes)
                was_reached = reached == last_seen
            _pause()


def _check_pull(read: _Read, response: RemotingCommand, address: str) -> None:
    if response.code in PULL_RESPONSES:
        return
    problem = response_error(response, f"read {read.queue}", address)
    if "SQL92" in (response.remark or ""):  # RocketMQ: PullMessageProcessor answers SYSTEM_ERROR, as to other problems
        raise UnsupportedError(f"{problem}; set enablePropertyFilter=true on the broker, or select by tags")
    raise problem


def _pull_result(
    read: _Read, response: RemotingCommand, header: PullMessageResponseHeader, max_body_bytes: int
) -> PullResult:
    queue, queue_offset = read.queue, read.queue_offset
    if response.code == ResponseCode.PULL_OFFSET_MOVED:
        raise OffsetOutOfRangeError(
            f"queue offset {queue_offset} is not in {queue}, which has {header.min_offset}..{header.max_offset}; "
            f"continue at {header.next_begin_offset}",
            header.next_begin_offset,
        )
    found = []
    if response.code == ResponseCode.SUCCESS:
        found = decode_messages(response.body, queue.broker_name, max_body_bytes)
    messages = matching_messages(found, read.selector)
    for message in messages:
        message.topic = queue.topic
    status = PullStatus.FOUND if messages else PullStatus.NO_NEW_MSG
    if not messages and header.next_begin_offset > queue_offset:
        status = PullStatus.NO_MATCHED_MSG
    return PullResult(status, header.next_begin_offset, header.min_offset, header.max_offset, messages)


@lru_cache(maxsize=256)
def _hosts_of(address: str) -> frozenset[HostAddress]:
    """Return the numeric forms of a route's address: a broker writes its IP address into message ids."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(HostAddress(str(info[4][0]), int(info[4][1])) for info in infos)


def _pause() -> None:
    threading.Event().wait(_REPEAT_S)
