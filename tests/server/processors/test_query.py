"""Messages by physical offset and by key, and the units of consume queues."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from mqtemplate.message import Message, MessageQueue
from mqtemplate.record.compression import CompressionType
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.remoting.protocol.properties import encode_properties_text
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServer
from tests.server.tool import Tool

QUEUE = MessageQueue("orders", "broker-a", 0)
END_OF_TIME = (1 << 63) - 1


@pytest.fixture
def server(server: BrokerServer) -> BrokerServer:
    server.engine.create_topic("orders", 1)
    return server


def send(server: BrokerServer, body: bytes = b"x", **properties: str) -> SendResult:
    return server.engine.send(Message("orders", body, properties), QUEUE)


def by_key(key: str, *, unique: bool | None = None, max_num: int = 32, from_ms: int = 0) -> QueryMessageRequestHeader:
    return QueryMessageRequestHeader(
        topic="orders", key=key, max_num=max_num, begin_timestamp=from_ms, end_timestamp=END_OF_TIME, unique=unique
    )


def test_a_query_decompresses_no_body(server: BrokerServer, tool: Tool) -> None:
    """A compressed body of some kilobytes may become a gigabyte. The response has the record as it is stored."""
    packed = zlib.compress(bytes(64 << 20))
    header = SendMessageRequestHeaderV2(
        producer_group="producers",
        topic="orders",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=CompressionType.ZLIB.sys_flag,
        born_timestamp=0,
        flag=0,
        properties=encode_properties_text({"KEYS": "A-1"}),
    )
    for _ in range(4):
        tool.request_ok(RequestCode.SEND_MESSAGE_V2, header, packed)

    tracemalloc.start()
    try:
        response = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key("A-1"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert response.body.count(packed) == 4
    assert peak < 16 << 20


def test_a_query_reads_no_more_messages_than_its_response_has(
    server: BrokerServer, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 messages may have the key, with 4 MiB each; a response has 8 MiB at most."""
    for _ in range(20):
        send(server, bytes(1 << 20), KEYS="A-1")
    read_at, reads = server.engine.store.read_at, []
    monkeypatch.setattr(server.engine.store, "read_at", lambda offset: reads.append(offset) or read_at(offset))

    response = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key("A-1"))

    assert len(decode_messages(response.body, "broker-a")) == 7
    assert len(set(reads)) == 8
