"""Routes of topics: their queues and the addresses of their brokers, cached and updated from the name servers.

Source: RocketMQ ``client: MQClientInstance``, ``MQClientAPIImpl``.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mqtemplate.brokers.remote.cluster.failures import check_response
from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.clock import Clock
from mqtemplate.engine.topics import UnknownTopics
from mqtemplate.errors import BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, QueueData, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import DeleteTopicFromNamesrvRequestHeader, GetRouteInfoRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, is_application_topic

_log = get_logger("mqtemplate.remote")

MASTER_ID = 0
_REPEAT_AFTER_MS = 1_000  # a missing topic is looked up again after this time
_REMOVE_AFTER_MS = 30_000  # brokers register at their name servers each 30 s


class MissingTopicError(BrokerError):
    """No name server has the topic, and no broker creates it. It may have been created a moment ago."""


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The queues of a topic and the addresses of their brokers. Routes of equal content are equal.

    Attributes:
        write_queues: Queues that accept messages, on brokers that have a master.
        read_queues: Readable queues, in the order by which all members of a group allocate them.
        addresses: Broker name -> broker id -> ``host:port``.
        is_default: The topic is missing; these are the queues that its first message would create.
        write_brokers: Names of the brokers that have writable queues.
        next_turn: Returns 0, 1, 2, …, to choose queues in turn.
    """

    topic: str
    write_queues: tuple[MessageQueue, ...]
    read_queues: tuple[MessageQueue, ...]
    addresses: Mapping[str, Mapping[int, str]]
    is_default: bool = False
    write_brokers: tuple[str, ...] = ()
    next_turn: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__, compare=False, repr=False)

    def masters(self) -> list[str]:
        """Return the addresses of the masters."""
        return [by_id[MASTER_ID] for by_id in self.addresses.values() if MASTER_ID in by_id]


_Invoke = Callable[[str, RemotingCommand, int], RemotingCommand]
"""Sends a request and waits: ``(address, request, timeout_ms)``; see `RemotingClient.invoke`."""


