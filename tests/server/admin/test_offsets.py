"""Offsets, as administration tools read and reset them."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerOffsetSerializeWrapper,
    ConsumeStats,
    ConsumeStatsList,
    GetConsumerStatusBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    SubscriptionGroupConfig,
)
from mqtemplate.remoting.protocol.headers.group import (
    CloneGroupOffsetRequestHeader,
    GetConsumerStatusRequestHeader,
    GetConsumeStatsInBrokerHeader,
    GetConsumeStatsRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
)
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.tool import ANY_PORT, Tool, make_engine

FIRST, SECOND = (MessageQueue("orders", "broker-a", queue_id) for queue_id in (0, 1))
WAIT_S = 10


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    """Two queues have ten messages each, one per second. Group billing has consumed 4 messages of the first queue."""
    clock = VirtualClock()
    engine = make_engine(clock)
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
        server.groups.put([SubscriptionGroupConfig(group_name="billing")])
        engine.create_topic("orders", 2)
        for number in range(10):
            for each in (FIRST, SECOND):
                engine.send(Message("orders", b"%d" % number), each)
            clock.move_ms(1_000)
        engine.commit_offset("billing", FIRST, 4)
        yield server
    engine.close()


def reset(tool: Tool, timestamp: int, *, force: bool = True, **more: int) -> dict[MessageQueue, int]:
    header = ResetOffsetRequestHeader(topic="orders", group="billing", timestamp=timestamp, is_force=force, **more)
    response = tool.request_ok(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
    return ResetOffsetBody.decode(response.body).offset_table


def test_consume_stats_have_the_progress_of_a_group(server: BrokerServer, tool: Tool) -> None:
    body = tool.request_ok(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="billing")).body

    assert b'{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:{' in body
    table = ConsumeStats.decode(body).offset_table
    assert (table[FIRST].broker_offset, table[FIRST].consumer_offset) == (10, 4)
    assert (
        table[FIRST].last_timestamp == server.engine.clock.now_ms() - 7_000
    )  # when the last consumed message was stored
    assert (table[SECOND].broker_offset, table[SECOND].consumer_offset, table[SECOND].last_timestamp) == (10, 0, 0)


def test_consume_stats_have_only_topics_that_connected_members_subscribe_to(tool: Tool) -> None:
    """The group's offsets contain every topic that it ever consumed."""
    tool.consume("billing", "invoices")
    by_name = GetConsumeStatsRequestHeader(consumer_group="billing", topic_list="orders;missing")

    of_all = tool.request_ok(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="billing"))
    of_named = tool.request_ok(RequestCode.GET_CONSUME_STATS, by_name)

    assert ConsumeStats.decode(of_all.body).offset_table == {}
    assert set(ConsumeStats.decode(of_named.body).offset_table) == {FIRST, SECOND}


def test_consume_stats_of_all_groups_are_returned(tool: Tool) -> None:
    every = tool.request_ok(RequestCode.GET_BROKER_CONSUME_STATS, GetConsumeStatsInBrokerHeader(is_order=False))
    ordered = tool.request_ok(RequestCode.GET_BROKER_CONSUME_STATS, GetConsumeStatsInBrokerHeader(is_order=True))

    found = ConsumeStatsList.decode(every.body)
    by_group = {group: stats for each in found.consume_stats_list for group, stats in each.items()}
    assert found.total_diff == 16
    assert set(by_group["billing"][0].offset_table) == {FIRST, SECOND}
    assert ConsumeStatsList.decode(ordered.body).total_diff == 0


def test_the_time_span_of_a_queue_is_returned(server: BrokerServer, tool: Tool) -> None:
    header = QueryConsumeTimeSpanRequestHeader(topic="orders", group="billing")

    body = tool.request_ok(RequestCode.QUERY_CONSUME_TIME_SPAN, header).body

    now_ms = server.engine.clock.now_ms()
    first, second = QueryConsumeTimeSpanBody.decode(body).consume_time_span_set
    assert (first.min_time_stamp, first.max_time_stamp) == (now_ms - 10_000, now_ms - 1_000)
    assert (first.consume_time_stamp, first.delay_time) == (now_ms - 7_000, 6_000)
    assert (second.consume_time_stamp, second.delay_time) == (0, 0)


def test_all_offsets_are_returned(tool: Tool) -> None:
    body = tool.request_ok(RequestCode.GET_ALL_CONSUMER_OFFSET).body

    assert ConsumerOffsetSerializeWrapper.decode(body).offset_table == {"orders@billing": {0: 4}}


