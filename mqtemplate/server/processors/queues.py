"""Requests about queues: offsets, messages by key and by physical offset, and the units of a consume queue.

Source: RocketMQ ``broker: ConsumerManageProcessor``, ``QueryMessageProcessor``, ``AdminBrokerProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.clients import ClientRegistry, GroupSubscription
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import MessageQueue
from mqtemplate.record.codec import StoredRecord
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import ConsumeQueueData, QueryConsumeQueueResponseBody
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.creations import ClientCreations
from mqtemplate.server.state.remote_clients import subscription_data
from mqtemplate.server.state.topics import TopicConfigs, queue_id_error


@dataclass(frozen=True, slots=True)
class OffsetProcessor:
    """Offsets of consumer groups, and of queues. A queue that does not exist counts as empty, as in RocketMQ.

    A group without an offset starts as in an embedded broker: at 0 of a young queue, else where its client chooses.
    """

    engine: Engine
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
        self.creations.group(connection, request, header.consumer_group)
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
        if not self.topics.has(header.topic):
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


def _matches(subscription: GroupSubscription | None, tags_code: int) -> bool:
    """Return True if a unit matches the tags of a subscription."""
    if subscription is None or subscription.expression_type != "TAG":
        return False
    return subscription.sub_string == "*" or tags_code in map(
        java_string_hash, subscription_data(subscription).tags_set
    )