class NameServers:
    """The name servers of a cluster. Requests go to the server that answered last, until it fails.

    The requests raise `BrokerError` if no name server answers, or it refuses.

    Args:
        reached_at: Address that a broker registered -> address at which this machine reaches it.
        map_setting: Name of the setting that has those addresses, for errors.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        invoke: _Invoke,
        timeout_ms: int,
        namespace: Namespace,
        reached_at: Callable[[str], str] = str,
        map_setting: str = "mqtemplate.cluster.address-map",
    ) -> None:
        self._addresses = random.sample(addresses, len(addresses))  # spreads the clients over the servers
        self._invoke_at = invoke
        self._timeout_ms = timeout_ms
        self._namespace = namespace
        self._reached_at = reached_at
        self._map_setting = map_setting
        self._registered: dict[str, tuple[str, str]] = {}
        self._current = 0

    def topic_route(self, topic: str, *, in_namespace: bool = True, ask_all: bool = False) -> TopicRouteData | None:
        """Return the route of a topic; None if the cluster does not have it.

        Args:
            ask_all: If the first name server does not have it, ask the others: a restarted one has no routes until the
                brokers have registered again.
        """
        wire_topic = self._namespace.wrap(topic) if in_namespace else topic
        header = GetRouteInfoRequestHeader(topic=wire_topic, accept_standard_json_only=True)
        accepts = (lambda response: response.code != ResponseCode.TOPIC_NOT_EXIST) if ask_all else None
        response, address = self._invoke(
            lambda: RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header), accepts
        )
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        found = TopicRouteData.decode(check_response(response, f"get the route of topic {wire_topic!r}", address).body)
        return replace(found, broker_datas=[self._reachable(broker) for broker in found.broker_datas])

    def topics(self) -> list[str]:
        """Return the names of all topics of the cluster, and of no other namespace."""
        response, address = self._invoke(
            lambda: RemotingCommand.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        )
        names = TopicList.decode(check_response(response, "get the topics of the cluster", address).body).topic_list
        own = map(self._namespace.unwrap, names)
        return [topic for topic, name in zip(own, names, strict=True) if self._namespace.wrap(topic) == name]

    def delete_topic(self, topic: str) -> None:
        """Remove a topic from the routes of all name servers that answer; the others have no routes after a restart."""
        header = DeleteTopicFromNamesrvRequestHeader(topic=self._namespace.wrap(topic))
        for address in self._addresses:
            request = RemotingCommand.request(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)
            with suppress(RemoteConnectError, RemoteTimeoutError):
                response = self._invoke_at(address, request, self._timeout_ms)
                check_response(response, f"delete the routes of topic {topic!r}", address)

    def cluster_info(self) -> ClusterInfo:
        """Return all brokers of the cluster."""
        response, address = self._invoke(lambda: RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))
        found = ClusterInfo.decode(check_response(response, "get the brokers of the cluster", address).body)
        table = {name: self._reachable(broker) for name, broker in found.broker_addr_table.items()}
        return replace(found, broker_addr_table=table)

    def _reachable(self, broker: BrokerData) -> BrokerData:
        """Return the data of a broker with the addresses at which this machine reaches it."""
        addresses = {broker_id: self._reached_at(address) for broker_id, address in broker.broker_addrs.items()}
        for broker_id, registered in broker.broker_addrs.items():
            self._registered[addresses[broker_id]] = broker.broker_name, registered
        return replace(broker, broker_addrs=addresses)

    def origin_of(self, address: str) -> str | None:
        """Return, for errors, where the address of a broker came from, and what to set; None for other addresses."""
        if address not in self._registered:
            return None
        broker_name, registered = self._registered[address]
        if registered != address:
            return (
                f"{self._map_setting} gives this address for {registered}, which broker {broker_name!r} has registered"
            )
        return (
            f"broker {broker_name!r} has registered this address at the name server; if it has another one here, as "
            f"in Docker, Kubernetes or behind NAT, set {self._map_setting}: {{'{address}': 'HOST:PORT'}}, or at the "
            "broker brokerIP1 (--advertise of our server)"
        )

    def _invoke(
        self,
        create_request: Callable[[], RemotingCommand],
        accepts: Callable[[RemotingCommand], bool] | None = None,
    ) -> tuple[RemotingCommand, str]:
        """Return the first response, and the address of the server.

        Args:
            create_request: Returns the request; a request object belongs to one attempt.
            accepts: False for a response that counts only if no other name server has a better one.

        Raises:
            RemoteConnectError: No name server answers.
        """
        problems: list[str] = []
        refused: tuple[RemotingCommand, str] | None = None
        for step in range(len(self._addresses)):
            index = (self._current + step) % len(self._addresses)
            address = self._addresses[index]
            try:
                response = self._invoke_at(address, create_request(), self._timeout_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                problems.append(str(exc))
                continue
            if accepts is not None and not accepts(response):
                refused = refused or (response, address)
                continue
            self._current = index
            return response, address
        if refused is not None:
            return refused
        raise RemoteConnectError(
            f"no name server answers ({'; '.join(problems)}); see that one is running at "
            f"{', '.join(sorted(self._addresses))}, and that rocketmq.name-server names it"
        )


@dataclass(slots=True, eq=False)
class RouteTable:
    """Cache of the routes in use, and of the brokers' addresses. Thread-safe.

    - A cached route is returned without a request; `refresh` updates all of them. A missing topic is looked up again
      at its next use, at most once a second.
    - The address of a broker comes from the newest response that contains the broker.
    - A topic that no name server has for half a minute is removed. Until then a name server may just have restarted.

    Args:
        default_queue_count: Number of queues for a topic that its first message creates, unless the default topic has
            fewer.
        on_change: Called with the topic when its route is new, has changed, or was removed.
        unknown: Check of topics that are not in the cluster.
        on_moved: Called with an address where no broker is any more, since it has another one now.

    Attributes:
        cluster_topics: Topics of the cluster itself: no namespace is added to their names.
    """

    name_servers: NameServers
    clock: Clock
    default_queue_count: int
    on_change: Callable[[str], None]
    unknown: UnknownTopics
    on_moved: Callable[[str], None] = lambda address: None
    cluster_topics: set[str] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _routes: dict[str, TopicRoute] = field(default_factory=dict, init=False)
    _looked_up_ms: dict[str, int] = field(default_factory=dict, init=False)
    _missing_since_ms: dict[str, int] = field(default_factory=dict, init=False)
    _cluster: dict[str, Mapping[int, str]] = field(default_factory=dict, init=False)
    _cluster_names: frozenset[str] = field(default=frozenset(), init=False)
    _brokers: dict[str, Mapping[int, str]] = field(default_factory=dict, init=False)

    # --- topics --------------------------------------------------------------------------------

    def existing(self, topic: str) -> TopicRoute | None:
        """Return the route of an existing topic; None if it is missing."""
        route = self.cached(topic)
        return self._fetch(topic) if route is None and self._may_look_up(topic) else route

    def publish_route(self, topic: str) -> TopicRoute:
        """Return the route for sending; for a missing topic, the queues that its first message creates.

        Raises:
            MissingTopicError: The topic is missing, and the cluster does not create topics by itself.
            DestinationError: The topic is missing and unknown, and must not be created.
        """
        route = self._routes.get(topic)
        if route is not None and not route.is_default:
            return route
        found = self._fetch(topic) if route is None or self._may_look_up(topic) else route
        return found or self._default(topic)

    def cached(self, topic: str) -> TopicRoute | None:
        """Return the cached route of an existing topic; None if it is missing, or was not looked up yet."""
        route = self._routes.get(topic)
        return None if route is None or route.is_default else route

    def forget(self, topic: str) -> None:
        """Remove a topic from the cache, so that its next use looks it up."""
        with self._lock:
            self._routes.pop(topic, None)
            self._looked_up_ms.pop(topic, None)

    def forget_default(self, topic: str) -> None:
        """Have the queues of a topic looked up that its first message has just created."""
        route = self._routes.get(topic)
        if route is not None and route.is_default:
            self.forget(topic)

    def look_up_missing(self) -> None:
        """Have missing topics looked up at their next use, even within a second."""
        self._looked_up_ms = {}

    def refresh(self) -> None:
        """Look up all cached topics.

        Raises:
            RemoteConnectError: No name server answers.
        """
        for topic in list(self._routes):
            try:
                self._fetch(topic)
            except RemoteConnectError:
                raise
            except BrokerError as exc:
                _log.warning("remote.route_refresh_failed", topic=topic, reason=str(exc))
        self._remove_unused_brokers()

    def follow(self) -> bool:
        """Look up all cached topics if the brokers of the cluster have changed: one request if they have not.

        Returns:
            True if the topics were looked up.

        Raises:
            RemoteConnectError: No name server answers.
        """
        before = self._cluster
        if isinstance(self.load_cluster(), ClusterInfo) and self._cluster == before:
            return False
        self.refresh()
        return True

    def _may_look_up(self, topic: str) -> bool:
        return self.clock.steady_ms() - self._looked_up_ms.get(topic, -_REPEAT_AFTER_MS) >= _REPEAT_AFTER_MS

    def _fetch(self, topic: str) -> TopicRoute | None:
        looked_up_ms = self._looked_up_ms
        looked_up_ms[topic] = self.clock.steady_ms()  # before the request: others may look it up meanwhile
        try:
            data = self.name_servers.topic_route(
                topic, in_namespace=topic not in self.cluster_topics, ask_all=topic in self._routes
            )
        except BrokerError:
            looked_up_ms.pop(topic, None)
            raise
        if data is None:
            self._remove_missing(topic)
            return None
        route = route_of(topic, data)
        self._note_brokers(route.addresses)
        with self._lock:
            self._missing_since_ms.pop(topic, None)
            before = self._routes.get(topic)
            if before == route:
                return before
            self._routes[topic] = route
        if before is not None:
            _log.info(
                "remote.route_changed", topic=topic, queues=len(route.write_queues), brokers=sorted(route.addresses)
            )
        self.on_change(topic)
        return route

    def _remove_missing(self, topic: str) -> None:
        """Remove the cached route of a topic that has been missing for half a minute."""
        now_ms = self.clock.steady_ms()
        with self._lock:
            route = self._routes.get(topic)
            if route is None or route.is_default:
                return
            if now_ms - self._missing_since_ms.setdefault(topic, now_ms) < _REMOVE_AFTER_MS:
                return
            del self._routes[topic], self._missing_since_ms[topic]
        _log.info("remote.route_removed", topic=topic, reason="no name server has the topic any more")
        self.on_change(topic)

    def _default(self, topic: str) -> TopicRoute:
        """Return the route that a missing topic gets: RocketMQ's default topic's, with a limited queue count."""
        data = self.name_servers.topic_route(AUTO_CREATE_TOPIC, in_namespace=False)
        if data is None:
            nearest = self.unknown.nearest(topic, self._names)
            raise MissingTopicError(
                f"topic {topic!r} is not in the cluster, and its brokers do not create topics by themselves; "
                f"{f'did you mean {nearest!r}? Else create' if nearest else 'create'} it (mqadmin updateTopic, or "
                "Broker.create_topic), or set autoCreateTopicEnable=true on the brokers"
            )
        if topic not in self._routes:
            self.unknown.check(topic, self._names, "it is not in the cluster, and no listener or setting names it")
        limited = [
            _with_queues(each, min(each.read_queue_nums, self.default_queue_count))
            for each in data.queue_datas
            if each.perm & Perm.INHERIT
        ]
        route = route_of(topic, TopicRouteData(queue_datas=limited, broker_datas=data.broker_datas), is_default=True)
        self._note_brokers(route.addresses)
        with self._lock:
            return self._routes.setdefault(topic, route)

    def _names(self) -> Iterable[str]:
        """Return the topics of the cluster; those in use if the cluster does not tell its topics."""
        try:
            return self.name_servers.topics()
        except BrokerError:  # access control may forbid this request
            return list(self._routes)

    def has_applications(self, topic: str) -> bool:
        """Return True for a topic to which applications send. Each broker and each cluster has a topic of its name."""
        return is_application_topic(topic) and topic not in self._brokers and topic not in self._cluster_names

    # --- brokers -------------------------------------------------------------------------------

    def load_cluster(self) -> ClusterInfo | BrokerError:
        """Fetch, cache and return all brokers of the cluster; the error if access control forbids this request.

        Without them the routes contain the brokers in use.

        Raises:
            RemoteConnectError: No name server answers.
        """
        try:
            cluster = self.name_servers.cluster_info()
        except RemoteConnectError:
            raise
        except BrokerError as exc:
            return exc
        self._cluster = {name: dict(data.broker_addrs) for name, data in cluster.broker_addr_table.items()}
        self._cluster_names = frozenset(cluster.cluster_addr_table)
        self._note_brokers(self._cluster)
        self._remove_unused_brokers()
        return cluster

    def _note_brokers(self, brokers: Mapping[str, Mapping[int, str]]) -> None:
        """Take the addresses of a response, and report the addresses from which brokers have moved."""
        with self._lock:
            before = {name: self._brokers.get(name, {}) for name in brokers}
            self._brokers = {**self._brokers, **brokers}
            used = {address for by_id in self._brokers.values() for address in by_id.values()}
        for name, by_id in brokers.items():
            for broker_id, address in before[name].items():
                if by_id.get(broker_id, address) != address and address not in used:
                    _log.info("remote.broker_moved", broker=name, address=by_id[broker_id], before=address)
                    self.on_moved(address)

    def _remove_unused_brokers(self) -> None:
        """Remove the brokers that are neither in the cluster nor in a cached route any more."""
        with self._lock:
            used = set(self._cluster).union(*(route.addresses for route in self._routes.values()))
            self._brokers = {name: by_id for name, by_id in self._brokers.items() if name in used}

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str:
        """Return the address of a broker: that with *broker_id*, else the master's, else any.

        Raises:
            RemoteConnectError: No cached route contains the broker.
        """
        if by_id := self._brokers.get(broker_name):
            return by_id.get(broker_id) or by_id.get(MASTER_ID) or next(iter(by_id.values()))
        raise RemoteConnectError(
            f"broker {broker_name!r} is in no known route (known brokers: {', '.join(sorted(self._brokers)) or 'none'}"
            "); it was removed, or the queue belongs to another cluster"
        )

    def master(self, broker_name: str) -> str:
        """Return the address of a broker's master.

        Raises:
            RemoteConnectError: The broker has no master now.
        """
        address = self._brokers.get(broker_name, {}).get(MASTER_ID)
        if address is None:
            raise RemoteConnectError(f"broker {broker_name!r} has no master now; see that it runs")
        return address

    def is_replica(self, broker_name: str, address: str) -> bool:
        """Return True if *address* is not the address of the broker's master."""
        return self._brokers.get(broker_name, {}).get(MASTER_ID) != address

    def brokers(self) -> Mapping[str, Mapping[int, str]]:
        """Return the brokers of the cached routes and of the cluster: name -> id -> address."""
        return self._brokers

    def registered_masters(self) -> dict[str, str]:
        """Return the addresses of all masters by broker name, sorted. If none is known, ask the name servers again.

        An answer of a cluster must not be that of no broker: nothing pending, nothing cancelled, nothing created.

        Raises:
            BrokerError: No broker is registered, or the account may not list the brokers and no topic was used yet.
        """
        if not self.masters():
            cluster = self.load_cluster()
            if not self.masters():
                if isinstance(cluster, BrokerError):
                    raise cluster
                raise BrokerError(
                    "no broker is registered at the name servers of rocketmq.name-server; start one, or wait until it "
                    "has registered again"
                )
        return {name: by_id[MASTER_ID] for name, by_id in sorted(self.brokers().items()) if MASTER_ID in by_id}

    def master_names(self) -> list[str]:
        """Return the names of the brokers that have a master, sorted; see `registered_masters`."""
        return list(self.registered_masters())

    def masters(self) -> list[str]:
        """Return the addresses of all masters, sorted."""
        return sorted({by_id[MASTER_ID] for by_id in self.brokers().values() if MASTER_ID in by_id})

    def addresses(self) -> list[str]:
        """Return the addresses of all masters and replicas, sorted."""
        return sorted({address for by_id in self.brokers().values() for address in by_id.values()})


