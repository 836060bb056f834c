"""Requests that are small on the wire and large when they are decoded, and large requests that are valid."""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.server import BrokerServer
from mqtemplate.server.grpc_api.checks import check_encoded_messages, check_encoded_settings
from mqtemplate.server.grpc_api.status import GrpcRefusedError
from tests.server.grpc_api.grpc_tool import (
    GrpcTool,
    consumer_settings,
    create_topic,
    message,
    producer_settings,
    serving,
)

Server = BrokerServer[EmbeddedBroker]
TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def topic(server: Server) -> str:
    return create_topic(server, TOPIC)


def send_encoded(tool: GrpcTool, content: bytes) -> Any:
    """Send any bytes as a ``SendMessageRequest``."""
    stub = tool.channel.unary_unary(
        protos.method_path("SendMessage"), lambda data: data, protos.SendMessageResponse.FromString
    )
    return stub(content, timeout=60, metadata=tool.metadata())


def encoded(*messages: Any) -> bytes:
    return bytes(protos.SendMessageRequest(messages=messages).SerializeToString())


def with_properties(count: int, size: int = 1) -> Any:
    made = message(TOPIC)
    for number in range(count):
        made.user_properties[f"name-{number}"] = "x" * size
    return made


# --- sends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4_097, 100_000])
def test_a_request_of_many_empty_messages_is_refused(tool: GrpcTool, topic: str, count: int) -> None:
    """Each has two bytes on the wire, and more than fifty when it is decoded."""
    answer = send_encoded(tool, b"\x0a\x00" * count)

    assert answer.status.code == Code.BAD_REQUEST
    assert "4096" in answer.status.message
    assert "max-batch-messages" in answer.status.message


def test_a_message_of_many_fields_is_refused(tool: GrpcTool, topic: str) -> None:
    answer = send_encoded(tool, encoded(with_properties(10_000)))

    assert answer.status.code == Code.MESSAGE_PROPERTIES_TOO_LARGE
    assert answer.status.message == "a message has more than 1000 fields, allowed are 128 properties"


def test_a_message_of_many_bytes_beside_its_body_is_refused(tool: GrpcTool, topic: str) -> None:
    made = message(TOPIC, bytes(100_000))
    made.system_properties.keys.extend(["k"] * 100_000)

    answer = send_encoded(tool, encoded(made))

    assert answer.status.code == Code.MESSAGE_PROPERTIES_TOO_LARGE
    assert "bytes beside its body; its properties may have 16384" in answer.status.message


@pytest.mark.parametrize(("count", "size"), [(1, 4 << 20), (30, 100_000), (65, 10), (1_000, 1_000)])
def test_large_requests_are_stored(tool: GrpcTool, topic: str, count: int, size: int) -> None:
    """Many messages are decoded and stored in a worker thread."""
    answer = tool.send(*(message(topic, bytes(size), f"id-{number}") for number in range(count)))

    assert answer.status.code == Code.OK
    assert [each.message_id for each in answer.entries] == [f"id-{number}" for number in range(count)]


