"""The name server: topic routes, the key-value table and write permissions. It runs in the process of its broker.

Source: RocketMQ ``namesrv: ClientRequestProcessor``, ``DefaultRequestProcessor``, ``RouteInfoManager``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, KVTable, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import admin as headers
from mqtemplate.remoting.server import Processor, RemotingServer
from mqtemplate.server.name_server.registered_brokers import MASTER_ID, RegisteredBrokers, queue_data
from mqtemplate.server.requests.registration import answers, register
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import format_errors, read_table, write_table

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""Namespace of the ordered topics: topic -> ``broker:queues``, separated by ``;``."""


class KVConfig:
    """Texts that administration tools store and read. A change is on disk before the call returns."""

    _NAME = "config/kvConfig.json"

    def __init__(self, store_files: StoreFiles) -> None:
        self._store_files = store_files
        self._lock = threading.Lock()
        self._table: dict[str, dict[str, str]] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            StoreFormatError: The file is no such table.
        """
        with format_errors(self._NAME):
            found = read_table(self._store_files, self._NAME).get("configTable", {})
            self._table = {
                str(namespace): {str(key): str(value) for key, value in entries.items()}
                for namespace, entries in found.items()
            }

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, or None if there is none."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """Return all entries of a namespace, or None if it never had one."""
        entries = self._table.get(namespace)
        return None if entries is None else dict(entries)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set an entry.

        Raises:
            StoreError: The file could not be written; it is as before.
        """
        with self._lock:
            self._replace(namespace, self._table.get(namespace, {}) | {key: value})

    def delete(self, namespace: str, key: str) -> None:
        """Remove an entry, if it exists.

        Raises:
            StoreError: The file could not be written; it is as before.
        """
        with self._lock:
            entries = self._table.get(namespace, {})
            if key in entries:
                self._replace(namespace, {name: value for name, value in entries.items() if name != key})

    def _replace(self, namespace: str, entries: dict[str, str]) -> None:
        table = self._table | {namespace: entries}
        write_table(self._store_files, self._NAME, {"configTable": table})
        self._table = table


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
