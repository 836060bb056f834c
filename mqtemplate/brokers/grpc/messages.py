"""Messages in the form of the gRPC protocol: those that an application sends, and those that it receives.

Source: RocketMQ ``client-java: PublishingMessageImpl``, ``MessageViewImpl``; ``proxy: GrpcConverter``.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mqtemplate.broker import ReceivedMessage
from mqtemplate.brokers.grpc.sessions import ProxyContext
from mqtemplate.clock import Clock
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.errors import ConversionError, MessageError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import DigestType, Encoding, GrpcMessageType
from mqtemplate.hashes import crc32
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    RESERVED_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    PackedBody,
    Property,
    create_unique_id,
    delay_number,
    split_keys,
)
from mqtemplate.numbers import parse_number
from mqtemplate.record.compression import CompressionType, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.topics import check_send_topic

_log = get_logger("mqtemplate.remote")

# --- sending --------------------------------------------------------------------------------------


_TRANSLATED = frozenset(DELAY_PROPERTIES) | {
    Property.KEYS,
    Property.TAGS,
    Property.UNIQ_KEY,
    Property.SHARDING_KEY,
    Property.CHECK_IMMUNITY_TIME,
}
_LEFT_OUT = BROKER_PROPERTIES | {
    Property.WAIT,
    Property.INSTANCE_ID,
    Property.MSG_REGION,
    Property.TRACE_ON,
    Property.CLUSTER,
    Property.MIN_OFFSET,
    Property.MAX_OFFSET,
}
_OTHERS = RESERVED_PROPERTIES - _TRANSLATED - _LEFT_OUT
_HOST_NAME = socket.gethostname()


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message in the form of the protocol.

    Attributes:
        encoded: The message of the request.
        has_delay: It has a deliver time.
        message_group: Messages with the same text stay in order; empty for none.
    """

    topic: str
    msg_id: str
    encoded: Any
    has_delay: bool
    message_group: str

    def __str__(self) -> str:
        return f"send message {self.msg_id} to {self.topic!r}"


