"""Reading and asking without being a member: pulls, offsets, messages by id and key.

Source: RocketMQ ``client: MQAdminImpl``, ``DefaultMQPullConsumerImpl``; sections 10, 11 and 18 of the specification.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import lru_cache

from mqtemplate.brokers.key_query import KeyQuery
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.consuming.pull import subscription_data
from mqtemplate.brokers.remote.errors import answer_problem, check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import MASTER_ID, RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.errors import BrokerError, MessageError, OffsetOutOfRangeError, RemoteProtocolError, UnsupportedError
from mqtemplate.message import HostAddress, MessageExt, MessageQueue, parse_offset_msg_id
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
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

_LONGEST_SUSPEND_MS = 20_000
_SETTLE_S = 1.0
_GLANCE_S = 0.002
_INT_MAX = (1 << 31) - 1
_SQL92_OFF = "SQL92"
_INDEX_PAGE = 32
_INDEX_LAG_MS = 100
_INDEX_GRAIN_MS = 1_000
"""Index files keep times by the second, rounded down."""
_PULL_ANSWERS = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)


class RemoteQueries:
    """Answers of brokers to single questions. What this client sent itself is always part of them."""

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        settings: RemoteSettings,
        marks: SentOffsets,
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._settings = settings
        self._marks = marks

    # --- pull ----------------------------------------------------------------------------------

    def pull(
        self, queue: MessageQueue, queue_offset: int, max_count: int, wait_ms: int, selector: Selector | None
    ) -> PullResult:
        """See `Broker.pull`."""
        deadline = time.monotonic() + wait_ms / 1_000
        wanted = selector or TagSelector()
        result = self._pull_settled(queue, queue_offset, max_count, wanted)
        while not result.messages and (left_s := deadline - time.monotonic()) > 0:
            later = self._pull_waiting(queue, result.next_begin_offset, max_count, wanted, left_s)
            if later is None:
                break
            result = later
        return result

    def _pull_settled(self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector) -> PullResult:
        """What there is now, and what this client sent is there."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            address, request = self._pull_request(queue, queue_offset, max_count, selector, suspend_ms=0)
            answer = self._instance.invoke(address, request, self._settings.pull_timeout_ms)
            header = self._pull_header(queue, address, answer)
            if header.max_offset >= self._marks.end_of(queue) or time.monotonic() > deadline:
                return _pull_result(queue, queue_offset, answer, header, selector)
            _pause()

    def _pull_waiting(
        self, queue: MessageQueue, queue_offset: int, max_count: int, selector: Selector, left_s: float
    ) -> PullResult | None:
        """What comes; None if the time is over first. The broker looks at the time every few seconds only."""
        suspend_ms = min(int(left_s * 1_000) + 1, _LONGEST_SUSPEND_MS)
        address, request = self._pull_request(queue, queue_offset, max_count, selector, suspend_ms=suspend_ms)
        future: Future[RemotingCommand | BrokerError] = Future()
        self._instance.invoke_async(address, request, self._settings.pull_timeout_ms, future.set_result)
        try:
            answer = future.result(left_s)
        except FutureTimeoutError:
            return None
        if isinstance(answer, BrokerError):
            raise answer
        return _pull_result(queue, queue_offset, answer, self._pull_header(queue, address, answer), selector)

    def read_as(self, wire_group: str, queue: MessageQueue) -> None:
        """Read a little for a group, so that its broker makes it, if it may."""
        address, request = self._pull_request(queue, 0, 1, TagSelector(), suspend_ms=0, wire_group=wire_group)
        self._pull_header(queue, address, self._instance.invoke(address, request, self._settings.pull_timeout_ms))

    def _pull_request(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int,
        selector: Selector,
        *,
        suspend_ms: int,
        wire_group: str | None = None,
    ) -> tuple[str, RemotingCommand]:
        wire = self._namespace.wrap_queue(queue)
        data = subscription_data(wire.topic, selector, 0)
        header = PullMessageRequestHeader(
            consumer_group=wire_group or self._settings.tools_group,
            topic=wire.topic,
            queue_id=wire.queue_id,
            queue_offset=queue_offset,
            max_msg_nums=max_count,
            sys_flag=PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if suspend_ms else 0),
            commit_offset=0,
            suspend_timeout_millis=suspend_ms,
            subscription=data.sub_string,
            sub_version=0,
            expression_type=data.expression_type,
            max_msg_bytes=_INT_MAX,
            broker_name=wire.broker_name,
        )
        return self._routes.address(queue.broker_name), RemotingCommand.request(RequestCode.PULL_MESSAGE, header)

    def _pull_header(self, queue: MessageQueue, address: str, answer: RemotingCommand) -> PullMessageResponseHeader:
        if answer.code in _PULL_ANSWERS:
            return answer.header(PullMessageResponseHeader)
        problem = answer_problem(answer, f"read {queue}", address)
        if _SQL92_OFF in (answer.remark or ""):
            raise UnsupportedError(f"{problem}; set enablePropertyFilter=true on the broker, or select by tags")
        raise problem

    # --- offsets -------------------------------------------------------------------------------

    def min_offset(self, queue: MessageQueue) -> int:
        wire = self._namespace.wrap_queue(queue)
        header = TopicQueueRequestHeader(topic=wire.topic, queue_id=wire.queue_id, broker_name=wire.broker_name)
        return self._offset(RequestCode.GET_MIN_OFFSET, header, queue, "the first offset")

    def max_offset(self, queue: MessageQueue) -> int:
        wire = self._namespace.wrap_queue(queue)
        header = GetMaxOffsetRequestHeader(topic=wire.topic, queue_id=wire.queue_id, broker_name=wire.broker_name)
        deadline = time.monotonic() + _SETTLE_S
        while True:
            end = self._offset(RequestCode.GET_MAX_OFFSET, header, queue, "the end")
            if end >= self._marks.end_of(queue) or time.monotonic() > deadline:
                return end
            _pause()

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        wire = self._namespace.wrap_queue(queue)
        header = SearchOffsetRequestHeader(
            topic=wire.topic, queue_id=wire.queue_id, timestamp=timestamp, broker_name=wire.broker_name
        )
        end = self.max_offset(queue)
        found = self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, queue, f"the offset at {timestamp}")
        if 0 <= found == end - 1 and self._instance.is_before_5(self._routes.address(queue.broker_name)):
            last = self.pull(queue, found, 1, 0, None).messages  # 4.x gives the last one where all are older
            return end if last and last[0].store_timestamp < timestamp else found
        return found

    def _offset(self, code: int, header: TopicQueueRequestHeader, queue: MessageQueue, what: str) -> int:
        address = self._routes.address(queue.broker_name)
        answer = self._instance.invoke(
            address, RemotingCommand.request(code, header), self._settings.request_timeout_ms
        )
        return check_answer(answer, f"ask for {what} of {queue}", address).header(OffsetResponseHeader).offset

    # --- messages ------------------------------------------------------------------------------

    def by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `Broker.message_by_id`."""
        host, physical_offset = parse_offset_msg_id(offset_msg_id)
        broker_name, address = self._broker_at(offset_msg_id, host)
        request = RemotingCommand.request(
            RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset)
        )
        answer = self._instance.invoke(address, request, self._settings.request_timeout_ms)
        if answer.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.QUERY_NOT_FOUND):
            return None
        body = check_answer(answer, f"read the message {offset_msg_id}", address).body
        try:
            found = decode_messages(body, broker_name)
        except RemoteProtocolError:
            return None  # the offset is amid a message
        if len(found) != 1 or found[0].physical_offset != physical_offset:
            return None
        found[0].topic = self._namespace.unwrap(found[0].topic)
        return found[0]

    def _broker_at(self, offset_msg_id: str, host: HostAddress) -> tuple[str, str]:
        brokers = self._routes.brokers()
        for name, by_id in brokers.items():
            for address in by_id.values():
                if host in _hosts_of(address):
                    return name, address
        known = ", ".join(sorted(address for by_id in brokers.values() for address in by_id.values()))
        raise MessageError(
            f"message id {offset_msg_id} was given by the broker at {host}; this cluster has brokers at "
            f"{known or 'no address'}, so ask that one"
        )

    def by_key(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int | None, *, unique: bool
    ) -> list[MessageExt]:
        """See `Broker.messages_by_key`.

        Raises:
            MessageError: *key* is no key, or *max_count* no number of messages.
        """
        query = KeyQuery(topic, key, max_count, begin_ms, end_ms, unique)
        route = self._routes.existing(topic)
        if route is None:
            return []
        header = QueryMessageRequestHeader(
            topic=self._namespace.wrap(topic),
            key=key,
            max_num=max(max_count, _INDEX_PAGE),
            begin_timestamp=max(0, begin_ms - _INDEX_GRAIN_MS),
            end_timestamp=query.last_ms,
            unique=unique,
        )
        found: list[MessageExt] = []
        for broker_name, by_id in route.addresses.items():
            if MASTER_ID in by_id:
                for message in self._ask_index(broker_name, by_id[MASTER_ID], header):
                    message.topic = self._namespace.unwrap(message.topic)
                    found.append(message)
        return query.merge(found)

    def _ask_index(self, broker_name: str, address: str, header: QueryMessageRequestHeader) -> list[MessageExt]:
        """What a broker's index has, once it has come as far as this client knows.

        A message's id enters it before its keys, so that of the last one known only the next answer is sure. A broker
        that finds nothing does not say how far its index is; that is believed when it has had time enough.
        """
        deadline = time.monotonic() + _SETTLE_S
        known, was_reached = self._marks.physical_of(broker_name), False
        while True:
            request = RemotingCommand.request(RequestCode.QUERY_MESSAGE, header)
            answer = self._instance.invoke(address, request, self._settings.request_timeout_ms)
            if answer.code == ResponseCode.QUERY_NOT_FOUND:
                if self._marks.age_of(broker_name) > _INDEX_LAG_MS:
                    return []
            else:
                check_answer(answer, f"ask for messages of {header.topic!r} with key {header.key!r}", address)
                reached = answer.header(QueryMessageResponseHeader).index_last_update_phyoffset
                if reached > known or was_reached or time.monotonic() > deadline:
                    return decode_messages(answer.body, broker_name)
                was_reached = reached == known
            _pause()


def _pull_result(
    queue: MessageQueue,
    queue_offset: int,
    answer: RemotingCommand,
    header: PullMessageResponseHeader,
    selector: Selector,
) -> PullResult:
    if answer.code == ResponseCode.PULL_OFFSET_MOVED:
        raise OffsetOutOfRangeError(
            f"queue offset {queue_offset} is not in {queue}, which has {header.min_offset}..{header.max_offset}; "
            f"go on at {header.next_begin_offset}",
            header.next_begin_offset,
        )
    messages = decode_messages(answer.body, queue.broker_name) if answer.code == ResponseCode.SUCCESS else []
    if isinstance(selector, TagSelector):
        messages = [message for message in messages if selector.matches(message.properties)]
    for message in messages:
        message.topic = queue.topic
    status = PullStatus.FOUND if messages else PullStatus.NO_NEW_MSG
    if not messages and header.next_begin_offset > queue_offset:
        status = PullStatus.NO_MATCHED_MSG
    return PullResult(status, header.next_begin_offset, header.min_offset, header.max_offset, messages)


@lru_cache(maxsize=256)
def _hosts_of(address: str) -> frozenset[HostAddress]:
    """What an address of a route may be in a message id: brokers write there the numbers, not the name."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(HostAddress(str(info[4][0]), int(info[4][1])) for info in infos)


def _pause() -> None:
    """A broker needs a millisecond or two from its log to its queues."""
    threading.Event().wait(_GLANCE_S)
