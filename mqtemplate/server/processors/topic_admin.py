"""Requests of administrators about topics and consumer groups: create, change, delete, list, and connected clients.

Source: RocketMQ ``broker: AdminBrokerProcessor``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import ClientChannel, ClientRegistry
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies import route
from mqtemplate.remoting.protocol.bodies.group import ClientConnection as ConnectionBody
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers import admin
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.server.processors.statistics import QueueStatistics
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import subscription_data
from mqtemplate.server.state.topics import TopicConfigs, apply_attributes
from mqtemplate.services import wall_time
from mqtemplate.store.tables import ConsumerOffsets
from mqtemplate.topics import SYSTEM_TOPICS

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
        self.offsets.forget(topic=topic)
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
    clock: Clock

    # --- settings ------------------------------------------------------------------------------

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, slow=True)
    def _update(self, config: bodies.SubscriptionGroupConfig, connection: Connection) -> None:
        self._update_all(bodies.SubscriptionGroupList(group_config_list=[config]), connection)

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, slow=True)
    def _update_all(self, body: bodies.SubscriptionGroupList, connection: Connection) -> None:
        configs = body.group_config_list
        for config in configs:
            _check(config)
        self.groups.put(configs)
        _log.info("admin.groups_updated", groups=[each.group_name for each in configs], by=str(connection.remote))

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP, slow=True)
    def _delete(self, header: headers.DeleteSubscriptionGroupRequestHeader, connection: Connection) -> None:
        deleted = self.groups.delete(header.group_name)
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
        table = self.groups.all()
        wanted = page(table, query.group_seq, query.max_group_num)
        body = bodies.SubscriptionGroupWrapper(subscription_group_table=wanted, data_version=self.groups.version)
        return headers.GetAllSubscriptionGroupResponseHeader(total_group_num=len(table)), body

    # --- connected clients ---------------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def _consumers(self, query: headers.ConsumerGroupRequestHeader) -> bodies.ConsumerConnection:
        group = query.consumer_group
        info = self.clients.consumer_group(group)
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
            f"{group[:40]!r} is no valid group name; use at most 120 letters, digits, '_', '-', '%', '|'",
        )
    for name, value in (("retryQueueNums", config.retry_queue_nums), ("retryMaxTimes", config.retry_max_times)):
        if value < 0:
            remark = f"{name} of group {group!r} must be 0 or more, got {value}"
            raise RefusedError(ResponseCode.INVALID_PARAMETER, remark)


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
