"""Messages: of a producer to the properties of a record, and of a record to a consumer.

Source: RocketMQ ``proxy: GrpcConverter``, ``SendMessageActivity``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from mqtemplate.errors import ConversionError, UnsupportedError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import DigestType, Encoding, GrpcMessageType
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import KEY_SEPARATOR, Property, offset_msg_id
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import StoredRecord, unpack_host
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import PRIORITY_PROPERTY, decode_properties
from mqtemplate.server.grpc_api.checks import RESERVED
from mqtemplate.server.grpc_api.encoded import varint

_BORN_HOST = "__BORNHOST"
_BORN_TIMESTAMP = "BORN_TIMESTAMP"
_LITE_TOPIC = "__LITE_TOPIC"
_TRACE_CONTEXT = "TRACE_CONTEXT"

_GZIP_MAGIC = b"\x1f\x8b"
_DELAYS = (Property.DELAY, Property.TIMER_DELIVER_MS, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS)


# --- from producers -------------------------------------------------------------------------------


def milliseconds(time: Any) -> int:
    """Return a ``Timestamp`` or a ``Duration`` in whole milliseconds."""
    return int(time.seconds) * 1_000 + int(time.nanos) // 1_000_000


class SentProperties(NamedTuple):
    """Properties of the record for a message of a producer.

    Attributes:
        text: As `ClientSend` takes them.
        sys_flag: Bits that describe the body.
    """

    text: str
    sys_flag: int
    born_ms: int


def sent_properties(message: Any, kind: GrpcMessageType, peer: str) -> SentProperties:
    """Return the properties for a message that was checked: no text in it has a separator.

    Args:
        message: ``apache.rocketmq.v2.Message``.
        peer: IP address of the client, if the message has no born host.
    """
    system = message.system_properties
    born_ms = milliseconds(system.born_timestamp)
    # The id first: the fast path of the other protocol has the same order.
    parts = [f"{Property.UNIQ_KEY}\x01{system.message_id}\x02"]
    parts += [f"{name}\x01{value}\x02" for name, value in message.user_properties.items() if value]
    if system.tag:
        parts.append(f"{Property.TAGS}\x01{system.tag}\x02")
    if system.keys:
        parts.append(f"{Property.KEYS}\x01{KEY_SEPARATOR.join(system.keys)}\x02")
    if system.message_group:
        parts.append(f"{Property.SHARDING_KEY}\x01{system.message_group}\x02")
    if kind is not GrpcMessageType.NORMAL and kind is not GrpcMessageType.FIFO:
        parts += _special_properties(system, kind)
    if system.trace_context:
        parts.append(f"{_TRACE_CONTEXT}\x01{system.trace_context}\x02")
    parts.append(
        f"{_BORN_HOST}\x01{system.born_host or peer}\x02{_BORN_TIMESTAMP}\x01{born_ms}\x02"
        f"{Property.PRODUCER_GROUP}\x01{message.topic.name}\x02"
    )
    if system.delivery_attempt:
        parts.append(f"{Property.RECONSUME_TIME}\x01{system.delivery_attempt}\x02")
    # A body that is packed by gzip has no bits for its kind: RocketMQ's clients recognise it by its first bytes.
    flag = SysFlag.COMPRESSED if system.body_encoding == Encoding.GZIP else 0
    return SentProperties("".join(parts), flag, born_ms)


def _special_properties(system: Any, kind: GrpcMessageType) -> list[str]:
    parts = []
    if kind is GrpcMessageType.TRANSACTION:
        parts.append(f"{Property.TRANSACTION_PREPARED}\x01true\x02")
        if seconds := system.orphaned_transaction_recovery_duration.seconds:
            parts.append(f"{Property.CHECK_IMMUNITY_TIME}\x01{seconds}\x02")
    if system.HasField("delivery_timestamp"):
        parts.append(f"{Property.TIMER_DELIVER_MS}\x01{milliseconds(system.delivery_timestamp)}\x02")
    if kind is GrpcMessageType.PRIORITY:  # a message has one type: the others have no priority
        parts.append(f"{PRIORITY_PROPERTY}\x01{system.priority}\x02")
    return parts


@lru_cache(maxsize=65_536)
def queue_of_group(message_group: str, count: int) -> int:
    """Return the queue of a message group among *count* queues: the one that RocketMQ's proxy chooses.

    Guava's ``Hashing.consistentHash`` (jump consistent hash) over ``String.hashCode``: with one queue more, only the
    groups that the new queue gets move.
    """
    state = java_string_hash(message_group) & 0xFFFF_FFFF_FFFF_FFFF
    candidate = 0
    while True:
        state = (2_862_933_555_777_941_757 * state + 1) & 0xFFFF_FFFF_FFFF_FFFF
        following = int((candidate + 1) / (((state >> 33) + 1) / 2**31))
        if following >= count:
            return candidate
        candidate = following


# --- to consumers ---------------------------------------------------------------------------------


def message_type(properties: dict[str, str]) -> GrpcMessageType:
    """Return the type of a stored message, by its properties."""
    if properties.get(Property.TRANSACTION_PREPARED) == "true":
        return GrpcMessageType.TRANSACTION
    if any(name in properties for name in _DELAYS):
        return GrpcMessageType.DELAY
    if Property.SHARDING_KEY in properties:
        return GrpcMessageType.FIFO
    if PRIORITY_PROPERTY in properties:
        return GrpcMessageType.PRIORITY
    return GrpcMessageType.LITE if _LITE_TOPIC in properties else GrpcMessageType.NORMAL


def body_for_clients(body: bytes, sys_flag: int, max_bytes: int) -> tuple[bytes, Encoding]:
    """Return the body of a record and its encoding for gRPC clients, of which some know gzip only.

    A body that cannot be decompressed stays as it is, with the encoding GZIP as RocketMQ's proxy marks all compressed
    ones: the client refuses it, and it becomes a dead letter at last.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        return body, Encoding.IDENTITY
    if body.startswith(_GZIP_MAGIC):
        return body, Encoding.GZIP
    try:
        return decompress_body(body, sys_flag, max_bytes), Encoding.IDENTITY
    except (ConversionError, UnsupportedError):
        return body, Encoding.GZIP


