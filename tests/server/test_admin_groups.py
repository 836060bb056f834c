"""Groups, as ``mqadmin`` and the dashboard see and change them."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from mqtemplate.server import BrokerServer, BrokerServerSettings
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.store import FolderStoreFiles, MemoryStoreFiles
from tests.server.tool import ANY_PORT, Tool, make_engine


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    engine = make_engine(VirtualClock())
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
        yield server
    engine.close()


@pytest.fixture
def tool(server: BrokerServer) -> Iterator[Tool]:
    with Tool(server.address) as tool:
        yield tool


def config_of(tool: Tool, group: str) -> SubscriptionGroupConfig:
    answer = tool.ask_well(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequestHeader(group=group))
    return SubscriptionGroupConfig.decode(answer.body)


# --- the table --------------------------------------------------------------------------------------


def test_a_group_is_kept_in_rocketmqs_form_and_what_is_not_known_stays(tmp_path: Path) -> None:
    """A newer RocketMQ may keep more of a group than we know; it must not be lost by a change here."""
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


def test_a_group_is_made_when_it_is_needed_unless_that_is_switched_off() -> None:
    store_files, clock = MemoryStoreFiles(), VirtualClock()

    made = SubscriptionGroupTable(store_files, clock).ensure("billing")

    refused = SubscriptionGroupTable(MemoryStoreFiles(), clock, auto_create=False).ensure("billing")
    again = SubscriptionGroupTable(store_files, clock)
    again.load()
    assert made == again.find("billing") == SubscriptionGroupConfig(group_name="billing")
    assert refused is None


def test_rocketmqs_own_groups_are_there_without_being_written() -> None:
    table = SubscriptionGroupTable(MemoryStoreFiles(), VirtualClock(), auto_create=False)

    assert table.ensure("TOOLS_CONSUMER") == SubscriptionGroupConfig(group_name="TOOLS_CONSUMER")
    assert table.version.counter == 0


@pytest.mark.parametrize("text", ['{"subscriptionGroupTable": {"a": {"retryMaxTimes": "many"}}}', "[1]"])
def test_a_table_that_cannot_be_understood_is_refused_with_a_way_out(text: str) -> None:
    store_files = MemoryStoreFiles()
    store_files.write_bytes("config/subscriptionGroup.json", text.encode())

    with pytest.raises(StoreFormatError, match="config/subscriptionGroup.json .*restore it from"):
        SubscriptionGroupTable(store_files, VirtualClock()).load()


# --- settings ---------------------------------------------------------------------------------------


def test_a_group_is_changed_listed_and_deleted(tool: Tool) -> None:
    config = SubscriptionGroupConfig(group_name="billing", retry_max_times=3, consume_enable=False)
    tool.ask_well(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode())
    assert config_of(tool, "billing") == config

    delete = DeleteSubscriptionGroupRequestHeader(group_name="billing")
    tool.ask_well(RequestCode.DELETE_SUBSCRIPTIONGROUP, delete)

    answer = tool.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, GroupRequestHeader(group="billing"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert answer.remark == "there is no group 'billing'; its first consumer makes it, or mqadmin updateSubGroup"


@pytest.mark.parametrize(("clean", "kept"), [(True, None), (False, 5)])
def test_offsets_go_with_a_deleted_group_if_that_is_asked_for(
    server: BrokerServer, tool: Tool, clean: bool, kept: int | None
) -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    server.engine.commit_offset("billing", queue, 5)

    header = DeleteSubscriptionGroupRequestHeader(group_name="billing", clean_offset=clean)
    tool.ask_well(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    assert server.engine.committed_offset("billing", queue) == kept


def test_several_groups_are_made_by_one_request_and_come_back_by_pages(tool: Tool) -> None:
    configs = [SubscriptionGroupConfig(group_name=name) for name in ("a", "b", "c")]
    body = SubscriptionGroupList(group_config_list=configs).encode()
    tool.ask_well(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body)

    whole = tool.ask_well(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    names = list(SubscriptionGroupWrapper.decode(whole.body).subscription_group_table)
    page = tool.ask_well(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        GetAllSubscriptionGroupRequestHeader(group_seq=len(names) - 2, max_group_num=10),
    )

    assert {"a", "b", "c", "TOOLS_CONSUMER"} <= set(names)
    assert whole.header(GetAllSubscriptionGroupResponseHeader).total_group_num == len(names)
    assert list(SubscriptionGroupWrapper.decode(page.body).subscription_group_table) == names[-2:]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (SubscriptionGroupConfig(group_name="a b"), "group 'a b' is no name for a group; use up to 120 letters"),
        (SubscriptionGroupConfig(group_name="g" * 121), "is no name for a group; use up to 120 letters"),
        (
            SubscriptionGroupConfig(group_name="g", retry_queue_nums=-1),
            "retryQueueNums of group 'g' must be 0 or more, got -1",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_the_reason(
    tool: Tool, config: SubscriptionGroupConfig, text: str
) -> None:
    answer = tool.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode())

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark is not None
    assert text in answer.remark


# --- who is there -----------------------------------------------------------------------------------


def test_the_members_of_a_group_are_told_with_what_they_subscribe(tool: Tool) -> None:
    tool.consume("billing", "orders", client_id="me@1")

    answer = tool.ask_well(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequestHeader(consumer_group="billing")
    )

    found = ConsumerConnection.decode(answer.body)
    (member,) = found.connection_set
    assert (member.client_id, member.language, member.version) == ("me@1", "PYTHON", CURRENT_VERSION)
    assert member.client_addr.startswith("127.0.0.1:")
    assert "orders" in found.subscription_table
    assert (found.consume_type, found.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert found.consume_from_where == "CONSUME_FROM_LAST_OFFSET"


def test_a_group_that_nobody_consumes_for_is_not_online(tool: Tool) -> None:
    header = ConsumerGroupRequestHeader(consumer_group="billing")

    answer = tool.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)

    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert answer.remark == "nobody consumes for group 'billing' now"


def test_producers_are_told_by_group_and_all_together(tool: Tool) -> None:
    tool.produce("shop", client_id="me@1")

    header = ProducerGroupRequestHeader(producer_group="shop")
    one = ProducerConnection.decode(tool.ask_well(RequestCode.GET_PRODUCER_CONNECTION_LIST, header).body)
    every = ProducerTableInfo.decode(tool.ask_well(RequestCode.GET_ALL_PRODUCER_INFO).body)
    nobody = ProducerGroupRequestHeader(producer_group="nobody")
    refused = tool.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, nobody)

    assert [connection.client_id for connection in one.connection_set] == ["me@1"]
    assert [info.client_id for info in every.data["shop"]] == ["me@1"]
    assert (refused.code, refused.remark) == (ResponseCode.SYSTEM_ERROR, "nobody sends for group 'nobody' now")


def test_a_groups_topics_and_subscriptions_are_told(server: BrokerServer, tool: Tool) -> None:
    server.engine.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 5)
    tool.consume("billing", "orders")

    topics = tool.ask_well(RequestCode.QUERY_TOPICS_BY_CONSUMER, GroupRequestHeader(group="billing"))
    asked = QuerySubscriptionByConsumerRequestHeader(group="billing", topic="orders")
    found = QuerySubscriptionResponseBody.decode(tool.ask_well(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, asked).body)

    assert TopicList.decode(topics.body).topic_list == ["orders"]
    assert found.subscription_data is not None
    assert found.subscription_data.topic == "orders"
