"""Topics, as ``mqadmin`` and the dashboard make, change, list and delete them."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    with make_server() as server:
        yield server
    server.engine.close()


@pytest.fixture
def tool(server: BrokerServer) -> Iterator[Tool]:
    with Tool(server.address) as tool:
        yield tool


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
    return tool.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def config_of(tool: Tool, topic: str) -> TopicConfig:
    answer = tool.ask_well(RequestCode.GET_TOPIC_CONFIG, TopicNameRequestHeader(topic=topic))
    return TopicConfig.decode(answer.body)


def test_a_topic_is_made_and_kept(tmp_path: Path) -> None:
    with make_server(tmp_path) as server, Tool(server.address) as tool:
        assert update(tool, "orders", 3, attributes="+message.type=FIFO").code == ResponseCode.SUCCESS
    server.engine.close()

    with make_server(tmp_path) as again, Tool(again.address) as tool:
        config = config_of(tool, "orders")
    again.engine.close()

    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)
    assert config.attributes == {"message.type": "FIFO"}


def test_a_topic_may_get_fewer_queues(server: BrokerServer, tool: Tool) -> None:
    """An administrator closes queues to writing first, and to reading when they are empty."""
    update(tool, "orders", 8)
    assert len(server.engine.queues("orders")) == 8

    update(tool, "orders", 2, read=8)

    config = config_of(tool, "orders")
    assert (config.read_queue_nums, config.write_queue_nums) == (8, 2)
    assert len(server.engine.queues("orders")) == 2


def test_attributes_are_changed_one_by_one(tool: Tool) -> None:
    update(tool, "orders", attributes="+message.type=DELAY,+cleanup.policy=DELETE")

    update(tool, "orders", attributes="-message.type")

    assert config_of(tool, "orders").attributes == {"cleanup.policy": "DELETE"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topic": "a b"}, "topic 'a b' has characters that are not allowed"),
        ({"topic": "TBW102"}, "topic 'TBW102' belongs to the broker itself and cannot be changed"),
        ({"topic": "rmq_sys_x"}, "topic 'rmq_sys_x' belongs to the broker itself and cannot be changed"),
        ({"topic": "DefaultCluster"}, "topic 'DefaultCluster' belongs to the broker itself and cannot be changed"),
        ({"topic": "orders", "queues": 0}, "readQueueNums of topic 'orders' must be 1..1024, got 0"),
        ({"topic": "orders", "queues": 4_000}, "readQueueNums of topic 'orders' must be 1..1024, got 4000"),
        (
            {"topic": "orders", "perm": 9},
            "perm of topic 'orders' must be made of 4 (read), 2 (write) and 1 (inherit), got 9",
        ),
        (
            {"topic": "orders", "attributes": "+colour=red"},
            "topic attribute '+colour=red': known are message.type, queue.type, cleanup.policy, as +name=value",
        ),
        (
            {"topic": "orders", "attributes": "+queue.type=BatchCQ"},
            "topic attribute '+queue.type=BatchCQ': write +queue.type=… with one of SimpleCQ",
        ),
    ],
)
def test_a_topic_that_cannot_be_is_refused_with_the_reason(tool: Tool, changes: dict[str, object], text: str) -> None:
    answer = update(tool, **changes)  # type: ignore[arg-type]

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark is not None
    assert text in answer.remark


def test_several_topics_are_made_by_one_request(tool: Tool) -> None:
    configs = [TopicConfig(topic_name=name, read_queue_nums=2, write_queue_nums=2) for name in ("a", "b")]

    tool.ask_well(
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=CreateTopicListRequestBody(topic_config_list=configs).encode()
    )

    assert [config_of(tool, name).write_queue_nums for name in ("a", "b")] == [2, 2]


def test_a_topic_that_is_deleted_is_gone_with_the_offsets_in_it(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 2)
    server.engine.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 5)

    tool.ask_well(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic="orders"))

    answer = tool.ask(RequestCode.GET_TOPIC_CONFIG, TopicNameRequestHeader(topic="orders"))
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert answer.remark == "there is no topic 'orders'; make it with mqadmin updateTopic, or send to it"
    assert server.engine.offsets.topics_of("billing") == set()


def test_deleting_what_is_not_there_is_as_good(tool: Tool) -> None:
    tool.ask_well(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic="nobody"))


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("SCHEDULE_TOPIC_XXXX", "topic 'SCHEDULE_TOPIC_XXXX' belongs to the broker itself and cannot be deleted"),
        (" ", "the topic to delete is empty; name one"),
    ],
)
def test_what_the_broker_needs_is_not_deleted(tool: Tool, topic: str, text: str) -> None:
    answer = tool.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic=topic))

    assert (answer.code, answer.remark) == (ResponseCode.INVALID_PARAMETER, text)


def test_all_topics_come_at_once_or_by_pages(tool: Tool) -> None:
    whole = tool.ask_well(RequestCode.GET_ALL_TOPIC_CONFIG)
    names = list(TopicConfigSerializeWrapper.decode(whole.body).topic_config_table)
    total = whole.header(GetAllTopicConfigResponseHeader).total_topic_num

    pages = []
    for start in range(0, len(names), 4):
        page = GetAllTopicConfigRequestHeader(topic_seq=start, max_topic_num=4)
        answer = tool.ask_well(RequestCode.GET_ALL_TOPIC_CONFIG, page)
        pages.append(list(TopicConfigSerializeWrapper.decode(answer.body).topic_config_table))

    assert total == len(names) > 8
    assert sum(pages, []) == names
    assert len(pages[0]) == 4


def test_the_version_of_the_table_counts_its_changes(tool: Tool) -> None:
    def version() -> int:
        body = tool.ask_well(RequestCode.GET_ALL_TOPIC_CONFIG).body
        return TopicConfigSerializeWrapper.decode(body).data_version.counter

    before = version()
    update(tool, "orders")
    made = version()
    update(tool, "orders")

    assert (made, version()) == (before + 1, before + 1)  # the second said nothing new


def test_the_ends_of_each_queue_are_told(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 2)
    queue = MessageQueue("orders", "broker-a", 1)
    for _ in range(3):
        server.engine.send(Message("orders", b"x"), queue)

    body = tool.ask_well(RequestCode.GET_TOPIC_STATS_INFO, TopicNameRequestHeader(topic="orders")).body

    assert body.startswith(b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:{')
    table = TopicStatsTable.decode(body).offset_table
    assert (table[queue].min_offset, table[queue].max_offset) == (0, 3)
    assert table[queue].last_update_timestamp == server.engine.clock.now_ms()
    assert table[MessageQueue("orders", "broker-a", 0)].max_offset == 0


def test_figures_of_an_unknown_topic_are_refused(tool: Tool) -> None:
    answer = tool.ask(RequestCode.GET_TOPIC_STATS_INFO, TopicNameRequestHeader(topic="%RETRY%nobody"))

    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert answer.remark == "there is no topic '%RETRY%nobody'; it is made when its group needs it"


def test_who_consumes_a_topic_is_told_whether_connected_or_not(server: BrokerServer, tool: Tool) -> None:
    update(tool, "orders", 1)
    server.engine.commit_offset("gone", MessageQueue("orders", "broker-a", 0), 1)
    tool.consume("here", "orders")

    body = tool.ask_well(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicNameRequestHeader(topic="orders"))

    assert GroupList.decode(body.body).group_list == ["gone", "here"]


def test_the_brokers_own_topics_are_told(tool: Tool) -> None:
    listed = TopicList.decode(tool.ask_well(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body).topic_list

    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"} <= set(listed)


def test_a_topic_that_is_closed_to_writing_or_reading_is_so_for_clients(tool: Tool) -> None:
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
    closed_to_writing = (tool.send_any("orders").code, tool.ask(RequestCode.PULL_MESSAGE, pull).code)
    update(tool, "orders", 1, perm=2)
    closed_to_reading = (tool.send_any("orders").code, tool.ask(RequestCode.PULL_MESSAGE, pull).code)

    assert closed_to_writing == (ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS)
    assert closed_to_reading == (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)
