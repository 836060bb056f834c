"""Topics, as administration tools create, change, list and delete them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import GroupList
from mqtemplate.remoting.protocol.bodies.route import (
    CreateTopicListRequestBody,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicStatsTable,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.admin import (
    CreateTopicRequestHeader,
    GetAllTopicConfigRequestHeader,
    GetAllTopicConfigResponseHeader,
    TopicNameRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.tool import ANY_PORT, Tool, make_engine


def make_server(path: Path | None = None) -> BrokerServer:
    settings = BrokerServerSettings(listen=ANY_PORT)
    return BrokerServer(make_engine(VirtualClock(), path), settings)


def update(
    tool: Tool, topic: str, queues: int = 8, perm: int = 6, attributes: str | None = None, read: int | None = None
) -> RemotingCommand:
    header = CreateTopicRequestHeader(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=queues if read is None else read,
        write_queue_nums=queues,
        perm=perm,
        topic_filter_type="SINGLE_TAG",
        order=False,
        attributes=attributes,
    )
    return tool.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def config_of(tool: Tool, topic: str) -> TopicConfig:
    response = tool.request_ok(RequestCode.GET_TOPIC_CONFIG, TopicNameRequestHeader(topic=topic))
    return TopicConfig.decode(response.body)


def test_a_created_topic_is_stored(tmp_path: Path) -> None:
    with make_server(tmp_path) as server, Tool(server.address) as tool:
        assert update(tool, "orders", 3, attributes="+message.type=FIFO").code == ResponseCode.SUCCESS
    server.engine.close()

    with make_server(tmp_path) as again, Tool(again.address) as tool:
        config = config_of(tool, "orders")
    again.engine.close()

    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)
    assert config.attributes == {"message.type": "FIFO"}


def test_the_number_of_queues_can_be_reduced(server: BrokerServer, tool: Tool) -> None:
    """An administrator reduces the write queues first, and the read queues when these are empty."""
    update(tool, "orders", 8)
    assert len(server.engine.queues("orders")) == 8

    update(tool, "orders", 2, read=8)

    config = config_of(tool, "orders")
    assert (config.read_queue_nums, config.write_queue_nums) == (8, 2)
    assert len(server.engine.queues("orders")) == 2


def test_attributes_are_added_and_removed(tool: Tool) -> None:
    update(tool, "orders", attributes="+message.type=DELAY,+cleanup.policy=DELETE")

    update(tool, "orders", attributes="-message.type")

    assert config_of(tool, "orders").attributes == {"cleanup.policy": "DELETE"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topic": "a b"}, "topic 'a b' has characters that are not allowed"),
        ({"topic": "TBW102"}, "topic 'TBW102' is a system topic and cannot be changed"),
        ({"topic": "rmq_sys_x"}, "topic 'rmq_sys_x' is a system topic and cannot be changed"),
        ({"topic": "DefaultCluster"}, "topic 'DefaultCluster' is a system topic and cannot be changed"),
        ({"topic": "orders", "queues": 0}, "readQueueNums of topic 'orders' must be 1..1024, got 0"),
        ({"topic": "orders", "queues": 4_000}, "readQueueNums of topic 'orders' must be 1..1024, got 4000"),
        (
            {"topic": "orders", "perm": 9},
            "perm of topic 'orders' must be a sum of 4 (read), 2 (write) and 1 (inherit), got 9",
        ),
        (
            {"topic": "orders", "attributes": "+colour=red"},
            "topic attribute '+colour=red': allowed are message.type, queue.type, cleanup.policy, as +name=value",
        ),
        (
            {"topic": "orders", "attributes": "+queue.type=BatchCQ"},
            "topic attribute '+queue.type=BatchCQ': write +queue.type=… with one of SimpleCQ",
        ),
    ],
)
def test_an_invalid_topic_is_refused_with_the_reason(tool: Tool, changes: dict[str, object], text: str) -> None:
    response = update(tool, **changes)  # type: ignore[arg-type]

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark is not None
    assert text in response.remark


def test_one_request_creates_several_topics(tool: Tool) -> None:
    configs = [TopicConfig(topic_name=name, read_queue_nums=2, write_queue_nums=2) for name in ("a", "b")]

    tool.request_ok(
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=CreateTopicListRequestBody(topic_config_list=configs).encode()
    )

    assert [config_of(tool, name).write_queue_nums for name in ("a", "b")] == [2, 2]


def test_a_topic_is_deleted_with_its_offsets(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 2)
    server.engine.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 5)

    tool.request_ok(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic="orders"))

    response = tool.request(RequestCode.GET_TOPIC_CONFIG, TopicNameRequestHeader(topic="orders"))
    assert response.code == ResponseCode.TOPIC_NOT_EXIST
    assert response.remark == "topic 'orders' does not exist; create it with mqadmin updateTopic"
    assert server.engine.engine.offsets.topics_of("billing") == set()


def test_deleting_a_missing_topic_succeeds(tool: Tool) -> None:
    tool.request_ok(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic="missing"))


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("SCHEDULE_TOPIC_XXXX", "topic 'SCHEDULE_TOPIC_XXXX' is a system topic and cannot be deleted"),
        (" ", "the topic to delete is empty; give its name"),
    ],
)
def test_a_system_topic_and_an_empty_name_cannot_be_deleted(tool: Tool, topic: str, text: str) -> None:
    response = tool.request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=topic))

    assert (response.code, response.remark) == (ResponseCode.INVALID_PARAMETER, text)


def test_all_topics_are_listed_at_once_or_in_pages(tool: Tool) -> None:
    whole = tool.request_ok(RequestCode.GET_ALL_TOPIC_CONFIG)
    names = list(TopicConfigSerializeWrapper.decode(whole.body).topic_config_table)
    total = whole.header(GetAllTopicConfigResponseHeader).total_topic_num

    pages = []
    for start in range(0, len(names), 4):
        page = GetAllTopicConfigRequestHeader(topic_seq=start, max_topic_num=4)
        response = tool.request_ok(RequestCode.GET_ALL_TOPIC_CONFIG, page)
        pages.append(list(TopicConfigSerializeWrapper.decode(response.body).topic_config_table))

    assert total == len(names) > 8
    assert sum(pages, []) == names
    assert len(pages[0]) == 4


def test_the_version_of_the_table_counts_its_changes(tool: Tool) -> None:
    def version() -> int:
        body = tool.request_ok(RequestCode.GET_ALL_TOPIC_CONFIG).body
        return TopicConfigSerializeWrapper.decode(body).data_version.counter

    before = version()
    update(tool, "orders")
    created = version()
    update(tool, "orders")

    assert (created, version()) == (before + 1, before + 1)  # The second request changed nothing.


def test_topic_stats_have_the_offsets_of_each_queue(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 2)
    queue = MessageQueue("orders", "broker-a", 1)
    for _ in range(3):
        server.engine.send(Message("orders", b"x"), queue)

    body = tool.request_ok(RequestCode.GET_TOPIC_STATS_INFO, TopicNameRequestHeader(topic="orders")).body

    assert body.startswith(b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:{')
    table = TopicStatsTable.decode(body).offset_table
    assert (table[queue].min_offset, table[queue].max_offset) == (0, 3)
    assert table[queue].last_update_timestamp == server.engine.clock.now_ms()
    assert table[MessageQueue("orders", "broker-a", 0)].max_offset == 0


def test_topic_stats_of_a_missing_topic_are_refused(tool: Tool) -> None:
    response = tool.request(RequestCode.GET_TOPIC_STATS_INFO, TopicNameRequestHeader(topic="%RETRY%missing"))

    assert response.code == ResponseCode.TOPIC_NOT_EXIST
    assert response.remark == "topic '%RETRY%missing' does not exist; it is created when its group needs it"


def test_the_groups_of_a_topic_are_listed_connected_or_not(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 1)
    server.engine.commit_offset("disconnected", MessageQueue("orders", "broker-a", 0), 1)
    tool.consume("with-member", "orders")

    body = tool.request_ok(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicNameRequestHeader(topic="orders"))

    assert GroupList.decode(body.body).group_list == ["disconnected", "with-member"]


def test_the_system_topics_are_listed(tool: Tool) -> None:
    listed = TopicList.decode(tool.request_ok(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body).topic_list

    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"} <= set(listed)


def test_the_permissions_of_a_topic_apply_to_clients(tool: Tool) -> None:
    update(tool, "orders", 1)
    tool.send("orders")
    pull = PullMessageRequestHeader(
        consumer_group="billing",
        topic="orders",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=PullSysFlag.SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )

    update(tool, "orders", 1, perm=4)
    only_readable = (tool.send_any("orders").code, tool.request(RequestCode.PULL_MESSAGE, pull).code)
    update(tool, "orders", 1, perm=2)
    only_writable = (tool.send_any("orders").code, tool.request(RequestCode.PULL_MESSAGE, pull).code)

    assert only_readable == (ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS)
    assert only_writable == (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)
