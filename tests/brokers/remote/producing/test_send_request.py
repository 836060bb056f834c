"""Send requests: ids, properties, delays, compression, and refused messages."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.brokers.remote.producing.send_request import SendRequest, SendRequestFactory
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, DelayError, DestinationError, MessageError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.messages import decode_batch, decode_properties_text

QUEUE = MessageQueue("orders", "broker-a", 3)


def factory(**settings: Any) -> SendRequestFactory:
    values = RemoteSettings(name_servers=("127.0.0.1:9876",), **settings)
    return SendRequestFactory(values, Namespace(values.namespace), VirtualClock())


def properties_of(request: SendRequest) -> dict[str, str]:
    return decode_properties_text(request.properties)


def test_a_message_is_encoded_as_a_send_request() -> None:
    message = Message("orders", b"body", {Property.TAGS: "paid", "region": "EU-ß"}, flag=7)

    request = factory(producer_group="shop").single(message)
    command = request.command(QUEUE)

    header = command.header(SendMessageRequestHeaderV2)
    assert (command.code, command.body, command.is_one_way) == (RequestCode.SEND_MESSAGE_V2, b"body", False)
    assert (header.producer_group, header.topic, header.queue_id, header.broker_name) == (
        "shop",
        "orders",
        3,
        "broker-a",
    )
    assert (header.default_topic, header.default_topic_queue_nums, header.flag, header.batch) == ("TBW102", 4, 7, False)
    assert header.born_timestamp == VirtualClock().now_ms()
    given = {Property.TAGS: "paid", "region": "EU-ß"}
    assert properties_of(request) == given | {Property.UNIQ_KEY: request.msg_id, Property.WAIT: "true"}


def test_each_send_has_a_new_id_and_does_not_change_the_message() -> None:
    message = Message("orders", b"body", {"region": "EU"})

    first, second = factory().single(message), factory().single(message)

    assert message.properties == {"region": "EU"}
    assert first.msg_id != second.msg_id


def test_the_namespace_is_added_to_topic_group_and_properties() -> None:
    request = factory(namespace="prod", producer_group="shop").single(Message("orders", b"x"))

    header = request.command(QUEUE).header(SendMessageRequestHeaderV2)

    assert (header.topic, header.producer_group) == ("prod%orders", "prod%shop")
    assert properties_of(request)[Property.INSTANCE_ID] == "prod"


def test_two_forms_of_a_namespace_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="keep one of them"):
        factory(namespace="a", namespace_v2="b")


# --- compression ----------------------------------------------------------------------------------


def test_a_large_body_is_compressed() -> None:
    body = b"the same again and again; " * 400

    request = factory().single(Message("orders", body))

    assert len(request.body) < len(body)
    assert decompress_body(request.body, request.sys_flag) == body


@pytest.mark.parametrize(("size", "threshold"), [(4_095, 4_096), (9_999, 10_000)])
def test_a_body_below_the_threshold_is_not_compressed(size: int, threshold: int) -> None:
    request = factory(compress_threshold=threshold).single(Message("orders", b"x" * size))

    assert (len(request.body), request.sys_flag & SysFlag.COMPRESSED) == (size, 0)


def test_a_body_that_would_grow_is_not_compressed() -> None:
    request = factory(compress_threshold=0).single(Message("orders", b"ab"))

    assert (request.body, request.sys_flag) == (b"ab", 0)


# --- delays ---------------------------------------------------------------------------------------


def test_a_start_deliver_time_is_renamed_for_brokers() -> None:
    request = factory().single(Message("orders", b"x", {Property.START_DELIVER_TIME: "1767225600000"}))

    assert properties_of(request)[Property.TIMER_DELIVER_MS] == "1767225600000"
    assert Property.START_DELIVER_TIME not in properties_of(request)
    assert request.has_timer


def test_properties_of_brokers_are_removed() -> None:
    """A delayed message that was received and is sent again goes to its own topic."""
    received = {Property.REAL_TOPIC: "elsewhere", Property.REAL_QID: "1", Property.TIMER_OUT_MS: "5", "own": "kept"}

    request = factory().single(Message("orders", b"x", received))

    assert properties_of(request).keys() == {"own", Property.UNIQ_KEY, Property.WAIT}


@pytest.mark.parametrize(
    ("properties", "is_immediate"),
    [
        ({}, True),
        ({Property.DELAY: "0"}, True),
        ({Property.DELAY: "3"}, False),
        ({Property.TIMER_DELAY_SEC: "1"}, False),
    ],
)
def test_a_message_without_a_delay_is_immediate(properties: dict[str, str], is_immediate: bool) -> None:
    assert factory().single(Message("orders", b"x", properties)).is_immediate is is_immediate


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (Property.DELAY, "-1", "delay level must be 0 or more, got -1"),
        (Property.DELAY, "soon", "property DELAY is 'soon', expected a whole number"),
        (Property.TIMER_DELIVER_MS, "", "property TIMER_DELIVER_MS is '', expected a whole number"),
        (Property.TIMER_DELAY_MS, "1.5", "property TIMER_DELAY_MS is '1.5'"),
    ],
)
def test_an_invalid_delay_is_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(DelayError, match=text):
        factory().single(Message("orders", b"x", {name: value}))


# --- batches, halves, replies ---------------------------------------------------------------------


def test_a_batch_has_the_properties_of_each_message_and_no_id_of_its_own() -> None:
    """4.x appends the batch's properties to each message, which would give all messages one id."""
    request = factory().batch([Message("orders", b"a", {Property.TAGS: "x"}), Message("orders", b"b", flag=3)])

    inner = decode_batch(request.body, "orders")
    assert [(message.body, message.tags, message.flag) for message in inner] == [(b"a", "x", 0), (b"b", None, 3)]
    assert tuple(message.properties[Property.UNIQ_KEY] for message in inner) == request.msg_ids
    assert properties_of(request) == {Property.WAIT: "true"}
    assert request.command(QUEUE).header(SendMessageRequestHeaderV2).batch
    assert request.code == RequestCode.SEND_BATCH_MESSAGE


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([], MessageError, "the batch is empty"),
        ([Message("a", b""), Message("b", b"")], MessageError, "a batch goes to one topic, this one names 'a' and 'b'"),
        ([Message("a", bytes(60))] * 2, MessageError, "the batch for 'a' has .* bytes, allowed are 100"),
    ],
)
def test_an_invalid_batch_is_refused(messages: list[Message], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        factory(max_message_size=100).batch(messages)


def test_a_half_message_has_its_producer_group() -> None:
    request = factory(namespace="prod").single(Message("orders", b"x"), transaction_group="shop")

    assert properties_of(request)[Property.TRANSACTION_PREPARED] == "true"
    assert properties_of(request)[Property.PRODUCER_GROUP] == request.group == "prod%shop"
    assert request.is_half
    assert not request.is_immediate


@pytest.mark.parametrize("delay", [{Property.TIMER_DELAY_SEC: "3"}, {Property.DELAY: "3"}])
def test_a_delay_in_a_batch_or_in_a_transaction_needs_a_capability_of_the_broker(delay: dict[str, str]) -> None:
    plain, delayed = Message("orders", b"x"), Message("orders", b"y", delay)

    assert factory().batch([plain, delayed]).needs is Capability.BATCH_DELAY
    assert factory().single(delayed, transaction_group="shop").needs is Capability.TRANSACTION_DELAY
    assert factory().single(delayed).needs is None
    assert factory().batch([plain, plain]).needs is None
    assert not factory().batch([plain, delayed]).is_immediate


def test_a_reply_goes_to_the_cluster_s_topic_without_a_namespace() -> None:
    request = factory(namespace="prod").reply("DefaultCluster_REPLY_TOPIC", b"x", {Property.CORRELATION_ID: "1"})

    assert request.command(QUEUE).header(SendMessageRequestHeaderV2).topic == "DefaultCluster_REPLY_TOPIC"
    assert request.code == RequestCode.SEND_REPLY_MESSAGE_V2


# --- refusals -------------------------------------------------------------------------------------


def test_the_error_for_a_large_body_has_both_sizes() -> None:
    with pytest.raises(MessageError, match="has 101 bytes, allowed are 100; .*raise max-message-size here and"):
        factory(max_message_size=100).single(Message("orders", bytes(101)))


def test_too_large_properties_are_refused() -> None:
    with pytest.raises(MessageError, match=r"have \d+ bytes, allowed are 32767; move data into the body"):
        factory().single(Message("orders", b"", {"long": "ß" * 20_000}))


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"])
def test_topics_of_the_broker_are_refused(topic: str) -> None:
    with pytest.raises(DestinationError, match=f"'{topic}' belongs to the broker"):
        factory().single(Message(topic, b""))


def test_the_settings_need_a_name_server() -> None:
    with pytest.raises(ConfigurationError, match="needs the address of a name server"):
        RemoteSettings(name_servers=())


# --- messages that may be sent with others ----------------------------------------------------------


@pytest.mark.parametrize(
    "properties", [{}, {Property.TAGS: "paid", "region": "EU-ß"}, {Property.UNIQ_KEY: "A1"}, {"copy": "x" * 40}]
)
@pytest.mark.parametrize("namespace", ["", "team"])
def test_a_message_has_the_same_properties_with_others_and_alone(properties: dict[str, str], namespace: str) -> None:
    """Also the second one with the same properties, which stay encoded."""
    requests = factory(namespace=namespace)
    for _ in range(2):
        part = requests.joinable(Message("orders", b"body", dict(properties), flag=3))
        (together,) = decode_batch(requests.joined([part]).body, "orders")
        alone = requests.alone(part)

        assert (together.body, together.flag, alone.body, alone.flag) == (b"body", 3, b"body", 3)
        assert together.properties == properties_of(alone)
        assert together.properties[Property.UNIQ_KEY] == part.msg_id == alone.msg_id


def test_messages_with_equal_properties_have_ids_of_their_own() -> None:
    requests = factory()
    parts = [requests.joinable(Message("orders", b"x", {"region": "EU"})) for _ in range(3)]

    found = [each.properties for part in parts for each in decode_batch(part.data, "orders")]

    assert [each[Property.UNIQ_KEY] for each in found] == [part.msg_id for part in parts]
    assert len({part.msg_id for part in parts}) == 3


def test_a_change_of_a_message_after_its_send_changes_no_part() -> None:
    requests, message = factory(), Message("orders", b"x", {"region": "EU"})
    first, second = requests.joinable(message), requests.joinable(message)

    message.properties["region"] = "US"
    third = requests.joinable(message)

    parts = (first, second, third)
    sent = [each.properties["region"] for part in parts for each in decode_batch(part.data, "orders")]
    assert [properties_of(requests.alone(part))["region"] for part in parts] == sent == ["EU", "EU", "US"]