class MessageEncoder:
    """Encoder of messages. It checks each message and does not change it.

    Attributes:
        levels: Table of delay levels; the encoder turns a level into a deliver time.
    """

    def __init__(self, context: ProxyContext, clock: Clock) -> None:
        settings = context.settings
        self.levels = DelayLevels.parse(settings.message_delay_level, is_clamping=settings.clamp_delay_level)
        self._context = context
        self._clock = clock

    def encode(self, message: Message, *, in_transaction: bool = False) -> OutgoingMessage:
        """Return a message in the form of the protocol.

        Raises:
            MessageError: It is too large, its topic is not one to send to, or its delay is not a number.
            UnsupportedError: The protocol does not carry its flag, one of its properties, or a delay in a transaction.
        """
        topic, properties = check_send_topic(message.topic), message.properties
        self._check(message)
        msg_id = properties.get(Property.UNIQ_KEY) or create_unique_id()
        deliver_ms = self._deliver_ms(properties, topic)
        group = properties.get(Property.SHARDING_KEY, "")
        if in_transaction and deliver_ms is not None:
            raise UnsupportedError(
                f"RocketMQ's gRPC protocol has no delay on a message in a transaction ({topic!r}); send it without a "
                "delay, or send a delayed message after the commit"
            )
        system = protos.SystemProperties(
            message_id=msg_id, keys=split_keys(properties.get(Property.KEYS)), born_host=_HOST_NAME
        )
        system.body_encoding = Encoding.IDENTITY
        system.born_timestamp.FromMilliseconds(self._clock.now_ms())
        system.message_type = _type_of(in_transaction, deliver_ms, group)
        if (tag := properties.get(Property.TAGS)) is not None:
            system.tag = tag
        if group:
            system.message_group = group
        if deliver_ms is not None:
            system.delivery_timestamp.FromMilliseconds(deliver_ms)
        if (immunity := properties.get(Property.CHECK_IMMUNITY_TIME)) is not None:
            system.orphaned_transaction_recovery_duration.seconds = parse_number(immunity) or 0
        own = {name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES}
        encoded = protos.Message(
            topic=self._context.resource(topic), user_properties=own, system_properties=system, body=message.body
        )
        return OutgoingMessage(topic, msg_id, encoded, deliver_ms is not None, group)

    def _check(self, message: Message) -> None:
        limit = self._context.settings.max_message_size
        if len(message.body) > limit:
            raise MessageError(
                f"the body for {message.topic!r} has {len(message.body)} bytes, allowed are {limit}; store large data "
                "elsewhere and send its address, or raise max-message-size here and maxMessageSize on the proxy"
            )
        if not message.body:
            raise MessageError(
                f"RocketMQ's gRPC protocol has no empty bodies, and the one for {message.topic!r} is empty; send a body"
            )
        if message.flag:
            raise UnsupportedError(
                f"the flag {message.flag} of a message for {message.topic!r} does not travel over RocketMQ's gRPC "
                "protocol; use a property"
            )
        if Property.PENDING_KEY in message.properties:
            raise UnsupportedError(
                f"pending_key={message.properties[Property.PENDING_KEY]!r} of a message for {message.topic!r}: "
                "RocketMQ's gRPC protocol does not carry it, nor the answer what became of the pending message; use an "
                "embedded broker, or rocketmq.name-server with a server of this library"
            )
        if Property.CANCELS in message.properties:
            raise UnsupportedError(
                f"cancels= of a transaction for {message.topic!r}: RocketMQ's gRPC protocol does not carry it; cancel "
                "the message after the commit, or use an embedded broker, or rocketmq.name-server with a server of "
                "this library"
            )
        if not _OTHERS.isdisjoint(message.properties):
            name = min(_OTHERS & message.properties.keys())
            raise UnsupportedError(
                f"property {name} of a message for {message.topic!r} is one of RocketMQ's own, and its gRPC protocol "
                "does not carry it; leave it out, or use rocketmq.name-server"
            )

    def _deliver_ms(self, properties: Mapping[str, str], topic: str) -> int | None:
        """Return the deliver time that the properties of a message request; None for a message without a delay."""
        if _DELAYS.isdisjoint(properties):
            return None
        now_ms = self._clock.now_ms()
        level = self.levels.read(properties[Property.DELAY], topic) if Property.DELAY in properties else 0
        given = {name: delay_number(name, properties[name]) for name in DELAY_PROPERTIES[1:] if name in properties}
        if level:
            return now_ms + self.levels.delay_ms(level)
        for name, factor in ((Property.TIMER_DELAY_SEC, 1_000), (Property.TIMER_DELAY_MS, 1)):
            if name in given:
                return now_ms + given[name] * factor
        return given.get(Property.TIMER_DELIVER_MS, given.get(Property.START_DELIVER_TIME))


_DELAYS = frozenset(DELAY_PROPERTIES)


def _type_of(in_transaction: bool, deliver_ms: int | None, group: str) -> GrpcMessageType:
    if in_transaction:
        return GrpcMessageType.TRANSACTION
    if deliver_ms is not None:
        return GrpcMessageType.DELAY
    return GrpcMessageType.FIFO if group else GrpcMessageType.NORMAL


# --- receiving ------------------------------------------------------------------------------------


_DIGESTS: dict[int, Callable[[bytes], str]] = {
    DigestType.CRC32: lambda body: f"{crc32(body):08X}",
    DigestType.MD5: lambda body: hashlib.md5(body, usedforsecurity=False).hexdigest().upper(),
    DigestType.SHA1: lambda body: hashlib.sha1(body, usedforsecurity=False).hexdigest().upper(),
}
_PACKED = {  # first bytes -> method: a proxy calls all compressed bodies of remoting clients GZIP
    b"\x1f\x8b": SysFlag.COMPRESSED,
    b"\x78": SysFlag.COMPRESSED,
    b"\x04\x22\x4d\x18": CompressionType.LZ4.sys_flag,
    b"\x28\xb5\x2f\xfd": CompressionType.ZSTD.sys_flag,
}
_RETRY_TOPIC_TYPES = ("1", "2")


