"""Codes 14, 15 and 29 to 32: how far groups have come, and how far queues reach.

Source: RocketMQ ``broker: ConsumerManageProcessor``, ``AdminBrokerProcessor``; section 11 of the specification.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.remoting.protocol.headers.group import (
    GetEarliestMsgStoretimeResponseHeader,
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_creation import ensure_group
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.raw_reader import RawReader
from mqtemplate.server.response import RefusedError

_YOUNG_QUEUE_BYTES = 1 << 30
"""A queue whose first message lies no farther behind the log's end is young: a new group reads it whole."""


class OffsetProcessor:
    """Offsets of groups and of queues.

    A group without an offset begins as an embedded one does: at 0 of a young queue, else where its client decides.

    Attributes:
        slow: Codes whose answers read messages.
    """

    slow: ClassVar[frozenset[int]] = frozenset(
        {RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.GET_EARLIEST_MSG_STORETIME}
    )

    def __init__(
        self, engine: EmbeddedBroker, raw: RawReader, groups: SubscriptionGroupTable, later: DeferredWork
    ) -> None:
        self._engine = engine
        self._raw = raw
        self._reader = engine.reader
        self._offsets = engine.offsets
        self._groups = groups
        self._deferred_work = later

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self._query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self._search,
            RequestCode.GET_MAX_OFFSET: self._max,
            RequestCode.GET_MIN_OFFSET: self._min,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self._earliest,
        }

    # --- of groups -----------------------------------------------------------------------------

    def _query(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(QueryConsumerOffsetRequestHeader)
        offset = self._offsets.offset(asked.consumer_group, asked.topic, asked.queue_id)
        if offset is None and asked.set_zero_if_not_found is not False and self._is_young(asked):
            offset = 0
        if offset is None:
            remark = f"group {asked.consumer_group!r} has no offset in queue {asked.queue_id} of {asked.topic!r}"
            return request.response(ResponseCode.QUERY_NOT_FOUND, remark=remark)
        return _offset(request, offset)

    def _is_young(self, asked: TopicQueueRequestHeader) -> bool:
        """A topic that is not there yet, or a queue that still has its first message close to the log's end."""
        if not self._has_queue(asked):
            return False
        queue = self._queue(asked)
        return self._reader.min_offset(queue) == 0 and self._reader.bytes_after(queue, 0) <= _YOUNG_QUEUE_BYTES

    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        told = request.header(UpdateConsumerOffsetRequestHeader)
        self._check_queue(told)
        if self._groups.find(told.consumer_group) is not None:
            return self._commit(request, told)
        return self._deferred_work.answer(connection, request, partial(self._make_and_commit, request, told))

    def _make_and_commit(
        self, request: RemotingCommand, told: UpdateConsumerOffsetRequestHeader
    ) -> RemotingCommand | None:
        ensure_group(self._groups, told.consumer_group)
        return self._commit(request, told)

    def _commit(self, request: RemotingCommand, told: UpdateConsumerOffsetRequestHeader) -> RemotingCommand | None:
        """An offset that is lower than before is taken too: a group may be sent back."""
        self._offsets.commit(told.consumer_group, told.topic, told.queue_id, max(0, told.commit_offset))
        return None if request.is_one_way else request.response()

    # --- of queues: one that is not there is empty, as RocketMQ answers ------------------------

    def _search(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(SearchOffsetRequestHeader)
        if not self._has_queue(asked):
            return _offset(request, 0)
        queue = self._queue(asked)
        if asked.boundary_type is not BoundaryType.UPPER:
            return _offset(request, self._reader.search_offset(queue, asked.timestamp))
        after = self._reader.search_offset(queue, asked.timestamp + 1)
        return _offset(request, max(self._reader.min_offset(queue), after - 1))

    def _max(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(GetMaxOffsetRequestHeader)
        return _offset(request, self._reader.max_offset(self._queue(asked)) if self._has_queue(asked) else 0)

    def _min(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(TopicQueueRequestHeader)
        return _offset(request, self._reader.min_offset(self._queue(asked)) if self._has_queue(asked) else 0)

    def _earliest(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(TopicQueueRequestHeader)
        timestamp = None
        if self._has_queue(asked):
            queue = self._queue(asked)
            timestamp = self._raw.store_time(queue, self._reader.min_offset(queue))
        return request.response(
            header=GetEarliestMsgStoretimeResponseHeader(timestamp=-1 if timestamp is None else timestamp)
        )

    def _check_queue(self, asked: TopicQueueRequestHeader) -> None:
        if self._has_queue(asked):
            return
        config = self._engine.topics.config(asked.topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"there is no topic {asked.topic!r}")
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"topic {asked.topic!r} has queues 0..{_queue_count(config) - 1}, asked was queue {asked.queue_id}",
        )

    def _has_queue(self, asked: TopicQueueRequestHeader) -> bool:
        config = self._engine.topics.config(asked.topic)
        return config is not None and 0 <= asked.queue_id < _queue_count(config)

    def _queue(self, asked: TopicQueueRequestHeader) -> MessageQueue:
        return MessageQueue(asked.topic, self._engine.name, asked.queue_id)


def _queue_count(config: dict[str, Any]) -> int:
    return max(int(config.get(name, 0)) for name in ("readQueueNums", "writeQueueNums"))


def _offset(request: RemotingCommand, offset: int) -> RemotingCommand:
    return request.response(header=OffsetResponseHeader(offset=offset))
