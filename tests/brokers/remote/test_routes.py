"""Routes: failing name servers, missing topics, and permissions of queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import NameServers, RouteTable
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.engine.topics import UnknownTopics
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


def test_a_topic_that_no_name_server_has_any_more_is_removed_after_half_a_minute(
    client: RemotingClient, cluster: ScriptedBroker
) -> None:
    """A name server that has restarted has no topic, until its brokers have registered again."""
    clock, changed = VirtualClock(), list[str]()
    routes = table(client, cluster.address, clock=clock, on_change=changed.append)
    cluster.topic("orders")
    routes.existing("orders")
    del cluster.routes["orders"]
    routes.refresh()
    clock.move_ms(29_999)
    routes.refresh()
    kept = routes.existing("orders")
    clock.move_ms(1)

    routes.refresh()

    assert kept is not None
    assert routes.existing("orders") is None
    assert changed == ["orders", "orders"]
    with pytest.raises(BrokerError, match="in no known route"):
        routes.address("broker-a")


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


def test_a_change_of_the_cluster_is_found_by_one_request(client: RemotingClient, cluster: ScriptedBroker) -> None:
    with ScriptedBroker("broker-b") as joining:
        for number in range(3):
            cluster.topic(f"topic-{number}")
        routes = table(client, cluster.address)
        routes.load_cluster()
        for number in range(3):
            routes.existing(f"topic-{number}")

        routes.follow()
        without_change = cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        cluster.others = [joining]
        cluster.topic("topic-0")
        routes.follow()

        assert (without_change, cluster.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)) == (3, 6)
        assert routes.address("broker-b") == joining.address


def test_a_topic_whose_look_up_is_refused_stops_no_refresh(client: RemotingClient, cluster: ScriptedBroker) -> None:
    routes = table(client, cluster.address)
    for topic in ("secret", "orders"):
        cluster.topic(topic, queues=2)
        routes.existing(topic)
    cluster.topic("orders", queues=6)
    cluster.refuse_route_of("secret")

    with capture_logs() as logs:
        routes.refresh()

    route = routes.cached("orders")
    assert route is not None
    assert len(route.write_queues) == 6
    assert [(log["event"], log["topic"]) for log in logs if log["log_level"] == "warning"] == [
        ("remote.route_refresh_failed", "secret")
    ]


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
