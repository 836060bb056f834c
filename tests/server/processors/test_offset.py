"""Offsets of consumer groups and of queues."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.group import (
    GetEarliestMsgStoretimeResponseHeader,
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
)
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


# --- of groups ---------------------------------------------------------------------------------------


def test_in_an_old_queue_a_new_group_has_no_offset(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_processor, "_YOUNG_QUEUE_BYTES", 1_000)
    serving.send("orders")
    serving.send("orders", b"x" * 2_000)

    response = query(serving)

    assert response.code == ResponseCode.QUERY_NOT_FOUND
    assert response.remark == "group 'billing' has no offset in queue 0 of 'orders'"


# --- of queues ---------------------------------------------------------------------------------------


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
