"""Requests of administrators about topics, consumer groups and their offsets: create, change, delete, list; connected
clients; consume statistics, times of messages, reset and clone of offsets.

Source: RocketMQ ``broker: AdminBrokerProcessor``, ``Broker2Client``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import ClientChannel, ClientRegistry
from mqtemplate.engine.pop.pop import PopService
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.numbers import parse_number
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies import own_requests as own
from mqtemplate.remoting.protocol.bodies import route
from mqtemplate.remoting.protocol.bodies.group import ClientConnection as ConnectionBody
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.bodies.route import TopicConfig, TopicList
from mqtemplate.remoting.protocol.codes import LanguageCode, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import admin
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.pop import popped_topic
from mqtemplate.server.processors.broker_admin import QueueStatistics
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.state.groups import RequestModes, SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import connection_of, subscription_data
from mqtemplate.server.state.topics import TopicConfigs, apply_attributes, queue_id_error
from mqtemplate.services import wall_time
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import SYSTEM_TOPICS, is_system_group

T = TypeVar("T")


def page(table: Mapping[str, T], start: int, count: int | None) -> dict[str, T]:
    """Return *count* entries of *table* from *start* on, sorted by name.

    Clients before 5.x request no page: *start* is 0 and *count* is None.
    """
    names = sorted(table)[start : None if count is None else start + count]
    return {name: table[name] for name in names}


_log = get_logger("mqtemplate.admin")


@dataclass(frozen=True, slots=True)
class TopicAdmin:
    """Processors of requests about topics. A change is on disk before the response is sent."""

    topics: TopicConfigs
    statistics: QueueStatistics
    clients: ClientRegistry
    offsets: ConsumerOffsets
    pops: PopService
    modes: RequestModes

    # --- changes -------------------------------------------------------------------------------

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC, slow=True)
    def _update(self, header: admin.CreateTopicRequestHeader, connection: Connection) -> None:
        found = self.topics.find(header.topic)
        config = route.TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=apply_attributes(found.attributes if found else {}, header.attributes),
        )
        self._update_all(route.CreateTopicListRequestBody(topic_config_list=[config]), connection)

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, slow=True)
    def _update_all(self, body: route.CreateTopicListRequestBody, connection: Connection) -> None:
        for config in body.topic_config_list:
            self.topics.put(config)
        names = [config.topic_name for config in body.topic_config_list]
        _log.info("admin.topics_updated", topics=names, by=str(connection.remote))

    @answers(RequestCode.DELETE_TOPIC_IN_BROKER, slow=True)
    def _delete(self, header: admin.TopicNameRequestHeader, connection: Connection) -> None:
        """Delete a topic. Deleting a missing topic succeeds: tools send the request to each broker of a cluster."""
        topic = header.topic
        if not topic.strip():
            raise RefusedError(ResponseCode.INVALID_PARAMETER, "the topic to delete is empty; give its name")
        deleted = self.topics.delete(topic)
        retry_topics = self.pops.retry_topics(topic)
        self.pops.forget_topic(topic)  # first: it ends deliveries that would commit an offset again
        for retry_topic in retry_topics:
            self.topics.delete(retry_topic)
        for name in (topic, *retry_topics):
            self.offsets.forget(topic=name)
        self.modes.forget(topic=topic)
        _log.info("admin.topic_deleted", topic=topic, found=deleted, by=str(connection.remote))

    # --- queries -------------------------------------------------------------------------------

    @answers(RequestCode.GET_TOPIC_CONFIG)
    def _config(self, query: admin.TopicNameRequestHeader) -> route.TopicConfig:
        return self.topics.get(query.topic)

    @answers(RequestCode.GET_ALL_TOPIC_CONFIG)
    def _list(
        self, query: admin.GetAllTopicConfigRequestHeader
    ) -> tuple[admin.GetAllTopicConfigResponseHeader, route.TopicConfigSerializeWrapper]:
        table = self.topics.all()
        wanted = page(table, query.topic_seq, query.max_topic_num)
        body = route.TopicConfigSerializeWrapper(topic_config_table=wanted, data_version=self.topics.version)
        return admin.GetAllTopicConfigResponseHeader(total_topic_num=len(table)), body

    @answers(RequestCode.GET_TOPIC_STATS_INFO, slow=True)
    def _stats(self, query: admin.TopicNameRequestHeader) -> route.TopicStatsTable:
        return self.statistics.topic_stats(self.topics.get(query.topic))

    @answers(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def _groups_of_topic(self, query: admin.TopicNameRequestHeader) -> GroupList:
        subscribed = self.clients.groups_of_topic(query.topic)
        return GroupList(group_list=sorted(self.offsets.groups_of(query.topic) | set(subscribed)))

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def _system_topics(self) -> route.TopicList:
        return route.TopicList(topic_list=sorted(SYSTEM_TOPICS))


_NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
"""A group name is part of the names of its retry and dead letter topics. Source: ``TopicValidator``."""


@dataclass(frozen=True, slots=True)
class GroupAdmin:
    """Processors of requests about groups. A change is on disk before the response is sent."""

    groups: SubscriptionGroupTable
    clients: ClientRegistry
    offsets: ConsumerOffsets
    pops: PopService
    modes: RequestModes
    clock: Clock

    # --- settings ------------------------------------------------------------------------------

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, slow=True)
    def _update(self, config: bodies.SubscriptionGroupConfig, connection: Connection) -> None:
        self._update_all(bodies.SubscriptionGroupList(group_config_list=[config]), connection)

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, slow=True)
    def _update_all(self, body: bodies.SubscriptionGroupList, connection: Connection) -> None:
        configs = []
        for config in body.group_config_list:
            found = self.groups.find(config.group_name)
            changed = _changed_attributes(found.attributes if found else {}, config.attributes)
            configs.append(replace(config, attributes=changed))
            _check(configs[-1])
        self.groups.put(configs)
        _log.info("admin.groups_updated", groups=[each.group_name for each in configs], by=str(connection.remote))

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP, slow=True)
    def _delete(self, header: headers.DeleteSubscriptionGroupRequestHeader, connection: Connection) -> None:
        deleted = self.groups.delete(header.group_name)
        self.modes.forget(group=header.group_name)
        self.pops.forget_group(header.group_name)
        if header.clean_offset:
            self.offsets.forget(group=header.group_name)
        _log.info("admin.group_deleted", group=header.group_name, found=deleted, by=str(connection.remote))

    @answers(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def _config(self, query: headers.GroupRequestHeader) -> bodies.SubscriptionGroupConfig:
        config = self.groups.find(query.group)
        if config is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {query.group!r} does not exist; its first consumer creates it, or mqadmin updateSubGroup",
            )
        return config

    @answers(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def _list(
        self, query: headers.GetAllSubscriptionGroupRequestHeader
    ) -> tuple[headers.GetAllSubscriptionGroupResponseHeader, bodies.SubscriptionGroupWrapper]:
        table = self._known()
        wanted = page(table, query.group_seq, query.max_group_num)
        body = bodies.SubscriptionGroupWrapper(subscription_group_table=wanted, data_version=self.groups.version)
        return headers.GetAllSubscriptionGroupResponseHeader(total_group_num=len(table)), body

    def _known(self) -> dict[str, bodies.SubscriptionGroupConfig]:
        """Return all groups, also those that only have offsets: an embedded broker on the folder stored no settings."""
        names = (name for name in self.offsets.groups() if not is_system_group(name))
        return {name: bodies.SubscriptionGroupConfig(group_name=name) for name in names} | self.groups.all()

    @answers(RequestCode.GET_GROUP_DELIVERIES, slow=True)
    def _deliveries(self, query: own.GetGroupDeliveriesRequestHeader) -> own.GroupDeliveriesData:
        found = self.pops.deliveries(query.consumer_group)
        if found is None:
            return own.GroupDeliveriesData(reads_by_pop=False)
        messages = [
            own.InFlightData(
                stored_topic=each.queue.topic,
                queue_id=each.queue.queue_id,
                queue_offset=each.queue_offset,
                topic=each.topic,
                msg_id=each.msg_id,
                keys=each.keys,
                client=each.client,
                since=each.since_ms,
                until=each.until_ms,
                is_renewed=each.is_renewed,
                attempt=each.attempt,
                message_group=each.message_group,
                blocked=each.blocked,
            )
            for each in found.messages
        ]
        return own.GroupDeliveriesData(
            reads_by_pop=True,
            in_flight=found.in_flight,
            waiting=found.waiting,
            expired=found.expired or 0,
            held=found.held or 0,
            messages=messages,
        )

    # --- connected clients ---------------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def _consumers(self, query: headers.ConsumerGroupRequestHeader) -> bodies.ConsumerConnection:
        group = query.consumer_group
        info = self.clients.consumers.get(group)
        if info is None:
            raise RefusedError(ResponseCode.CONSUMER_NOT_ONLINE, f"group {group!r} has no connected consumer")
        return bodies.ConsumerConnection(
            connection_set=_connections(info.channels.values()),
            subscription_table={topic: subscription_data(found) for topic, found in info.subscriptions.items()},
            consume_type=info.consume_type,
            message_model=info.message_model,
            consume_from_where=info.consume_from_where,
        )

    @answers(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def _producers(self, query: headers.ProducerGroupRequestHeader) -> bodies.ProducerConnection:
        channels = self.clients.producers(query.producer_group)
        if not channels:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {query.producer_group!r} has no connected producer")
        return bodies.ProducerConnection(connection_set=_connections(channels))

    @answers(RequestCode.GET_ALL_PRODUCER_INFO)
    def _all_producers(self) -> bodies.ProducerTableInfo:
        table = {
            group: [
                bodies.ProducerInfo(
                    client_id=channel.client_id,
                    remote_ip=str(channel.remote_address),
                    language=channel.language,
                    version=channel.version,
                    last_update_timestamp=wall_time(self.clock, channel.last_update_ms) or 0,
                )
                for channel in channels
            ]
            for group, channels in self.clients.producer_groups().items()
        }
        return bodies.ProducerTableInfo(data=table)

    # --- subscriptions -------------------------------------------------------------------------

    @answers(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def _topics(self, query: headers.GroupRequestHeader) -> TopicList:
        return TopicList(topic_list=sorted(self.offsets.topics_of(query.group)))

    @answers(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def _subscription(
        self, query: headers.QuerySubscriptionByConsumerRequestHeader
    ) -> bodies.QuerySubscriptionResponseBody:
        found = None if query.topic is None else self.clients.subscription(query.group, query.topic)
        data = None if found is None else subscription_data(found)
        return bodies.QuerySubscriptionResponseBody(group=query.group, topic=query.topic or "", subscription_data=data)


def _check(config: bodies.SubscriptionGroupConfig) -> None:
    """Raise `RefusedError` if the name or a number in *config* is invalid."""
    group = config.group_name
    if not _NAME.fullmatch(group):
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"{group[:40]!r} is not a valid group name; use at most 120 letters, digits, '_', '-', '%', '|'",
        )
    for name, value in (("retryQueueNums", config.retry_queue_nums), ("retryMaxTimes", config.retry_max_times)):
        if value < 0:
            remark = f"{name} of group {group!r} must be 0 or more, got {value}"
            raise RefusedError(ResponseCode.INVALID_PARAMETER, remark)


def _changed_attributes(attributes: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return *attributes* after *changes*, whose names have a sign: ``+name`` sets one, ``-name`` removes it."""
    result = dict(attributes)
    for name, value in changes.items():
        if name.startswith("-"):
            result.pop(name[1:], None)
        else:  # without a sign: all attributes of a group that another broker has
            result[name.removeprefix("+")] = value
    factor = result.get("priority.factor", "100")
    if parse_number(factor) not in range(101):
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER, f"the group attribute priority.factor must be 0..100, got {factor[:20]!r}"
        )
    return result


