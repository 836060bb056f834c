"""Requests of administrators about consumer groups: create, change, delete, list, connected clients, subscriptions.

Source: RocketMQ ``broker: AdminBrokerProcessor``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.engine.clients import ClientChannel
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies.group import Connection as ConnectionBody
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.paging import page
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.services import wall_time

_log = get_logger("mqtemplate.admin")

_NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
"""A group name is part of the names of its retry and dead letter topics. Source: ``TopicValidator``."""


@dataclass(frozen=True, slots=True)
class GroupAdmin:
    """Processors of requests about groups. A change is on disk before the response is sent."""

    server: ServerParts

    # --- settings ------------------------------------------------------------------------------

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, slow=True)
    def _update(self, config: bodies.SubscriptionGroupConfig, connection: Connection) -> None:
        self._update_all(bodies.SubscriptionGroupList(group_config_list=[config]), connection)

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, slow=True)
    def _update_all(self, body: bodies.SubscriptionGroupList, connection: Connection) -> None:
        configs = body.group_config_list
        for config in configs:
            _check(config)
        self.server.groups.put(configs)
        _log.info("admin.groups_updated", groups=[each.group_name for each in configs], by=str(connection.remote))

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP, slow=True)
    def _delete(self, header: headers.DeleteSubscriptionGroupRequestHeader, connection: Connection) -> None:
        deleted = self.server.groups.delete(header.group_name)
        if header.clean_offset:
            self.server.engine.offsets.forget(group=header.group_name)
        _log.info("admin.group_deleted", group=header.group_name, found=deleted, by=str(connection.remote))

    @answers(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def _config(self, query: headers.GroupRequestHeader) -> bodies.SubscriptionGroupConfig:
        config = self.server.groups.find(query.group)
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
        table = self.server.groups.all()
        wanted = page(table, query.group_seq, query.max_group_num)
        body = bodies.SubscriptionGroupWrapper(subscription_group_table=wanted, data_version=self.server.groups.version)
        return headers.GetAllSubscriptionGroupResponseHeader(total_group_num=len(table)), body

    # --- connected clients ---------------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def _consumers(self, query: headers.ConsumerGroupRequestHeader) -> bodies.ConsumerConnection:
        group = query.consumer_group
        info = self.server.clients.consumer_group(group)
        if info is None:
            raise RefusedError(ResponseCode.CONSUMER_NOT_ONLINE, f"group {group!r} has no connected consumer")
        return bodies.ConsumerConnection(
            connection_set=_connections(info.channels.values()),
            subscription_table=dict(info.subscriptions),
            consume_type=info.consume_type,
            message_model=info.message_model,
            consume_from_where=info.consume_from_where,
        )

    @answers(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def _producers(self, query: headers.ProducerGroupRequestHeader) -> bodies.ProducerConnection:
        channels = self.server.clients.producers(query.producer_group)
        if not channels:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {query.producer_group!r} has no connected producer")
        return bodies.ProducerConnection(connection_set=_connections(channels))

    @answers(RequestCode.GET_ALL_PRODUCER_INFO)
    def _all_producers(self) -> bodies.ProducerTableInfo:
        table = {
            group: [
                bodies.ProducerInfo(
                    client_id=channel.client_id,
                    remote_ip=str(channel.connection.remote),
                    language=channel.language.name,
                    version=channel.version,
                    last_update_timestamp=wall_time(self.server.engine.clock, channel.last_update_ms) or 0,
                )
                for channel in channels
            ]
            for group, channels in self.server.clients.producer_groups().items()
        }
        return bodies.ProducerTableInfo(data=table)

    # --- subscriptions -------------------------------------------------------------------------

    @answers(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def _topics(self, query: headers.GroupRequestHeader) -> TopicList:
        return TopicList(topic_list=sorted(self.server.engine.offsets.topics_of(query.group)))

    @answers(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def _subscription(
        self, query: headers.QuerySubscriptionByConsumerRequestHeader
    ) -> bodies.QuerySubscriptionResponseBody:
        found = None if query.topic is None else self.server.clients.subscription(query.group, query.topic)
        return bodies.QuerySubscriptionResponseBody(group=query.group, topic=query.topic or "", subscription_data=found)


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
            client_addr=str(channel.connection.remote),
            language=channel.language.name,
            version=channel.version,
        )
        for channel in channels
    ]
