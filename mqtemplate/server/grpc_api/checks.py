"""Checks of names and of messages of producers, before anything is stored.

Source: RocketMQ ``proxy: GrpcValidator``, ``SendMessageActivity``, ``DefaultTopicMessageTypeValidator``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mqtemplate.grpc_protos.enums import Code, GrpcMessageType
from mqtemplate.message import RESERVED_PROPERTIES
from mqtemplate.server.grpc_api.status import GrpcRefusedError
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_LITE_TOPIC = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CLIENT_PROPERTY = re.compile(r"[a-zA-Z][a-zA-Z0-9_.-]{0,63}")
_MAX_TOPIC, _MAX_GROUP = 127, 255
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"

_MAX_PROPERTIES = 128
_MAX_PROPERTIES_BYTES = 16 << 10
_MAX_MESSAGE_GROUP_BYTES = 64
_MAX_RECOVERY_S = 3_600
MAX_INVISIBLE_MS = 12 * 3_600_000
MIN_INVISIBLE_MS = 10_000

RESERVED = RESERVED_PROPERTIES | {
    "TRANSFER_FLAG",
    "CORRECTION_FLAG",
    "MQ2_FLAG",
    "DUP_INFO",
    "EXTEND_UNIQ_INFO",
    "POP_CK_OFFSET",
    "ARRIVE_TIME",
    "PUSH_REPLY_TIME",
    "TIMER_DELAY_LEVEL",
    "INNER_BASE",
    "__BORNHOST",
    "BORN_TIMESTAMP",
    "TRACE_CONTEXT",
    "_SYS_MSG_PRIORITY_",
    "__LITE_TOPIC",
}
"""Names that no property of an application has: those of RocketMQ (``MessageConst``) and those of this library."""


# --- names ----------------------------------------------------------------------------------------


@lru_cache(maxsize=4_096)
def check_topic_name(topic: str) -> str:
    """Return the name of a topic of a request, if clients may use it."""
    if not topic or topic.isspace():
        raise GrpcRefusedError(Code.ILLEGAL_TOPIC, "the topic is empty; name a topic")
    if len(topic) > _MAX_TOPIC:
        raise GrpcRefusedError(
            Code.ILLEGAL_TOPIC, f"topic {topic[:40]!r}… has {len(topic)} characters, allowed are {_MAX_TOPIC}"
        )
    if not _NAME.fullmatch(topic):
        raise GrpcRefusedError(
            Code.ILLEGAL_TOPIC,
            f"topic {topic!r} has characters that are not allowed; use letters, digits, '_', '-', '%' and '|'",
        )
    if topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX):
        raise GrpcRefusedError(
            Code.ILLEGAL_TOPIC, f"topic {topic!r} is a system topic; use a topic of your application"
        )
    return topic


@lru_cache(maxsize=4_096)
def check_group_name(group: str) -> str:
    """Return the name of a consumer group of a request, if clients may use it."""
    if not group or group.isspace():
        raise GrpcRefusedError(Code.ILLEGAL_CONSUMER_GROUP, "the consumer group is empty; name a group")
    if len(group) > _MAX_GROUP:
        raise GrpcRefusedError(
            Code.ILLEGAL_CONSUMER_GROUP, f"group {group[:40]!r}… has {len(group)} characters, allowed are {_MAX_GROUP}"
        )
    if not _NAME.fullmatch(group):
        raise GrpcRefusedError(
            Code.ILLEGAL_CONSUMER_GROUP,
            f"group {group!r} has characters that are not allowed; use letters, digits, '_', '-', '%' and '|'",
        )
    if group.startswith(_SYSTEM_GROUP_PREFIX):
        raise GrpcRefusedError(Code.ILLEGAL_CONSUMER_GROUP, f"group {group!r} is a system group; use one of your own")
    return group


def check_client_properties(properties: Mapping[str, str]) -> None:
    """Check the properties that a client declares about itself."""
    text = None
    if len(properties) > 32:
        text = f"a client may have 32 client properties, got {len(properties)}"
    for name, value in properties.items():
        if not _CLIENT_PROPERTY.fullmatch(name):
            text = f"client property {name[:64]!r}: a name is a letter, then letters, digits, '_', '.', '-', at most 64"
        elif len(value) > 256:
            text = f"client property {name!r} has a value of {len(value)} characters, allowed are 256"
    if sum(len(name.encode()) + len(value.encode()) for name, value in properties.items()) > 4_096:
        text = "the client properties have more than 4096 bytes together"
    if text is not None:
        raise GrpcRefusedError(Code.INVALID_CLIENT_PROPERTIES, text)


# --- messages -------------------------------------------------------------------------------------


def check_message(message: Any, max_body_bytes: int) -> None:
    """Check a message of a producer, but for its topic and its type.

    Args:
        message: ``apache.rocketmq.v2.Message``.
    """
    size = len(message.body)
    if not size:
        raise GrpcRefusedError(Code.MESSAGE_BODY_EMPTY, "the body of the message is empty")
    if size > max_body_bytes:
        raise GrpcRefusedError(
            Code.MESSAGE_BODY_TOO_LARGE,
            f"the body has {size} bytes, allowed are {max_body_bytes}; send less, or raise max-message-size",
        )
    system = message.system_properties
    properties = message.user_properties
    if properties or system.keys or system.tag:
        _check_texts(properties, system)
    _check_fields(system)


def _check_texts(properties: Mapping[str, str], system: Any) -> None:
    """Check the properties, the tag and the keys."""
    if len(properties) > _MAX_PROPERTIES:
        raise GrpcRefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"a message may have {_MAX_PROPERTIES} properties, this one has {len(properties)}",
        )
    keys = system.keys
    text = "".join([*properties, *properties.values(), system.tag, *keys])
    size = len(text) if text.isascii() else len(text.encode())
    if size > _MAX_PROPERTIES_BYTES:
        raise GrpcRefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"properties, tag and keys have {size} bytes, allowed are {_MAX_PROPERTIES_BYTES}; put data into the body",
        )
    if not RESERVED.isdisjoint(properties):
        name = min(RESERVED.intersection(properties))
        raise GrpcRefusedError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r} is reserved; choose another name")
    if not text.isprintable() or "" in properties:  # one test of all texts: most have no such character
        _check_properties(properties)
    for key in keys:
        if not key.strip() or _CONTROL.search(key):
            raise GrpcRefusedError(
                Code.ILLEGAL_MESSAGE_KEY, f"message key {key[:64]!r} is blank or has control characters"
            )


def _check_properties(properties: Mapping[str, str]) -> None:
    for name, value in properties.items():
        if not name or _CONTROL.search(name) or _CONTROL.search(value):
            raise GrpcRefusedError(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {name[:64]!r} is empty or has control characters, in its name or its value",
            )


def _check_fields(system: Any) -> None:
    """Check the system properties of a message."""
    tag = system.tag  # empty is none: some clients always set it
    if tag and (not tag.strip() or "|" in tag or _CONTROL.search(tag)):
        raise GrpcRefusedError(Code.ILLEGAL_MESSAGE_TAG, f"tag {tag[:64]!r} is blank, or has '|' or control characters")
    message_id = system.message_id
    if not message_id.strip() or _CONTROL.search(message_id):
        raise GrpcRefusedError(
            Code.ILLEGAL_MESSAGE_ID, "the message id is blank or has control characters; clients create it"
        )
    group = system.message_group
    if group and (not group.strip() or len(group.encode()) >= _MAX_MESSAGE_GROUP_BYTES or _CONTROL.search(group)):
        raise GrpcRefusedError(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message group {group[:64]!r} must not be blank, must have less than {_MAX_MESSAGE_GROUP_BYTES} bytes and "
            "no control characters",
        )
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = system.orphaned_transaction_recovery_duration.seconds
        if seconds > _MAX_RECOVERY_S or seconds < 0:
            raise GrpcRefusedError(
                Code.BAD_REQUEST,
                f"the recovery duration of a transaction must be 0..{_MAX_RECOVERY_S} seconds, got {seconds}",
            )
    if system.lite_topic and not _LITE_TOPIC.fullmatch(system.lite_topic):
        raise GrpcRefusedError(
            Code.ILLEGAL_LITE_TOPIC,
            f"lite topic {system.lite_topic[:64]!r} must have 1..64 letters, digits, '_' or '-'",
        )
    if system.priority < 0:
        raise GrpcRefusedError(Code.BAD_REQUEST, f"the priority must be 0 or more, got {system.priority}")
    for text in (system.trace_context, system.born_host):
        if text and _CONTROL.search(text):
            raise GrpcRefusedError(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "the trace context or the born host has control characters"
            )


# --- types ----------------------------------------------------------------------------------------

_UNSPECIFIED = GrpcMessageType.MESSAGE_TYPE_UNSPECIFIED
_MIXED = (GrpcMessageType.NORMAL, GrpcMessageType.FIFO, GrpcMessageType.DELAY, GrpcMessageType.TRANSACTION)
_ACCEPTED: Mapping[str, tuple[GrpcMessageType, ...]] = {
    "UNSPECIFIED": (_UNSPECIFIED,),
    "MIXED": _MIXED,
    **{kind.name: (kind,) for kind in GrpcMessageType if kind is not _UNSPECIFIED},
}


def accepted_types(attributes: Mapping[str, str]) -> tuple[GrpcMessageType, ...]:
    """Return the types of messages that a topic accepts, by its attribute ``message.type``."""
    return _ACCEPTED.get(attributes.get("message.type", "NORMAL"), (_UNSPECIFIED,))


def sent_type(system: Any) -> GrpcMessageType:
    """Return the type of a message of a producer, by its system properties.

    Source: ``common: TopicMessageType.parseFromMessageProperty``.
    """
    if system.message_type == GrpcMessageType.TRANSACTION:
        return GrpcMessageType.TRANSACTION
    if system.HasField("delivery_timestamp"):
        return GrpcMessageType.DELAY
    if system.message_group:
        return GrpcMessageType.FIFO
    if system.HasField("priority"):
        return GrpcMessageType.PRIORITY
    if system.lite_topic:
        return GrpcMessageType.LITE
    return GrpcMessageType.NORMAL


def check_type(topic: str, kind: GrpcMessageType, attributes: Mapping[str, str]) -> None:
    """Check that a topic accepts messages of a type."""
    expected = attributes.get("message.type", "NORMAL")
    if expected in (kind.name, "MIXED") or topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        return
    raise GrpcRefusedError(
        Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        f"topic {topic!r} accepts {expected} messages, this one is {kind.name}; send it to another topic, or change "
        f"the topic: mqadmin updateTopic -a +message.type={kind.name}",
    )


# --- encoded requests -----------------------------------------------------------------------------


_MESSAGES, _BODY = 1, 4
"""Numbers of the fields ``SendMessageRequest.messages`` and ``Message.body``."""
_SETTINGS, _PUB_SUB = (2,), (5, 6)
"""Numbers of ``TelemetryCommand.settings``, and of ``Settings.publishing`` and ``Settings.subscription``."""
_MAX_FIELDS = 1_000
_MAX_BYTES_BESIDE_BODY = 128 << 10
_MAX_REQUEST_FIELDS = 10_000
INLINE_BYTES = 64 << 10
"""A longer message may have so many fields that its decoding takes more than a millisecond: in a worker thread then."""


def check_encoded_fields(data: bytes) -> None:
    """Refuse a request that is no message, but has so many fields that its decoding would hold all threads.

    Raises:
        GrpcRefusedError: There are too many.
    """
    at = count = 0
    while at < len(data):
        _, _, at = _next_field(data, at, len(data))
        count += 1
        if count > _MAX_REQUEST_FIELDS:
            raise GrpcRefusedError(
                Code.PAYLOAD_TOO_LARGE, f"the request has more than {_MAX_REQUEST_FIELDS} fields; send several requests"
            )


def check_encoded_settings(data: bytes, max_subscriptions: int) -> None:
    """Refuse a command with settings of too many topics: its decoding would hold all threads.

    Args:
        data: A ``TelemetryCommand``.

    Raises:
        GrpcRefusedError: There are too many.
    """
    parts = [(0, len(data))]
    for numbers, most in ((_SETTINGS, _MAX_FIELDS), (_PUB_SUB, _MAX_FIELDS), ((), max_subscriptions + _MAX_FIELDS)):
        found, count = [], 0
        for at, end in parts:
            while at < end:
                number, start, at = _next_field(data, at, end)
                count += 1
                if count > most:
                    raise GrpcRefusedError(
                        Code.TOO_MANY_REQUESTS,
                        f"the settings have more than {most} fields; a consumer has at most {max_subscriptions} "
                        "subscriptions: use several, or raise max-subscriptions-per-connection",
                    )
                if number in numbers:
                    found.append((start, at))
        parts = found


def check_encoded_messages(data: bytes, max_messages: int, *, most_inline: int | None = None) -> bool:
    """Refuse a request of a producer whose decoded form would be many times larger: two bytes are an empty message.

    Args:
        data: A ``SendMessageRequest``. What is no valid one is left to the decoder.
        max_messages: Most messages of a request.
        most_inline: With more fields than this the check ends: it would take too long in this thread.

    Returns:
        False if it has ended so, with no result.

    Raises:
        GrpcRefusedError: There are too many messages, or one has too many fields, or too many bytes beside its body.
    """
    at = count = 0
    while at < len(data):
        number, start, at = _next_field(data, at, len(data))
        count += 1
        if count > max_messages:
            raise GrpcRefusedError(
                Code.BAD_REQUEST,
                f"the request has more than {max_messages} messages; send fewer at once, or raise max-batch-messages",
            )
        if most_inline is not None and count > most_inline:
            return False
        if number == _MESSAGES:
            _check_encoded_message(data, start, at)
    return True


def _check_encoded_message(data: bytes, start: int, end: int) -> None:
    at, count, beside = start, 0, end - start
    while at < end:
        number, content, at = _next_field(data, at, end)
        count += 1
        if number == _BODY:
            beside -= at - content
        if count > _MAX_FIELDS:
            raise GrpcRefusedError(
                Code.MESSAGE_PROPERTIES_TOO_LARGE,
                f"a message has more than {_MAX_FIELDS} fields, allowed are {_MAX_PROPERTIES} properties",
            )
    if beside > _MAX_BYTES_BESIDE_BODY:
        raise GrpcRefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"a message has {beside} bytes beside its body; its properties may have {_MAX_PROPERTIES_BYTES}",
        )


def _next_field(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the number, the start and the end of the content of a field; the end of *data* for an invalid one."""
    key, at = _varint(data, at, end)
    kind = key & 7
    if kind == 2:
        size, start = _varint(data, at, end)
        return key >> 3, start, min(start + size, end)
    if kind == 0:
        return key >> 3, at, _varint(data, at, end)[1]
    return key >> 3, at, min(at + {1: 8, 5: 4}.get(kind, end), end)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift >= 63:
            break
        shift += 7
    return value, at
