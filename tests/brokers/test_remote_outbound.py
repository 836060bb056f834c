"""From a message to the request that sends it: ids, properties, delays, compression, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import Outbound, OutboundMaker
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, DelayError, DestinationError, MessageError, UnsupportedError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.messages import decode_batch
from mqtemplate.remoting.protocol.properties import decode_properties_text

QUEUE = MessageQueue("orders", "broker-a", 3)


def maker(**settings: Any) -> OutboundMaker:
    made = RemoteSettings(name_servers=("127.0.0.1:9876",), **settings)
    return OutboundMaker(made, Namespace(made.namespace), VirtualClock())


def properties_of(out: Outbound) -> dict[str, str]:
    return decode_properties_text(out.properties)


def test_a_message_becomes_a_request_that_a_broker_takes() -> None:
    message = Message("orders", b"body", {Property.TAGS: "paid", "region": "EU-ß"}, flag=7)

    out = maker(producer_group="shop").single(message)
    request = out.request(QUEUE)

    header = request.header(SendMessageRequestHeaderV2)
    assert (request.code, request.body, request.is_one_way) == (RequestCode.SEND_MESSAGE_V2, b"body", False)
    assert (header.producer_group, header.topic, header.queue_id, header.broker_name) == (
        "shop",
        "orders",
        3,
        "broker-a",
    )
    assert (header.default_topic, header.default_topic_queue_nums, header.flag, header.batch) == ("TBW102", 4, 7, False)
    assert header.born_timestamp == VirtualClock().now_ms()
    own = {Property.TAGS: "paid", "region": "EU-ß"}
    assert properties_of(out) == own | {Property.UNIQ_KEY: out.msg_id, Property.WAIT: "true"}


def test_the_message_is_not_changed_and_gets_an_id_for_each_send() -> None:
    message = Message("orders", b"body", {"region": "EU"})

    first, second = maker().single(message), maker().single(message)

    assert message.properties == {"region": "EU"}
    assert first.msg_id != second.msg_id


def test_a_namespace_goes_in_front_of_topic_and_group_and_is_told() -> None:
    out = maker(namespace="prod", producer_group="shop").single(Message("orders", b"x"))

    header = out.request(QUEUE).header(SendMessageRequestHeaderV2)

    assert (header.topic, header.producer_group) == ("prod%orders", "prod%shop")
    assert properties_of(out)[Property.INSTANCE_ID] == "prod"


def test_two_namespaces_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="keep one of them"):
        maker(namespace="a", namespace_v2="b")


# --- compression ----------------------------------------------------------------------------------


def test_a_large_body_is_compressed_and_says_so() -> None:
    body = b"the same again and again; " * 400

    out = maker().single(Message("orders", body))

    assert len(out.body) < len(body)
    assert decompress_body(out.body, out.sys_flag) == body


@pytest.mark.parametrize(("size", "threshold"), [(4_095, 4_096), (9_999, 10_000)])
def test_a_body_below_the_threshold_travels_as_it_is(size: int, threshold: int) -> None:
    out = maker(compress_threshold=threshold).single(Message("orders", b"x" * size))

    assert (len(out.body), out.sys_flag & SysFlag.COMPRESSED) == (size, 0)


def test_a_body_that_would_grow_is_not_compressed() -> None:
    out = maker(compress_threshold=0).single(Message("orders", b"ab"))

    assert (out.body, out.sys_flag) == (b"ab", 0)


# --- delays ---------------------------------------------------------------------------------------


def test_a_start_deliver_time_is_said_in_the_words_of_brokers() -> None:
    out = maker().single(Message("orders", b"x", {Property.START_DELIVER_TIME: "1767225600000"}))

    assert properties_of(out)[Property.TIMER_DELIVER_MS] == "1767225600000"
    assert Property.START_DELIVER_TIME not in properties_of(out)
    assert out.wants_timer


def test_what_only_brokers_write_is_left_out_of_a_copy() -> None:
    """A message that was received after a wait and is sent on must go to its own topic."""
    received = {Property.REAL_TOPIC: "elsewhere", Property.REAL_QID: "1", Property.TIMER_OUT_MS: "5", "own": "kept"}

    out = maker().single(Message("orders", b"x", received))

    assert properties_of(out).keys() == {"own", Property.UNIQ_KEY, Property.WAIT}


@pytest.mark.parametrize(
    ("properties", "is_at_once"),
    [
        ({}, True),
        ({Property.DELAY: "0"}, True),
        ({Property.DELAY: "3"}, False),
        ({Property.TIMER_DELAY_SEC: "1"}, False),
    ],
)
def test_it_is_known_whether_a_message_waits(properties: dict[str, str], is_at_once: bool) -> None:
    assert maker().single(Message("orders", b"x", properties)).is_at_once is is_at_once


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (Property.DELAY, "-1", "delay level must be 0 or more, got -1"),
        (Property.DELAY, "soon", "property DELAY is 'soon', expected a whole number"),
        (Property.TIMER_DELIVER_MS, "", "property TIMER_DELIVER_MS is '', expected a whole number"),
        (Property.TIMER_DELAY_MS, "1.5", "property TIMER_DELAY_MS is '1.5'"),
    ],
)
def test_a_delay_that_is_none_is_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(DelayError, match=text):
        maker().single(Message("orders", b"x", {name: value}))


# --- batches, halves, replies ---------------------------------------------------------------------


def test_a_batch_keeps_each_message_s_properties_and_leaves_the_id_out_of_the_outer_ones() -> None:
    """4.x appends the outer properties to each message, and would give all one id."""
    out = maker().batch([Message("orders", b"a", {Property.TAGS: "x"}), Message("orders", b"b", flag=3)])

    inner = decode_batch(out.body, "orders")
    assert [(message.body, message.tags, message.flag) for message in inner] == [(b"a", "x", 0), (b"b", None, 3)]
    assert tuple(message.properties[Property.UNIQ_KEY] for message in inner) == out.msg_ids
    assert properties_of(out) == {Property.WAIT: "true"}
    assert out.request(QUEUE).header(SendMessageRequestHeaderV2).batch
    assert out.code == RequestCode.SEND_BATCH_MESSAGE


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([], MessageError, "the batch is empty"),
        ([Message("a", b""), Message("b", b"")], MessageError, "a batch goes to one topic, this one names 'a' and 'b'"),
        ([Message("a", b"", {"DELAY": "1"})] * 2, UnsupportedError, "asks for a delay .DELAY., but RocketMQ delays no"),
        ([Message("a", bytes(60))] * 2, MessageError, "the batch for 'a' has .* bytes, allowed are 100"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(messages: list[Message], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        maker(max_message_size=100).batch(messages)


def test_a_half_message_says_whose_it_is() -> None:
    out = maker(namespace="prod").single(Message("orders", b"x"), transaction_group="shop")

    assert properties_of(out)[Property.TRANSACTION_PREPARED] == "true"
    assert properties_of(out)[Property.PRODUCER_GROUP] == out.group == "prod%shop"
    assert out.is_half
    assert not out.is_at_once


def test_a_half_message_cannot_be_delayed() -> None:
    with pytest.raises(UnsupportedError, match="a message in a transaction is not delayed by RocketMQ"):
        maker().single(Message("orders", b"x", {Property.TIMER_DELAY_SEC: "3"}), transaction_group="shop")


def test_a_reply_goes_to_the_cluster_s_own_topic_whatever_the_namespace() -> None:
    out = maker(namespace="prod").reply("DefaultCluster_REPLY_TOPIC", b"x", {Property.CORRELATION_ID: "1"})

    assert out.request(QUEUE).header(SendMessageRequestHeaderV2).topic == "DefaultCluster_REPLY_TOPIC"
    assert out.code == RequestCode.SEND_REPLY_MESSAGE_V2


# --- refusals -------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_refused_with_both_sizes() -> None:
    with pytest.raises(MessageError, match="has 101 bytes, allowed are 100; .*raise max-message-size here and"):
        maker(max_message_size=100).single(Message("orders", bytes(101)))


def test_properties_that_take_too_much_room_are_refused() -> None:
    with pytest.raises(MessageError, match=r"take \d+ bytes, allowed are 32767; move data into the body"):
        maker().single(Message("orders", b"", {"long": "ß" * 20_000}))


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"])
def test_topics_that_brokers_keep_for_themselves_are_refused(topic: str) -> None:
    with pytest.raises(DestinationError, match=f"'{topic}' belongs to the broker"):
        maker().single(Message(topic, b""))


def test_a_broker_needs_an_address() -> None:
    with pytest.raises(ConfigurationError, match="needs the address of a name server"):
        RemoteSettings(name_servers=())