def _with_queues(data: QueueData, count: int) -> QueueData:
    return QueueData(broker_name=data.broker_name, read_queue_nums=count, write_queue_nums=count, perm=data.perm)


def route_of(topic: str, data: TopicRouteData, *, is_default: bool = False) -> TopicRoute:
    """Return the route that a name server's answer describes."""
    brokers = sorted(data.broker_datas, key=lambda broker: broker.broker_name)
    addresses = {broker.broker_name: dict(broker.broker_addrs) for broker in brokers}
    write_queues: list[MessageQueue] = []
    read_queues: list[MessageQueue] = []
    for each in sorted(data.queue_datas, key=lambda each: each.broker_name):
        name, by_id = each.broker_name, addresses.get(each.broker_name)
        if each.perm & Perm.WRITE and by_id and MASTER_ID in by_id:
            write_queues += [MessageQueue(topic, name, queue_id) for queue_id in range(each.write_queue_nums)]
        if each.perm & Perm.READ and by_id is not None:
            read_queues += [MessageQueue(topic, name, queue_id) for queue_id in range(each.read_queue_nums)]
    write_brokers = tuple(sorted({queue.broker_name for queue in write_queues}))
    return TopicRoute(topic, tuple(write_queues), tuple(read_queues), addresses, is_default, write_brokers)
