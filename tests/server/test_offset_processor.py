"""Offsets of groups and of queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.remoting.protocol.headers.group import (
    GetEarliestMsgStoretimeResponseHeader,
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.processors import offset as offset_processor
from tests.server.serving import Serving


@pytest.fixture
def serving():
    with Serving() as serving:
        yield serving


def offset(answer: RemotingCommand | None) -> int:
    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS, answer
    return answer.header(OffsetResponseHeader).offset


def query(serving: Serving, topic: str = "orders", group: str = "billing", **more: Any) -> RemotingCommand:
    header = QueryConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=0, **more)
    answer = serving.ask(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert answer is not None
    return answer


def commit(serving: Serving, commit_offset: int, topic: str = "orders", queue_id: int = 0) -> RemotingCommand:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="billing", topic=topic, queue_id=queue_id, commit_offset=commit_offset
    )
    answer = serving.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert answer is not None
    return answer


# --- of groups ---------------------------------------------------------------------------------------


def test_what_was_committed_is_what_is_told_also_when_it_went_back(serving: Serving) -> None:
    serving.send("orders")
    commit(serving, 7)
    assert offset(query(serving)) == 7

    commit(serving, 3)

    assert offset(query(serving)) == 3


def test_a_new_group_reads_a_young_queue_whole(serving: Serving) -> None:
    """As small brokers of RocketMQ do, also with CONSUME_FROM_LAST_OFFSET; it may say that it wants to be told."""
    serving.send("orders")

    assert offset(query(serving)) == 0
    assert query(serving, set_zero_if_not_found=False).code == ResponseCode.QUERY_NOT_FOUND


def test_a_new_group_decides_by_itself_where_a_queue_is_old(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_processor, "_YOUNG_QUEUE_BYTES", 1_000)
    serving.send("orders")
    serving.send("orders", b"x" * 2_000)

    answer = query(serving)

    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert answer.remark == "group 'billing' has no offset in queue 0 of 'orders'"


def test_of_an_unknown_topic_no_offset_is_found(serving: Serving) -> None:
    assert query(serving, "nowhere").code == ResponseCode.QUERY_NOT_FOUND


def test_an_offset_of_a_topic_or_queue_that_is_not_there_is_not_taken(serving: Serving) -> None:
    serving.send("orders")

    assert commit(serving, 1, "nowhere").code == ResponseCode.TOPIC_NOT_EXIST
    assert commit(serving, 1, queue_id=9).code == ResponseCode.INVALID_PARAMETER


def test_a_group_is_made_by_its_first_offset_or_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as closed:
        closed.send("orders")
        refused = commit(closed, 1)
    with Serving() as open_to_all:
        open_to_all.send("orders")
        taken = commit(open_to_all, 1)
        made = open_to_all.server.groups.find("billing")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert taken.code == ResponseCode.SUCCESS
    assert made is not None


def test_an_offset_survives_a_restart(tmp_path: Path) -> None:
    with Serving(engine=EmbeddedBroker(tmp_path, None, VirtualClock())) as serving:
        serving.send("orders")
        commit(serving, 1)

    with Serving(engine=EmbeddedBroker(tmp_path, None, VirtualClock())) as serving:
        assert offset(query(serving)) == 1
        assert serving.server.groups.find("billing") is not None


# --- of queues ---------------------------------------------------------------------------------------


def test_the_ends_of_a_queue(serving: Serving) -> None:
    """The larger one is the next free place, not the last message."""
    serving.send("orders")
    serving.send("orders")

    asked = TopicQueueRequestHeader(topic="orders", queue_id=0)
    assert offset(serving.ask(RequestCode.GET_MIN_OFFSET, asked)) == 0
    assert offset(serving.ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic="orders", queue_id=0))) == 2
    empty = GetMaxOffsetRequestHeader(topic="orders", queue_id=3)
    assert offset(serving.ask(RequestCode.GET_MAX_OFFSET, empty)) == 0


@pytest.mark.parametrize("place", [("nowhere", 0), ("orders", 9), ("orders", -1)])
def test_a_queue_that_is_not_there_is_empty(serving: Serving, place: tuple[str, int]) -> None:
    """As RocketMQ answers; and nothing is made for the asking."""
    serving.send("orders")
    topic, queue_id = place
    asked = TopicQueueRequestHeader(topic=topic, queue_id=queue_id)
    queues = len(serving.engine.store._queues)

    high = serving.ask(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id))
    low = serving.ask(RequestCode.GET_MIN_OFFSET, asked)
    since = SearchOffsetRequestHeader(topic=topic, queue_id=queue_id, timestamp=5)
    found = serving.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, since)
    earliest = serving.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, asked)

    assert (offset(high), offset(low), offset(found)) == (0, 0, 0)
    assert earliest.header(GetEarliestMsgStoretimeResponseHeader).timestamp == -1
    assert len(serving.engine.store._queues) == queues


@pytest.mark.parametrize(
    ("since_ms", "boundary", "found"),
    [
        (-1, None, 0),
        (0, None, 0),
        (1, None, 2),
        (1_000, BoundaryType.LOWER, 2),
        (1_001, None, 3),
        (0, BoundaryType.UPPER, 1),
        (999, BoundaryType.UPPER, 1),
        (1_000, BoundaryType.UPPER, 2),
        (9_999, BoundaryType.UPPER, 2),
        (-1, BoundaryType.UPPER, 0),
    ],
)
def test_a_time_finds_the_first_message_from_then_on_or_the_last_until_then(
    serving: Serving, since_ms: int, boundary: BoundaryType | None, found: int
) -> None:
    """Two messages at one time, and one a second later."""
    begin = serving.clock.now_ms()
    serving.send("orders")
    serving.send("orders")
    serving.advance(1_000)
    serving.send("orders")

    header = SearchOffsetRequestHeader(topic="orders", queue_id=0, timestamp=begin + since_ms, boundary_type=boundary)

    assert offset(serving.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)) == found


def test_the_time_of_the_first_message(serving: Serving) -> None:
    begin = serving.clock.now_ms()
    serving.send("orders")

    answers = [
        serving.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, TopicQueueRequestHeader(topic="orders", queue_id=queue_id))
        for queue_id in (0, 1)
    ]

    times = [answer.header(GetEarliestMsgStoretimeResponseHeader).timestamp for answer in answers]
    assert times == [begin, -1]
