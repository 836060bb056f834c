"""Routes: failing name servers, missing topics, and permissions of queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import NameServers, RouteTable
from mqtemplate.brokers.unknown_topics import UnknownTopics
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.topics import AUTO_CREATE_TOPIC
from tests.brokers.remote.scripted_cluster import ScriptedBroker

DEAD = "127.0.0.1:1"


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


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
) -> RouteTable:
    names = NameServers(addresses, client.invoke, 3_000, Namespace(namespace))
    unknown = UnknownTopics(get_logger("mqtemplate.remote"), auto_create=True)
    return RouteTable(names, clock or VirtualClock(), default_queue_count=4, on_change=on_change, unknown=unknown)


def test_the_queues_of_a_topic_are_sorted_by_broker(client: RemotingClient) -> None:
    with ScriptedBroker("broker-a") as first, ScriptedBroker("broker-b") as second:
        second.others = [first]
        second.topic("orders", queues=2)

        route = table(client, second.address).existing("orders")

        assert route is not None
        expected = [MessageQueue("orders", f"broker-{name}", queue_id) for name in "ab" for queue_id in (0, 1)]
        assert route.write_queues == route.read_queues == tuple(expected)
        assert route.masters() == [first.address, second.address]


@pytest.mark.parametrize(("perm", "writable", "readable"), [(Perm.READ, 0, 4), (Perm.WRITE, 4, 0), (0, 0, 0)])
def test_the_permission_decides_which_queues_are_readable_and_writable(
    client: RemotingClient, cluster: ScriptedBroker, perm: int, writable: int, readable: int
) -> None:
    cluster.topic("orders", perm=perm)

    route = table(client, cluster.address).existing("orders")

    assert route is not None
    assert (len(route.write_queues), len(route.read_queues)) == (writable, readable)


def test_a_missing_topic_has_the_queues_that_its_first_message_would_create(
    client: RemotingClient, cluster: ScriptedBroker
) -> None:
    cluster.topic(AUTO_CREATE_TOPIC, queues=8, perm=Perm.READ | Perm.WRITE | Perm.INHERIT)

    routes = table(client, cluster.address)

    assert routes.existing("new") is None
    assert (len(routes.publish_route("new").write_queues), routes.publish_route("new").is_default) == (4, True)


def test_the_error_for_a_missing_topic_names_the_setting_that_creates_topics(
    client: RemotingClient, cluster: ScriptedBroker
) -> None:
    with pytest.raises(BrokerError, match=r"topic 'new' is not in the cluster.*autoCreateTopicEnable=true"):
        table(client, cluster.address).publish_route("new")


def test_a_missing_topic_is_looked_up_once_a_second(client: RemotingClient, cluster: ScriptedBroker) -> None:
    clock = VirtualClock()
    routes = table(client, cluster.address, clock=clock)
    for _ in range(3):
        assert routes.existing("new") is None
    assert cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 1

    cluster.topic("new")
    clock.move_ms(1_000)

    assert routes.existing("new") is not None


def test_a_route_is_cached_until_it_is_refreshed(client: RemotingClient, cluster: ScriptedBroker) -> None:
    cluster.topic("orders", queues=2)
    changed: list[str] = []
    routes = table(client, cluster.address, on_change=changed.append)
    routes.existing("orders")
    cluster.topic("orders", queues=6)

    before = len(routes.publish_route("orders").write_queues)
    routes.refresh()
    routes.refresh()

    assert (before, len(routes.publish_route("orders").write_queues)) == (2, 6)
    assert changed == ["orders", "orders"], "new, then changed; an equal route is no change"


def test_the_next_name_server_is_used_when_one_fails(client: RemotingClient, cluster: ScriptedBroker) -> None:
    cluster.topic("orders")
    routes = table(client, DEAD, cluster.address, DEAD)

    assert routes.existing("orders") is not None
    assert routes.load_cluster().cluster_addr_table == {"c": ["broker-a"]}


def test_the_error_names_all_name_servers_if_none_answers(client: RemotingClient) -> None:
    with pytest.raises(
        RemoteConnectError, match=r"no name server answers.*127\.0\.0\.1:1, 127\.0\.0\.1:2.*name-server"
    ):
        table(client, DEAD, "127.0.0.1:2").existing("orders")


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


def test_the_error_for_an_unknown_broker_names_the_known_ones(client: RemotingClient, cluster: ScriptedBroker) -> None:
    cluster.topic("orders")
    routes = table(client, cluster.address)
    routes.existing("orders")

    assert routes.address("broker-a") == cluster.address
    with pytest.raises(BrokerError, match=r"'broker-z' is in no known route \(known brokers: broker-a\)"):
        routes.address("broker-z")


def test_topics_are_looked_up_in_the_namespace_and_cluster_topics_without_it(
    client: RemotingClient, cluster: ScriptedBroker
) -> None:
    cluster.topic("prod%orders")
    cluster.topic("c_REPLY_TOPIC")
    routes = table(client, cluster.address, namespace="prod")
    routes.add_cluster_topic("c_REPLY_TOPIC")

    orders, cluster_topic = routes.existing("orders"), routes.existing("c_REPLY_TOPIC")

    assert orders is not None
    assert orders.write_queues[0].topic == "orders"
    assert cluster_topic is not None


def test_a_missing_topic_is_looked_up_at_once_after_a_broker_has_reported_a_change(
    client: RemotingClient, cluster: ScriptedBroker
) -> None:
    """Otherwise at most once a second. Our server reports that a topic was created."""
    routes = table(client, cluster.address)
    assert routes.existing("orders") is None
    cluster.topic("orders")
    assert routes.existing("orders") is None, "it was looked up just now"

    routes.look_up_missing()

    assert routes.existing("orders") is not None


def test_a_look_up_that_failed_is_repeated_at_its_next_use(client: RemotingClient, cluster: ScriptedBroker) -> None:
    routes = table(client, cluster.address)
    cluster.refuse(RequestCode.GET_ROUTEINFO_BY_TOPIC, ResponseCode.SYSTEM_ERROR)

    for _ in range(2):
        with pytest.raises(BrokerError, match="SYSTEM_ERROR"):
            routes.existing("orders")