def test_a_group_is_reset_to_a_time(server: BrokerServer, tool: Tool) -> None:
    table = reset(tool, server.engine.clock.now_ms() - 8_000)

    assert table == {FIRST: 2, SECOND: 2}
    assert [server.engine.committed_offset("billing", each) for each in (FIRST, SECOND)] == [2, 2]


def test_the_time_minus_one_stands_for_the_end(tool: Tool) -> None:
    assert reset(tool, -1) == {FIRST: 10, SECOND: 10}


def test_without_force_a_group_never_skips_messages(tool: Tool) -> None:
    assert reset(tool, -1, force=False) == {FIRST: 4, SECOND: 10}  # the second queue it has never read


def test_one_queue_is_reset_to_an_offset(server: BrokerServer, tool: Tool) -> None:
    assert reset(tool, -1, queue_id=1, offset=7) == {SECOND: 7}
    assert server.engine.committed_offset("billing", FIRST) == 4


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (
            {"topic": "missing"},
            ResponseCode.TOPIC_NOT_EXIST,
            "topic 'missing' does not exist; create it with mqadmin updateTopic",
        ),
        ({"group": "missing"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "group 'missing' does not exist"),
        (
            {"queue_id": 2},
            ResponseCode.INVALID_PARAMETER,
            "the queue ID of topic 'orders' must be 0..1, got 2; update the route",
        ),
        (
            {"queue_id": 0, "offset": 11},
            ResponseCode.INVALID_PARAMETER,
            "the offset in queue 0 of orders must be 0..10, got 11",
        ),
    ],
)
def test_an_invalid_reset_changes_no_offset(
    server: BrokerServer, tool: Tool, changes: dict[str, object], code: ResponseCode, text: str
) -> None:
    fields = {"topic": "orders", "group": "billing", "timestamp": -1, "is_force": True} | changes

    response = tool.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffsetRequestHeader(**fields))

    assert (response.code, response.remark) == (code, text)
    assert server.engine.committed_offset("billing", FIRST) == 4


def test_connected_members_are_notified_of_a_reset(server: BrokerServer, tool: Tool) -> None:
    """Otherwise each would continue, and commit its own offset over the new one."""
    received: queue.SimpleQueue[RemotingCommand] = queue.SimpleQueue()

    def on_request(connection: Connection, request: RemotingCommand) -> None:
        if request.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            received.put(request)

    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders")
        reset(tool, -1)
        request = received.get(timeout=WAIT_S)

    assert request.is_one_way
    assert request.header(ResetOffsetRequestHeader).group == "billing"
    assert ResetOffsetBody.decode(request.body).offset_table == {FIRST: 10, SECOND: 10}


def test_the_read_positions_of_connected_members_are_returned(server: BrokerServer, tool: Tool) -> None:
    def on_request(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code != RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
            return None
        return request.response(body=GetConsumerStatusBody(message_queue_table={FIRST: 6}).encode())

    header = GetConsumerStatusRequestHeader(topic="orders", group="billing")
    with Tool(server.address, on_request=on_request) as member:
        member.consume("billing", "orders", client_id="me@1")
        response = tool.request_ok(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
        other = GetConsumerStatusRequestHeader(topic="orders", group="billing", client_addr="you@2")
        refused = tool.request(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, other)

    assert GetConsumerStatusBody.decode(response.body).consumer_table == {"me@1": {FIRST: 6}}
    assert (refused.code, refused.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "group 'billing' has no connected consumer",
    )


def test_the_offsets_of_a_group_are_cloned(server: BrokerServer, tool: Tool) -> None:
    header = CloneGroupOffsetRequestHeader(src_group="billing", dest_group="audit", offline=True)

    tool.request_ok(RequestCode.CLONE_GROUP_OFFSET, header)

    assert server.engine.engine.offsets.offsets("audit", "orders") == {0: 4}


def test_the_correction_offset_is_the_minimum_of_several_groups(server: BrokerServer, tool: Tool) -> None:
    """In a queue in which the compared group is slower than the others, it is the maximum long."""
    for group, offsets in (("audit", (2, 8)), ("stats", (3, 9)), ("filtered", (0, 0)), ("me", (7, 7))):
        for each, offset in zip((FIRST, SECOND), offsets, strict=True):
            server.engine.commit_offset(group, each, offset)
    header = QueryCorrectionOffsetHeader(topic="orders", compare_group="me", filter_groups="filtered,billing,me")

    body = tool.request_ok(RequestCode.QUERY_CORRECTION_OFFSET, header).body

    assert QueryCorrectionOffsetBody.decode(body).correction_offsets == {0: 2, 1: (1 << 63) - 1}
