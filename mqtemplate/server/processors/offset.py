"""Codes 14, 15 and 29 to 32: offsets of consumer groups and of queues.

Source: RocketMQ ``broker: ConsumerManageProcessor``, ``AdminBrokerProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.topics import queue_id_error

_YOUNG_QUEUE_BYTES = 1 << 30
"""A queue is young while its first message is within this distance of the log's end: a new group starts at offset 0.

RocketMQ: ``ConsumerManageProcessor`` checks whether the message is still in memory.
"""


@dataclass(frozen=True, slots=True)
class OffsetProcessor:
    """Offsets of consumer groups, and of queues. A queue that does not exist counts as empty, as in RocketMQ.

    A group without an offset starts as in an embedded broker: at 0 of a young queue, else where its client chooses.
    """

    server: ServerParts

    # --- of groups -----------------------------------------------------------------------------

    @answers(RequestCode.QUERY_CONSUMER_OFFSET)
    def _query(self, header: headers.QueryConsumerOffsetRequestHeader) -> headers.OffsetResponseHeader:
        offset = self.server.engine.offsets.offset(header.consumer_group, header.topic, header.queue_id)
        if offset is None and header.set_zero_if_not_found is not False and self._is_young(header):
            offset = 0
        if offset is None:
            raise RefusedError(
                ResponseCode.QUERY_NOT_FOUND,
                f"group {header.consumer_group!r} has no offset in queue {header.queue_id} of {header.topic!r}",
            )
        return headers.OffsetResponseHeader(offset=offset)

    def _is_young(self, header: headers.TopicQueueRequestHeader) -> bool:
        queue, reader = self._queue(header), self.server.engine.reader
        if queue is None:
            return False
        return reader.min_offset(queue) == 0 and reader.bytes_after(queue, 0) <= _YOUNG_QUEUE_BYTES

    @handles(RequestCode.UPDATE_CONSUMER_OFFSET)
    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(headers.UpdateConsumerOffsetRequestHeader)
        self._check_queue(header)
        if self.server.groups.find(header.consumer_group) is not None:
            return self._commit(connection, request, header)
        return self.server.deferred_work.run(connection, request, partial(self._commit, connection, request, header))

    def _commit(
        self, connection: Connection, request: RemotingCommand, header: headers.UpdateConsumerOffsetRequestHeader
    ) -> RemotingCommand:
        """Commit an offset, also one that is lower than before: an administrator may have reset the group."""
        self.server.group_for(connection, request, header.consumer_group)
        offset = max(0, header.commit_offset)
        self.server.engine.offsets.commit(header.consumer_group, header.topic, header.queue_id, offset)
        return request.response()

    # --- of queues -----------------------------------------------------------------------------

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, slow=True)
    def _search(self, header: headers.SearchOffsetRequestHeader) -> headers.OffsetResponseHeader:
        reader = self.server.engine.reader

        def search(queue: MessageQueue) -> int:
            if header.boundary_type is not BoundaryType.UPPER:
                return reader.search_offset(queue, header.timestamp)
            return max(reader.min_offset(queue), reader.search_offset(queue, header.timestamp + 1) - 1)

        return self._offset(header, search)

    @answers(RequestCode.GET_MAX_OFFSET)
    def _max(self, header: headers.GetMaxOffsetRequestHeader) -> headers.OffsetResponseHeader:
        return self._offset(header, self.server.engine.reader.max_offset)

    @answers(RequestCode.GET_MIN_OFFSET)
    def _min(self, header: headers.TopicQueueRequestHeader) -> headers.OffsetResponseHeader:
        return self._offset(header, self.server.engine.reader.min_offset)

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME, slow=True)
    def _earliest(self, header: headers.TopicQueueRequestHeader) -> headers.GetEarliestMsgStoretimeResponseHeader:
        queue, server = self._queue(header), self.server
        timestamp = None if queue is None else server.raw.store_time(queue, server.engine.reader.min_offset(queue))
        return headers.GetEarliestMsgStoretimeResponseHeader(timestamp=-1 if timestamp is None else timestamp)

    def _offset(
        self, header: headers.TopicQueueRequestHeader, read: Callable[[MessageQueue], int]
    ) -> headers.OffsetResponseHeader:
        queue = self._queue(header)
        return headers.OffsetResponseHeader(offset=0 if queue is None else read(queue))

    def _check_queue(self, header: headers.TopicQueueRequestHeader) -> None:
        if not self.server.topics.has(header.topic):
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic {header.topic!r} does not exist")
        if self._queue(header) is None:
            raise queue_id_error(header.topic, header.queue_id, self.server.topics.queue_count(header.topic))

    def _queue(self, header: headers.TopicQueueRequestHeader) -> MessageQueue | None:
        """Return the queue in a request, or None if it does not exist."""
        if not 0 <= header.queue_id < self.server.topics.queue_count(header.topic):
            return None
        return MessageQueue(header.topic, self.server.engine.name, header.queue_id)
