"""Brokers that register with this name server, such as RocketMQ's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import (
    ClusterInfo,
    DataVersionBody,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicRouteData,
)
from mqtemplate.remoting.protocol.headers.admin import (
    BrokerNameRequestHeader,
    BrokerRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetRouteInfoRequestHeader,
    GetTopicsByClusterRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool, make_engine

VERSION = DataVersionBody(counter=3, timestamp=7)
MASTER, REPLICA = "192.0.2.1:10911", "192.0.2.2:10911"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    settings = BrokerServerSettings(listen=ANY_PORT, broker_registration_enable=True)
    with LocalCluster(make_engine(VirtualClock()), settings, ANY_PORT) as cluster:
        cluster.engine.create_topic("shared", 1)
        yield cluster


@pytest.fixture
def tool(cluster: LocalCluster) -> Iterator[Tool]:
    with Tool(cluster.name_server_address) as tool:
        yield tool


@pytest.fixture
def broker(cluster: LocalCluster) -> Iterator[Tool]:
    """The connection of the other broker."""
    with Tool(cluster.name_server_address) as broker:
        yield broker


def register(broker: Tool, *topics: str, name: str = "broker-b", broker_id: int = 0, **more: object) -> RemotingCommand:
    table = {topic: TopicConfig(topic_name=topic, read_queue_nums=4, write_queue_nums=4) for topic in topics}
    wrapper = TopicConfigSerializeWrapper(topic_config_table=table, data_version=VERSION)
    body = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()
    header = RegisterBrokerRequestHeader(
        broker_name=name,
        broker_addr=REPLICA if broker_id else MASTER,
        cluster_name="another",
        ha_server_addr="",
        broker_id=broker_id,
        **{"body_crc32": zlib.crc32(body) & 0x7FFF_FFFF} | more,  # type: ignore[arg-type]
    )
    return broker.request(RequestCode.REGISTER_BROKER, header, body)


def route_of(tool: Tool, topic: str) -> TopicRouteData | None:
    response = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))
    return TopicRouteData.decode(response.body) if response.code == ResponseCode.SUCCESS else None


def brokers_of(tool: Tool, topic: str) -> list[str]:
    route = route_of(tool, topic)
    return [] if route is None else [queues.broker_name for queues in route.queue_datas]


def test_routes_contain_the_topics_of_both_brokers(tool: Tool, broker: Tool) -> None:
    assert register(broker, "shared", "single").code == ResponseCode.SUCCESS

    assert (brokers_of(tool, "shared"), brokers_of(tool, "single")) == (["broker-a", "broker-b"], ["broker-b"])
    route = route_of(tool, "single")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {0: MASTER}
    info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"], "another": ["broker-b"]}
    of_cluster = GetTopicsByClusterRequestHeader(cluster="another")
    listed = tool.request_ok(RequestCode.GET_TOPICS_BY_CLUSTER, of_cluster)
    assert TopicList.decode(listed.body).topic_list == ["shared", "single"]


def test_a_later_registration_adds_topics(tool: Tool, broker: Tool) -> None:
    """After a change a broker registers the changed topics only."""
    register(broker, "first")

    register(broker, "second")

    assert (brokers_of(tool, "first"), brokers_of(tool, "second")) == (["broker-b"], ["broker-b"])


def test_a_replica_receives_the_address_of_its_master(tool: Tool, broker: Tool) -> None:
    register(broker, "single")

    response = register(broker, broker_id=1)

    assert response.header(RegisterBrokerResponseHeader).master_addr == MASTER
    route = route_of(tool, "single")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {0: MASTER, 1: REPLICA}


def test_a_broker_that_unregisters_is_removed(tool: Tool, broker: Tool) -> None:
    register(broker, "single")
    header = BrokerRequestHeader(broker_name="broker-b", broker_addr=MASTER, cluster_name="another", broker_id=0)

    broker.request_ok(RequestCode.UNREGISTER_BROKER, header)

    assert brokers_of(tool, "single") == []


def test_a_broker_whose_connection_closes_is_removed(cluster: LocalCluster, tool: Tool, broker: Tool) -> None:
    register(broker, "single")
    others = cluster.broker.name_server.others
    (connection_id,) = {member.connection_id for member in others.all()[0].members.values()}
    servers = (cluster.broker.remoting, cluster._name_server)
    connections = [each for server in servers if server for each in server.connections()]
    (closed,) = [each for each in connections if each.id == connection_id]

    others.forget(closed)

    assert brokers_of(tool, "single") == []


def test_a_registration_expires_unless_the_broker_queries_its_version(
    cluster: LocalCluster, tool: Tool, broker: Tool
) -> None:
    register(broker, "single", heartbeat_timeout_millis=60_000)
    header = BrokerRequestHeader(broker_name="broker-b", broker_addr=MASTER, cluster_name="another", broker_id=0)
    move = cluster.engine.clock.move_ms  # type: ignore[attr-defined]  # it is virtual

    move(50_000)
    same = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, VERSION.encode())
    move(50_000)
    after_the_query = brokers_of(tool, "single")
    newer = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, DataVersionBody(counter=4).encode())
    move(60_000)

    assert (after_the_query, brokers_of(tool, "single")) == (["broker-b"], [])
    assert same.header(QueryDataVersionResponseHeader).changed is False
    assert newer.header(QueryDataVersionResponseHeader).changed is True
    assert DataVersionBody.decode(newer.body) == VERSION


def test_an_unknown_broker_must_register_all_its_topics(broker: Tool) -> None:
    header = BrokerRequestHeader(broker_name="x", broker_addr=MASTER, cluster_name="y", broker_id=0)

    response = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, VERSION.encode())

    assert response.header(QueryDataVersionResponseHeader).changed is True


def test_the_write_permission_and_the_topics_of_a_registered_broker_can_be_removed(tool: Tool, broker: Tool) -> None:
    register(broker, "single", "old")

    wiped = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequestHeader(broker_name="broker-b"))
    tool.request_ok(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicFromNamesrvRequestHeader(topic="old"))

    assert wiped.header(WipeWritePermOfBrokerResponseHeader).wipe_topic_count == 2
    route = route_of(tool, "single")
    assert route is not None
    assert route.queue_datas[0].perm == 4
    assert brokers_of(tool, "old") == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"name": "broker-a"},
            "broker name 'broker-a' belongs to the broker of this name server; choose another",
        ),
        ({"compressed": True}, "compressed registrations are not supported; set compressedRegister=false"),
        ({"body_crc32": 1}, "the checksum of the body differs from bodyCrc32"),
    ],
)
def test_an_invalid_registration_is_refused_with_the_reason(
    tool: Tool, broker: Tool, changes: dict[str, object], text: str
) -> None:
    response = register(broker, "single", **changes)  # type: ignore[arg-type]

    assert (response.code, response.remark) == (ResponseCode.SYSTEM_ERROR, text)
    assert brokers_of(tool, "single") == []


@pytest.mark.parametrize(
    "code", [RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER, RequestCode.QUERY_DATA_VERSION]
)
def test_no_broker_registers_by_default(code: RequestCode) -> None:
    """A local user could redirect any topic to a broker of their own."""
    with LocalCluster(make_engine(VirtualClock()), BrokerServerSettings(listen=ANY_PORT), ANY_PORT) as cluster:
        cluster.engine.create_topic("shared", 1)
        with Tool(cluster.name_server_address) as broker:
            response = register(broker, "shared") if code is RequestCode.REGISTER_BROKER else query(broker, code)
            route = route_of(broker, "shared")

    assert response.code == ResponseCode.NO_PERMISSION
    assert response.remark == (
        "brokers may not register with this name server: a registration could redirect any topic. Set "
        "mqtemplate.server.broker-registration-enable to true if it is meant for several brokers"
    )
    assert route is not None
    assert [broker_data.broker_name for broker_data in route.broker_datas] == ["broker-a"]


def query(broker: Tool, code: RequestCode) -> RemotingCommand:
    header = BrokerRequestHeader(broker_name="broker-b", broker_addr=MASTER, cluster_name="another", broker_id=0)
    return broker.request(code, header, VERSION.encode())
