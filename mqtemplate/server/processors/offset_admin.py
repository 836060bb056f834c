"""Requests of administrators about offsets: consume statistics, times of messages, reset and clone.

Source: RocketMQ ``broker: AdminBrokerProcessor``, ``Broker2Client``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.clients import ClientChannel, ClientRegistry
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies.route import TopicConfig
from mqtemplate.remoting.protocol.codes import LanguageCode, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.server.processors.statistics import QueueStatistics
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import connection_of
from mqtemplate.server.state.topics import TopicConfigs, queue_id_error
from mqtemplate.store.tables import ConsumerOffsets

_log = get_logger("mqtemplate.admin")

_CLIENT_TIMEOUT_MS = 5_000
_MAX_LONG = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class OffsetAdmin:
    """Processors of requests that read or change the offsets of groups.

    The new offsets of a group are valid at once. Connected members are notified: each has read positions of its own,
    and would commit its old offset over the new one.
    """

    offsets: ConsumerOffsets
    topics: TopicConfigs
    groups: SubscriptionGroupTable
    clients: ClientRegistry
    statistics: QueueStatistics

    # --- statistics ----------------------------------------------------------------------------

    @answers(RequestCode.GET_CONSUME_STATS, slow=True)
    def _consume_stats(self, query: headers.GetConsumeStatsRequestHeader) -> bodies.ConsumeStats:
        group = query.consumer_group
        if query.topic_list:
            topics = sorted(filter(None, query.topic_list.split(";")))
        else:
            topics = self._subscribed(group, {query.topic} if query.topic else self.offsets.topics_of(group))
        return self.statistics.consume_stats(group, self._existing(topics))

    def _subscribed(self, group: str, topics: Iterable[str]) -> list[str]:
        """Return those of *topics* that the group subscribes to, sorted; all of them if it has no connected member."""
        info = self.clients.consumer_group(group)
        return sorted(topic for topic in topics if info is None or topic in info.subscriptions)

    def _existing(self, topics: Iterable[str]) -> list[TopicConfig]:
        return [config for topic in topics if (config := self.topics.find(topic)) is not None]

    @answers(RequestCode.GET_BROKER_CONSUME_STATS, slow=True)
    def _all_consume_stats(self, query: headers.GetConsumeStatsInBrokerHeader) -> bodies.ConsumeStatsList:
        stats: list[dict[str, list[bodies.ConsumeStats]]] = []
        lag = 0
        for group in sorted(self.groups.all()):
            configs = self._existing(self._subscribed(group, self.offsets.topics_of(group)))
            wanted = [config for config in configs if config.order or not query.is_order]
            by_topic = [self.statistics.consume_stats(group, [config]) for config in wanted]
            stats.append({group: by_topic})
            lag += sum(map(_lag, by_topic))
        return bodies.ConsumeStatsList(consume_stats_list=stats, total_diff=lag)

    @answers(RequestCode.QUERY_CONSUME_TIME_SPAN, slow=True)
    def _time_span(self, query: headers.QueryConsumeTimeSpanRequestHeader) -> bodies.QueryConsumeTimeSpanBody:
        config = self.topics.get(query.topic)
        return bodies.QueryConsumeTimeSpanBody(consume_time_span_set=self.statistics.time_spans(query.group, config))

    @answers(RequestCode.GET_ALL_CONSUMER_OFFSET)
    def _all_offsets(self) -> bodies.ConsumerOffsetSerializeWrapper:
        table = {f"{topic}@{group}": offsets for (group, topic), offsets in sorted(self.offsets.all().items())}
        return bodies.ConsumerOffsetSerializeWrapper(offset_table=table)

    @answers(RequestCode.QUERY_CORRECTION_OFFSET)
    def _correction(self, query: headers.QueryCorrectionOffsetHeader) -> bodies.QueryCorrectionOffsetBody:
        """Return the minimum offset of all groups for each queue.

        The maximum long stands for a queue in which the compared group is slower than all others. Source:
        ``ConsumerOffsetManager.queryMinOffsetInAllGroup``.
        """
        filtered = set(filter(None, (query.filter_groups or "").split(",")))
        minimum: dict[int, int] = {}
        for group in self.offsets.groups_of(query.topic) - filtered:
            for queue_id, offset in self.offsets.offsets(group, query.topic).items():
                minimum[queue_id] = min(offset, minimum.get(queue_id, offset))
        for queue_id, offset in self.offsets.offsets(query.compare_group, query.topic).items():
            if minimum.get(queue_id, _MAX_LONG) > offset:
                minimum[queue_id] = _MAX_LONG
        return bodies.QueryCorrectionOffsetBody(correction_offsets=minimum)

    # --- changes -------------------------------------------------------------------------------

    @answers(RequestCode.CLONE_GROUP_OFFSET)
    def _clone(self, header: headers.CloneGroupOffsetRequestHeader) -> None:
        topics = [header.topic] if header.topic else sorted(self.offsets.topics_of(header.src_group))
        if not header.offline:
            topics = self._subscribed(header.src_group, topics)
        for topic in topics:
            for queue_id, offset in self.offsets.offsets(header.src_group, topic).items():
                self.offsets.commit(header.dest_group, topic, queue_id, offset)
        _log.info("admin.offsets_cloned", group=header.dest_group, of=header.src_group, topics=topics)

    @answers(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, slow=True)
    def _reset(self, header: headers.ResetOffsetRequestHeader, connection: Connection) -> bodies.ResetOffsetBody:
        config = self.topics.get(header.topic)
        if self.groups.find(header.group) is None and header.group not in self.offsets.groups():
            raise RefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {header.group!r} does not exist")
        count = max(config.read_queue_nums, config.write_queue_nums)
        if header.queue_id >= count:  # A negative ID stands for all queues.
            raise queue_id_error(header.topic, header.queue_id, count)
        table = self._new_offsets(header, config)
        for queue, offset in table.items():
            self.offsets.commit(header.group, queue.topic, queue.queue_id, offset)
        for channel in self._members(header.group):
            connection_of(channel).send_one_way(_reset_request(header, table, channel))
        _log.info("admin.offsets_reset", group=header.group, topic=header.topic, by=str(connection.remote))
        return bodies.ResetOffsetBody(offset_table=table)

    def _members(self, group: str) -> list[ClientChannel]:
        info = self.clients.consumer_group(group)
        return [] if info is None else list(info.channels.values())

    def _new_offsets(self, header: headers.ResetOffsetRequestHeader, config: TopicConfig) -> dict[MessageQueue, int]:
        """Return the new offset of each queue. Without *is_force* an offset is only decreased."""
        table = {}
        queue_ids = [header.queue_id] if header.queue_id >= 0 else range(config.read_queue_nums)
        for queue_id in queue_ids:
            queue = self.statistics.queue(header.topic, queue_id)
            if header.queue_id >= 0 and header.offset is not None and header.offset >= 0:
                target = self._checked_offset(queue, header.offset)
            else:
                target = self.statistics.offset_at(queue, header.timestamp)
            committed = self.offsets.offset(header.group, header.topic, queue_id)
            table[queue] = target if header.is_force or committed is None else min(committed, target)
        return table

    def _checked_offset(self, queue: MessageQueue, queue_offset: int) -> int:
        low, high = self.statistics.span(queue)
        if not low <= queue_offset <= high:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"the offset in queue {queue.queue_id} of {queue.topic} must be {low}..{high}, got {queue_offset}",
            )
        return queue_offset

    # --- offsets of connected members ----------------------------------------------------------

    @handles(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS)
    def _consumer_status(self, connection: Connection, request: RemotingCommand) -> None:
        """Request the read positions of the members, and respond when all members have responded."""
        header = request.header(headers.GetConsumerStatusRequestHeader)
        members = [each for each in self._members(header.group) if header.client_addr in (None, "", each.client_id)]
        if not members:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {header.group!r} has no connected consumer")
        positions: dict[str, dict[MessageQueue, int]] = {}
        pending = len(members)

        def on_response(client_id: str, response: RemotingCommand | BrokerError) -> None:
            # The responses arrive in the I/O thread one after the other, so no lock is needed.
            nonlocal pending
            if isinstance(response, RemotingCommand) and response.code == ResponseCode.SUCCESS and response.body:
                try:
                    positions[client_id] = bodies.GetConsumerStatusBody.decode(response.body).message_queue_table
                except RemoteProtocolError as exc:
                    _log.warning("admin.status_unreadable", client_id=client_id, reason=str(exc))
            pending -= 1
            if pending == 0:
                connection.reply(request.response(body=bodies.GetConsumerStatusBody(consumer_table=positions).encode()))

        member_header = headers.GetConsumerStatusRequestHeader(topic=header.topic, group=header.group)
        for member in members:
            member_request = RemotingCommand.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, member_header)
            connection_of(member).request(member_request, _CLIENT_TIMEOUT_MS, partial(on_response, member.client_id))


def _reset_request(
    header: headers.ResetOffsetRequestHeader, table: dict[MessageQueue, int], channel: ClientChannel
) -> RemotingCommand:
    notified = headers.ResetOffsetRequestHeader(
        topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=header.is_force
    )
    if channel.language == LanguageCode.CPP.name:
        offsets = [
            bodies.ResetOffsetForC(
                topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset
            )
            for queue, offset in table.items()
        ]
        body = bodies.ResetOffsetBodyForC(offset_table=offsets).encode()
    else:
        body = bodies.ResetOffsetBody(offset_table=table).encode()
    return RemotingCommand.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, notified, body, one_way=True)


def _lag(stats: bodies.ConsumeStats) -> int:
    return sum(each.broker_offset - each.consumer_offset for each in stats.offset_table.values())
