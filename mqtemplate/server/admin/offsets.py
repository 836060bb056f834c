"""What administrators ask of offsets: how far groups are, from when their messages are, and to go somewhere else.

Source: RocketMQ ``broker: AdminBrokerProcessor``, ``Broker2Client``; section 18 of the specification.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import structlog

from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerOffsetSerializeWrapper,
    ConsumeStats,
    ConsumeStatsList,
    GetConsumerStatusBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    ResetOffsetBodyForC,
    ResetOffsetForC,
)
from mqtemplate.remoting.protocol.bodies.route import TopicConfig
from mqtemplate.remoting.protocol.headers.group import (
    CloneGroupOffsetRequestHeader,
    GetConsumerStatusRequestHeader,
    GetConsumeStatsInBrokerHeader,
    GetConsumeStatsRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.admin.consume_stats import QueueFigures
from mqtemplate.server.clients import ClientChannel, ClientRegistry
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.response import RefusedError
from mqtemplate.server.topic_configs import TopicConfigs
from mqtemplate.store import ConsumerOffsets
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.admin")

_CLIENT_TIMEOUT_MS = 5_000
_LAST_OF_ALL = (1 << 63) - 1


class OffsetAdmin:
    """Answers about how far groups are, and moves them.

    A group that is moved has the new offsets at once; the members that are connected are told too, since each keeps a
    read position of its own and would write the old one over.

    Attributes:
        slow: Codes whose answers read messages.
    """

    slow: ClassVar[frozenset[int]] = frozenset(
        {
            RequestCode.GET_CONSUME_STATS,
            RequestCode.GET_BROKER_CONSUME_STATS,
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        }
    )

    def __init__(
        self,
        topics: TopicConfigs,
        groups: SubscriptionGroupTable,
        offsets: ConsumerOffsets,
        figures: QueueFigures,
        clients: ClientRegistry,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._figures = figures
        self._clients = clients
        self._clock = clock

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.GET_CONSUME_STATS: self._consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self._all_consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self._time_span,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._consumer_status,
            RequestCode.QUERY_CORRECTION_OFFSET: self._correction,
            RequestCode.CLONE_GROUP_OFFSET: self._clone,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self._all_offsets,
        }

    # --- how far -------------------------------------------------------------------------------

    def _consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(GetConsumeStatsRequestHeader)
        if asked.topic_list:
            topics = sorted(filter(None, asked.topic_list.split(";")))
        else:
            every = {asked.topic} if asked.topic else self._offsets.topics_of(asked.consumer_group)
            topics = self._subscribed(asked.consumer_group, every)
        return request.response(body=self._figures.consume_stats(asked.consumer_group, topics).encode())

    def _subscribed(self, group: str, topics: Iterable[str]) -> list[str]:
        """Those of *topics* that the group still reads, sorted: all, while nobody of it is connected."""
        info = self._clients.consumer_group(group)
        return sorted(topic for topic in topics if info is None or topic in info.subscriptions)

    def _all_consume_stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        only_ordered = request.header(GetConsumeStatsInBrokerHeader).is_order
        stats, behind = [], 0
        for group in sorted(self._groups.all()):
            found = self._stats_by_topic(group, only_ordered=only_ordered)
            behind += sum(map(_behind, found))
            stats.append({group: found})
        return request.response(body=ConsumeStatsList(consume_stats_list=stats, total_diff=behind).encode())

    def _stats_by_topic(self, group: str, *, only_ordered: bool) -> list[ConsumeStats]:
        configs = map(self._topics.find, self._subscribed(group, self._offsets.topics_of(group)))
        return [
            self._figures.consume_stats(group, [config.topic_name])
            for config in configs
            if config is not None and (config.order or not only_ordered)
        ]

    def _time_span(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(QueryConsumeTimeSpanRequestHeader)
        config = self._topics.find(asked.topic)
        if config is None:
            return _no_topic(request, asked.topic)
        spans = self._figures.time_spans(asked.group, config, self._clock.now_ms())
        return request.response(body=QueryConsumeTimeSpanBody(consume_time_span_set=spans).encode())

    def _all_offsets(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        table = {f"{topic}@{group}": offsets for (group, topic), offsets in sorted(self._offsets.all().items())}
        return request.response(body=ConsumerOffsetSerializeWrapper(offset_table=table).encode())

    def _correction(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Where the slowest of the groups is in each queue; the end of all numbers where the one that asks is slower.

        Source: ``ConsumerOffsetManager.queryMinOffsetInAllGroup``.
        """
        asked = request.header(QueryCorrectionOffsetHeader)
        left_out = set(filter(None, (asked.filter_groups or "").split(",")))
        slowest: dict[int, int] = {}
        for group in self._offsets.groups_of(asked.topic) - left_out:
            for queue_id, offset in self._offsets.offsets(group, asked.topic).items():
                slowest[queue_id] = min(offset, slowest.get(queue_id, offset))
        for queue_id, offset in self._offsets.offsets(asked.compare_group, asked.topic).items():
            if slowest.get(queue_id, _LAST_OF_ALL) > offset:
                slowest[queue_id] = _LAST_OF_ALL
        return request.response(body=QueryCorrectionOffsetBody(correction_offsets=slowest).encode())

    # --- elsewhere -----------------------------------------------------------------------------

    def _clone(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(CloneGroupOffsetRequestHeader)
        topics = [asked.topic] if asked.topic else sorted(self._offsets.topics_of(asked.src_group))
        if not asked.offline:
            topics = self._subscribed(asked.src_group, topics)
        for topic in topics:
            for queue_id, offset in self._offsets.offsets(asked.src_group, topic).items():
                self._offsets.commit(asked.dest_group, topic, queue_id, offset)
        _log.info("admin.offsets_cloned", group=asked.dest_group, of=asked.src_group, topics=topics)
        return request.response()

    def _reset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(ResetOffsetRequestHeader)
        config = self._topics.find(asked.topic)
        if config is None:
            return _no_topic(request, asked.topic)
        if not self._is_known(asked.group):
            remark = f"there is no group {asked.group!r} that could be moved"
            return request.response(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
        if asked.queue_id >= max(config.read_queue_nums, config.write_queue_nums):
            remark = f"topic {asked.topic!r} has queues 0..{config.read_queue_nums - 1}, got {asked.queue_id}"
            return request.response(ResponseCode.INVALID_PARAMETER, remark=remark)
        table = self._targets(asked, config)
        for queue, offset in table.items():
            self._offsets.commit(asked.group, queue.topic, queue.queue_id, offset)
        info = self._clients.consumer_group(asked.group)
        for channel in [] if info is None else list(info.channels.values()):
            channel.connection.send_one_way(_reset_request(asked, table, channel))
        _log.info("admin.offsets_reset", group=asked.group, topic=asked.topic, by=str(connection.remote))
        return request.response(body=ResetOffsetBody(offset_table=table).encode())

    def _is_known(self, group: str) -> bool:
        return self._groups.find(group) is not None or group in self._offsets.groups()

    def _targets(self, asked: ResetOffsetRequestHeader, config: TopicConfig) -> dict[MessageQueue, int]:
        """Where each queue goes on; without force a group goes back, and never forward."""
        table = {}
        queue_ids = [asked.queue_id] if asked.queue_id >= 0 else range(config.read_queue_nums)
        for queue_id in queue_ids:
            queue = self._figures.queue(asked.topic, queue_id)
            if asked.queue_id >= 0 and asked.offset is not None and asked.offset >= 0:
                target = self._within(queue, asked.offset)
            else:
                target = self._figures.offset_at(queue, asked.timestamp)
            committed = self._offsets.offset(asked.group, asked.topic, queue_id)
            keeps = not asked.is_force and committed is not None and committed < target
            table[queue] = committed if keeps and committed is not None else target
        return table

    def _within(self, queue: MessageQueue, queue_offset: int) -> int:
        low, high = self._figures.span(queue)
        if not low <= queue_offset <= high:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"queue {queue.queue_id} of {queue.topic} can be read from {low} to {high}, got {queue_offset}",
            )
        return queue_offset

    # --- what members say ----------------------------------------------------------------------

    def _consumer_status(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Ask the members where they are, and answer when the last one has."""
        asked = request.header(GetConsumerStatusRequestHeader)
        info = self._clients.consumer_group(asked.group)
        members = [] if info is None else list(info.channels.values())
        if asked.client_addr:
            members = [member for member in members if member.client_id == asked.client_addr]
        if not members:
            remark = f"nobody consumes for group {asked.group!r} now"
            return request.response(ResponseCode.SYSTEM_ERROR, remark=remark)
        question = GetConsumerStatusRequestHeader(topic=asked.topic, group=asked.group)
        _StatusRound(connection, request, len(members)).ask(members, question)
        return None


class _StatusRound:
    """One question to several members. The answers come in the server's I/O thread, one after the other."""

    def __init__(self, connection: Connection, request: RemotingCommand, awaited: int) -> None:
        self._connection = connection
        self._request = request
        self._awaited = awaited
        self._table: dict[str, dict[MessageQueue, int]] = {}

    def ask(self, members: Iterable[ClientChannel], question: GetConsumerStatusRequestHeader) -> None:
        for member in members:
            request = RemotingCommand.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, question)
            member.connection.request(request, _CLIENT_TIMEOUT_MS, partial(self._take, member.client_id))

    def _take(self, client_id: str, answer: RemotingCommand | BrokerError) -> None:
        if isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS and answer.body:
            try:
                self._table[client_id] = GetConsumerStatusBody.decode(answer.body).message_queue_table
            except RemoteProtocolError as exc:
                _log.warning("admin.status_unreadable", client_id=client_id, reason=str(exc))
        self._awaited -= 1
        if self._awaited == 0:
            body = GetConsumerStatusBody(consumer_table=self._table).encode()
            self._connection.reply(self._request.response(body=body))


def _reset_request(
    asked: ResetOffsetRequestHeader, table: dict[MessageQueue, int], channel: ClientChannel
) -> RemotingCommand:
    header = ResetOffsetRequestHeader(
        topic=asked.topic, group=asked.group, timestamp=asked.timestamp, is_force=asked.is_force
    )
    if channel.language is LanguageCode.CPP:
        offsets = [
            ResetOffsetForC(topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset)
            for queue, offset in table.items()
        ]
        body = ResetOffsetBodyForC(offset_table=offsets).encode()
    else:
        body = ResetOffsetBody(offset_table=table).encode()
    return RemotingCommand.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body, one_way=True)


def _behind(stats: ConsumeStats) -> int:
    return sum(each.broker_offset - each.consumer_offset for each in stats.offset_table.values())


def _no_topic(request: RemotingCommand, topic: str) -> RemotingCommand:
    kind = "it is made when its group needs it" if topic.startswith(RETRY_TOPIC_PREFIX) else "name one of topicList"
    return request.response(ResponseCode.TOPIC_NOT_EXIST, remark=f"there is no topic {topic!r}; {kind}")
