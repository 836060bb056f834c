"""Requests of administrators about topics: create, change, delete, list, and statistics.

Source: RocketMQ ``broker: AdminBrokerProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import route as bodies
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers import admin as headers
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.paging import page
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.topics import apply_attributes
from mqtemplate.topics import SYSTEM_TOPICS

_log = get_logger("mqtemplate.admin")


@dataclass(frozen=True, slots=True)
class TopicAdmin:
    """Processors of requests about topics. A change is on disk before the response is sent."""

    server: ServerParts

    # --- changes -------------------------------------------------------------------------------

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC, slow=True)
    def _update(self, header: headers.CreateTopicRequestHeader, connection: Connection) -> None:
        found = self.server.topics.find(header.topic)
        config = bodies.TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=apply_attributes(found.attributes if found else {}, header.attributes),
        )
        self._update_all(bodies.CreateTopicListRequestBody(topic_config_list=[config]), connection)

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, slow=True)
    def _update_all(self, body: bodies.CreateTopicListRequestBody, connection: Connection) -> None:
        for config in body.topic_config_list:
            self.server.topics.put(config)
        names = [config.topic_name for config in body.topic_config_list]
        _log.info("admin.topics_updated", topics=names, by=str(connection.remote))

    @answers(RequestCode.DELETE_TOPIC_IN_BROKER, slow=True)
    def _delete(self, header: headers.TopicNameRequestHeader, connection: Connection) -> None:
        """Delete a topic. Deleting a missing topic succeeds: tools send the request to each broker of a cluster."""
        topic = header.topic
        if not topic.strip():
            raise RefusedError(ResponseCode.INVALID_PARAMETER, "the topic to delete is empty; give its name")
        deleted = self.server.topics.delete(topic)
        self.server.engine.offsets.forget(topic=topic)
        _log.info("admin.topic_deleted", topic=topic, found=deleted, by=str(connection.remote))

    # --- queries -------------------------------------------------------------------------------

    @answers(RequestCode.GET_TOPIC_CONFIG)
    def _config(self, query: headers.TopicNameRequestHeader) -> bodies.TopicConfig:
        return self.server.topics.get(query.topic)

    @answers(RequestCode.GET_ALL_TOPIC_CONFIG)
    def _list(
        self, query: headers.GetAllTopicConfigRequestHeader
    ) -> tuple[headers.GetAllTopicConfigResponseHeader, bodies.TopicConfigSerializeWrapper]:
        table = self.server.topics.all()
        wanted = page(table, query.topic_seq, query.max_topic_num)
        body = bodies.TopicConfigSerializeWrapper(topic_config_table=wanted, data_version=self.server.topics.version)
        return headers.GetAllTopicConfigResponseHeader(total_topic_num=len(table)), body

    @answers(RequestCode.GET_TOPIC_STATS_INFO, slow=True)
    def _stats(self, query: headers.TopicNameRequestHeader) -> bodies.TopicStatsTable:
        return self.server.statistics.topic_stats(self.server.topics.get(query.topic))

    @answers(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def _groups_of_topic(self, query: headers.TopicNameRequestHeader) -> GroupList:
        subscribed = self.server.clients.groups_of_topic(query.topic)
        return GroupList(group_list=sorted(self.server.engine.offsets.groups_of(query.topic) | set(subscribed)))

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def _system_topics(self) -> bodies.TopicList:
        return bodies.TopicList(topic_list=sorted(SYSTEM_TOPICS))