def test_bytes_that_are_no_request_are_an_error_of_the_call(tool: GrpcTool, topic: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send_encoded(tool, b"\x0a\xff\xff" + b"\xff" * 100_000)

    assert caught.value.code() is grpc.StatusCode.INTERNAL


@given(st.binary(max_size=200))
def test_any_bytes_are_left_to_the_decoder_or_refused(content: bytes) -> None:
    with suppress(GrpcRefusedError):
        assert check_encoded_messages(content, 20)


@given(st.lists(st.tuples(st.binary(max_size=50), st.integers(0, 20)), max_size=8), st.integers(1, 10))
def test_messages_are_counted_as_the_decoder_does(made: list[tuple[bytes, int]], most: int) -> None:
    content = encoded(*(message(TOPIC, body, "x" * size) for body, size in made))

    if len(made) > most:
        with pytest.raises(GrpcRefusedError):
            check_encoded_messages(content, most)
    else:
        assert check_encoded_messages(content, most)
    assert check_encoded_messages(content, 100, most_inline=most) is (len(made) <= most)


# --- other requests -------------------------------------------------------------------------------


def test_an_acknowledgement_of_too_many_messages_is_refused(tool: GrpcTool, topic: str) -> None:
    answer = tool.ack(GROUP, topic, *[""] * 4_097)

    assert answer.status.code == Code.BAD_REQUEST
    assert answer.status.message == "the request acknowledges 4097 messages, allowed are 4096; send several"


def test_an_acknowledgement_of_empty_entries_is_refused_before_it_is_decoded(tool: GrpcTool, topic: str) -> None:
    """A megabyte of them would hold all threads while it is decoded."""
    stub = tool.channel.unary_unary(
        protos.method_path("AckMessage"), lambda data: data, protos.AckMessageResponse.FromString
    )

    answer = stub(b"\x1a\x00" * 500_000, timeout=60, metadata=tool.metadata())

    assert answer.status.code == Code.PAYLOAD_TOO_LARGE
    assert answer.status.message == "the request has more than 10000 fields; send several requests"


def test_many_messages_are_acknowledged_together(server: Server, tool: GrpcTool, topic: str) -> None:
    tool.send(*(message(topic, message_id=f"id-{number}") for number in range(100)))
    handles: list[str] = []
    while len(handles) < 100:
        received = tool.receive(GROUP, topic)
        handles += [each.system_properties.receipt_handle for each in received.messages]

    assert tool.ack(GROUP, topic, *handles).status.code == Code.OK

    assert all(queue.in_flight == 0 for queue in server.engine.engine.pop.in_flight(GROUP, topic))


def test_a_producer_of_too_many_topics_is_refused() -> None:
    with serving(max_client_groups_per_connection=3) as server, GrpcTool(server) as tool:
        stream = tool.telemetry()

        with pytest.raises(grpc.RpcError) as caught:
            stream.report(producer_settings("a", "b", "c", "d"))

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "a producer has at most 3 topics, got 4" in str(caught.value.details())


def test_a_consumer_of_too_many_subscriptions_is_refused_before_they_are_built() -> None:
    """The last name is illegal. Neither the client nor its group is created."""
    with serving(max_subscriptions_per_connection=3) as server, GrpcTool(server) as tool:
        stream = tool.telemetry()

        with pytest.raises(grpc.RpcError) as caught:
            stream.report(consumer_settings(GROUP, "a", "b", "c", "not a topic"))

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "may have 3 subscriptions at one time" in str(caught.value.details())
        assert "raise max-subscriptions, max-subscriptions-per-connection" in str(caught.value.details())
        assert (len(server.grpc.service.clients), server.groups.find(GROUP)) == (0, None)  # type: ignore[union-attr]


def test_a_consumer_may_report_as_many_subscriptions_again() -> None:
    """They replace the ones before, which do not count any more."""
    with serving(max_subscriptions_per_connection=3) as server, GrpcTool(server) as tool:
        stream = tool.telemetry()
        stream.report(consumer_settings(GROUP, "a", "b", "c"))

        stream.report(consumer_settings(GROUP, "d", "e", "f"))

        assert sorted(server.clients.consumers[GROUP].subscriptions) == ["d", "e", "f"]


def test_large_settings_of_empty_subscriptions_are_refused_before_they_are_decoded() -> None:
    with serving(max_subscriptions_per_connection=3) as server, GrpcTool(server) as tool:
        stub = tool.channel.stream_stream(
            protos.method_path("Telemetry"), lambda data: data, protos.TelemetryCommand.FromString
        )
        requests: queue.Queue[bytes | None] = queue.Queue()  # the stream stays open: its end would end the call
        requests.put(b"\x12\xa4\x8d\x06" + b"\x32\xa0\x8d\x06" + b"\x12\x00" * 50_000)

        with pytest.raises(grpc.RpcError) as caught:
            next(stub(iter(requests.get, None), timeout=60, metadata=tool.metadata()))
        requests.put(None)

        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == (
            "the settings have more than 1003 fields; a consumer has at most 3 subscriptions: use several, or raise "
            "max-subscriptions-per-connection"
        )


@given(st.binary(max_size=200))
def test_any_bytes_of_a_command_are_left_to_the_decoder(content: bytes) -> None:
    check_encoded_settings(content, 3)


def test_subscriptions_are_counted_as_the_decoder_does() -> None:
    def report(topics: int) -> bytes:
        settings = consumer_settings(GROUP, *[""] * (topics - 1))
        return bytes(protos.TelemetryCommand(settings=settings).SerializeToString())

    check_encoded_settings(report(1_003), 3)

    with pytest.raises(GrpcRefusedError):
        check_encoded_settings(report(1_004), 3)


def test_large_settings_are_answered(server: Server, tool: GrpcTool) -> None:
    """They are decoded in a worker thread."""
    topics = [f"topic-{number:0100}" for number in range(700)]

    answer = tool.telemetry().report(consumer_settings(GROUP, *topics))

    assert len(answer.settings.subscription.subscriptions) == len(topics)
    assert tool.heartbeat(GROUP).status.code == Code.OK
