"""Brokers that register at our name server, as RocketMQ's own do."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import (
    ClusterInfo,
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicRouteData,
)
from mqtemplate.remoting.protocol.headers.admin import (
    BrokerNameRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetRouteInfoRequestHeader,
    GetTopicsByClusterRequestHeader,
    QueryDataVersionRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    UnRegisterBrokerRequestHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool, make_engine

VERSION = DataVersion(counter=3, timestamp=7)
MASTER, REPLICA = "192.0.2.1:10911", "192.0.2.2:10911"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(make_engine(VirtualClock()), BrokerServerSettings(listen=ANY_PORT), ANY_PORT) as cluster:
        cluster.engine.create_topic("shared", 1)
        yield cluster


@pytest.fixture
def tool(cluster: LocalCluster) -> Iterator[Tool]:
    with Tool(cluster.name_server_address) as tool:
        yield tool


@pytest.fixture
def broker(cluster: LocalCluster) -> Iterator[Tool]:
    """The other broker's connection."""
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


def test_its_topics_are_found_beside_ours(tool: Tool, broker: Tool) -> None:
    assert register(broker, "shared", "theirs").code == ResponseCode.SUCCESS

    assert (brokers_of(tool, "shared"), brokers_of(tool, "theirs")) == (["broker-a", "broker-b"], ["broker-b"])
    route = route_of(tool, "theirs")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {0: MASTER}
    info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"], "another": ["broker-b"]}
    of_cluster = GetTopicsByClusterRequestHeader(cluster="another")
    listed = tool.request_ok(RequestCode.GET_TOPICS_BY_CLUSTER, of_cluster)
    assert TopicList.decode(listed.body).topic_list == ["shared", "theirs"]


def test_what_it_tells_later_is_added(tool: Tool, broker: Tool) -> None:
    """Of a new topic a broker tells that topic alone."""
    register(broker, "first")

    register(broker, "second")

    assert (brokers_of(tool, "first"), brokers_of(tool, "second")) == (["broker-b"], ["broker-b"])


def test_a_replica_is_told_who_its_master_is(tool: Tool, broker: Tool) -> None:
    register(broker, "theirs")

    response = register(broker, broker_id=1)

    assert response.header(RegisterBrokerResponseHeader).master_addr == MASTER
    route = route_of(tool, "theirs")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {0: MASTER, 1: REPLICA}


def test_it_is_forgotten_when_it_says_so(tool: Tool, broker: Tool) -> None:
    register(broker, "theirs")
    header = UnRegisterBrokerRequestHeader(
        broker_name="broker-b", broker_addr=MASTER, cluster_name="another", broker_id=0
    )

    broker.request_ok(RequestCode.UNREGISTER_BROKER, header)

    assert brokers_of(tool, "theirs") == []


def test_it_is_forgotten_when_its_connection_ends(cluster: LocalCluster, tool: Tool, broker: Tool) -> None:
    register(broker, "theirs")
    others = cluster.broker.name_server.others
    (connection,) = {door.connection_id for door in others.all()[0].doors.values()}
    doors = (cluster.broker.remoting, cluster._names)
    (ours,) = [each for door in doors if door for each in door.connections() if each.id == connection]

    others.forget(ours)

    assert brokers_of(tool, "theirs") == []


def test_it_is_forgotten_when_it_is_silent_and_a_question_is_a_sign_of_life(
    cluster: LocalCluster, tool: Tool, broker: Tool
) -> None:
    register(broker, "theirs", heartbeat_timeout_millis=60_000)
    header = QueryDataVersionRequestHeader(
        broker_name="broker-b", broker_addr=MASTER, cluster_name="another", broker_id=0
    )
    move = cluster.engine.clock.move_ms  # type: ignore[attr-defined]  # it is virtual

    move(50_000)
    same = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, VERSION.encode())
    move(50_000)
    after_a_sign = brokers_of(tool, "theirs")
    newer = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, DataVersion(counter=4).encode())
    move(60_000)

    assert (after_a_sign, brokers_of(tool, "theirs")) == (["broker-b"], [])
    assert same.header(QueryDataVersionResponseHeader).changed is False
    assert newer.header(QueryDataVersionResponseHeader).changed is True
    assert DataVersion.decode(newer.body) == VERSION


def test_a_broker_that_nobody_knows_has_to_tell_everything(broker: Tool) -> None:
    header = QueryDataVersionRequestHeader(broker_name="x", broker_addr=MASTER, cluster_name="y", broker_id=0)

    response = broker.request_ok(RequestCode.QUERY_DATA_VERSION, header, VERSION.encode())

    assert response.header(QueryDataVersionResponseHeader).changed is True


def test_its_right_to_write_is_taken_and_its_topics_are_deleted(tool: Tool, broker: Tool) -> None:
    register(broker, "theirs", "old")

    wiped = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequestHeader(broker_name="broker-b"))
    tool.request_ok(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicFromNamesrvRequestHeader(topic="old"))

    assert wiped.header(WipeWritePermOfBrokerResponseHeader).wipe_topic_count == 2
    route = route_of(tool, "theirs")
    assert route is not None
    assert route.queue_datas[0].perm == 4
    assert brokers_of(tool, "old") == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"name": "broker-a"},
            "broker name 'broker-a' is the one of the broker beside this name server; take another",
        ),
        ({"compressed": True}, "compressed registrations are not read here; set compressedRegister=false"),
        ({"body_crc32": 1}, "the body is not the one that bodyCrc32 was computed over"),
    ],
)
def test_what_cannot_be_registered_is_refused_with_the_reason(
    tool: Tool, broker: Tool, changes: dict[str, object], text: str
) -> None:
    response = register(broker, "theirs", **changes)  # type: ignore[arg-type]

    assert (response.code, response.remark) == (ResponseCode.SYSTEM_ERROR, text)
    assert brokers_of(tool, "theirs") == []
