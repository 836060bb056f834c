"""Routes: failing name servers, missing topics, and permissions of queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers.remote.cluster.routes import NameServers, RouteTable, TopicRoute
from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.topics import UnknownTopics
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.golden import check_script, scripts_in

DEAD = "127.0.0.1:1"


@pytest.fixture
def client() -> Iterator[RemotingClient]:
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    yield client
    client.close()


def table(
    client: RemotingClient,
    *addresses: str,
    clock: VirtualClock | None = None,
    namespace: str = "",
    on_change: Callable[[str], None] = lambda topic: None,
    on_moved: Callable[[str], None] = lambda address: None,
) -> RouteTable:
    names = NameServers(addresses, client.invoke, 3_000, Namespace(namespace))
    unknown = UnknownTopics(get_logger("mqtemplate.remote"), auto_create=True)
    return RouteTable(
        names,
        clock or VirtualClock(),
        default_queue_count=4,
        on_change=on_change,
        unknown=unknown,
        on_moved=on_moved,
    )


def test_a_broker_that_has_moved_is_found_at_its_new_address_by_all_routes(client: RemotingClient) -> None:
    """Kubernetes moves brokers. The route of a topic that was deleted keeps the address that it had."""
    with ScriptedBroker("broker-a") as before, ScriptedBroker("broker-a") as after:
        moved: list[str] = []
        routes = table(client, before.address, on_moved=moved.append)
        before.topic("deleted")
        before.topic("orders")
        routes.existing("deleted")
        routes.existing("orders")
        del before.routes["deleted"]
        before.move_to(after)

        routes.refresh()

        assert (routes.address("broker-a"), routes.masters()) == (after.address, [after.address])
        assert moved == [before.address]


def test_a_topic_that_one_name_server_lost_is_looked_up_at_the_others(client: RemotingClient) -> None:
    with ScriptedBroker("broker-a") as one, ScriptedBroker("broker-a") as other:
        one.topic("orders")
        other.topic("orders")
        routes = table(client, one.address, other.address)
        routes.existing("orders")
        used, unused = (one, other) if one.seen else (other, one)
        unused.topic("orders", queues=8)
        del used.routes["orders"]

        routes.refresh()

        route = routes.existing("orders")
        assert route is not None
        assert len(route.write_queues) == 8


def test_the_name_server_that_answered_is_used_again() -> None:
    used: list[str] = []

    def invoke(address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        used.append(address)
        if address == DEAD:
            raise RemoteConnectError("refused")
        return request.response(ResponseCode.TOPIC_NOT_EXIST)

    names = NameServers((DEAD, "10.0.0.1:9876"), invoke, 3_000, Namespace(""))
    for _ in range(3):
        names.topic_route("orders")

    assert used.count("10.0.0.1:9876") == 3
    assert used.count(DEAD) <= 1


class Routes:
    """The commands of the script: a table of routes, and the brokers of its cluster. The first one is a name server."""

    def __init__(self, client: RemotingClient, stack: ExitStack) -> None:
        self._client = client
        self._stack = stack

    def cluster(self, *names: str) -> None:
        """Start brokers, and a table of their routes."""
        self._brokers = {name: self._stack.enter_context(ScriptedBroker(f"broker-{name}")) for name in names}
        self._names = self._brokers[names[0]]
        self._names.others = [self._brokers[name] for name in names[1:]]
        self.table(names[0])

    def table(self, *servers: str, namespace: str = "") -> None:
        """Create another table, for these name servers."""
        self._clock, self._changes = VirtualClock(), list[str]()
        addresses = [DEAD if name == "dead" else self._brokers[name].address for name in servers]
        self._table = table(
            self._client, *addresses, clock=self._clock, namespace=namespace, on_change=self._changes.append
        )

    def join(self, name: str) -> None:
        self._brokers[name] = self._stack.enter_context(ScriptedBroker(f"broker-{name}"))
        self._names.others.append(self._brokers[name])

    def topic(self, name: str, queues: str = "4", perm: str = "6") -> None:
        self._names.topic(name, int(queues), int(perm))

    def drop(self, topic: str) -> None:
        del self._names.routes[topic]

    def refuse(self) -> None:
        self._names.refuse(RequestCode.GET_ROUTEINFO_BY_TOPIC, ResponseCode.SYSTEM_ERROR)

    def refuse_route_of(self, topic: str) -> None:
        self._names.refuse_route_of(topic)

    def move(self, ms: str) -> None:
        self._clock.move_ms(int(ms))

    def look_up_missing(self) -> None:
        self._table.look_up_missing()

    def cluster_topic(self, topic: str) -> None:
        self._table.cluster_topics.add(topic)

    def existing(self, topic: str) -> Iterator[str]:
        yield from self._printed(lambda: self._table.existing(topic))

    def publish(self, topic: str) -> Iterator[str]:
        yield from self._printed(lambda: self._table.publish_route(topic))

    def address(self, broker_name: str) -> Iterator[str]:
        yield from self._printed(lambda: self._table.address(broker_name))

    def load(self) -> Iterator[str]:
        cluster = self._table.load_cluster()
        yield from self._printed(lambda: cluster.cluster_addr_table if isinstance(cluster, ClusterInfo) else cluster)

    def refresh(self) -> Iterator[str]:
        with capture_logs() as logs:
            self._table.refresh()
        yield from (f"warning {log['event']} {log['topic']}" for log in logs if log["log_level"] == "warning")

    def follow(self) -> Iterator[str]:
        yield "looked up" if self._table.follow() else "no change"

    def requests(self) -> Iterator[str]:
        """Print the number of requests for routes."""
        yield f"{self._names.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)} requests"

    def changes(self) -> Iterator[str]:
        yield f"changed: {' '.join(self._changes)}"

    def _printed(self, call: Callable[[], object]) -> Iterator[str]:
        """Yield a result, or the error, with names instead of addresses."""
        try:
            text = _shown(call())
        except BrokerError as exc:
            text = str(exc)
        for name, broker in self._brokers.items():
            text = text.replace(broker.address, f"<{name}>")
        yield text


def _shown(found: object) -> str:
    if not isinstance(found, TopicRoute):
        return str(found)
    kinds = [("write", found.write_queues), ("read", found.read_queues)]
    parts = [f"{kind} {' '.join(f'{q.broker_name[-1]}{q.queue_id}' for q in queues) or '-'}" for kind, queues in kinds]
    topics = {queue.topic for queue in (*found.write_queues, *found.read_queues)} or {found.topic}
    return (
        f"{'/'.join(topics)}{' (default)' if found.is_default else ''}: {', '.join(parts)}; masters {found.masters()}"
    )


def test_routes_are_those_of_the_script(client: RemotingClient) -> None:
    (script,) = scripts_in(Path(__file__).with_name("route_scripts"))
    with ExitStack() as stack:
        check_script(script, Routes(client, stack))
