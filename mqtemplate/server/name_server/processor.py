"""The name server: topic routes, the key-value table and write permissions. It runs in the process of its broker.

Source: RocketMQ ``namesrv: ClientRequestProcessor``, ``DefaultRequestProcessor``, ``RouteInfoManager``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, KVTable, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import admin as headers
from mqtemplate.remoting.server import Processor, RemotingServer
from mqtemplate.server.name_server.kv_config import ORDER_TOPIC_CONFIG, KVConfig
from mqtemplate.server.name_server.registered_brokers import MASTER_ID, RegisteredBrokers, queue_data
from mqtemplate.server.requests.registration import answers, register
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.topics import TopicConfigs

_log = get_logger("mqtemplate.name_server")


@dataclass(slots=True)
class NameServer:
    """Processors of the requests to a name server.

    - A route is built from the broker's topic table for each request, so a new topic is found at once.
    - The broker of this process is always a master, and its address is always the same text: clients compare routes as
      text. Other brokers may register; see `RegisteredBrokers`.

    Args:
        broker_address: Returns the address that clients connect to. The port may be chosen when the server starts.

    Attributes:
        entries: The key-value table.
        others: The registered brokers.
    """

    topics: TopicConfigs
    entries: KVConfig
    others: RegisteredBrokers
    broker_address: Callable[[], str]
    is_writable: bool = True

    def register(self, server: RemotingServer) -> dict[int, Processor]:
        """Serve the name server's requests that arrive at *server*. Return the processors by request code."""
        server.on_close(self.others.forget)
        return register(server, self, self.others)

    # --- routes --------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """Return the route of *topic*, or None if no broker has it."""
        others = self.others.with_topic(topic)
        queues = [queue_data(other.name, other.topics[topic], is_writable=other.is_writable) for other in others]
        brokers = [other.data() for other in others]
        config = self.topics.find(topic)
        if config is not None:
            queues.insert(0, queue_data(self.topics.broker_name, config, is_writable=self.is_writable))
            brokers.insert(0, self._own_data())
        if not queues:
            return None
        order = self.entries.get(ORDER_TOPIC_CONFIG, topic)
        return TopicRouteData(queue_datas=queues, broker_datas=brokers, order_topic_conf=order)

    def _own_data(self) -> BrokerData:
        return BrokerData(
            cluster=self.topics.cluster_name,
            broker_name=self.topics.broker_name,
            broker_addrs={MASTER_ID: self.broker_address()},
        )

    @answers(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    def _route(self, query: headers.GetRouteInfoRequestHeader, request: RemotingCommand) -> bytes:
        route = self.route(query.topic)
        if route is None:
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"no route: topic {query.topic!r} does not exist; its first message creates it if the broker permits "
                "that, or mqadmin updateTopic",
            )
        # Older clients only read fastjson's form, which has numbers as keys.
        is_standard = request.version >= Version.V4_9_4 or bool(query.accept_standard_json_only)
        return route.encode(standard=is_standard)

    @answers(RequestCode.GET_BROKER_CLUSTER_INFO)
    def _cluster_info(self) -> ClusterInfo:
        brokers = [self._own_data(), *(other.data() for other in self.others.all())]
        clusters: dict[str, list[str]] = {}
        for broker in brokers:
            clusters.setdefault(broker.cluster or "", []).append(broker.broker_name)
        by_name = {broker.broker_name: broker for broker in brokers}
        return ClusterInfo(broker_addr_table=by_name, cluster_addr_table=clusters)

    # --- topics --------------------------------------------------------------------------------

    @answers(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    def _topic_list(self) -> TopicList:
        return TopicList(topic_list=self._names())

    @answers(RequestCode.GET_TOPICS_BY_CLUSTER)
    def _topics_by_cluster(self, query: headers.GetTopicsByClusterRequestHeader) -> TopicList:
        return TopicList(topic_list=self._names(query.cluster))

    def _names(self, cluster: str | None = None) -> list[str]:
        """Return the sorted names of all topics, or of the topics of one cluster."""
        names = set(self.topics.names()) if cluster in (None, self.topics.cluster_name) else set()
        for other in self.others.all():
            if cluster in (None, other.cluster):
                names |= other.topics.keys()
        return sorted(names)

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    def _system_topics(self) -> TopicList:
        """Return the names of clusters and brokers, which are topics too, and the address of one broker."""
        others = self.others.all()
        clusters = {self.topics.cluster_name, *(other.cluster for other in others)}
        names = [*sorted(clusters), self.topics.broker_name, *(other.name for other in others)]
        return TopicList(topic_list=names, broker_addr=self.broker_address())

    @answers(RequestCode.DELETE_TOPIC_IN_NAMESRV)
    def _delete_topic(self, header: headers.DeleteTopicFromNamesrvRequestHeader) -> None:
        """Remove a topic from the registered brokers. The route of the own broker follows from its topic table."""
        self.others.forget_topic(header.topic)

    # --- key-value table -----------------------------------------------------------------------

    @answers(RequestCode.PUT_KV_CONFIG, slow=True)
    def _put_entry(self, header: headers.PutKVConfigRequestHeader) -> None:
        self.entries.put(header.namespace, header.key, header.value)

    @answers(RequestCode.GET_KV_CONFIG)
    def _get_entry(self, query: headers.KVConfigKeyRequestHeader) -> headers.GetKVConfigResponseHeader:
        value = self.entries.get(query.namespace, query.key)
        if value is None:
            raise RefusedError(ResponseCode.QUERY_NOT_FOUND, f"no entry {query.key!r} in {query.namespace!r}")
        return headers.GetKVConfigResponseHeader(value=value)

    @answers(RequestCode.DELETE_KV_CONFIG, slow=True)
    def _delete_entry(self, header: headers.KVConfigKeyRequestHeader) -> None:
        self.entries.delete(header.namespace, header.key)

    @answers(RequestCode.GET_KVLIST_BY_NAMESPACE)
    def _entries_of_namespace(self, query: headers.KVNamespaceRequestHeader) -> KVTable:
        entries = self.entries.namespace(query.namespace)
        if entries is None:
            raise RefusedError(ResponseCode.QUERY_NOT_FOUND, f"namespace {query.namespace!r} has no entries")
        return KVTable(table=entries)

    # --- write permission ----------------------------------------------------------------------

    @answers(RequestCode.WIPE_WRITE_PERM_OF_BROKER)
    def _wipe_write_perm(
        self, header: headers.BrokerNameRequestHeader, connection: Connection
    ) -> headers.WipeWritePermOfBrokerResponseHeader:
        count = self._set_writable(header.broker_name, connection, is_writable=False)
        return headers.WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count)

    @answers(RequestCode.ADD_WRITE_PERM_OF_BROKER)
    def _add_write_perm(
        self, header: headers.BrokerNameRequestHeader, connection: Connection
    ) -> headers.AddWritePermOfBrokerResponseHeader:
        count = self._set_writable(header.broker_name, connection, is_writable=True)
        return headers.AddWritePermOfBrokerResponseHeader(add_topic_count=count)

    def _set_writable(self, name: str, connection: Connection, *, is_writable: bool) -> int:
        """Return the number of topics of the broker. As in RocketMQ, a restart grants the permission again."""
        _log.info("name_server.write_perm_changed", broker=name, writable=is_writable, by=str(connection.remote))
        if name != self.topics.broker_name:
            return self.others.set_writable(name, is_writable=is_writable)
        self.is_writable = is_writable
        return len(self.topics.names())

    @answers(RequestCode.GET_NAMESRV_CONFIG)
    def _config(self) -> bytes:
        """Return the settings, which are constants here."""
        lines = ["orderMessageEnable=true", "returnOrderTopicConfigToBroker=false", "enableTopicList=true"]
        return "".join(f"{line}\n" for line in lines).encode()