def delivered_message(record: StoredRecord, topic: str, max_body_bytes: int) -> Any:
    """Return a record as ``apache.rocketmq.v2.Message``, without handle and number of the attempt.

    Args:
        topic: The real topic, also of a record in a retry topic.
        max_body_bytes: Largest body that is decompressed.
    """
    properties = decode_properties(record.properties_bytes)
    message = protos.Message(body=(found := body_for_clients(record.body, record.sys_flag, max_body_bytes))[0])
    message.topic.name = topic
    user = message.user_properties
    for name, value in properties.items():
        if name not in RESERVED:
            user[name] = value
    system = message.system_properties
    system.message_type = message_type(properties)
    system.body_encoding = found[1]
    system.body_digest.type = DigestType.MD5
    system.body_digest.checksum = hashlib.md5(found[0], usedforsecurity=False).hexdigest().upper()
    _set_texts(system, properties)
    host, port = unpack_host(record.store_host)
    system.message_id = properties.get(Property.UNIQ_KEY) or offset_msg_id(
        unpack_host(record.store_host), record.physical_offset
    )
    system.store_host = f"{host}:{port}"
    system.born_host = properties.get(_BORN_HOST) or unpack_host(record.born_host).ip
    _set_time(system.born_timestamp, record.born_timestamp)
    _set_time(system.store_timestamp, record.store_timestamp)
    system.queue_id = record.queue_id
    system.queue_offset = record.queue_offset
    return message


_UNIQUE_ID, _KEYS, _BORN = (b"%b\x01" % name.encode() for name in (Property.UNIQ_KEY, Property.KEYS, _BORN_TIMESTAMP))
_OF_EACH = ("message_id", "keys", "body_digest", "born_timestamp", "store_timestamp", "queue_id", "queue_offset")
"""System properties that differ between the messages of one producer."""
_MAX_SHARED = 1_000
_MAX_SHARED_BYTES = 2_048


class _SharedFields(NamedTuple):
    """Encoded fields that are equal in many messages: those before the system properties, and some of these."""

    front: bytes
    system: bytes


class _SharedKey(NamedTuple):
    """Properties without those that differ, and all else that the shared fields depend on."""

    topic: str
    properties: bytes
    born_host: bytes
    store_host: bytes


