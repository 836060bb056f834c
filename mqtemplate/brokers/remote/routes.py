"""Routes of topics: their queues and the addresses of their brokers, cached and updated from the name servers.

Source: RocketMQ ``client: MQClientInstance``, ``MQClientAPIImpl``.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mqtemplate.brokers.remote.errors import check_response
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo, QueueData, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, nearest_topic

_log = get_logger("mqtemplate.remote")

MASTER_ID = 0
_REPEAT_AFTER_MS = 1_000  # a missing topic is looked up again after this time


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The queues of a topic and the addresses of their brokers. Routes of equal content are equal.

    Attributes:
        write_queues: Queues that accept messages, on brokers that have a master.
        read_queues: Readable queues, in the order by which all members of a group allocate them.
        addresses: Broker name -> broker id -> ``host:port``.
        is_default: The topic is missing; these are the queues that its first message would create.
        next_turn: Returns 0, 1, 2, …, to choose queues in turn.
    """

    topic: str
    write_queues: tuple[MessageQueue, ...]
    read_queues: tuple[MessageQueue, ...]
    addresses: Mapping[str, Mapping[int, str]]
    is_default: bool = False
    next_turn: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__, compare=False, repr=False)

    def masters(self) -> list[str]:
        """Return the addresses of the masters."""
        return [by_id[MASTER_ID] for by_id in self.addresses.values() if MASTER_ID in by_id]


_Invoke = Callable[[str, RemotingCommand, int], RemotingCommand]
"""Sends a request and waits: ``(address, request, timeout_ms)``; see `RemotingClient.invoke`."""


