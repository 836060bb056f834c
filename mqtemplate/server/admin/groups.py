"""What administrators ask of groups: make, change, forget, list, who is connected, and what is subscribed.

Source: RocketMQ ``broker: AdminBrokerProcessor``; section 18 of the specification.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

import structlog

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
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
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupResponseHeader,
    GroupRequestHeader,
    ProducerGroupRequestHeader,
    QuerySubscriptionByConsumerRequestHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientChannel, ClientRegistry
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.response import RefusedError
from mqtemplate.store import ConsumerOffsets

_log = structlog.stdlib.get_logger("mqtemplate.admin")

_NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
"""It is part of the names of the group's retry and dead letter topics. Source: ``TopicValidator``."""


class GroupAdmin:
    """Answers about groups. A change is in the folder before it is answered.

    Attributes:
        slow: Codes whose answers wait for the disk.
    """

    slow: ClassVar[frozenset[int]] = frozenset(
        {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            RequestCode.DELETE_SUBSCRIPTIONGROUP,
        }
    )

    def __init__(self, groups: SubscriptionGroupTable, offsets: ConsumerOffsets, clients: ClientRegistry) -> None:
        self._groups = groups
        self._offsets = offsets
        self._clients = clients

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._update_list,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._config,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self._all_producers,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
        }

    # --- settings ------------------------------------------------------------------------------

    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return self._put(connection, request, [SubscriptionGroupConfig.decode(request.body)])

    def _update_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return self._put(connection, request, SubscriptionGroupList.decode(request.body).group_config_list)

    def _put(
        self, connection: Connection, request: RemotingCommand, configs: list[SubscriptionGroupConfig]
    ) -> RemotingCommand:
        for config in configs:
            _check(config)
        self._groups.put(configs)
        _log.info("admin.groups_updated", groups=[each.group_name for each in configs], by=str(connection.remote))
        return request.response()

    def _delete(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(DeleteSubscriptionGroupRequestHeader)
        deleted = self._groups.delete(asked.group_name)
        if asked.clean_offset:
            self._offsets.forget(group=asked.group_name)
        _log.info("admin.group_deleted", group=asked.group_name, found=deleted, by=str(connection.remote))
        return request.response()

    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(GroupRequestHeader).group
        config = self._groups.find(group)
        if config is None:
            remark = f"there is no group {group!r}; its first consumer makes it, or mqadmin updateSubGroup"
            return request.response(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark=remark)
        return request.response(body=config.encode())

    def _all(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """A page of them where a page is asked for; those who do not know pages get all."""
        asked = request.header(GetAllSubscriptionGroupRequestHeader)
        table = dict(sorted(self._groups.all().items()))
        end = None if asked.max_group_num is None else asked.group_seq + asked.max_group_num
        page = dict(list(table.items())[asked.group_seq : end])
        wrapper = SubscriptionGroupWrapper(subscription_group_table=page, data_version=self._groups.version)
        return request.response(
            header=GetAllSubscriptionGroupResponseHeader(total_group_num=len(table)), body=wrapper.encode()
        )

    # --- who is connected ----------------------------------------------------------------------

    def _consumers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(ConsumerGroupRequestHeader).consumer_group
        info = self._clients.consumer_group(group)
        if info is None:
            remark = f"nobody consumes for group {group!r} now"
            return request.response(ResponseCode.CONSUMER_NOT_ONLINE, remark=remark)
        body = ConsumerConnection(
            connection_set=_connections(info.channels.values()),
            subscription_table=dict(info.subscriptions),
            consume_type=info.consume_type,
            message_model=info.message_model,
            consume_from_where=info.consume_from_where,
        )
        return request.response(body=body.encode())

    def _producers(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(ProducerGroupRequestHeader).producer_group
        channels = self._clients.producers(group)
        if not channels:
            return request.response(ResponseCode.SYSTEM_ERROR, remark=f"nobody sends for group {group!r} now")
        return request.response(body=ProducerConnection(connection_set=_connections(channels)).encode())

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
            for group, channels in self._clients.producer_groups().items()
        }
        return request.response(body=ProducerTableInfo(data=table).encode())

    # --- what is subscribed --------------------------------------------------------------------

    def _topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(GroupRequestHeader).group
        return request.response(body=TopicList(topic_list=sorted(self._offsets.topics_of(group))).encode())

    def _subscription(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(QuerySubscriptionByConsumerRequestHeader)
        found = None if asked.topic is None else self._clients.subscription(asked.group, asked.topic)
        body = QuerySubscriptionResponseBody(group=asked.group, topic=asked.topic or "", subscription_data=found)
        return request.response(body=body.encode())


def _check(config: SubscriptionGroupConfig) -> None:
    """Refuse settings that no group can have."""
    name = config.group_name
    if not _NAME.fullmatch(name):
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"group {name[:40]!r} is no name for a group; use up to 120 letters, digits, '_', '-', '%', '|'",
        )
    for name, value in (("retryQueueNums", config.retry_queue_nums), ("retryMaxTimes", config.retry_max_times)):
        if value < 0:
            remark = f"{name} of group {config.group_name!r} must be 0 or more, got {value}"
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
