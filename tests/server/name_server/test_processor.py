"""Routes and lists, as clients and tools get them from a name server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo, KVTable, TopicList, TopicRouteData
from mqtemplate.remoting.protocol.headers.admin import (
    AddWritePermOfBrokerResponseHeader,
    BrokerNameRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetKVConfigResponseHeader,
    GetRouteInfoRequestHeader,
    GetTopicsByClusterRequestHeader,
    KVConfigKeyRequestHeader,
    KVNamespaceRequestHeader,
    PutKVConfigRequestHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool, make_engine


def make_cluster(path: Path | None = None, **settings: bool) -> LocalCluster:
    engine = make_engine(VirtualClock(), path)
    return LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT, **settings), ANY_PORT)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with make_cluster() as cluster:
        yield cluster


@pytest.fixture
def tool(cluster: LocalCluster) -> Iterator[Tool]:
    with Tool(cluster.name_server_address) as tool:
        yield tool


def route_of(tool: Tool, topic: str) -> TopicRouteData:
    response = tool.request_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))
    return TopicRouteData.decode(response.body)


def test_a_route_leads_to_the_broker(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 6)

    route = route_of(tool, "orders")

    (queues,), (broker,) = route.queue_datas, route.broker_datas
    assert (queues.broker_name, queues.read_queue_nums, queues.write_queue_nums, queues.perm) == ("broker-a", 6, 6, 6)
    assert (broker.cluster, broker.broker_name) == ("DefaultCluster", "broker-a")
    assert broker.broker_addrs == {0: str(cluster.address)}


def test_the_broker_answers_as_a_name_server_too(cluster: LocalCluster) -> None:
    """Who was given one address only gets along with it."""
    cluster.engine.create_topic("orders", 1)

    with Tool(cluster.address) as at_the_broker:
        route = route_of(at_the_broker, "orders")

    assert route.broker_datas[0].broker_addrs == {0: str(cluster.address)}


def test_an_unknown_topic_is_no_empty_route(tool: Tool) -> None:
    response = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="nobody"))

    assert (response.code, response.body) == (ResponseCode.TOPIC_NOT_EXIST, b"")
    assert response.remark == (
        "no route: there is no topic 'nobody'; its first message makes it where topics may be made so, or mqadmin "
        "updateTopic does"
    )


def test_new_peers_get_standard_json_and_old_ones_what_they_read(tool: Tool) -> None:
    """A number as a key stands without quotes for those older than 4.9.4."""
    header = GetRouteInfoRequestHeader(topic="TBW102")

    new = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, version=401).body
    old = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, version=399).body
    asked = GetRouteInfoRequestHeader(topic="TBW102", accept_standard_json_only=True)
    old_but_asking = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, asked, version=399).body

    assert b'"brokerAddrs":{0:"' in old
    assert json.loads(new)["brokerDatas"][0]["brokerAddrs"].keys() == {"0"}
    assert old_but_asking == new


def test_topics_may_be_made_where_tbw102_can_be_inherited(tool: Tool) -> None:
    (queues,) = route_of(tool, "TBW102").queue_datas

    assert (queues.perm, queues.read_queue_nums) == (7, 8)


def test_without_topics_made_by_messages_there_is_no_tbw102() -> None:
    with make_cluster(auto_create_topic_enable=False) as cluster, Tool(cluster.name_server_address) as tool:
        response = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="TBW102"))

        assert response.code == ResponseCode.TOPIC_NOT_EXIST


def test_clients_find_the_topics_that_they_expect_of_a_broker(tool: Tool) -> None:
    for topic in ("DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC", "RMQ_SYS_TRACE_TOPIC", "SELF_TEST_TOPIC"):
        assert route_of(tool, topic).queue_datas[0].read_queue_nums >= 1


def test_the_cluster_has_one_broker(cluster: LocalCluster, tool: Tool) -> None:
    """Java's tools read this body with bare numbers as keys."""
    body = tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body

    info = ClusterInfo.decode(body)
    assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"]}
    assert info.broker_addr_table["broker-a"].broker_addrs == {0: str(cluster.address)}
    assert b'{0:"' in body