def _connections(channels: Iterable[ClientChannel]) -> list[ConnectionBody]:
    return [
        ConnectionBody(
            client_id=channel.client_id,
            client_addr=str(channel.remote_address),
            language=channel.language,
            version=channel.version,
        )
        for channel in channels
    ]


_CLIENT_TIMEOUT_MS = 5_000
_MAX_LONG = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class OffsetAdmin:
    """Processors of requests that read or change the offsets of groups.

    The new offsets of a group are valid at once. Connected members are notified: each has read positions of its own,
    and would commit its old offset over the new one.
    """

    offsets: ConsumerOffsets
    pops: PopService
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
        """Return the *topics* that the group subscribes to, sorted; all of them if it has no connected member.

        A group that pops from a topic also reads its retry topic for it.
        """
        info = self.clients.consumers.get(group)
        return sorted(topic for topic in topics if info is None or popped_topic(topic, group)[0] in info.subscriptions)

    def _existing(self, topics: Iterable[str]) -> list[TopicConfig]:
        return [config for topic in topics if (config := self.topics.find(topic)) is not None]

    @answers(RequestCode.GET_BROKER_CONSUME_STATS, slow=True)
    def _all_consume_stats(self, query: headers.GetConsumeStatsInBrokerHeader) -> bodies.ConsumeStatsList:
        stats: list[dict[str, list[bodies.ConsumeStats]]] = []
        lag = 0
        for group in sorted(self.offsets.groups() | set(self.groups.all())):
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
                self.pops.reset(header.dest_group, self.statistics.queue(topic, queue_id), offset)
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
            self.pops.reset(header.group, queue, offset)
        for channel in self._members(header.group):
            connection_of(channel).send_one_way(_reset_request(header, table, channel))
        _log.info("admin.offsets_reset", group=header.group, topic=header.topic, by=str(connection.remote))
        return bodies.ResetOffsetBody(offset_table=table)

    def _members(self, group: str) -> list[ClientChannel]:
        info = self.clients.consumers.get(group)
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