class RecordEncoder:
    """Encodes records for consumers as ``ReceiveMessageResponse``. Thread-safe.

    Protobuf takes three times as long for all fields. So it encodes once what the messages of a producer share. What
    differs follows it: the order of fields has no meaning. An unusual record is encoded by protobuf alone.

    Args:
        max_body_bytes: Returns the size of the largest body that is decompressed.
    """

    def __init__(self, max_body_bytes: Callable[[], int]) -> None:
        self._max_body_bytes = max_body_bytes
        self._shared: dict[_SharedKey, _SharedFields | None] = {}
        self._seen: set[int] = set()

    def encode(self, record: StoredRecord, topic: str, handle: str, attempt: int) -> bytes:
        """Return a record as it is delivered.

        Args:
            topic: The real topic, also of a record in a retry topic.
            attempt: Number of the delivery, from 1 on.
        """
        unique_id, rest = _cut(record.properties_bytes, _UNIQUE_ID)
        keys, rest = _cut(_cut(rest, _BORN)[1], _KEYS)
        is_ascii = unique_id.isascii() and keys.isascii()
        if not unique_id or not is_ascii or record.sys_flag & SysFlag.COMPRESSED or len(rest) > _MAX_SHARED_BYTES:
            return self._by_protobuf(record, topic, handle, attempt)
        key = _SharedKey(topic, rest, record.born_host, record.store_host)
        shared = self._shared.get(key) or self._share(key, record, unique_id, keys)
        if shared is None:
            return self._by_protobuf(record, topic, handle, attempt)
        system = _system(shared, record, unique_id, keys) + b"b%b%b\x80\x01%b" % (
            *(varint(len(handle)), handle.encode()),
            varint(attempt),
        )
        return _received(_message(shared, system, record.body))

    def _by_protobuf(self, record: StoredRecord, topic: str, handle: str, attempt: int) -> bytes:
        message = delivered_message(record, topic, self._max_body_bytes())
        message.system_properties.receipt_handle = handle
        message.system_properties.delivery_attempt = attempt
        return _received(message.SerializeToString())

    def _share(self, key: _SharedKey, record: StoredRecord, unique_id: bytes, keys: bytes) -> _SharedFields | None:
        """Return what messages like this one share; None if they are not only what is shared and what differs."""
        # The second time: messages with a text of their own in each are not worth it.
        if key in self._shared or hash(key) not in self._seen:
            if len(self._seen) >= _MAX_SHARED:
                self._seen.clear()
            self._seen.add(hash(key))
            return None
        message = delivered_message(record, key.topic, self._max_body_bytes())
        system = protos.SystemProperties()
        system.CopyFrom(message.system_properties)
        for name in _OF_EACH:
            system.ClearField(name)
        front = protos.Message(topic=message.topic, user_properties=message.user_properties)
        shared = _SharedFields(front.SerializeToString(), system.SerializeToString())
        encoded = _message(shared, _system(shared, record, unique_id, keys), record.body)
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()
        is_equal = protos.Message.FromString(encoded) == message
        self._shared[key] = shared if is_equal else None
        return self._shared[key]


def _cut(properties: bytes, name: bytes) -> tuple[bytes, bytes]:
    """Return the value of a property, empty without one, and the properties without it."""
    at = 0 if properties.startswith(name) else properties.find(b"\x02" + name) + 1
    if not at and not properties.startswith(name):
        return b"", properties
    start = at + len(name)
    end = properties.find(b"\x02", start)
    if end < 0:
        return properties[start:], properties[:at]
    return properties[start:end], properties[:at] + properties[end + 1 :]


@lru_cache(maxsize=4_096)
def _time(time_ms: int) -> bytes:
    """Return an encoded ``Timestamp``, with its length."""
    timestamp = protos.SystemProperties().born_timestamp
    _set_time(timestamp, time_ms)
    content = timestamp.SerializeToString()
    return b"%c%b" % (len(content), content)


def _system(shared: _SharedFields, record: StoredRecord, unique_id: bytes, keys: bytes) -> bytes:
    """Return encoded system properties, without receipt handle and attempt."""
    digest = hashlib.md5(record.body, usedforsecurity=False).hexdigest().upper().encode()
    each_key = b"".join([b"\x12%b%b" % (varint(len(each)), each) for each in keys.split(b" ") if each]) if keys else b""
    return b'%b%b\x1a%b%b"\x24\x08\x02\x12\x20%b:%bJ%bh%bp%b' % (
        *(shared.system, each_key, varint(len(unique_id)), unique_id, digest),
        *(_time(record.born_timestamp), _time(record.store_timestamp)),
        *(varint(record.queue_id), varint(record.queue_offset)),
    )


def _message(shared: _SharedFields, system: bytes, body: bytes) -> bytes:
    return b"".join((shared.front, b"\x1a", varint(len(system)), system, b'"', varint(len(body)), body))


def _received(message: bytes) -> bytes:
    return b"".join((b"\x12", varint(len(message)), message))


def _set_texts(system: Any, properties: dict[str, str]) -> None:
    """Set what a producer may have set."""
    get = properties.get
    if tag := get(Property.TAGS):
        system.tag = tag
    if keys := get(Property.KEYS):
        system.keys.extend(filter(None, keys.split(KEY_SEPARATOR)))
    if group := get(Property.SHARDING_KEY):
        system.message_group = group
    if (deliver_ms := parse_number(get(Property.TIMER_DELIVER_MS))) is not None:
        _set_time(system.delivery_timestamp, deliver_ms)
    if trace_context := get(_TRACE_CONTEXT):
        system.trace_context = trace_context
    priority = parse_number(get(PRIORITY_PROPERTY))
    if priority is not None and 0 <= priority < 1 << 31:
        system.priority = priority
    if lite_topic := get(_LITE_TOPIC):
        system.lite_topic = lite_topic
    origin_topic, origin_id = get(Property.DLQ_ORIGIN_TOPIC), get(Property.DLQ_ORIGIN_MESSAGE_ID)
    if origin_topic and origin_id:
        system.dead_letter_queue.topic = origin_topic
        system.dead_letter_queue.message_id = origin_id


def _set_time(timestamp: Any, time_ms: int) -> None:
    timestamp.seconds, left_ms = divmod(time_ms, 1_000)
    timestamp.nanos = left_ms * 1_000_000


def set_now(timestamp: Any, now_ms: int) -> None:
    """Set a ``Timestamp`` to a time in milliseconds."""
    _set_time(timestamp, now_ms)
