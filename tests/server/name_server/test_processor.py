"""The name server: routes, lists, the key-value table and write permissions."""

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


def test_a_route_has_the_queues_and_the_address_of_the_broker(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 6)

    route = route_of(tool, "orders")

    (queues,), (broker,) = route.queue_datas, route.broker_datas
    assert (queues.broker_name, queues.read_queue_nums, queues.write_queue_nums, queues.perm) == ("broker-a", 6, 6, 6)
    assert (broker.cluster, broker.broker_name) == ("DefaultCluster", "broker-a")
    assert broker.broker_addrs == {0: str(cluster.address)}


def test_the_broker_answers_requests_to_a_name_server_too(cluster: LocalCluster) -> None:
    """A client may know one address only."""
    cluster.engine.create_topic("orders", 1)

    with Tool(cluster.address) as at_the_broker:
        route = route_of(at_the_broker, "orders")

    assert route.broker_datas[0].broker_addrs == {0: str(cluster.address)}


def test_a_missing_topic_is_an_error_and_no_empty_route(tool: Tool) -> None:
    response = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="missing"))

    assert (response.code, response.body) == (ResponseCode.TOPIC_NOT_EXIST, b"")
    assert response.remark == (
        "no route: topic 'missing' does not exist; its first message creates it if the broker permits that, or mqadmin "
        "updateTopic"
    )


def test_old_clients_receive_fastjsons_form_and_new_ones_standard_json(tool: Tool) -> None:
    """For clients older than 4.9.4, numbers as keys have no quotes."""
    header = GetRouteInfoRequestHeader(topic="TBW102")

    new = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, version=401).body
    old = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, version=399).body
    standard = GetRouteInfoRequestHeader(topic="TBW102", accept_standard_json_only=True)
    old_with_standard = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, standard, version=399).body

    assert b'"brokerAddrs":{0:"' in old
    assert json.loads(new)["brokerDatas"][0]["brokerAddrs"].keys() == {"0"}
    assert old_with_standard == new


def test_tbw102_has_the_inherit_permission(tool: Tool) -> None:
    (queues,) = route_of(tool, "TBW102").queue_datas

    assert (queues.perm, queues.read_queue_nums) == (7, 8)


def test_without_auto_creation_there_is_no_tbw102() -> None:
    with make_cluster(auto_create_topic_enable=False) as cluster, Tool(cluster.name_server_address) as tool:
        response = tool.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="TBW102"))

        assert response.code == ResponseCode.TOPIC_NOT_EXIST


def test_the_system_topics_have_routes(tool: Tool) -> None:
    for topic in ("DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC", "RMQ_SYS_TRACE_TOPIC", "SELF_TEST_TOPIC"):
        assert route_of(tool, topic).queue_datas[0].read_queue_nums >= 1


def test_the_cluster_has_one_broker(cluster: LocalCluster, tool: Tool) -> None:
    """Java's tools read this body with numbers without quotes as keys."""
    body = tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body

    info = ClusterInfo.decode(body)
    assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"]}
    assert info.broker_addr_table["broker-a"].broker_addrs == {0: str(cluster.address)}
    assert b'{0:"' in body


