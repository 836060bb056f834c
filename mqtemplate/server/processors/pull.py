"""Requests that read. Codes 11 and 361: consumers pull messages. Code 500,020: programs read blocks of records. The
other codes read and commit offsets, find messages by key and by physical offset, and return the units of a queue.

Source: RocketMQ ``broker: PullMessageProcessor``, ``DefaultPullMessageResultHandler``, ``ConsumerManageProcessor``,
``QueryMessageProcessor``, ``AdminBrokerProcessor``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mqtemplate.engine.clients import ClientRegistry, TopicSubscription
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.errors import StoreError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.remoting.protocol.bodies.route import ConsumeQueueData, QueryConsumeQueueResponseBody
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.remoting.protocol.headers.message import (
    PullMessageRequestHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.pulls.pull_checks import LONG_EXPRESSION, PullChecks, Subscriptions
from mqtemplate.server.pulls.pull_commands import client_pull, pull_response
from mqtemplate.server.pulls.pull_hold import HeldPull, PullHold
from mqtemplate.server.pulls.raw_reader import RawPull, RawReader, RawStatus
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.state.groups import ClientCreations
from mqtemplate.server.state.remote_clients import subscription_data
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs, queue_id_error
from mqtemplate.store.files.layout import PRE_BLANK_SIZE_MARK

_MAX_BLOCK_UNITS = 65_536


@dataclass(frozen=True, slots=True)
class PullProcessor:
    """Answers a pull at once if it found a message or may not wait. `PullHold` holds the others."""

    engine: Engine
    callers: Callers
    settings: BrokerServerSettings
    creations: ClientCreations
    checks: PullChecks
    subscriptions: Subscriptions
    raw: RawReader
    hold: PullHold
    deferred_work: DeferredWork

    @handles(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PullMessageRequestHeader)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._pull(connection, request, header, may_compile=False)
        return self.deferred_work.run(connection, request, partial(self._pull, connection, request, header))

    def _pull(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: PullMessageRequestHeader,
        *,
        may_compile: bool = True,
    ) -> RemotingCommand | None:
        caller, pull = self.callers.of(connection, request), client_pull(header, header.queue_id)
        group = self.creations.group(caller, pull.group)
        self.checks.check_pull(pull.topic, pull.queue_id, group)
        expression = self.subscriptions.expression_of_pull(pull)
        compiled = self.subscriptions.find(expression)
        if compiled is None:
            if not may_compile and len(expression[1]) > LONG_EXPRESSION:
                again = partial(self._pull, connection, request, header)
                return self.deferred_work.run(connection, request, again)
            compiled = self.subscriptions.compile(*expression)
        if header.sys_flag & PullSysFlag.COMMIT_OFFSET:
            offset = max(0, header.commit_offset)
            self.engine.offsets.commit(pull.group, pull.topic, pull.queue_id, offset)
        query, at = self.checks.query(pull, compiled.selector), header.queue_offset
        found = self.raw.pull(query, at)
        may_wait = header.sys_flag & PullSysFlag.SUSPEND and header.suspend_timeout_millis > 0
        if found.status is RawStatus.NO_NEW_MSG and may_wait:
            suspend_ms = min(header.suspend_timeout_millis, self.settings.max_suspend_ms)
            deadline_ms = self.engine.clock.steady_ms() + suspend_ms
            answer = partial(_answer_held, connection, request)
            self.hold.hold(HeldPull(caller, answer, query, at, at, deadline_ms))
            return None
        return pull_response(request, found)


def _answer_held(connection: Connection, request: RemotingCommand, found: RawPull | StoreError) -> None:
    if isinstance(found, StoreError):
        connection.reply(request.response(ResponseCode.SYSTEM_ERROR, remark=str(found)))
    else:
        connection.reply(pull_response(request, found))


@dataclass(frozen=True, slots=True)
class RecordBlockProcessor:
    """Returns a block of records of one queue as they are stored, for programs that parse many at once.

    A pull returns 32 messages, each verified and copied on its own. A block has megabytes, and its receiver verifies
    the records: unlike a pull it also has the checksum property, which covers all bytes. RocketMQ has no such request.
    """

    topics: TopicConfigs
    raw: RawReader

    @answers(RequestCode.GET_RECORD_BLOCK, slow=True)
    def _block(self, header: GetRecordBlockRequestHeader) -> tuple[GetRecordBlockResponseHeader, bytes]:
        self.topics.check_readable(header.topic, header.queue_id)
        queue = MessageQueue(header.topic, self.topics.broker_name, header.queue_id)
        low, high = self.raw.reader.min_offset(queue), self.raw.reader.max_offset(queue)
        if not low <= header.queue_offset <= high:
            raise RefusedError(
                ResponseCode.PULL_OFFSET_MOVED,
                f"offset {header.queue_offset} is not stored: the queue has {low}..{high}",
            )
        records, at = self._read(header, min(high, header.end_offset))
        sizes = np.array([len(record) for record in records], ">i4")
        body = b"".join([struct.pack(">i", len(records)), sizes.tobytes(), *records])
        return GetRecordBlockResponseHeader(next_offset=at, min_offset=low, max_offset=high), body

    def _read(self, header: GetRecordBlockRequestHeader, end: int) -> tuple[list[bytes], int]:
        """Return the records, and the queue offset after them."""
        store, at = self.raw.store, header.queue_offset
        units = store.consume_queue(header.topic, header.queue_id).units(at, max(0, min(end - at, _MAX_BLOCK_UNITS)))
        sizes = units["size"].astype(np.int64)
        is_record = (sizes >= SMALLEST_RECORD) & (sizes != PRE_BLANK_SIZE_MARK)  # others are marks without a message
        count = _fitting(np.where(is_record, sizes, 0), max(1, min(header.max_bytes, MAX_BLOCK_BYTES)))
        records: list[bytes] = []
        pairs = zip(units["physical_offset"][:count].tolist(), sizes[:count].tolist(), strict=True)
        for number, ((physical_offset, size), counts) in enumerate(zip(pairs, is_record[:count].tolist(), strict=True)):
            if not counts:
                continue
            record = store.read_bytes(physical_offset, size)
            if not record:  # deleted by retention
                return records, at + number
            records.append(record)
        return records, at + count


def _fitting(sizes: npt.NDArray[np.int64], max_bytes: int) -> int:
    """Return the number of leading records that have *max_bytes* together; one at least, if there is one."""
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))))


@dataclass(frozen=True, slots=True)
class OffsetProcessor:
    """Offsets of consumer groups, and of queues. A queue that does not exist counts as empty, as in RocketMQ.

    A group without an offset starts as in an embedded broker: at 0 of a young queue, else where its client chooses.
    """

    engine: Engine
    callers: Callers
    topics: TopicConfigs
    creations: ClientCreations
    raw: RawReader
    deferred_work: DeferredWork

    # --- of groups -----------------------------------------------------------------------------

    @answers(RequestCode.QUERY_CONSUMER_OFFSET)
    def _query(self, header: headers.QueryConsumerOffsetRequestHeader) -> headers.OffsetResponseHeader:
        offset = self.engine.offsets.offset(header.consumer_group, header.topic, header.queue_id)
        if offset is None and header.set_zero_if_not_found is not False:
            queue = self._queue(header)
            offset = 0 if queue is not None and self.engine.queues.is_young(queue) else None
        if offset is None:
            raise RefusedError(
                ResponseCode.QUERY_NOT_FOUND,
                f"group {header.consumer_group!r} has no offset in queue {header.queue_id} of {header.topic!r}",
            )
        return headers.OffsetResponseHeader(offset=offset)

    @handles(RequestCode.UPDATE_CONSUMER_OFFSET)
    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(headers.UpdateConsumerOffsetRequestHeader)
        self._check_queue(header)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._commit(connection, request, header)
        return self.deferred_work.run(connection, request, partial(self._commit, connection, request, header))

    def _commit(
        self, connection: Connection, request: RemotingCommand, header: headers.UpdateConsumerOffsetRequestHeader
    ) -> RemotingCommand:
        """Commit an offset, also one that is lower than before: an administrator may have reset the group."""
        self.creations.group(self.callers.of(connection, request), header.consumer_group)
        offset = max(0, header.commit_offset)
        self.engine.offsets.commit(header.consumer_group, header.topic, header.queue_id, offset)
        return request.response()

    # --- of queues -----------------------------------------------------------------------------

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, slow=True)
    def _search(self, header: headers.SearchOffsetRequestHeader) -> headers.OffsetResponseHeader:
        reader = self.engine.reader

        def search(queue: MessageQueue) -> int:
            if header.boundary_type is not BoundaryType.UPPER:
                return reader.search_offset(queue, header.timestamp)
            return max(reader.min_offset(queue), reader.search_offset(queue, header.timestamp + 1) - 1)

        return self._offset(header, search)

    @answers(RequestCode.GET_MAX_OFFSET)
    def _max(self, header: headers.GetMaxOffsetRequestHeader) -> headers.OffsetResponseHeader:
        return self._offset(header, self.engine.queues.max_offset)

    @answers(RequestCode.GET_MIN_OFFSET)
    def _min(self, header: headers.TopicQueueRequestHeader) -> headers.OffsetResponseHeader:
        return self._offset(header, self.engine.queues.min_offset)

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME, slow=True)
    def _earliest(self, header: headers.TopicQueueRequestHeader) -> headers.GetEarliestMsgStoretimeResponseHeader:
        queue = self._queue(header)
        timestamp = None if queue is None else self.raw.store_time(queue, self.engine.queues.min_offset(queue))
        return headers.GetEarliestMsgStoretimeResponseHeader(timestamp=-1 if timestamp is None else timestamp)

    def _offset(
        self, header: headers.TopicQueueRequestHeader, read: Callable[[MessageQueue], int]
    ) -> headers.OffsetResponseHeader:
        queue = self._queue(header)
        return headers.OffsetResponseHeader(offset=0 if queue is None else read(queue))

    def _check_queue(self, header: headers.TopicQueueRequestHeader) -> None:
        if not self.topics.table.has(header.topic):
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic {header.topic!r} does not exist")
        if self._queue(header) is None:
            raise queue_id_error(header.topic, header.queue_id, self.topics.queue_count(header.topic))

    def _queue(self, header: headers.TopicQueueRequestHeader) -> MessageQueue | None:
        """Return the queue in a request, or None if it does not exist."""
        if not 0 <= header.queue_id < self.topics.queue_count(header.topic):
            return None
        return MessageQueue(header.topic, self.engine.name, header.queue_id)


_MAX_UNIQUE = 32
"""Maximum number of messages for a unique key, whatever the request has. RocketMQ: ``defaultQueryMaxNum``."""
_MAX_MESSAGES = 64
_MAX_BYTES = 8 << 20
_MAX_UNITS = 1_024


@dataclass(frozen=True, slots=True)
class QueryProcessor:
    """Answers with records as they are stored, without the checksum property that the embedded broker adds.

    A message that is not yet as durable as the flush mode requires is not found.
    """

    engine: Engine
    raw: RawReader
    clients: ClientRegistry

    # --- messages ------------------------------------------------------------------------------

    @answers(RequestCode.VIEW_MESSAGE_BY_ID, slow=True)
    def _by_offset(self, query: ViewMessageRequestHeader) -> bytes:
        record = self.raw.record_at(query.offset)
        if record is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"no message starts at physical offset {query.offset}; retention may have deleted it",
            )
        return record

    @handles(RequestCode.QUERY_MESSAGE, slow=True)
    def _by_key(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        query = request.header(QueryMessageRequestHeader)
        records = self._records(query)
        header = QueryMessageResponseHeader(
            index_last_update_timestamp=self.engine.clock.now_ms(),
            index_last_update_phyoffset=self.engine.store.confirm_offset,
        )
        if not records:
            remark = f"no message of topic {query.topic!r} has the key {query.key!r} in this period"
            return request.response(ResponseCode.QUERY_NOT_FOUND, header, remark=remark)
        connection.reply(request.response(header=header), body=records)
        return None

    def _records(self, query: QueryMessageRequestHeader) -> list[bytes]:
        """Return the matching records, the newest first, as many as fit into one response."""
        records: list[bytes] = []
        size = 0
        for found in self._found(query):
            size += found.total_size
            if records and size > _MAX_BYTES:
                break
            record = self.raw.record_at(found.physical_offset)
            if record is not None:  # None: retention has just deleted it.
                records.append(record)
        return records

    def _found(self, query: QueryMessageRequestHeader) -> Iterator[StoredRecord]:
        """Find records by key, or by unique key. Older clients do not name the kind of key: try both."""
        for unique in [False, True] if query.unique is None else [query.unique]:
            max_count = _MAX_UNIQUE if unique else min(max(query.max_num, 1), _MAX_MESSAGES)
            found = self.engine.finder.records(
                KeyQuery(query.topic, query.key, max_count, query.begin_timestamp, query.end_timestamp, unique)
            )
            if (first := next(found, None)) is not None:
                yield first
                yield from found
                return

    # --- units of queues -----------------------------------------------------------------------

    @answers(RequestCode.QUERY_CONSUME_QUEUE, slow=True)
    def _consume_queue(self, query: QueryConsumeQueueRequestHeader) -> QueryConsumeQueueResponseBody:
        engine, topic = self.engine, query.topic or ""
        if not 0 <= query.queue_id < engine.topics.queue_count(topic):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic {topic!r} has no queue {query.queue_id}")
        queue = engine.store.consume_queue(topic, query.queue_id)
        subscription = self.clients.subscription(query.consumer_group, topic) if query.consumer_group else None
        units = []
        if queue.min_offset <= query.index < queue.max_offset:
            units = queue.unit_tuples(query.index, min(max(query.count, 0), _MAX_UNITS))
        return QueryConsumeQueueResponseBody(
            queue_data=[
                ConsumeQueueData(
                    physic_offset=physical_offset,
                    physic_size=size,
                    tags_code=code,
                    eval=_matches(subscription, code),
                )
                for physical_offset, size, code in units
            ],
            max_queue_index=queue.max_offset,
            min_queue_index=queue.min_offset,
            subscription_data=None if subscription is None else subscription_data(subscription),
        )


def _matches(subscription: TopicSubscription | None, tags_code: int) -> bool:
    """Return True if a unit matches the tags of a subscription."""
    if subscription is None or subscription.expression_type != "TAG":
        return False
    return subscription.sub_string == "*" or tags_code in map(
        java_string_hash, subscription_data(subscription).tags_set
    )
