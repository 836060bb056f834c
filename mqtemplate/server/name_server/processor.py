"""The name server: where each topic is. It is one process with its broker, and asks that broker's own table.

Source: RocketMQ ``namesrv: ClientRequestProcessor``, ``DefaultRequestProcessor``, ``RouteInfoManager``; section 6 of
the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import structlog

from mqtemplate.clock import Clock
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerData,
    ClusterInfo,
    KVTable,
    QueueData,
    TopicList,
    TopicRouteData,
)
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.protocol.headers.admin import (
    AddWritePermOfBrokerResponseHeader,
    BrokerNameRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetKVConfigResponseHeader,
    GetRouteInfoRequestHeader,
    GetTopicsByClusterRequestHeader,
    KVConfigKeyRequestHeader,
    KVNamespaceRequestHeader,
    PutKVConfigRequestHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from mqtemplate.remoting.server import Processor
from mqtemplate.server.name_server.kv_config import ORDER_TOPIC_CONFIG, KVConfig
from mqtemplate.server.name_server.registered_brokers import RegisteredBrokers
from mqtemplate.server.topic_configs import TopicConfigs

_log = structlog.stdlib.get_logger("mqtemplate.name_server")

_MASTER = 0


class NameServer:
    """Answers what clients and tools ask a name server.

    - A route is made of the broker's table whenever it is asked for, so a topic is found as soon as it is there.
    - The broker of this process is always the master, and always at the same text of an address: clients compare
      routes as text, and connect to what stands there. Others may register; see `RegisteredBrokers`.

    Args:
        broker_address: Where clients reach the broker, ``host:port``; asked for each time, since a port may be chosen
            when the server starts.

    Attributes:
        others: Brokers that registered.
        slow: Codes whose answers wait for the disk.
    """

    slow: ClassVar[frozenset[int]] = frozenset({RequestCode.PUT_KV_CONFIG, RequestCode.DELETE_KV_CONFIG})

    def __init__(
        self, topics: TopicConfigs, entries: KVConfig, broker_address: Callable[[], str], clock: Clock
    ) -> None:
        self.others = RegisteredBrokers(topics.broker_name, clock)
        self._topics = topics
        self._entries = entries
        self._broker_address = broker_address
        self._is_writable = True

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            **self.others.processors(),
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster_info,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topic_list,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_by_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.PUT_KV_CONFIG: self._put_entry,
            RequestCode.GET_KV_CONFIG: self._get_entry,
            RequestCode.DELETE_KV_CONFIG: self._delete_entry,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._entries_of,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_perm,
            RequestCode.GET_NAMESRV_CONFIG: self._config,
        }

    # --- where topics are ----------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """Where *topic* is; None if nobody has it."""
        others = self.others.with_topic(topic)
        queues = [queues for broker in others if (queues := broker.queues(topic)) is not None]
        brokers = [broker.data() for broker in others]
        own = self._own_queues(topic)
        if own is not None:
            queues.insert(0, own)
            brokers.insert(0, self._broker())
        if not queues:
            return None
        order = self._entries.get(ORDER_TOPIC_CONFIG, topic)
        return TopicRouteData(queue_datas=queues, broker_datas=brokers, order_topic_conf=order)

    def _own_queues(self, topic: str) -> QueueData | None:
        """The queues that the broker of this process has of *topic*."""
        config = self._topics.find(topic)
        if config is None:
            return None
        return QueueData(
            broker_name=self._topics.broker_name,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm if self._is_writable else config.perm & ~Perm.WRITE,
            topic_sys_flag=config.topic_sys_flag,
        )

    def _broker(self) -> BrokerData:
        addresses = {_MASTER: self._broker_address()}
        return BrokerData(
            cluster=self._topics.cluster_name, broker_name=self._topics.broker_name, broker_addrs=addresses
        )

    def _route(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(GetRouteInfoRequestHeader)
        route = self.route(asked.topic)
        if route is None:
            return request.response(
                ResponseCode.TOPIC_NOT_EXIST,
                remark=f"no route: there is no topic {asked.topic!r}; its first message makes it where topics may be "
                "made so, or mqadmin updateTopic does",
            )
        reads_standard = request.version >= Version.V4_9_4 or bool(asked.accept_standard_json_only)
        return request.response(body=route.encode(standard=reads_standard))

    def _cluster_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        brokers = [self._broker(), *(broker.data() for broker in self.others.all())]
        clusters: dict[str, list[str]] = {}
        for broker in brokers:
            clusters.setdefault(broker.cluster or "", []).append(broker.broker_name)
        info = ClusterInfo(
            broker_addr_table={broker.broker_name: broker for broker in brokers}, cluster_addr_table=clusters
        )
        return request.response(body=info.encode())

    # --- which topics there are ----------------------------------------------------------------

    def _topic_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=TopicList(topic_list=self._names()).encode())

    def _topics_by_cluster(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        cluster = request.header(GetTopicsByClusterRequestHeader).cluster
        return request.response(body=TopicList(topic_list=self._names(cluster)).encode())

    def _names(self, cluster: str | None = None) -> list[str]:
        """All topics, or those of one cluster, sorted."""
        names = set(self._topics.names()) if cluster in (None, self._topics.cluster_name) else set()
        for broker in self.others.all():
            if cluster in (None, broker.cluster):
                names |= broker.topics.keys()
        return sorted(names)

    def _system_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """The names of clusters and brokers, which are topics too, and where one of the brokers is."""
        others = self.others.all()
        clusters = {self._topics.cluster_name, *(broker.cluster for broker in others)}
        names = [*sorted(clusters), self._topics.broker_name, *(broker.name for broker in others)]
        return request.response(body=TopicList(topic_list=names, broker_addr=self._broker_address()).encode())

    def _delete_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Of the broker here nothing is left to do: what it forgot is not in its table, and what it has, it has."""
        self.others.forget_topic(request.header(DeleteTopicFromNamesrvRequestHeader).topic)
        return request.response()

    # --- entries -------------------------------------------------------------------------------

    def _put_entry(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        entry = request.header(PutKVConfigRequestHeader)
        self._entries.put(entry.namespace, entry.key, entry.value)
        return request.response()

    def _get_entry(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(KVConfigKeyRequestHeader)
        value = self._entries.get(asked.namespace, asked.key)
        if value is None:
            remark = f"no entry {asked.key!r} in namespace {asked.namespace!r}"
            return request.response(ResponseCode.QUERY_NOT_FOUND, remark=remark)
        return request.response(header=GetKVConfigResponseHeader(value=value))

    def _delete_entry(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(KVConfigKeyRequestHeader)
        self._entries.delete(asked.namespace, asked.key)
        return request.response()

    def _entries_of(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        namespace = request.header(KVNamespaceRequestHeader).namespace
        entries = self._entries.namespace(namespace)
        if entries is None:
            return request.response(ResponseCode.QUERY_NOT_FOUND, remark=f"no entries in namespace {namespace!r}")
        return request.response(body=KVTable(table=entries).encode())

    # --- the right to write --------------------------------------------------------------------

    def _wipe_write_perm(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        count = self._set_writable(connection, request, is_writable=False)
        return request.response(header=WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count))

    def _add_write_perm(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        count = self._set_writable(connection, request, is_writable=True)
        return request.response(header=AddWritePermOfBrokerResponseHeader(add_topic_count=count))

    def _set_writable(self, connection: Connection, request: RemotingCommand, *, is_writable: bool) -> int:
        """How many topics it concerned. As with RocketMQ, a restart gives the right back."""
        broker_name = request.header(BrokerNameRequestHeader).broker_name
        _log.info("name_server.write_perm", broker=broker_name, writable=is_writable, by=str(connection.remote))
        if broker_name != self._topics.broker_name:
            return self.others.set_writable(broker_name, is_writable=is_writable)
        self._is_writable = is_writable
        return len(self._topics.names())

    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Its settings as lines: there is nothing to set, and orders of topics are always told."""
        lines = ["orderMessageEnable=true", "returnOrderTopicConfigToBroker=false", "enableTopicList=true"]
        return request.response(body="".join(f"{line}\n" for line in lines).encode())
