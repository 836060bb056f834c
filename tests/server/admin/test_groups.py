"""Consumer groups, as administration tools see and change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import StoreFormatError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import CURRENT_VERSION, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerConnection,
    ProducerConnection,
    ProducerTableInfo,
    QuerySubscriptionResponseBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    SubscriptionGroupWrapper,
)
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupRequestHeader,
    GetAllSubscriptionGroupResponseHeader,
    GroupRequestHeader,
    ProducerGroupRequestHeader,
    QuerySubscriptionByConsumerRequestHeader,
)
from mqtemplate.server import BrokerServer
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.store import FolderStoreFiles, MemoryStoreFiles
from tests.server.tool import Tool


def config_of(tool: Tool, group: str) -> SubscriptionGroupConfig:
    response = tool.request_ok(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequestHeader(group=group))
    return SubscriptionGroupConfig.decode(response.body)


# --- the table --------------------------------------------------------------------------------------


def test_a_change_preserves_settings_that_are_unknown_here(tmp_path: Path) -> None:
    """A newer RocketMQ may store more settings of a group in the same file."""
    file = tmp_path / "config" / "subscriptionGroup.json"
    file.parent.mkdir()
    known = {"groupName": "billing", "retryMaxTimes": 3, "newInVersion9": {"a": 1}}
    file.write_text(json.dumps({"subscriptionGroupTable": {"billing": known}, "forbiddenTable": {"x": {"y": 1}}}))
    table = SubscriptionGroupTable(FolderStoreFiles(tmp_path), VirtualClock())
    table.load()

    table.put([SubscriptionGroupConfig(group_name="billing", retry_max_times=5)])

    written = json.loads(file.read_text())
    assert written["subscriptionGroupTable"]["billing"]["retryMaxTimes"] == 5
    assert written["subscriptionGroupTable"]["billing"]["newInVersion9"] == {"a": 1}
    assert written["forbiddenTable"] == {"x": {"y": 1}}
    assert written["dataVersion"]["counter"] == 1


def test_a_missing_group_is_created_and_stored() -> None:
    store_files, clock = MemoryStoreFiles(), VirtualClock()

    created = SubscriptionGroupTable(store_files, clock).ensure("billing")

    loaded = SubscriptionGroupTable(store_files, clock)
    loaded.load()
    assert created == loaded.find("billing") == SubscriptionGroupConfig(group_name="billing")


def test_without_auto_creation_a_missing_group_is_refused() -> None:
    table = SubscriptionGroupTable(MemoryStoreFiles(), VirtualClock(), auto_create=False)

    with pytest.raises(RefusedError, match="group 'billing' does not exist; create it first, or set auto-create-"):
        table.ensure("billing")

    assert table.find("billing") is None


def test_system_groups_exist_without_being_stored() -> None:
    table = SubscriptionGroupTable(MemoryStoreFiles(), VirtualClock(), auto_create=False)

    assert table.ensure("TOOLS_CONSUMER") == SubscriptionGroupConfig(group_name="TOOLS_CONSUMER")
    assert table.version.counter == 0


@pytest.mark.parametrize("text", ['{"subscriptionGroupTable": {"a": {"retryMaxTimes": "many"}}}', "[1]"])
def test_the_error_for_a_malformed_table_suggests_the_backup(text: str) -> None:
    store_files = MemoryStoreFiles()
    store_files.write_bytes("config/subscriptionGroup.json", text.encode())

    with pytest.raises(StoreFormatError, match="config/subscriptionGroup.json .*restore it from"):
        SubscriptionGroupTable(store_files, VirtualClock()).load()


# --- settings ---------------------------------------------------------------------------------------


def test_a_group_is_changed_listed_and_deleted(tool: Tool) -> None:
    config = SubscriptionGroupConfig(group_name="billing", retry_max_times=3, consume_enable=False)
    tool.request_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode())
    assert config_of(tool, "billing") == config

    delete = DeleteSubscriptionGroupRequestHeader(group_name="billing")
    tool.request_ok(RequestCode.DELETE_SUBSCRIPTIONGROUP, delete)

    response = tool.request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequestHeader(group="billing"))
    assert response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert response.remark == "group 'billing' does not exist; its first consumer creates it, or mqadmin updateSubGroup"


@pytest.mark.parametrize(("clean", "kept"), [(True, None), (False, 5)])
def test_the_offsets_of_a_deleted_group_are_deleted_on_request(
    server: BrokerServer, tool: Tool, clean: bool, kept: int | None
) -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    server.engine.commit_offset("billing", queue, 5)

    header = DeleteSubscriptionGroupRequestHeader(group_name="billing", clean_offset=clean)
    tool.request_ok(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    assert server.engine.committed_offset("billing", queue) == kept


def test_one_request_creates_several_groups_and_the_list_has_pages(tool: Tool) -> None:
    configs = [SubscriptionGroupConfig(group_name=name) for name in ("a", "b", "c")]
    body = SubscriptionGroupList(group_config_list=configs).encode()
    tool.request_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body)

    whole = tool.request_ok(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    names = list(SubscriptionGroupWrapper.decode(whole.body).subscription_group_table)
    page = tool.request_ok(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        GetAllSubscriptionGroupRequestHeader(group_seq=len(names) - 2, max_group_num=10),
    )

    assert {"a", "b", "c", "TOOLS_CONSUMER"} <= set(names)
    assert whole.header(GetAllSubscriptionGroupResponseHeader).total_group_num == len(names)
    assert list(SubscriptionGroupWrapper.decode(page.body).subscription_group_table) == names[-2:]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (SubscriptionGroupConfig(group_name="a b"), "'a b' is no valid group name; use at most 120 letters"),
        (SubscriptionGroupConfig(group_name="g" * 121), "is no valid group name; use at most 120 letters"),
        (
            SubscriptionGroupConfig(group_name="g", retry_queue_nums=-1),
            "retryQueueNums of group 'g' must be 0 or more, got -1",
        ),
    ],
)
def test_an_invalid_group_is_refused_with_the_reason(tool: Tool, config: SubscriptionGroupConfig, text: str) -> None:
    response = tool.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode())

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark is not None
    assert text in response.remark


# --- connected clients ------------------------------------------------------------------------------


def test_the_members_of_a_group_are_returned_with_its_subscriptions(tool: Tool) -> None:
    tool.consume("billing", "orders", client_id="me@1")

    response = tool.request_ok(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequestHeader(consumer_group="billing")
    )

    found = ConsumerConnection.decode(response.body)
    (member,) = found.connection_set
    assert (member.client_id, member.language, member.version) == ("me@1", "PYTHON", CURRENT_VERSION)
    assert member.client_addr.startswith("127.0.0.1:")
    assert "orders" in found.subscription_table
    assert (found.consume_type, found.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert found.consume_from_where == "CONSUME_FROM_LAST_OFFSET"


def test_a_group_without_consumers_is_not_online(tool: Tool) -> None:
    header = ConsumerGroupRequestHeader(consumer_group="billing")

    response = tool.request(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)

    assert response.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert response.remark == "group 'billing' has no connected consumer"


def test_producers_are_listed_by_group_and_all_together(tool: Tool) -> None:
    tool.produce("shop", client_id="me@1")

    header = ProducerGroupRequestHeader(producer_group="shop")
    one = ProducerConnection.decode(tool.request_ok(RequestCode.GET_PRODUCER_CONNECTION_LIST, header).body)
    every = ProducerTableInfo.decode(tool.request_ok(RequestCode.GET_ALL_PRODUCER_INFO).body)
    missing = ProducerGroupRequestHeader(producer_group="missing")
    refused = tool.request(RequestCode.GET_PRODUCER_CONNECTION_LIST, missing)

    assert [connection.client_id for connection in one.connection_set] == ["me@1"]
    assert [info.client_id for info in every.data["shop"]] == ["me@1"]
    assert (refused.code, refused.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "group 'missing' has no connected producer",
    )


def test_the_topics_and_subscriptions_of_a_group_are_returned(server: BrokerServer, tool: Tool) -> None:
    server.engine.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 5)
    tool.consume("billing", "orders")

    topics = tool.request_ok(RequestCode.QUERY_TOPICS_BY_CONSUMER, GroupRequestHeader(group="billing"))
    header = QuerySubscriptionByConsumerRequestHeader(group="billing", topic="orders")
    subscription = tool.request_ok(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, header)
    found = QuerySubscriptionResponseBody.decode(subscription.body)

    assert TopicList.decode(topics.body).topic_list == ["orders"]
    assert found.subscription_data is not None
    assert found.subscription_data.topic == "orders"
