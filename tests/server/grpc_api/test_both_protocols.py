"""Messages of one protocol that clients of the other one read: properties, compression, delays, transactions."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, Encoding, GrpcMessageType, TransactionResolution
from mqtemplate.message import MessageExt
from mqtemplate.record.compression import CompressionType, compress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerConnection, ConsumerRunningInfo, ProducerConnection
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.message import ConsumeMessageDirectlyResultRequestHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServer
from mqtemplate.server.processors.client import ConsumeDirectlyResult
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    advance,
    consumer_settings,
    create_topic,
    delayed,
    message,
    producer_settings,
)
from tests.server.tool import Tool, pull_header, send_header

Server = BrokerServer[EmbeddedBroker]


@pytest.fixture
def remoting(server: Server) -> Iterator[Tool]:
    with Tool(server.remoting.address) as remoting:
        yield remoting


def pulled(remoting: Tool, topic: str, queue_id: int = 0) -> list[MessageExt]:
    """Return the messages of a queue, as a consumer of the other protocol decodes them."""
    response = remoting.request(RequestCode.PULL_MESSAGE, pull_header(topic, group="readers", queue_id=queue_id))
    assert response.code in (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND)
    return decode_messages(response.body, "broker-a") if response.body else []


def remoting_send(remoting: Tool, topic: str, body: bytes, sys_flag: int = 0, **properties: str) -> None:
    header = send_header(topic, properties=properties, sys_flag=sys_flag)
    assert remoting.request(RequestCode.SEND_MESSAGE_V2, header, body).code == ResponseCode.SUCCESS


# --- from gRPC to remoting ------------------------------------------------------------------------


def test_a_grpc_message_is_read_with_its_properties(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    create_topic(server, "orders", "FIFO", queues=1)
    sent = message("orders", b"body", "id-1", tag="paid", message_group="customer-1", trace_context="trace")
    sent.user_properties["colour"] = "größe"
    sent.system_properties.keys.extend(["k1", "k2"])
    tool.send(sent)

    [read] = pulled(remoting, "orders")

    assert (read.body, read.tags, read.keys, read.msg_id) == (b"body", "paid", "k1 k2", "id-1")
    assert read.properties["colour"] == "größe"
    assert read.properties["__SHARDINGKEY"] == "customer-1"
    assert read.properties["TRACE_CONTEXT"] == "trace"
    assert read.properties["PGROUP"] == "orders"
    assert read.properties["CLUSTER"] == "DefaultCluster"
    assert read.born_timestamp == int(read.properties["BORN_TIMESTAMP"])


def test_a_gzip_body_is_unpacked_by_clients_of_this_library(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    create_topic(server, "orders", queues=1)

    tool.send(message("orders", gzip.compress(b"a long body"), body_encoding=Encoding.GZIP))

    [read] = pulled(remoting, "orders")
    assert read.body == b"a long body"


def test_a_delayed_grpc_message_is_delivered(stepped: Server, stepped_tool: GrpcTool) -> None:
    create_topic(stepped, "later", "DELAY", queues=1)
    deliver_ms = stepped.engine.clock.now_ms() + 5_000
    stepped_tool.send(delayed("later", deliver_ms))

    with Tool(stepped.remoting.address) as remoting:
        advance(stepped, 4_000)
        assert pulled(remoting, "later") == []
        advance(stepped, 2_000)
        [read] = pulled(remoting, "later")
    [received] = stepped_tool.receive("billing", "later", timeout=600).messages

    assert read.properties["TIMER_DELIVER_MS"] == str(deliver_ms)
    assert received.system_properties.delivery_timestamp.ToMilliseconds() == deliver_ms
    assert received.system_properties.message_type == GrpcMessageType.DELAY


def test_a_grpc_transaction_is_delivered(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    create_topic(server, "orders", "TRANSACTION", queues=1)
    tool.send(message("orders", message_type=GrpcMessageType.TRANSACTION))
    tool.end_transaction("orders", "id-1", TransactionResolution.COMMIT)

    [read] = pulled(remoting, "orders")
    [received] = tool.receive("billing", "orders").messages

    assert read.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_COMMIT
    assert read.properties["TRAN_MSG"] == "true"
    assert received.system_properties.message_type == GrpcMessageType.TRANSACTION


# --- from remoting to gRPC ------------------------------------------------------------------------


def test_a_remoting_message_is_received_with_its_properties(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    create_topic(server, "orders", queues=1)
    remoting_send(
        remoting, "orders", b"body", UNIQ_KEY="7F00" * 8, TAGS="paid", KEYS="k1 k2", colour="blue", WAIT="true"
    )

    [received] = tool.receive("billing", "orders").messages

    system = received.system_properties
    assert (received.body, dict(received.user_properties)) == (b"body", {"colour": "blue"})
    assert (system.tag, list(system.keys), system.message_id) == ("paid", ["k1", "k2"], "7F00" * 8)
    assert system.born_timestamp.ToMilliseconds() == 1_700_000_000_000
    assert system.born_host == "127.0.0.1"


@pytest.mark.parametrize("kind", CompressionType)
def test_a_compressed_body_arrives_unpacked(
    server: Server, tool: GrpcTool, remoting: Tool, kind: CompressionType
) -> None:
    create_topic(server, "orders", queues=1)
    body, flag = compress_body(b"a long body " * 100, kind)
    remoting_send(remoting, "orders", body, flag)

    [received] = tool.receive("billing", "orders").messages

    assert received.body == b"a long body " * 100
    assert received.system_properties.body_encoding == Encoding.IDENTITY


def test_a_message_with_a_delay_level_is_received(stepped: Server, stepped_tool: GrpcTool) -> None:
    create_topic(stepped, "orders", queues=1)
    with Tool(stepped.remoting.address) as remoting:
        remoting_send(remoting, "orders", b"body", DELAY="2", UNIQ_KEY="id-1")

    advance(stepped, 6_000)

    [received] = stepped_tool.receive("billing", "orders", timeout=600).messages
    assert received.system_properties.message_type == GrpcMessageType.DELAY
    assert received.system_properties.message_id == "id-1"


def test_a_grpc_producer_is_checked_for_its_topic_only(stepped: Server, stepped_tool: GrpcTool) -> None:
    """Its producer group has the name of its topic; a client of the other protocol chooses the name."""
    create_topic(stepped, "orders", "TRANSACTION", queues=1)
    stream = stepped_tool.telemetry()
    stream.report(producer_settings("orders"))
    with Tool(stepped.remoting.address) as remoting:
        remoting_send(remoting, "orders", b"body", TRAN_MSG="true", PGROUP="others", UNIQ_KEY="id-9")

    advance(stepped, 60_000)

    assert stepped_tool.end_transaction("orders", "id-9", TransactionResolution.COMMIT).status.code == (
        Code.INTERNAL_SERVER_ERROR
    )
    assert stepped.engine.engine.transactions.open_count == 1


# --- one port, one group, clients of both -------------------------------------------------------------------


def test_the_port_of_the_other_protocol_takes_grpc_clients_too(server: Server, remoting: Tool) -> None:
    create_topic(server, "orders", queues=1)

    with GrpcTool(server.remoting.address) as shared:
        assert shared.send(message("orders")).status.code == Code.OK

    assert len(pulled(remoting, "orders")) == 1


def test_tools_see_the_clients_of_both_protocols(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    consumer, producer = tool.telemetry(), GrpcTool(server, "client-2")
    consumer.report(consumer_settings("billing", "orders"))
    stream = producer.telemetry()
    stream.report(producer_settings("orders"))

    consumers = remoting.request_ok(
        RequestCode.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupRequestHeader(consumer_group="billing")
    )
    producers = remoting.request_ok(
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        headers.ProducerGroupRequestHeader(producer_group="orders"),
    )

    [member] = ConsumerConnection.decode(consumers.body).connection_set
    assert (member.client_id, member.language) == ("client-1", "PYTHON")
    assert ConsumerConnection.decode(consumers.body).subscription_table["orders"].sub_string == "*"
    assert [each.client_id for each in ProducerConnection.decode(producers.body).connection_set] == ["client-2"]
    producer.channel.close()


def running_info(*, jstack_enable: bool) -> headers.GetConsumerRunningInfoRequestHeader:
    return headers.GetConsumerRunningInfoRequestHeader(
        consumer_group="billing", client_id="client-1", jstack_enable=jstack_enable
    )


def test_a_tool_gets_the_threads_of_a_grpc_client(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))
    header = running_info(jstack_enable=True)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(remoting.request_ok, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        nonce = stream.next().print_thread_stack_trace_command.nonce
        stream.send(thread_stack_trace=protos.ThreadStackTrace(nonce=nonce, thread_stack_trace="main: running"))

    info = ConsumerRunningInfo.decode(answer.result().body)
    assert info.jstack == "main: running"
    assert [each.topic for each in info.subscription_set] == ["orders"]


@pytest.mark.parametrize(
    ("code", "result"),
    [(Code.OK, "CR_SUCCESS"), (Code.FAILED_TO_CONSUME_MESSAGE, "CR_LATER"), (Code.MESSAGE_CORRUPTED, "CR_RETURN_NULL")],
)
def test_a_tool_lets_a_grpc_client_handle_a_message(
    server: Server, tool: GrpcTool, remoting: Tool, code: Code, result: str
) -> None:
    create_topic(server, "orders", queues=1)
    tool.send(message("orders"))
    [stored] = pulled(remoting, "orders")
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))
    header = ConsumeMessageDirectlyResultRequestHeader(
        consumer_group="billing", client_id="client-1", msg_id=stored.offset_msg_id, topic="orders"
    )

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(remoting.request_ok, RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        command = stream.next().verify_message_command
        verified = protos.VerifyMessageResult(nonce=command.nonce)
        stream.send(status=protos.Status(code=code), verify_message_result=verified)

    assert (command.message.topic.name, command.message.body) == ("orders", b"body")
    assert ConsumeDirectlyResult.decode(answer.result().body).consume_result == result


def test_a_client_that_does_not_answer_a_tool_is_reported(stepped: Server, stepped_tool: GrpcTool) -> None:
    stream = stepped_tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))
    header = running_info(jstack_enable=True)

    with Tool(stepped.remoting.address) as remoting, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(remoting.request, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        assert stream.next().print_thread_stack_trace_command.nonce
        advance(stepped, 6_000)

    assert answer.result().code == ResponseCode.CONSUME_MSG_TIMEOUT
    assert "did not respond: no answer for 5s" in (answer.result().remark or "")


def test_a_client_without_a_stream_is_reported_to_a_tool(server: Server, tool: GrpcTool, remoting: Tool) -> None:
    stream = tool.telemetry()
    stream.report(consumer_settings("billing", "orders"))
    stream.end()
    with pytest.raises(StopIteration):
        stream.next()

    threads = running_info(jstack_enable=True)
    without = running_info(jstack_enable=False)

    assert "it has no stream of telemetry" in (
        remoting.request(RequestCode.GET_CONSUMER_RUNNING_INFO, threads).remark or ""
    )
    assert remoting.request(RequestCode.GET_CONSUMER_RUNNING_INFO, without).code == ResponseCode.SUCCESS


def test_a_group_of_listeners_of_this_process_takes_no_clients(server: Server, tool: GrpcTool) -> None:
    """Its members share the queues among each other, and POP would deliver the messages twice."""
    create_topic(server, "orders", queues=1)
    member = server.engine.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))

    assert tool.receive("billing", "orders").code is Code.FORBIDDEN
    member.close()