def test_all_topics_are_listed(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)

    listed = TopicList.decode(tool.request_ok(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)
    of_cluster = tool.request_ok(
        RequestCode.GET_TOPICS_BY_CLUSTER, GetTopicsByClusterRequestHeader(cluster="DefaultCluster")
    )
    of_missing_cluster = tool.request_ok(
        RequestCode.GET_TOPICS_BY_CLUSTER, GetTopicsByClusterRequestHeader(cluster="missing")
    )

    assert {"orders", "TBW102", "SCHEDULE_TOPIC_XXXX"} <= set(listed.topic_list)
    assert TopicList.decode(of_cluster.body).topic_list == listed.topic_list
    assert TopicList.decode(of_missing_cluster.body).topic_list == []


def test_the_names_of_cluster_and_broker_are_listed_as_system_topics(cluster: LocalCluster, tool: Tool) -> None:
    listed = TopicList.decode(tool.request_ok(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body)

    assert listed.topic_list == ["DefaultCluster", "broker-a"]
    assert listed.broker_addr == str(cluster.address)


def test_the_name_server_cannot_delete_a_topic_of_its_own_broker(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)

    tool.request_ok(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicFromNamesrvRequestHeader(topic="orders"))

    assert route_of(tool, "orders").queue_datas[0].write_queue_nums == 1


def test_the_write_permission_is_revoked_and_granted(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 1)
    header = BrokerNameRequestHeader(broker_name="broker-a")

    wiped = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, header).header(WipeWritePermOfBrokerResponseHeader)
    without = route_of(tool, "orders").queue_datas[0].perm
    added = tool.request_ok(RequestCode.ADD_WRITE_PERM_OF_BROKER, header).header(AddWritePermOfBrokerResponseHeader)

    assert wiped.wipe_topic_count == added.add_topic_count > 5
    assert (without, route_of(tool, "orders").queue_datas[0].perm) == (4, 6)


def test_revoking_the_write_permission_of_an_unknown_broker_has_no_effect(tool: Tool) -> None:
    response = tool.request_ok(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequestHeader(broker_name="broker-b"))

    assert response.header(WipeWritePermOfBrokerResponseHeader).wipe_topic_count == 0


def test_entries_survive_a_restart(tmp_path: Path) -> None:
    header = PutKVConfigRequestHeader(namespace="shops", key="berlin", value="open")
    with make_cluster(tmp_path) as cluster, Tool(cluster.name_server_address) as tool:
        tool.request_ok(RequestCode.PUT_KV_CONFIG, header)

    with make_cluster(tmp_path) as cluster, Tool(cluster.name_server_address) as tool:
        key = KVConfigKeyRequestHeader(namespace="shops", key="berlin")
        found = tool.request_ok(RequestCode.GET_KV_CONFIG, key).header(GetKVConfigResponseHeader)
        listed = tool.request_ok(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceRequestHeader(namespace="shops"))

    assert found.value == "open"
    assert KVTable.decode(listed.body).table == {"berlin": "open"}


def test_a_deleted_entry_and_a_missing_namespace_are_not_found(tool: Tool) -> None:
    key = KVConfigKeyRequestHeader(namespace="shops", key="berlin")
    tool.request_ok(RequestCode.PUT_KV_CONFIG, PutKVConfigRequestHeader(namespace="shops", key="berlin", value="open"))

    tool.request_ok(RequestCode.DELETE_KV_CONFIG, key)

    response = tool.request(RequestCode.GET_KV_CONFIG, key)
    elsewhere = tool.request(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceRequestHeader(namespace="elsewhere"))
    assert (response.code, response.remark) == (ResponseCode.QUERY_NOT_FOUND, "no entry 'berlin' in 'shops'")
    assert (elsewhere.code, elsewhere.remark) == (ResponseCode.QUERY_NOT_FOUND, "namespace 'elsewhere' has no entries")


def test_the_route_of_an_ordered_topic_has_its_order(cluster: LocalCluster, tool: Tool) -> None:
    cluster.engine.create_topic("orders", 4)

    tool.request_ok(
        RequestCode.PUT_KV_CONFIG,
        PutKVConfigRequestHeader(namespace="ORDER_TOPIC_CONFIG", key="orders", value="broker-a:4"),
    )

    assert route_of(tool, "orders").order_topic_conf == "broker-a:4"
    assert route_of(tool, "TBW102").order_topic_conf is None


def test_the_settings_of_the_name_server_are_returned_as_lines(tool: Tool) -> None:
    body = tool.request_ok(RequestCode.GET_NAMESRV_CONFIG).body.decode()

    assert "orderMessageEnable=true" in body.splitlines()
