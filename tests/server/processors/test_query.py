"""Messages by physical offset and by key, and the units of consume queues."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from mqtemplate.message import Message, MessageQueue
from mqtemplate.record.codec import parse_record
from mqtemplate.record.compression import CompressionType
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import QueryConsumeQueueResponseBody
from mqtemplate.remoting.protocol.headers.admin import QueryConsumeQueueRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    SendMessageRequestHeaderV2,
    ViewMessageRequestHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages, encode_properties_text
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


def physical_offset(result: SendResult) -> int:
    return int(result.offset_msg_id[-16:], 16)


def by_key(key: str, *, unique: bool | None = None, max_num: int = 32, from_ms: int = 0) -> QueryMessageRequestHeader:
    return QueryMessageRequestHeader(
        topic="orders", key=key, max_num=max_num, begin_timestamp=from_ms, end_timestamp=END_OF_TIME, unique=unique
    )


def test_a_message_is_found_by_its_physical_offset(server: BrokerServer, tool: Tool) -> None:
    send(server, b"before")
    result = send(server, b"this")

    body = tool.request_ok(
        RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset(result))
    ).body

    record = parse_record(body)
    assert (record.body, record.queue_offset, record.physical_offset) == (b"this", 1, physical_offset(result))


@pytest.mark.parametrize("offset", [-1, 1, 1 << 40])
def test_a_wrong_physical_offset_finds_no_message(server: BrokerServer, tool: Tool, offset: int) -> None:
    send(server)

    response = tool.request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset))

    assert response.code == ResponseCode.SYSTEM_ERROR
    assert response.remark == f"no message starts at physical offset {offset}; retention may have deleted it"


def test_messages_are_found_by_each_of_their_keys(server: BrokerServer, tool: Tool) -> None:
    send(server, b"one", KEYS="A-1 A-2")
    send(server, b"two", KEYS="A-2")

    response = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key("A-2", unique=False))
    first = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key("A-2", unique=False, max_num=1))

    assert sorted(message.body for message in decode_messages(response.body, "broker-a")) == [b"one", b"two"]
    assert [message.body for message in decode_messages(first.body, "broker-a")] == [b"two"]
    header = response.header(QueryMessageResponseHeader)
    assert header.index_last_update_phyoffset == server.engine.store.end_offset


def test_a_message_is_found_by_its_unique_key(server: BrokerServer, tool: Tool) -> None:
    msg_id = send(server, b"this").msg_id

    unique = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key(msg_id, unique=True, max_num=0))
    either = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key(msg_id))
    as_key = tool.request(RequestCode.QUERY_MESSAGE, by_key(msg_id, unique=False))

    assert [message.body for message in decode_messages(unique.body, "broker-a")] == [b"this"]
    assert either.body == unique.body
    assert as_key.code == ResponseCode.QUERY_NOT_FOUND


def test_a_key_outside_the_period_is_not_found(server: BrokerServer, tool: Tool) -> None:
    send(server, KEYS="A-1")

    response = tool.request(RequestCode.QUERY_MESSAGE, by_key("A-1", from_ms=server.engine.clock.now_ms() + 1))

    assert response.code == ResponseCode.QUERY_NOT_FOUND
    assert response.remark == "no message of topic 'orders' has the key 'A-1' in this period"
    response.header(QueryMessageResponseHeader)  # Java reads the header of this response too.


def test_records_are_returned_without_our_checksum(server: BrokerServer, tool: Tool) -> None:
    """An application would see a property that the producer did not send."""
    result = send(server, KEYS="A-1")

    viewed = tool.request_ok(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=physical_offset(result)))
    queried = tool.request_ok(RequestCode.QUERY_MESSAGE, by_key("A-1"))

    assert viewed.body == queried.body
    (message,) = decode_messages(viewed.body, "broker-a")
    assert {name for name in message.properties if name.startswith("__")} == set()


def test_units_of_a_queue_are_returned_with_the_result_of_the_filter(server: BrokerServer, tool: Tool) -> None:
    for _ in range(3):
        send(server)
    tool.consume("billing", "orders")
    header = QueryConsumeQueueRequestHeader(topic="orders", queue_id=0, index=1, count=5, consumer_group="billing")

    found = QueryConsumeQueueResponseBody.decode(tool.request_ok(RequestCode.QUERY_CONSUME_QUEUE, header).body)

    assert (found.min_queue_index, found.max_queue_index) == (0, 3)
    assert [unit.eval for unit in found.queue_data] == [True, True]
    assert found.subscription_data is not None
    for unit in found.queue_data:
        assert server.engine.store.read(unit.physic_offset, unit.physic_size).topic == "orders"


def test_a_missing_queue_has_no_units(tool: Tool) -> None:
    header = QueryConsumeQueueRequestHeader(topic="orders", queue_id=7, index=0, count=1)

    response = tool.request(RequestCode.QUERY_CONSUME_QUEUE, header)

    assert (response.code, response.remark) == (ResponseCode.SYSTEM_ERROR, "topic 'orders' has no queue 7")


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