def test_all_topics_are_listed(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)

    every = TopicList.decode(tool.request_ok(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)
    ours = tool.request_ok(RequestCode.GET_TOPICS_BY_CLUSTER, GetTopicsByClusterRequestHeader(cluster="DefaultCluster"))
    others = tool.request_ok(RequestCode.GET_TOPICS_BY_CLUSTER, GetTopicsByClusterRequestHeader(cluster="elsewhere"))

    assert {"orders", "TBW102", "SCHEDULE_TOPIC_XXXX"} <= set(every.topic_list)
    assert TopicList.decode(ours.body).topic_list == every.topic_list
    assert TopicList.decode(others.body).topic_list == []


def test_the_names_of_cluster_and_broker_are_system_topics(cluster: LocalCluster, tool: Tool) -> None:
    listed = TopicList.decode(tool.request_ok(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body)

    assert listed.topic_list == ["DefaultCluster", "broker-a"]
    assert listed.broker_addr == str(cluster.address)


def test_a_topic_that_the_broker_has_cannot_be_forgotten_by_its_name_server(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)

    tool.request_ok(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicFromNamesrvRequestHeader(topic="orders"))

    assert route_of(tool, "orders").queue_datas[0].write_queue_nums == 1


def test_the_right_to_write_is_taken_and_given_back(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)
    ours = BrokerNameRequestHeader(broker_name="broker-a")

    wiped = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, ours).header(WipeWritePermOfBrokerResponseHeader)
    without = route_of(tool, "orders").queue_datas[0].perm
    added = tool.request_ok(RequestCode.ADD_WRITE_PERM_OF_BROKER, ours).header(AddWritePermOfBrokerResponseHeader)

    assert wiped.wipe_topic_count == added.add_topic_count > 5
    assert (without, route_of(tool, "orders").queue_datas[0].perm) == (4, 6)


def test_the_right_to_write_of_another_broker_is_no_business_of_ours(tool: Tool) -> None:
    response = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequestHeader(broker_name="broker-b"))

    assert response.header(WipeWritePermOfBrokerResponseHeader).wipe_topic_count == 0


def test_entries_are_kept_over_a_restart(tmp_path: Path) -> None:
    header = PutKVConfigRequestHeader(namespace="shops", key="berlin", value="open")
    with make_cluster(tmp_path) as cluster, Tool(cluster.name_server_address) as tool:
        tool.request_ok(RequestCode.PUT_KV_CONFIG, header)

    with make_cluster(tmp_path) as cluster, Tool(cluster.name_server_address) as tool:
        asked = KVConfigKeyRequestHeader(namespace="shops", key="berlin")
        found = tool.request_ok(RequestCode.GET_KV_CONFIG, asked).header(GetKVConfigResponseHeader)
        listed = tool.request_ok(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceRequestHeader(namespace="shops"))

    assert found.value == "open"
    assert KVTable.decode(listed.body).table == {"berlin": "open"}


def test_an_entry_that_is_deleted_or_never_was_is_not_found(tool: Tool) -> None:
    asked = KVConfigKeyRequestHeader(namespace="shops", key="berlin")
    tool.request_ok(RequestCode.PUT_KV_CONFIG, PutKVConfigRequestHeader(namespace="shops", key="berlin", value="open"))

    tool.request_ok(RequestCode.DELETE_KV_CONFIG, asked)

    response = tool.request(RequestCode.GET_KV_CONFIG, asked)
    elsewhere = tool.request(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceRequestHeader(namespace="elsewhere"))
    assert (response.code, response.remark) == (ResponseCode.QUERY_NOT_FOUND, "no entry 'berlin' in namespace 'shops'")
    assert (elsewhere.code, elsewhere.remark) == (ResponseCode.QUERY_NOT_FOUND, "no entries in namespace 'elsewhere'")


def test_an_ordered_topic_says_so_in_its_route(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 4)

    tool.request_ok(
        RequestCode.PUT_KV_CONFIG,
        PutKVConfigRequestHeader(namespace="ORDER_TOPIC_CONFIG", key="orders", value="broker-a:4"),
    )

    assert route_of(tool, "orders").order_topic_conf == "broker-a:4"
    assert route_of(tool, "TBW102").order_topic_conf is None


def test_its_settings_are_told_as_lines(tool: Tool) -> None:
    body = tool.request_ok(RequestCode.GET_NAMESRV_CONFIG).body.decode()

    assert "orderMessageEnable=true" in body.splitlines()
