"""The name server: topic routes, the key-value table and write permissions. It runs in the process of its broker. Other
brokers, such as RocketMQ's own, may register with it.

Source: RocketMQ ``namesrv: ClientRequestProcessor``, ``DefaultRequestProcessor``, ``RouteInfoManager``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from mqtemplate.clock import Clock
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import route as bodies
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, KVTable, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import admin as headers
from mqtemplate.remoting.server import Processor, RemotingServer
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers, register
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.tables import format_errors, read_table, write_table

_log = get_logger("mqtemplate.name_server")

MASTER_ID = 0
_EXPIRE_MS = 120_000
_MAX_BROKERS = 1_000
_MAX_REGISTRATION_BYTES = 16 << 20
"""Largest registration: the settings of all topics of a broker."""


@dataclass(frozen=True, slots=True)
class _Member:
    """The master or one replica of a broker: its address, and when it registered last."""

    address: str
    connection_id: int
    registered_ms: int
    expire_ms: int
    version: bodies.DataVersionBody


@dataclass(frozen=True, slots=True)
class RegisteredBroker:
    """A broker by its name: a master and its replicas.

    Attributes:
        members: By broker ID.
        topics: The topics that the master registered.
        is_writable: False if an administrator revoked the write permission.
    """

    cluster: str
    name: str
    members: dict[int, _Member] = field(default_factory=dict)
    topics: dict[str, bodies.TopicConfig] = field(default_factory=dict)
    is_writable: bool = True

    def data(self) -> bodies.BrokerData:
        """Return the addresses of the broker."""
        addresses = {broker_id: member.address for broker_id, member in sorted(self.members.items())}
        return bodies.BrokerData(cluster=self.cluster, broker_name=self.name, broker_addrs=addresses)


def queue_data(broker_name: str, config: bodies.TopicConfig, *, is_writable: bool) -> bodies.QueueData:
    """Return the queues of one topic on one broker."""
    return bodies.QueueData(
        broker_name=broker_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm if is_writable else config.perm & ~Perm.WRITE,
        topic_sys_flag=config.topic_sys_flag,
    )


class RegisteredBrokers:
    """Registrations of brokers, in memory only: each broker repeats its registration every 30 seconds.

    A registration ends with a request of the broker, or with its connection. It expires after two minutes, or after the
    timeout that the broker chose.

    Args:
        own_name: Name of the broker in this process. No other broker may register with it.
        is_open: False: all registrations are refused.
    """

    def __init__(self, own_name: str, clock: Clock, *, is_open: bool) -> None:
        self._own_name = own_name
        self._is_open = is_open
        self._clock = clock
        self._lock = threading.Lock()
        self._brokers: dict[str, RegisteredBroker] = {}

    # --- queries -------------------------------------------------------------------------------

    def all(self) -> list[RegisteredBroker]:
        """Return the brokers whose registration is valid, by name."""
        now_ms = self._clock.steady_ms()
        alive = []
        known = list(self._brokers.values())  # a copy: other threads may change the table
        for broker in sorted(known, key=lambda broker: broker.name):
            members = {
                broker_id: member
                for broker_id, member in broker.members.items()
                if member.registered_ms + member.expire_ms > now_ms
            }
            if members:
                alive.append(replace(broker, members=members))
        return alive

    def with_topic(self, topic: str) -> list[RegisteredBroker]:
        """Return the brokers that have queues of *topic*."""
        return [broker for broker in self.all() if topic in broker.topics]

    # --- changes -------------------------------------------------------------------------------

    def set_writable(self, name: str, *, is_writable: bool) -> int:
        """Grant or revoke the write permission of a broker. Return the number of its topics."""
        with self._lock:
            broker = self._brokers.get(name)
            if broker is None:
                return 0
            self._brokers[name] = replace(broker, is_writable=is_writable)
            return len(broker.topics)

    def forget_topic(self, topic: str) -> None:
        """Remove *topic* from all brokers. A broker that still has the topic registers it again."""
        with self._lock:
            for name, broker in self._brokers.items():
                topics = {other: config for other, config in broker.topics.items() if other != topic}
                self._brokers[name] = replace(broker, topics=topics)

    def forget(self, connection: Connection) -> None:
        """Remove the registrations that arrived on a closed connection."""
        with self._lock:
            for broker in list(self._brokers.values()):
                closed = [id_ for id_, member in broker.members.items() if member.connection_id == connection.id]
                self._remove(broker, closed)

    def _remove(self, broker: RegisteredBroker, broker_ids: Iterable[int]) -> None:
        removed = set(broker_ids)
        if not removed:
            return
        members = {broker_id: member for broker_id, member in broker.members.items() if broker_id not in removed}
        if members:
            self._brokers[broker.name] = replace(broker, members=members)
        else:
            del self._brokers[broker.name]
        _log.info("name_server.broker_removed", broker=broker.name, ids=sorted(removed))

    # --- requests ------------------------------------------------------------------------------

    @answers(RequestCode.REGISTER_BROKER, max_body_bytes=_MAX_REGISTRATION_BYTES)
    def _register(
        self, header: headers.RegisterBrokerRequestHeader, connection: Connection, request: RemotingCommand
    ) -> headers.RegisterBrokerResponseHeader:
        self._check_open()
        self._check(header, request.body)
        wrapper = bodies.RegisterBrokerBody.decode(request.body).topic_config_serialize_wrapper
        expire_ms = header.heartbeat_timeout_millis or _EXPIRE_MS
        member = _Member(header.broker_addr, connection.id, self._clock.steady_ms(), expire_ms, wrapper.data_version)
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            if broker is None:
                if len(self._brokers) >= _MAX_BROKERS:
                    raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{_MAX_BROKERS} brokers are registered already")
                broker = RegisteredBroker(header.cluster_name, header.broker_name)
                _log.debug("name_server.broker_registered", broker=header.broker_name, address=header.broker_addr)
            # After a change a broker registers the changed topics only, so the other topics are kept.
            topics = broker.topics | (wrapper.topic_config_table if header.broker_id == MASTER_ID else {})
            members = broker.members | {header.broker_id: member}
            self._brokers[header.broker_name] = replace(
                broker, cluster=header.cluster_name, members=members, topics=topics
            )
            master = members.get(MASTER_ID)
        is_replica = header.broker_id != MASTER_ID and master is not None
        return headers.RegisterBrokerResponseHeader(master_addr=master.address if master and is_replica else None)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                "brokers may not register with this name server: a registration could redirect any topic. Set "
                "mqtemplate.server.broker-registration-enable to true if it is meant for several brokers",
            )

    def _check(self, header: headers.RegisterBrokerRequestHeader, body: bytes) -> None:
        reason = None
        if header.broker_name == self._own_name:
            reason = f"broker name {header.broker_name!r} belongs to the broker of this name server; choose another"
        elif header.compressed:
            reason = "compressed registrations are not supported; set compressedRegister=false"
        elif header.body_crc32 and header.body_crc32 != zlib.crc32(body) & 0x7FFF_FFFF:  # Java's sign bit is cleared
            reason = "the checksum of the body differs from bodyCrc32"
        if reason is not None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, reason)

    @answers(RequestCode.UNREGISTER_BROKER)
    def _unregister(self, header: headers.BrokerRequestHeader) -> None:
        self._check_open()
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            if broker is not None and header.broker_id in broker.members:
                self._remove(broker, [header.broker_id])

    @answers(RequestCode.QUERY_DATA_VERSION)
    def _query_version(
        self, header: headers.BrokerRequestHeader, version: bodies.DataVersionBody
    ) -> tuple[headers.QueryDataVersionResponseHeader, bodies.DataVersionBody | None]:
        """Tell a broker if it must register its topics again. The request also renews the registration."""
        self._check_open()
        with self._lock:
            broker = self._brokers.get(header.broker_name)
            member = None if broker is None else broker.members.get(header.broker_id)
            if broker is None or member is None or member.address != header.broker_addr:
                return headers.QueryDataVersionResponseHeader(changed=True), None
            members = broker.members | {header.broker_id: replace(member, registered_ms=self._clock.steady_ms())}
            self._brokers[header.broker_name] = replace(broker, members=members)
        return headers.QueryDataVersionResponseHeader(changed=member.version != version), member.version


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
            StoreFormatError: The file is not such a table.
        """
        with format_errors(self._NAME):
            found = read_table(self._store_files, self._NAME).get("configTable", {})
            self._table = {
                str(namespace): {str(key): str(value) for key, value in entries.items()}
                for namespace, entries in found.items()
            }

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, or None if it is missing."""
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

    @answers(
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    )
    def _unit_topics(self) -> TopicList:
        """Return no topic: units are parts of a cluster over several sites, and this one has none."""
        return TopicList()

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
