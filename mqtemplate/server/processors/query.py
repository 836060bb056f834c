"""Codes 12, 33 and 321: messages by key and by physical offset, and the units of a consume queue.

Source: RocketMQ ``broker: QueryMessageProcessor``, ``AdminBrokerProcessor.queryConsumeQueue``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mqtemplate.brokers.key_query import KeyQuery
from mqtemplate.hashes import java_string_hash
from mqtemplate.record.codec import StoredRecord
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import ConsumeQueueData, QueryConsumeQueueResponseBody, SubscriptionData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.registration import answers, handles
from mqtemplate.server.response import RefusedError

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

    server: ServerParts

    # --- messages ------------------------------------------------------------------------------

    @answers(RequestCode.VIEW_MESSAGE_BY_ID, slow=True)
    def _by_offset(self, query: ViewMessageRequestHeader) -> bytes:
        record = self.server.raw.record_at(query.offset)
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
            index_last_update_timestamp=self.server.engine.clock.now_ms(),
            index_last_update_phyoffset=self.server.engine.store.confirm_offset,
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
            record = self.server.raw.record_at(found.physical_offset)
            if record is not None:  # None: retention has just deleted it.
                records.append(record)
        return records

    def _found(self, query: QueryMessageRequestHeader) -> Iterator[StoredRecord]:
        """Find records by key, or by unique key. Older clients do not name the kind of key: try both."""
        for unique in [False, True] if query.unique is None else [query.unique]:
            max_count = _MAX_UNIQUE if unique else min(max(query.max_num, 1), _MAX_MESSAGES)
            found = self.server.engine.finder.records(
                KeyQuery(query.topic, query.key, max_count, query.begin_timestamp, query.end_timestamp, unique)
            )
            if (first := next(found, None)) is not None:
                yield first
                yield from found
                return

    # --- units of queues -----------------------------------------------------------------------

    @answers(RequestCode.QUERY_CONSUME_QUEUE, slow=True)
    def _consume_queue(self, query: QueryConsumeQueueRequestHeader) -> QueryConsumeQueueResponseBody:
        engine, topic = self.server.engine, query.topic or ""
        if not 0 <= query.queue_id < engine.topics.queue_count(topic):
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"topic {topic!r} has no queue {query.queue_id}")
        queue = engine.store.consume_queue(topic, query.queue_id)
        subscription = self.server.clients.subscription(query.consumer_group, topic) if query.consumer_group else None
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
            subscription_data=subscription,
        )


def _matches(subscription: SubscriptionData | None, tags_code: int) -> bool:
    """Return True if a unit matches the tags of a subscription."""
    if subscription is None or subscription.expression_type != "TAG":
        return False
    return subscription.sub_string == "*" or tags_code in map(java_string_hash, subscription.tags_set)
