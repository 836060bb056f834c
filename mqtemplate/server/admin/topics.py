"""Requests of administrators about topics: create, change, delete, list, and statistics.

Source: RocketMQ ``broker: AdminBrokerProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.bodies.route import (
    CreateTopicListRequestBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import (
    CreateTopicRequestHeader,
    GetAllTopicConfigRequestHeader,
    GetAllTopicConfigResponseHeader,
    TopicNameRequestHeader,
)
from mqtemplate.server.admin.paging import page
from mqtemplate.server.admin.queue_statistics import QueueStatistics
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError
from mqtemplate.server.topic_configs import TopicConfigs, apply_attributes
from mqtemplate.store.consumer_offsets import ConsumerOffsets
from mqtemplate.topics import SYSTEM_TOPICS

_log = structlog.stdlib.get_logger("mqtemplate.admin")


@dataclass(frozen=True, slots=True)
class TopicAdmin:
    """Processors of requests about topics. A change is on disk before the response is sent."""

    topics: TopicConfigs
    statistics: QueueStatistics
    offsets: ConsumerOffsets
    clients: ClientRegistry

    # --- changes -------------------------------------------------------------------------------

    @handles(RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, slow=True)
    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        if request.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            configs = [self._requested_config(request.header(CreateTopicRequestHeader))]
        else:
            configs = CreateTopicListRequestBody.decode(request.body).topic_config_list
        for config in configs:
            self.topics.put(config)
        _log.info("admin.topics_updated", topics=[config.topic_name for config in configs], by=str(connection.remote))
        return request.response()

    def _requested_config(self, header: CreateTopicRequestHeader) -> TopicConfig:
        found = self.topics.find(header.topic)
        return TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=apply_attributes(found.attributes if found else {}, header.attributes),
        )

    @handles(RequestCode.DELETE_TOPIC_IN_BROKER, slow=True)
    def _delete(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Delete a topic. Deleting a missing topic succeeds: tools send the request to each broker of a cluster."""
        topic = request.header(TopicNameRequestHeader).topic
        if not topic.strip():
            raise RefusedError(ResponseCode.INVALID_PARAMETER, "the topic to delete is empty; give its name")
        deleted = self.topics.delete(topic)
        self.offsets.forget(topic=topic)
        _log.info("admin.topic_deleted", topic=topic, found=deleted, by=str(connection.remote))
        return request.response()

    # --- queries -------------------------------------------------------------------------------

    @handles(RequestCode.GET_TOPIC_CONFIG)
    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        return request.response(body=self.topics.get(topic).encode())

    @handles(RequestCode.GET_ALL_TOPIC_CONFIG)
    def _list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetAllTopicConfigRequestHeader)
        table = self.topics.all()
        wrapper = TopicConfigSerializeWrapper(
            topic_config_table=page(table, header.topic_seq, header.max_topic_num), data_version=self.topics.version
        )
        return request.response(
            header=GetAllTopicConfigResponseHeader(total_topic_num=len(table)), body=wrapper.encode()
        )

    @handles(RequestCode.GET_TOPIC_STATS_INFO, slow=True)
    def _stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        return request.response(body=self.statistics.topic_stats(self.topics.get(topic)).encode())

    @handles(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def _groups_of_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        groups = self.offsets.groups_of(topic) | set(self.clients.groups_of_topic(topic))
        return request.response(body=GroupList(group_list=sorted(groups)).encode())

    @handles(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def _system_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=TopicList(topic_list=sorted(SYSTEM_TOPICS)).encode())
