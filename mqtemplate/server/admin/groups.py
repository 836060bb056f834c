"""Requests of administrators about consumer groups: create, change, delete, list, connected clients, subscriptions.

Source: RocketMQ ``broker: AdminBrokerProcessor``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import Connection as ConnectionBody
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerConnection,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    QuerySubscriptionResponseBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    SubscriptionGroupWrapper,
)
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupResponseHeader,
    GroupRequestHeader,
    ProducerGroupRequestHeader,
    QuerySubscriptionByConsumerRequestHeader,
)
from mqtemplate.server.admin.paging import page
from mqtemplate.server.clients import ClientChannel, ClientRegistry
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError
from mqtemplate.store.consumer_offsets import ConsumerOffsets

_log = structlog.stdlib.get_logger("mqtemplate.admin")

_NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
"""A group name is part of the names of its retry and dead letter topics. Source: ``TopicValidator``."""


@dataclass(frozen=True, slots=True)
class GroupAdmin:
    """Processors of requests about groups. A change is on disk before the response is sent."""

    groups: SubscriptionGroupTable
    offsets: ConsumerOffsets
    clients: ClientRegistry

    # --- settings ------------------------------------------------------------------------------

    @handles(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, slow=True
    )
    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        if request.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
            configs = [SubscriptionGroupConfig.decode(request.body)]
        else:
            configs = SubscriptionGroupList.decode(request.body).group_config_list
        for config in configs:
            _check(config)
        self.groups.put(configs)
        _log.info("admin.groups_updated", groups=[each.group_name for each in configs], by=str(connection.remote))
        return request.response()

    @handles(RequestCode.DELETE_SUBSCRIPTIONGROUP, slow=True)
    def _delete(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(DeleteSubscriptionGroupRequestHeader)
        deleted = self.groups.delete(header.group_name)
        if header.clean_offset:
            self.offsets.forget(group=header.group_name)
        _log.info("admin.group_deleted", group=header.group_name, found=deleted, by=str(connection.remote))
        return request.response()

    @handles(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(GroupRequestHeader).group
        config = self.groups.find(group)
        if config is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {group!r} does not exist; its first consumer creates it, or mqadmin updateSubGroup",
            )
        return request.response(body=config.encode())

    @handles(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def _list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetAllSubscriptionGroupRequestHeader)
        table = self.groups.all()
        wrapper = SubscriptionGroupWrapper(
            subscription_group_table=page(table, header.group_seq, header.max_group_num),
            data_version=self.groups.version,
        )
        return request.response(
            header=GetAllSubscriptionGroupResponseHeader(total_group_num=len(table)), body=wrapper.encode()
        )

    # --- connected clients ---------------------------------------------------------------------

    @handles(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def _consumers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(ConsumerGroupRequestHeader).consumer_group
        info = self.clients.consumer_group(group)
        if info is None:
            raise RefusedError(ResponseCode.CONSUMER_NOT_ONLINE, f"group {group!r} has no connected consumer")
        body = ConsumerConnection(
            connection_set=_connections(info.channels.values()),
            subscription_table=dict(info.subscriptions),
            consume_type=info.consume_type,
            message_model=info.message_model,
            consume_from_where=info.consume_from_where,
        )
        return request.response(body=body.encode())

    @handles(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def _producers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(ProducerGroupRequestHeader).producer_group
        channels = self.clients.producers(group)
        if not channels:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {group!r} has no connected producer")
        return request.response(body=ProducerConnection(connection_set=_connections(channels)).encode())

    @handles(RequestCode.GET_ALL_PRODUCER_INFO)
    def _all_producers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        table = {
            group: [
                ProducerInfo(
                    client_id=channel.client_id,
                    remote_ip=str(channel.connection.remote),
                    language=channel.language.name,
                    version=channel.version,
                    last_update_timestamp=channel.last_update_ms,
                )
                for channel in channels
            ]
            for group, channels in self.clients.producer_groups().items()
        }
        return request.response(body=ProducerTableInfo(data=table).encode())

    # --- subscriptions -------------------------------------------------------------------------

    @handles(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def _topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(GroupRequestHeader).group
        return request.response(body=TopicList(topic_list=sorted(self.offsets.topics_of(group))).encode())

    @handles(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def _subscription(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(QuerySubscriptionByConsumerRequestHeader)
        found = None if header.topic is None else self.clients.subscription(header.group, header.topic)
        body = QuerySubscriptionResponseBody(group=header.group, topic=header.topic or "", subscription_data=found)
        return request.response(body=body.encode())


def _check(config: SubscriptionGroupConfig) -> None:
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
