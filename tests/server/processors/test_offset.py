"""Offsets of consumer groups and of queues."""

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
from mqtemplate.server.processors import queues as offset_processor
from tests.server.serving import Serving


def offset(response: RemotingCommand | None) -> int:
    assert response is not None
    assert response.code == ResponseCode.SUCCESS, response
    return response.header(OffsetResponseHeader).offset


def query(serving: Serving, topic: str = "orders", group: str = "billing", **more: Any) -> RemotingCommand:
    header = QueryConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=0, **more)
    response = serving.request(RequestCode.QUERY_CONSUMER_OFFSET, header)
    assert response is not None
    return response


def commit(serving: Serving, commit_offset: int, topic: str = "orders", queue_id: int = 0) -> RemotingCommand:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="billing", topic=topic, queue_id=queue_id, commit_offset=commit_offset
    )
    response = serving.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert response is not None
    return response


# --- of groups ---------------------------------------------------------------------------------------


def test_a_query_returns_the_committed_offset_also_a_lower_one(serving: Serving) -> None:
    serving.send("orders")
    commit(serving, 7)
    assert offset(query(serving)) == 7

    commit(serving, 3)

    assert offset(query(serving)) == 3


def test_a_new_group_starts_at_zero_of_a_young_queue(serving: Serving) -> None:
    """RocketMQ does so even with CONSUME_FROM_LAST_OFFSET. The request can disable it."""
    serving.send("orders")

    assert offset(query(serving)) == 0
    assert query(serving, set_zero_if_not_found=False).code == ResponseCode.QUERY_NOT_FOUND


def test_in_an_old_queue_a_new_group_has_no_offset(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_processor, "_YOUNG_QUEUE_BYTES", 1_000)
    serving.send("orders")
    serving.send("orders", b"x" * 2_000)

    response = query(serving)

    assert response.code == ResponseCode.QUERY_NOT_FOUND
    assert response.remark == "group 'billing' has no offset in queue 0 of 'orders'"


def test_a_missing_topic_has_no_offset(serving: Serving) -> None:
    assert query(serving, "nowhere").code == ResponseCode.QUERY_NOT_FOUND


def test_an_offset_of_a_missing_topic_or_queue_is_refused(serving: Serving) -> None:
    serving.send("orders")

    assert commit(serving, 1, "nowhere").code == ResponseCode.TOPIC_NOT_EXIST
    assert commit(serving, 1, queue_id=9).code == ResponseCode.INVALID_PARAMETER


def test_the_first_offset_creates_a_missing_group_or_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as without_creation:
        without_creation.send("orders")
        refused = commit(without_creation, 1)
    with Serving() as with_creation:
        with_creation.send("orders")
        committed = commit(with_creation, 1)
        created = with_creation.server.groups.find("billing")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert committed.code == ResponseCode.SUCCESS
    assert created is not None


def test_an_offset_survives_a_restart(tmp_path: Path) -> None:
    with Serving(engine=EmbeddedBroker(tmp_path, None, VirtualClock())) as serving:
        serving.send("orders")
        commit(serving, 1)

    with Serving(engine=EmbeddedBroker(tmp_path, None, VirtualClock())) as serving:
        assert offset(query(serving)) == 1
        assert serving.server.groups.find("billing") is not None


# --- of queues ---------------------------------------------------------------------------------------


def test_the_minimum_and_maximum_offset_of_a_queue(serving: Serving) -> None:
    """The maximum is the offset of the next message, not of the last one."""
    serving.send("orders")
    serving.send("orders")

    header = TopicQueueRequestHeader(topic="orders", queue_id=0)
    assert offset(serving.request(RequestCode.GET_MIN_OFFSET, header)) == 0
    assert (
        offset(serving.request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic="orders", queue_id=0))) == 2
    )
    empty = GetMaxOffsetRequestHeader(topic="orders", queue_id=3)
    assert offset(serving.request(RequestCode.GET_MAX_OFFSET, empty)) == 0


@pytest.mark.parametrize(("topic", "queue_id"), [("nowhere", 0), ("orders", 9), ("orders", -1)])
def test_a_missing_queue_counts_as_empty(serving: Serving, topic: str, queue_id: int) -> None:
    """RocketMQ does the same. The requests create nothing."""
    serving.send("orders")
    header = TopicQueueRequestHeader(topic=topic, queue_id=queue_id)
    queues = len(serving.engine.store._queues)

    high = serving.request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id))
    low = serving.request(RequestCode.GET_MIN_OFFSET, header)
    since = SearchOffsetRequestHeader(topic=topic, queue_id=queue_id, timestamp=5)
    found = serving.request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, since)
    earliest = serving.request(RequestCode.GET_EARLIEST_MSG_STORETIME, header)

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
def test_a_search_by_time_finds_the_first_message_since_or_the_last_until_that_time(
    serving: Serving, since_ms: int, boundary: BoundaryType | None, found: int
) -> None:
    """Two messages are stored at the same time, and one a second later."""
    start = serving.clock.now_ms()
    serving.send("orders")
    serving.send("orders")
    serving.advance(1_000)
    serving.send("orders")

    header = SearchOffsetRequestHeader(topic="orders", queue_id=0, timestamp=start + since_ms, boundary_type=boundary)

    assert offset(serving.request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)) == found


def test_the_store_time_of_the_first_message(serving: Serving) -> None:
    start = serving.clock.now_ms()
    serving.send("orders")

    responses = [
        serving.request(
            RequestCode.GET_EARLIEST_MSG_STORETIME, TopicQueueRequestHeader(topic="orders", queue_id=queue_id)
        )
        for queue_id in (0, 1)
    ]

    times = [response.header(GetEarliestMsgStoretimeResponseHeader).timestamp for response in responses]
    assert times == [start, -1]
