"""Where topics are in a cluster: asked of its name servers, remembered, and asked again from time to time.

Source: RocketMQ ``client: MQClientInstance``; section 6 of the specification.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from mqtemplate.brokers.remote.errors import check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, QueueData, TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.remote")

MASTER_ID = 0
_ASK_AGAIN_MS = 1_000
"""A topic that was not there is asked for again so soon."""
_Ask = Callable[[str, RemotingCommand, int], RemotingCommand]
"""Asks one address: ``(address, request, timeout_ms)``."""


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The queues of a topic and the addresses of their brokers. Two of equal content are equal.

    Attributes:
        publish: Queues that take messages, of brokers that have a master.
        subscribe: Queues that can be read; in the order that all clients share them out by.
        addresses: Broker name -> broker id -> ``host:port``.
        is_default: The topic is not there; these are the queues that its first message would make.
    """

    topic: str
    publish: tuple[MessageQueue, ...]
    subscribe: tuple[MessageQueue, ...]
    addresses: Mapping[str, Mapping[int, str]]
    is_default: bool = False
    turn: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__, compare=False, repr=False)

    def masters(self) -> list[str]:
        return [by_id[MASTER_ID] for by_id in self.addresses.values() if MASTER_ID in by_id]


class NameServers:
    """Asks one of several name servers; the one that answered is asked again, until it fails."""

    def __init__(self, addresses: tuple[str, ...], ask: _Ask, timeout_ms: int) -> None:
        self._addresses = random.sample(addresses, len(addresses))  # clients spread over the servers
        self._ask = ask
        self._timeout_ms = timeout_ms
        self._current = 0

    def invoke(self, make: Callable[[], RemotingCommand]) -> tuple[RemotingCommand, str]:
        """The answer of the first that gives one, and its address.

        Args:
            make: A request, for each try anew.

        Raises:
            RemoteConnectError: None does.
        """
        problems: list[str] = []
        for step in range(len(self._addresses)):
            index = (self._current + step) % len(self._addresses)
            address = self._addresses[index]
            try:
                answer = self._ask(address, make(), self._timeout_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                problems.append(str(exc))
                continue
            self._current = index
            return answer, address
        raise RemoteConnectError(
            f"no name server answers ({'; '.join(problems)}); see that one is running at "
            f"{', '.join(sorted(self._addresses))}, and that rocketmq.name-server names it"
        )


class RouteTable:
    """The routes that are in use.

    A route that is known is given without asking. `refresh`, which a service calls each 30 s, asks for all of them; a
    topic that was not there is asked for again when it is wanted, once a second at most.

    Args:
        default_queue_count: How many queues a message gets for its new topic; the default topic's are more.
    """

    def __init__(self, names: NameServers, namespace: Namespace, clock: Clock, default_queue_count: int) -> None:
        self._names = names
        self._namespace = namespace
        self._clock = clock
        self._default_queue_count = default_queue_count
        self._lock = threading.Lock()
        self._routes: dict[str, TopicRoute] = {}
        self._asked_ms: dict[str, int] = {}
        self._cluster: dict[str, Mapping[int, str]] = {}
        self._shared: set[str] = set()
        self.on_change: Callable[[str], None] = lambda topic: None

    # --- asking --------------------------------------------------------------------------------

    def existing(self, topic: str) -> TopicRoute | None:
        """The route of a topic that is there; None if it is not."""
        known = self._routes.get(topic)
        if known is not None and not known.is_default:
            return known
        return self._fetch(topic) if self._may_ask(topic) else None

    def publish(self, topic: str) -> TopicRoute:
        """The route for sending: of a topic that is not there, the queues that its first message makes.

        Raises:
            BrokerError: It is not there, and the cluster makes no topics by itself.
        """
        known = self._routes.get(topic)
        if known is not None and not known.is_default:
            return known
        found = self._fetch(topic) if known is None or self._may_ask(topic) else known
        return found or self._default(topic)

    def known(self, topic: str) -> TopicRoute | None:
        """What is known of a topic, without asking."""
        return self._routes.get(topic)

    def forget(self, topic: str) -> None:
        """Ask for it anew when it is wanted next."""
        with self._lock:
            self._routes.pop(topic, None)
            self._asked_ms.pop(topic, None)

    def share(self, topic: str) -> None:
        """It is one of the cluster's own, which no namespace goes in front of."""
        self._shared.add(topic)

    def refresh(self) -> None:
        """Ask for all that is known; a name server that does not answer leaves it as it is."""
        for topic in list(self._routes):
            self._fetch(topic)

    def topics(self) -> list[str]:
        return list(self._routes)

    def _may_ask(self, topic: str) -> bool:
        return self._clock.now_ms() - self._asked_ms.get(topic, -_ASK_AGAIN_MS) >= _ASK_AGAIN_MS

    def _fetch(self, topic: str) -> TopicRoute | None:
        data = self._ask_for(topic if topic in self._shared else self._namespace.wrap(topic))
        self._asked_ms[topic] = self._clock.now_ms()
        if data is None:
            return None
        route = _route_of(topic, data)
        with self._lock:
            before = self._routes.get(topic)
            if before == route:
                return before
            self._routes[topic] = route
        if before is not None:
            _log.info("remote.route_changed", topic=topic, queues=len(route.publish), brokers=sorted(route.addresses))
        self.on_change(topic)
        return route

    def _ask_for(self, wire_topic: str) -> TopicRouteData | None:
        header = GetRouteInfoRequestHeader(topic=wire_topic, accept_standard_json_only=True)
        answer, address = self._names.invoke(
            lambda: RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        return TopicRouteData.decode(check_answer(answer, f"ask for the route of topic {wire_topic!r}", address).body)

    def _default(self, topic: str) -> TopicRoute:
        data = self._ask_for(AUTO_CREATE_TOPIC)
        if data is None:
            raise BrokerError(
                f"topic {topic!r} is not in the cluster, and its brokers make no topics by themselves; create it "
                "(mqadmin updateTopic, or Broker.create_topic), or set autoCreateTopicEnable=true on the brokers"
            )
        limited = [
            _with_queues(each, min(each.read_queue_nums, self._default_queue_count))
            for each in data.queue_datas
            if each.perm & Perm.INHERIT
        ]
        route = _route_of(topic, TopicRouteData(queue_datas=limited, broker_datas=data.broker_datas), is_default=True)
        with self._lock:
            return self._routes.setdefault(topic, route)

    # --- brokers -------------------------------------------------------------------------------

    def load_cluster(self) -> ClusterInfo:
        """Ask for all brokers.

        Raises:
            BrokerError: No name server answers, or it does not say.
        """
        answer, address = self._names.invoke(lambda: RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))
        cluster = ClusterInfo.decode(check_answer(answer, "ask for the brokers", address).body)
        self._cluster = {name: dict(data.broker_addrs) for name, data in cluster.broker_addr_table.items()}
        return cluster

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str:
        """Where a broker is; where it has not this id, one of its others.

        Raises:
            BrokerError: No route names it.
        """
        for by_id in self._known(broker_name):
            if by_id:
                return by_id.get(broker_id) or by_id.get(MASTER_ID) or next(iter(by_id.values()))
        raise BrokerError(
            f"broker {broker_name!r} is in no route that is known here ({', '.join(sorted(self.brokers())) or 'none'} "
            "are); it was taken away, or the queue is one of another cluster"
        )

    def _known(self, broker_name: str) -> list[Mapping[int, str]]:
        routes = list(self._routes.values())
        found = [route.addresses[broker_name] for route in routes if broker_name in route.addresses]
        return [*found, self._cluster.get(broker_name, {})]

    def brokers(self) -> dict[str, dict[int, str]]:
        """All that routes name, and those that the cluster had when it was asked: name -> id -> address."""
        brokers: dict[str, dict[int, str]] = {}
        for route in list(self._routes.values()):
            for name, by_id in route.addresses.items():
                brokers.setdefault(name, {}).update(by_id)
        for name, by_id in self._cluster.items():
            if name not in brokers:
                brokers[name] = dict(by_id)
        return brokers

    def masters(self) -> list[str]:
        return sorted({by_id[MASTER_ID] for by_id in self.brokers().values() if MASTER_ID in by_id})

    def addresses(self) -> list[str]:
        """Of masters and replicas."""
        return sorted({address for by_id in self.brokers().values() for address in by_id.values()})


def _with_queues(data: QueueData, count: int) -> QueueData:
    return QueueData(broker_name=data.broker_name, read_queue_nums=count, write_queue_nums=count, perm=data.perm)


def _route_of(topic: str, data: TopicRouteData, *, is_default: bool = False) -> TopicRoute:
    addresses = {broker.broker_name: dict(broker.broker_addrs) for broker in _in_order(data.broker_datas)}
    publish: list[MessageQueue] = []
    subscribe: list[MessageQueue] = []
    for each in sorted(data.queue_datas, key=lambda each: each.broker_name):
        has_master = MASTER_ID in addresses.get(each.broker_name, {})
        if each.perm & Perm.WRITE and has_master:
            publish += [MessageQueue(topic, each.broker_name, queue_id) for queue_id in range(each.write_queue_nums)]
        if each.perm & Perm.READ and each.broker_name in addresses:
            subscribe += [MessageQueue(topic, each.broker_name, queue_id) for queue_id in range(each.read_queue_nums)]
    return TopicRoute(topic, tuple(publish), tuple(subscribe), addresses, is_default)


def _in_order(brokers: list[BrokerData]) -> list[BrokerData]:
    return sorted(brokers, key=lambda broker: broker.broker_name)
