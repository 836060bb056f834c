"""Offsets, and messages by key: what `tests/server/scripts/queues.script` cannot say."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from mqtemplate.engine import reader
from mqtemplate.record.compression import CompressionType
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.group import QueryConsumerOffsetRequestHeader, TopicQueueRequestHeader
from mqtemplate.remoting.protocol.headers.message import QueryMessageRequestHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from tests.server.serving import Serving

BY_KEY = QueryMessageRequestHeader(
    topic="orders", key="A-1", max_num=32, begin_timestamp=0, end_timestamp=(1 << 63) - 1, unique=None
)


def found(serving: Serving) -> bytes:
    """Return the records with the key."""
    response = serving.request(RequestCode.QUERY_MESSAGE, BY_KEY)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    return response.body


def test_in_an_old_queue_a_new_group_has_no_offset(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_YOUNG_QUEUE_BYTES", 1_000)
    serving.send("orders")
    serving.send("orders", b"x" * 2_000)

    header = QueryConsumerOffsetRequestHeader(consumer_group="billing", topic="orders", queue_id=0)
    response = serving.request(RequestCode.QUERY_CONSUMER_OFFSET, header)

    assert response is not None
    assert response.code == ResponseCode.QUERY_NOT_FOUND
    assert response.remark == "group 'billing' has no offset in queue 0 of 'orders'"


@pytest.mark.parametrize("queue", [("nowhere", 0), ("orders", 9), ("orders", -1)])
def test_a_request_for_a_missing_queue_creates_nothing(serving: Serving, queue: tuple[str, int]) -> None:
    serving.send("orders")
    before = serving.engine.store.topic_ends()

    for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_EARLIEST_MSG_STORETIME):
        serving.request(code, TopicQueueRequestHeader(topic=queue[0], queue_id=queue[1]))

    assert serving.engine.store.topic_ends() == before
    assert not serving.engine.store.has_queue(*queue)


def test_a_query_decompresses_no_body(serving: Serving) -> None:
    """A compressed body of some kilobytes may become a gigabyte. The response has the record as it is stored."""
    packed = zlib.compress(bytes(64 << 20))
    for _ in range(4):
        serving.send("orders", packed, {"KEYS": "A-1"}, sys_flag=CompressionType.ZLIB.sys_flag)

    tracemalloc.start()
    try:
        body = found(serving)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert body.count(packed) == 4
    assert peak < 16 << 20


def test_a_query_reads_no_more_messages_than_its_response_has(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 messages may have the key, with 4 MiB each; a response has 8 MiB at most."""
    for _ in range(20):
        serving.send("orders", bytes(1 << 20), {"KEYS": "A-1"})
    store, reads = serving.engine.store, []
    read_at = store.read_at
    monkeypatch.setattr(store, "read_at", lambda offset: reads.append(offset) or read_at(offset))

    body = found(serving)

    assert len(decode_messages(body, "broker-a")) == 7
    assert len(set(reads)) == 8
