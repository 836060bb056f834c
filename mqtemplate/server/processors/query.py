"""Finding messages: by their place in the log, by a key, and by their place in a queue.

Source: RocketMQ ``broker: QueryMessageProcessor``, ``AdminBrokerProcessor.queryConsumeQueue``; section 18.2 of the
specification.
"""

from __future__ import annotations

from typing import ClassVar

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import DeletedRecordError
from mqtemplate.java_hash import java_string_hash
from mqtemplate.message import MessageExt
from mqtemplate.record.codec import without_check
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import ConsumeQueueData, QueryConsumeQueueResponseBody, SubscriptionData
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientRegistry

_UNIQUE_COUNT = 32
"""A question for a sender's id ignores how many it asks for. RocketMQ: ``defaultQueryMaxNum``."""
_MOST_MESSAGES = 64
_MOST_BYTES = 8 << 20
_MOST_UNITS = 1_024


class QueryProcessor:
    """Answers with records as the log has them, but for the check that ours end with.

    What is not yet as safe as the flush mode promises is not found.

    Attributes:
        slow: Codes whose answers look for messages.
    """

    slow: ClassVar[frozenset[int]] = frozenset(
        {RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.QUERY_CONSUME_QUEUE}
    )

    def __init__(self, engine: EmbeddedBroker, clients: ClientRegistry) -> None:
        self._engine = engine
        self._clients = clients

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.QUERY_MESSAGE: self._by_key,
            RequestCode.VIEW_MESSAGE_BY_ID: self._by_offset,
            RequestCode.QUERY_CONSUME_QUEUE: self._consume_queue,
        }

    # --- messages ------------------------------------------------------------------------------

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record that begins there, whole; None where none does, or none any more, or none that is safe yet.

        Raises:
            CorruptRecordError: It is there, but damaged.
        """
        store = self._engine.store
        if not 0 <= physical_offset < store.confirm_offset:
            return None
        try:
            record = store.read_at(physical_offset)
        except DeletedRecordError:
            return None
        if record is None or physical_offset + record.total_size > store.confirm_offset:
            return None
        return without_check(store.read_bytes(physical_offset, record.total_size), record)

    def _by_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(ViewMessageRequestHeader)
        record = self.record_at(asked.offset)
        if record is None:
            remark = f"no message begins at physical offset {asked.offset}; it may have been deleted with its file"
            return request.response(ResponseCode.SYSTEM_ERROR, remark=remark)
        return request.response(body=record)

    def _by_key(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        asked = request.header(QueryMessageRequestHeader)
        records = self._records(asked)
        header = QueryMessageResponseHeader(
            index_last_update_timestamp=self._engine.clock.now_ms(),
            index_last_update_phyoffset=self._engine.store.confirm_offset,
        )
        if not records:
            remark = f"no message of topic {asked.topic!r} has the key {asked.key!r} in that time"
            return request.response(ResponseCode.QUERY_NOT_FOUND, header, remark=remark)
        connection.reply(request.response(header=header), body=records)
        return None

    def _records(self, asked: QueryMessageRequestHeader) -> list[bytes]:
        """What was found, the newest first, as many as go into one answer."""
        records: list[bytes] = []
        room = _MOST_BYTES
        for message in self._messages(asked):
            room -= message.store_size
            if records and room < 0:
                break
            record = self.record_at(message.physical_offset)
            if record is not None:  # None: deleted at this moment
                records.append(record)
        return records

    def _messages(self, asked: QueryMessageRequestHeader) -> list[MessageExt]:
        """Those who do not say what kind of key they have get both."""
        kinds = {True: [True], False: [False], None: [False, True]}[asked.unique]
        for unique in kinds:
            count = _UNIQUE_COUNT if unique else min(max(asked.max_num, 1), _MOST_MESSAGES)
            found = self._engine.messages_by_key(
                asked.topic,
                asked.key,
                count,
                begin_ms=asked.begin_timestamp,
                end_ms=asked.end_timestamp,
                unique=unique,
            )
            if found:
                return found
        return []

    # --- units of queues -----------------------------------------------------------------------

    def _consume_queue(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(QueryConsumeQueueRequestHeader)
        topic = asked.topic or ""
        if not 0 <= asked.queue_id < self._engine.topics.queue_count(topic):
            remark = f"there is no queue {asked.queue_id} of topic {topic!r}"
            return request.response(ResponseCode.SYSTEM_ERROR, remark=remark)
        queue = self._engine.store.consume_queue(topic, asked.queue_id)
        subscription = self._clients.subscription(asked.consumer_group, topic) if asked.consumer_group else None
        units = []
        if queue.min_offset <= asked.index < queue.max_offset:
            units = queue.unit_tuples(asked.index, min(max(asked.count, 0), _MOST_UNITS))
        body = QueryConsumeQueueResponseBody(
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
        return request.response(body=body.encode())


def _matches(subscription: SubscriptionData | None, tags_code: int) -> bool:
    """Whether a group's filter by tags lets a unit through."""
    if subscription is None or subscription.expression_type != "TAG":
        return False
    return subscription.sub_string == "*" or tags_code in map(java_string_hash, subscription.tags_set)