def is_intact(given: Any) -> bool:
    """Return True if the body of a received message has the digest that the proxy sent, or it sent none."""
    digest = given.system_properties.body_digest
    compute = _DIGESTS.get(digest.type)
    if compute is None or not digest.checksum:
        return True
    checksum: str = digest.checksum
    return compute(given.body).lstrip("0") == checksum.upper().lstrip("0")


def decode_message(given: Any, broker_name: str, max_body_bytes: int) -> MessageExt:
    """Return a message of the protocol as listeners get it.

    A body that cannot be decompressed stays as it is, as a `PackedBody`.

    Args:
        broker_name: Broker that it was requested from, if its receipt handle does not say.
    """
    system = given.system_properties
    handle = system.receipt_handle.split(" ")
    named_broker = handle[5] if len(handle) > 7 else broker_name
    properties = _properties(given)
    if len(handle) > 7 and handle[4] in _RETRY_TOPIC_TYPES:
        properties[Property.RETRY_TOPIC] = given.topic.name
    return MessageExt(
        topic=given.topic.name,
        body=_body(given, max_body_bytes),
        properties=properties,
        broker_name=named_broker,
        queue_id=system.queue_id,
        queue_offset=system.queue_offset,
        physical_offset=(parse_number(handle[8]) or 0) if len(handle) > 8 else 0,
        store_size=len(given.body),
        sys_flag=0,
        body_crc=crc32(given.body),
        born_timestamp=system.born_timestamp.ToMilliseconds(),
        born_host=_host(system.born_host),
        store_timestamp=system.store_timestamp.ToMilliseconds(),
        store_host=_host(system.store_host),
        reconsume_times=max(system.delivery_attempt - 1, 0),
        prepared_transaction_offset=0,
    )


def decode_received(given: Any, broker_name: str, max_body_bytes: int) -> ReceivedMessage:
    """Return a received message with its receipt handle."""
    system = given.system_properties
    message = decode_message(given, broker_name, max_body_bytes)
    return ReceivedMessage(message, system.receipt_handle, max(system.delivery_attempt, 1))


def _properties(given: Any) -> dict[str, str]:
    system = given.system_properties
    found = dict(given.user_properties)
    if system.HasField("tag"):
        found[Property.TAGS] = system.tag
    if system.keys:
        found[Property.KEYS] = " ".join(system.keys)
    found[Property.UNIQ_KEY] = system.message_id
    if system.message_group:
        found[Property.SHARDING_KEY] = system.message_group
    if system.HasField("delivery_timestamp"):
        found[Property.TIMER_DELIVER_MS] = str(system.delivery_timestamp.ToMilliseconds())
    if system.message_type == GrpcMessageType.TRANSACTION:
        found[Property.TRANSACTION_PREPARED] = "true"
    if system.HasField("dead_letter_queue"):
        found[Property.DLQ_ORIGIN_TOPIC] = system.dead_letter_queue.topic
        found[Property.DLQ_ORIGIN_MESSAGE_ID] = system.dead_letter_queue.message_id
    return found


def _body(given: Any, max_body_bytes: int) -> bytes:
    body: bytes = given.body
    if given.system_properties.body_encoding != Encoding.GZIP:
        return body
    flag = next((flag for start, flag in _PACKED.items() if body.startswith(start)), SysFlag.COMPRESSED)
    try:
        return decompress_body(body, flag, max_body_bytes)
    except (ConversionError, UnsupportedError) as exc:
        _log.warning("message.left_compressed", msg_id=given.system_properties.message_id, reason=str(exc))
        return PackedBody(body, str(exc))


def _host(text: str) -> HostAddress:
    ip, _, port = text.rpartition(":")
    number = parse_number(port)
    if not ip or number is None or not 0 <= number < 1 << 16:
        return HostAddress(text, 0)
    return HostAddress(ip.strip("[]"), number)