class NameServers:
    """The name servers of a cluster. Requests go to the server that answered last, until it fails.

    The requests raise `BrokerError` if no name server answers, or it refuses.
    """

    def __init__(self, addresses: Sequence[str], invoke: _Invoke, timeout_ms: int, namespace: Namespace) -> None:
        self._addresses = random.sample(addresses, len(addresses))  # spreads the clients over the servers
        self._invoke_at = invoke
        self._timeout_ms = timeout_ms
        self._namespace = namespace
        self._current = 0

    def topic_route(self, topic: str, *, in_namespace: bool = True) -> TopicRouteData | None:
        """Return the route of a topic; None if the cluster does not have it."""
        wire_topic = self._namespace.wrap(topic) if in_namespace else topic
        header = GetRouteInfoRequestHeader(topic=wire_topic, accept_standard_json_only=True)
        response, address = self._invoke(lambda: RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header))
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        return TopicRouteData.decode(check_response(response, f"get the route of topic {wire_topic!r}", address).body)

    def cluster_info(self) -> ClusterInfo:
        """Return all brokers of the cluster."""
        response, address = self._invoke(lambda: RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))
        return ClusterInfo.decode(check_response(response, "get the brokers of the cluster", address).body)

    def topics(self) -> set[str]:
        """Return the names of all topics."""
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        response, address = self._invoke(lambda: RemotingCommand.request(code))
        return set(TopicList.decode(check_response(response, "list the topics", address).body).topic_list)

    def _invoke(self, create_request: Callable[[], RemotingCommand]) -> tuple[RemotingCommand, str]:
        """Return the first response, and the address of the server.

        Args:
            create_request: Returns the request; a request object belongs to one attempt.

        Raises:
            RemoteConnectError: No name server answers.
        """
        problems: list[str] = []
        for step in range(len(self._addresses)):
            index = (self._current + step) % len(self._addresses)
            address = self._addresses[index]
            try:
                response = self._invoke_at(address, create_request(), self._timeout_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                problems.append(str(exc))
                continue
            self._current = index
            return response, address
        raise RemoteConnectError(
            f"no name server answers ({'; '.join(problems)}); see that one is running at "
            f"{', '.join(sorted(self._addresses))}, and that rocketmq.name-server names it"
        )


@dataclass(slots=True, eq=False)
class RouteTable:
    """Cache of the routes in use. Thread-safe.

    A cached route is returned without a request; `refresh` updates all of them. A missing topic is looked up again at
    its next use, at most once a second.

    Args:
        default_queue_count: Number of queues for a topic that its first message creates, unless the default topic has
            fewer.
        on_change: Called with the topic when its route is new or has changed.
    """

    name_servers: NameServers
    clock: Clock
    default_queue_count: int
    on_change: Callable[[str], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _routes: dict[str, TopicRoute] = field(default_factory=dict, init=False)
    _looked_up_ms: dict[str, int] = field(default_factory=dict, init=False)
    _cluster: dict[str, Mapping[int, str]] = field(default_factory=dict, init=False)
    _cluster_topics: set[str] = field(default_factory=set, init=False)

    # --- topics --------------------------------------------------------------------------------

    def existing(self, topic: str) -> TopicRoute | None:
        """Return the route of an existing topic; None if it is missing."""
        route = self._routes.get(topic)
        if route is not None and not route.is_default:
            return route
        return self._fetch(topic) if self._may_look_up(topic) else None

    def publish_route(self, topic: str) -> TopicRoute:
        """Return the route for sending; for a missing topic, the queues that its first message creates.

        Raises:
            BrokerError: The topic is missing, and the cluster does not create topics by itself.
        """
        route = self._routes.get(topic)
        if route is not None and not route.is_default:
            return route
        found = self._fetch(topic) if route is None or self._may_look_up(topic) else route
        return found or self._default(topic)

    def cached(self, topic: str) -> TopicRoute | None:
        """Return the cached route of a topic, if there is one."""
        return self._routes.get(topic)

    def forget(self, topic: str) -> None:
        """Remove a topic from the cache, so that its next use looks it up."""
        with self._lock:
            self._routes.pop(topic, None)
            self._looked_up_ms.pop(topic, None)

    def look_up_missing(self) -> None:
        """Have missing topics looked up at their next use, even within a second."""
        self._looked_up_ms = {}

    def add_cluster_topic(self, topic: str) -> None:
        """Declare a topic of the cluster itself: no namespace is added to its name."""
        self._cluster_topics.add(topic)

    def refresh(self) -> None:
        """Look up all cached topics; a missing topic keeps its cached route."""
        for topic in list(self._routes):
            self._fetch(topic)

    def _may_look_up(self, topic: str) -> bool:
        return self.clock.now_ms() - self._looked_up_ms.get(topic, -_REPEAT_AFTER_MS) >= _REPEAT_AFTER_MS

    def _fetch(self, topic: str) -> TopicRoute | None:
        looked_up_ms = self._looked_up_ms
        looked_up_ms[topic] = self.clock.now_ms()  # before the request: `look_up_missing` may be called while it runs
        try:
            data = self.name_servers.topic_route(topic, in_namespace=topic not in self._cluster_topics)
        except BrokerError:
            looked_up_ms.pop(topic, None)
            raise
        if data is None:
            return None
        route = _route_of(topic, data)
        with self._lock:
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

    def _default(self, topic: str) -> TopicRoute:
        """Return the route that a missing topic gets: that of RocketMQ's default topic, with a limited queue count."""
        data = self.name_servers.topic_route(AUTO_CREATE_TOPIC, in_namespace=False)
        if data is None:
            raise BrokerError(
                f"topic {topic!r} is not in the cluster, and its brokers do not create topics by themselves; create it "
                "(mqadmin updateTopic, or Broker.create_topic), or set autoCreateTopicEnable=true on the brokers"
            )
        limited = [
            _with_queues(each, min(each.read_queue_nums, self.default_queue_count))
            for each in data.queue_datas
            if each.perm & Perm.INHERIT
        ]
        route = _route_of(topic, TopicRouteData(queue_datas=limited, broker_datas=data.broker_datas), is_default=True)
        with self._lock:
            nearest = nearest_topic(topic, self._routes)
            is_new = topic not in self._routes
            route = self._routes.setdefault(topic, route)
        if is_new:
            fields = {"nearest": nearest} if nearest else {}
            _log.info("topic.created", topic=topic, reason="it is not in the cluster", **fields)
        return route

    # --- brokers -------------------------------------------------------------------------------

    def load_cluster(self) -> ClusterInfo:
        """Fetch, cache and return all brokers of the cluster.

        Raises:
            BrokerError: No name server answers, or it refuses.
        """
        cluster = self.name_servers.cluster_info()
        self._cluster = {name: dict(data.broker_addrs) for name, data in cluster.broker_addr_table.items()}
        return cluster

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str:
        """Return the address of a broker: that with *broker_id*, else the master's, else any.

        Raises:
            BrokerError: No cached route contains the broker.
        """
        routes = [route.addresses for route in list(self._routes.values())]
        for addresses in (*routes, self._cluster):
            if by_id := addresses.get(broker_name):
                return by_id.get(broker_id) or by_id.get(MASTER_ID) or next(iter(by_id.values()))
        raise BrokerError(
            f"broker {broker_name!r} is in no known route (known brokers: {', '.join(sorted(self.brokers())) or 'none'}"
            "); it was removed, or the queue belongs to another cluster"
        )

    def brokers(self) -> dict[str, dict[int, str]]:
        """Return the brokers of all cached routes and of the cluster when it was loaded: name -> id -> address."""
        brokers: dict[str, dict[int, str]] = {}
        for route in list(self._routes.values()):
            for name, by_id in route.addresses.items():
                brokers.setdefault(name, {}).update(by_id)
        return {name: dict(by_id) for name, by_id in self._cluster.items()} | brokers

    def masters(self) -> list[str]:
        """Return the addresses of all masters, sorted."""
        return sorted({by_id[MASTER_ID] for by_id in self.brokers().values() if MASTER_ID in by_id})

    def addresses(self) -> list[str]:
        """Return the addresses of all masters and replicas, sorted."""
        return sorted({address for by_id in self.brokers().values() for address in by_id.values()})


def _with_queues(data: QueueData, count: int) -> QueueData:
    return QueueData(broker_name=data.broker_name, read_queue_nums=count, write_queue_nums=count, perm=data.perm)


def _route_of(topic: str, data: TopicRouteData, *, is_default: bool = False) -> TopicRoute:
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
    return TopicRoute(topic, tuple(write_queues), tuple(read_queues), addresses, is_default)
