"""Messages in the form of the gRPC protocol."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import Any

import pytest

from mqtemplate.brokers import GrpcSettings
from mqtemplate.brokers.grpc.channels import Channels
from mqtemplate.brokers.grpc.messages import MessageEncoder, decode_message, decode_received, is_intact
from mqtemplate.brokers.grpc.sessions import ProxyContext
from mqtemplate.brokers.remote.cluster.failures import Outages
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DelayError, DestinationError, MessageError, UnsupportedError
from mqtemplate.grpc_protos.enums import DigestType, Encoding, GrpcMessageType
from mqtemplate.message import HostAddress, Message, PackedBody, Property
from tests.brokers.grpc.scripted_proxy import received

_LIMIT = 1 << 20


def encoder(**settings: Any) -> MessageEncoder:
    given = GrpcSettings(endpoints="127.0.0.1:1", max_message_size=10, **settings)
    context = ProxyContext(given, Channels(given, Outages(VirtualClock())), "client-1")
    return MessageEncoder(context, VirtualClock())


def deliver_ms(properties: dict[str, str]) -> int:
    """Time from now to the deliver time of a message with these properties."""
    encoded = encoder().encode(Message("orders", b"x", properties)).encoded
    deliver = encoded.system_properties.delivery_timestamp.ToMilliseconds()
    return int(deliver) - VirtualClock().now_ms()


# --- sending --------------------------------------------------------------------------------------


def test_what_rocketmq_defines_travels_beside_the_properties_of_the_application() -> None:
    properties = {Property.TAGS: "paid", Property.KEYS: "4466 4467", Property.UNIQ_KEY: "ID-1", "region": "EU"}

    found = encoder(namespace="shop").encode(Message("orders", b"body", properties)).encoded

    system = found.system_properties
    assert (found.topic.name, found.topic.resource_namespace, found.body) == ("orders", "shop", b"body")
    assert dict(found.user_properties) == {"region": "EU"}
    assert (system.tag, list(system.keys), system.message_id) == ("paid", ["4466", "4467"], "ID-1")
    assert system.born_timestamp.ToMilliseconds() == VirtualClock().now_ms()


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, GrpcMessageType.NORMAL),
        ({Property.SHARDING_KEY: "customer-7"}, GrpcMessageType.FIFO),
        ({Property.TIMER_DELAY_SEC: "5"}, GrpcMessageType.DELAY),
        ({Property.SHARDING_KEY: "customer-7", Property.DELAY: "1"}, GrpcMessageType.DELAY),
    ],
)
def test_the_type_of_a_message_follows_from_its_options(properties: dict[str, str], kind: GrpcMessageType) -> None:
    found = encoder().encode(Message("orders", b"x", properties)).encoded.system_properties

    assert found.message_type == kind
    assert found.message_group == properties.get(Property.SHARDING_KEY, "")


def test_a_half_message_is_one_of_a_transaction() -> None:
    found = encoder().encode(Message("orders", b"x", {Property.CHECK_IMMUNITY_TIME: "30"}), in_transaction=True)

    system = found.encoded.system_properties
    assert system.message_type == GrpcMessageType.TRANSACTION
    assert system.orphaned_transaction_recovery_duration.seconds == 30


@pytest.mark.parametrize(
    ("properties", "delay_ms"),
    [
        ({Property.DELAY: "1"}, 1_000),
        ({Property.DELAY: "18"}, 7_200_000),
        ({Property.TIMER_DELAY_SEC: "5"}, 5_000),
        ({Property.TIMER_DELAY_MS: "5"}, 5),
        ({Property.TIMER_DELIVER_MS: str(VirtualClock().now_ms() + 7)}, 7),
        ({Property.START_DELIVER_TIME: str(VirtualClock().now_ms() + 8)}, 8),
        ({Property.DELAY: "1", Property.TIMER_DELAY_SEC: "5"}, 1_000),
    ],
)
def test_each_delay_becomes_a_deliver_time(properties: dict[str, str], delay_ms: int) -> None:
    assert deliver_ms(properties) == delay_ms


def test_a_level_of_another_table_has_its_time_there() -> None:
    found = encoder(message_delay_level="1s 1d").encode(Message("orders", b"x", {Property.DELAY: "2"}))

    deliver = found.encoded.system_properties.delivery_timestamp.ToMilliseconds()
    assert deliver == VirtualClock().now_ms() + 86_400_000


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (Message("orders", bytes(11)), MessageError, r"has 11 bytes, allowed are 10; .*maxMessageSize on the proxy"),
        (Message("orders", b""), MessageError, r"no empty bodies, and the one for 'orders' is empty; send a body"),
        (Message("orders", b"x", flag=7), UnsupportedError, r"the flag 7 of a message for 'orders' .*use a property"),
        (Message("orders", b"x", {"TTL": "1"}), UnsupportedError, r"property TTL .*rocketmq\.name-server"),
        (Message("no blanks", b"x"), DestinationError, r"topic"),
        (Message("orders", b"x", {Property.DELAY: "19"}), DelayError, r"the delay level must be 0\.\.18 .*got 19"),
        (Message("orders", b"x", {Property.TIMER_DELAY_MS: "soon"}), DelayError, r"TIMER_DELAY_MS is 'soon'"),
    ],
)
def test_what_the_protocol_does_not_carry_is_refused(message: Message, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        encoder().encode(message)


def test_a_delay_in_a_transaction_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no delay on a message in a transaction \('orders'\); send it without"):
        encoder().encode(Message("orders", b"x", {Property.DELAY: "1"}), in_transaction=True)


# --- receiving ------------------------------------------------------------------------------------


def test_a_received_message_has_what_was_sent() -> None:
    given = received(b"body", "0 17 60000 0 0 broker-a 3 42 4096", offset=42, attempt=2)
    given.user_properties["region"] = "EU"
    given.system_properties.tag = "paid"
    given.system_properties.keys.extend(["4466", "4467"])
    given.system_properties.message_group = "customer-7"
    given.system_properties.queue_id = 3

    found = decode_received(given, "other", _LIMIT)
    message = found.message

    assert (found.attempt, message.reconsume_times, found.receipt) == (2, 1, given.system_properties.receipt_handle)
    assert (message.topic, message.body, message.msg_id, message.tags, message.keys) == (
        "orders",
        b"body",
        "ID-42",
        "paid",
        "4466 4467",
    )
    assert message.user_properties == {"region": "EU"}
    assert message.properties[Property.SHARDING_KEY] == "customer-7"
    assert (message.broker_name, message.queue_id, message.queue_offset) == ("broker-a", 3, 42)
    assert message.physical_offset == 4_096
    assert message.store_host == HostAddress("127.0.0.1", 10_911)


def test_a_retry_is_marked_as_one_of_the_retry_topic() -> None:
    """Its queue offset is one of the retry topic, so listeners count it there."""
    retry = decode_message(received(b"x", "0 17 60000 0 1 broker-a 0 5 4096"), "broker-a", _LIMIT)
    first = decode_message(received(b"x", "0 17 60000 0 0 broker-a 0 5 4096"), "broker-a", _LIMIT)

    assert retry.properties[Property.RETRY_TOPIC] == "orders"
    assert Property.RETRY_TOPIC not in first.properties


def test_a_receipt_handle_of_another_form_is_taken_as_it_is() -> None:
    found = decode_received(received(b"x", "opaque"), "broker-b", _LIMIT)

    assert (found.receipt, found.message.broker_name, found.message.physical_offset) == ("opaque", "broker-b", 0)


@pytest.mark.parametrize("packed", [gzip.compress(b"body"), zlib.compress(b"body")], ids=["gzip", "zlib"])
def test_a_packed_body_is_unpacked_whatever_packed_it(packed: bytes) -> None:
    """A proxy calls the bodies of remoting clients, which pack with zlib, GZIP."""
    given = received(packed, "r")
    given.system_properties.body_encoding = Encoding.GZIP

    assert decode_message(given, "broker-a", _LIMIT).body == b"body"


def test_a_body_that_cannot_be_unpacked_stays_packed_with_the_reason() -> None:
    given = received(gzip.compress(bytes(2_000)), "r")
    given.system_properties.body_encoding = Encoding.GZIP

    body = decode_message(given, "broker-a", 1_000).body

    assert isinstance(body, PackedBody)
    assert "more than 1000 bytes" in body.reason


@pytest.mark.parametrize(
    ("kind", "checksum"),
    [
        (DigestType.MD5, hashlib.md5(b"body").hexdigest().upper()),
        (DigestType.SHA1, hashlib.sha1(b"body").hexdigest()),
        (DigestType.CRC32, f"{zlib.crc32(b'body'):08X}"),
    ],
)
def test_a_body_is_compared_with_its_digest(kind: DigestType, checksum: str) -> None:
    given = received(b"body", "r")
    given.system_properties.body_digest.type = kind
    given.system_properties.body_digest.checksum = checksum
    damaged = received(b"bodx", "r")
    damaged.system_properties.body_digest.CopyFrom(given.system_properties.body_digest)

    assert is_intact(given)
    assert not is_intact(damaged)


def test_a_cancel_by_a_commit_is_refused_with_what_helps() -> None:
    with pytest.raises(UnsupportedError, match="cancels= .*does not carry it; cancel the message after the commit, or"):
        encoder().encode(Message("orders", b"x", {Property.CANCELS: "handle"}))


def test_a_pending_key_is_refused_with_what_helps() -> None:
    properties = {Property.TIMER_DELAY_MS: "1000", Property.PENDING_KEY: "cart-17"}

    with pytest.raises(
        UnsupportedError,
        match=r"pending_key='cart-17'.*does not carry it.*use an embedded broker, or rocketmq\.name-server",
    ):
        encoder().encode(Message("orders", b"x", properties))
