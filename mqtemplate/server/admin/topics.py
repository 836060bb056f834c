"""What administrators ask of topics: make, change, delete, list, and how full they are.

Source: RocketMQ ``broker: AdminBrokerProcessor``; section 18 of the specification.
"""

from __future__ import annotations

from typing import ClassVar

import structlog

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.bodies.route import (
    CreateTopicListRequestBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
)
from mqtemplate.remoting.protocol.headers.admin import (
    CreateTopicRequestHeader,
    GetAllTopicConfigRequestHeader,
    GetAllTopicConfigResponseHeader,
    TopicNameRequestHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.admin.consume_stats import QueueFigures
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.topic_configs import TopicConfigs, apply_attributes
from mqtemplate.store import ConsumerOffsets
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SYSTEM_TOPICS

_log = structlog.stdlib.get_logger("mqtemplate.admin")


class TopicAdmin:
    """Answers about topics. A change is in the folder before it is answered.

    Attributes:
        slow: Codes whose answers wait for the disk.
    """

    slow: ClassVar[frozenset[int]] = frozenset(
        {
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
            RequestCode.DELETE_TOPIC_IN_BROKER,
            RequestCode.GET_TOPIC_STATS_INFO,
        }
    )

    def __init__(
        self, topics: TopicConfigs, figures: QueueFigures, offsets: ConsumerOffsets, clients: ClientRegistry
    ) -> None:
        self._topics = topics
        self._figures = figures
        self._offsets = offsets
        self._clients = clients

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._update,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self._update_list,
            RequestCode.DELETE_TOPIC_IN_BROKER: self._delete,
            RequestCode.GET_TOPIC_CONFIG: self._config,
            RequestCode.GET_ALL_TOPIC_CONFIG: self._all,
            RequestCode.GET_TOPIC_STATS_INFO: self._stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._consumed_by,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
        }

    # --- changes -------------------------------------------------------------------------------

    def _update(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(CreateTopicRequestHeader)
        found = self._topics.find(asked.topic)
        self._topics.put(
            TopicConfig(
                topic_name=asked.topic,
                read_queue_nums=asked.read_queue_nums,
                write_queue_nums=asked.write_queue_nums,
                perm=asked.perm,
                topic_filter_type=asked.topic_filter_type,
                topic_sys_flag=asked.topic_sys_flag or 0,
                order=asked.order,
                attributes=apply_attributes(found.attributes if found else {}, asked.attributes),
            )
        )
        _log.info("admin.topic_updated", topic=asked.topic, by=str(connection.remote))
        return request.response()

    def _update_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        configs = CreateTopicListRequestBody.decode(request.body).topic_config_list
        for config in configs:
            self._topics.put(config)
        _log.info("admin.topics_updated", topics=[config.topic_name for config in configs], by=str(connection.remote))
        return request.response()

    def _delete(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Deleting what is not there is as good: tools ask each broker of a cluster."""
        topic = request.header(TopicNameRequestHeader).topic
        if not topic.strip():
            return request.response(ResponseCode.INVALID_PARAMETER, remark="the topic to delete is empty; name one")
        deleted = self._topics.delete(topic)
        self._offsets.forget(topic=topic)
        _log.info("admin.topic_deleted", topic=topic, found=deleted, by=str(connection.remote))
        return request.response()

    # --- questions -----------------------------------------------------------------------------

    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        config = self._topics.find(topic)
        return _unknown(request, topic) if config is None else request.response(body=config.encode())

    def _all(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """A page of them where a page is asked for; those who do not know pages get all."""
        asked = request.header(GetAllTopicConfigRequestHeader)
        table = self._topics.all()
        end = None if asked.max_topic_num is None else asked.topic_seq + asked.max_topic_num
        page = dict(list(table.items())[asked.topic_seq : end])
        wrapper = TopicConfigSerializeWrapper(topic_config_table=page, data_version=self._topics.version)
        return request.response(
            header=GetAllTopicConfigResponseHeader(total_topic_num=len(table)), body=wrapper.encode()
        )

    def _stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        config = self._topics.find(topic)
        if config is None:
            return _unknown(request, topic)
        return request.response(body=self._figures.topic_stats(config).encode())

    def _consumed_by(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = request.header(TopicNameRequestHeader).topic
        groups = self._offsets.groups_of(topic) | set(self._clients.groups_of_topic(topic))
        return request.response(body=GroupList(group_list=sorted(groups)).encode())

    def _system_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=TopicList(topic_list=sorted(SYSTEM_TOPICS)).encode())


def _unknown(request: RemotingCommand, topic: str) -> RemotingCommand:
    belongs = topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    hint = "it is made when its group needs it" if belongs else "make it with mqadmin updateTopic, or send to it"
    return request.response(ResponseCode.TOPIC_NOT_EXIST, remark=f"there is no topic {topic!r}; {hint}")
