"""Messages: what a producer sends, and what a consumer receives."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Protocol, Self

from mqtemplate.errors import DelayError, MessageError, UnsupportedError
from mqtemplate.numbers import INT_MAX, LONG_MAX, parse_number
from mqtemplate.user_code import shown

__all__ = [
    "BROKER_PROPERTIES",
    "DELAY_PROPERTIES",
    "FAIR_BY_HASH_KEY",
    "INTERNAL_PROPERTIES",
    "KEY_SEPARATOR",
    "ORIGIN_PROPERTIES",
    "PENDING_KEY_PROPERTIES",
    "RESERVED_PROPERTIES",
    "SPECIAL_PROPERTIES",
    "HostAddress",
    "InvisibleTime",
    "Message",
    "MessageExt",
    "MessageQueue",
    "PackedBody",
    "Property",
    "SelectedQueue",
    "SendSequence",
    "copy_properties",
    "create_unique_id",
    "delay_number",
    "joined_keys",
    "key_text",
    "offset_msg_id",
    "offset_msg_ids",
    "parse_offset_msg_id",
    "property_text",
    "split_keys",
    "storable",
    "valid_time",
]


FAIR_BY_HASH_KEY = "hash_key"
"""Value of ``fair-by`` for the key of ordered sends, ``hash_key=``, which is no property that applications name."""


class Property:
    """Names of the message properties that RocketMQ and this library define. Source: ``common: MessageConst``.

    An application cannot use these names for its own properties; see `RESERVED_PROPERTIES`.
    """

    KEYS = "KEYS"
    TAGS = "TAGS"
    WAIT = "WAIT"
    UNIQ_KEY = "UNIQ_KEY"
    SHARDING_KEY = "__SHARDINGKEY"
    BUYER_ID = "BUYER_ID"
    INSTANCE_ID = "INSTANCE_ID"
    UNIT_MODE = "UNIT_MODE"

    # delays
    DELAY = "DELAY"
    START_DELIVER_TIME = "__STARTDELIVERTIME"
    TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
    TIMER_OUT_MS = "TIMER_OUT_MS"
    TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
    TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
    TIMER_ROLL_LABEL = "TIMER_ROLL_LABEL"
    REAL_TOPIC = "REAL_TOPIC"
    REAL_QID = "REAL_QID"
    LEVEL_DELAY_MS = "__DELAY_MS"
    """Of this library. Delay (ms) of the level at the time of the send; the level table may change later."""
    REPLACED_LEVEL = "__STEERED"
    """Of this library. On the record that replaces a cancelled or rescheduled message: the level of that message, 0
    for a timer."""

    PENDING_KEY = "__MQT_PENDING_KEY"
    """Of this library. Key under which a topic has at most one pending message."""
    ON_PENDING = "__MQT_ON_PENDING"
    """Of this library. Value of `OnPending`: what happens if a message with the same pending key is pending."""
    NO_LATER_THAN = "__MQT_NO_LATER_THAN"
    """Of this library. Longest time (ms) from the first send until the delivery of a message that is postponed."""
    ON_PENDING_STRICT = "__MQT_ON_PENDING_STRICT"
    """Of this library. ``true``: a client does not send the message to brokers that do not decide in one step."""
    PENDING_SINCE = "__MQT_PENDING_SINCE"
    """Of this library. On a delayed message with a pending key: time (epoch ms) of the first send under this key."""
    CANCELS = "__MQT_CANCELS"
    """Of this library. On a half message: handles of pending messages that the commit cancels."""

    # retries
    RETRY_TOPIC = "RETRY_TOPIC"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    ORIGIN_GROUP = "ORIGIN_GROUP"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    CONSUME_START_TIME = "CONSUME_START_TIME"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"

    # transactions
    TRANSACTION_PREPARED = "TRAN_MSG"
    PRODUCER_GROUP = "PGROUP"
    TRANSACTION_ID = "__transactionId__"
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
    TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
    CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    FOLLOWED = "__FOLLOWED"
    """Of this library. On an op message: the id of the message that is stored right after it, in place of the half
    message."""

    SEQUENCE = "__SEQUENCE"
    """Of this library. Application id, version, partition and number of a message in a sequenced send; see
    `SendSequence`."""

    HAND_OVER = "__HAND_OVER"
    """Of this library. On a message that was moved from another broker: names its transit there."""
    HAND_OVER_BACK = "__HAND_OVER_BACK"
    """Of this library. On a record in transit: it comes back from the new broker, which still has the message."""
    HAND_OVER_RECALLED = "__HAND_OVER_RECALLED"
    """Of this library. On a delayed message that has come back: when it was due in the broker that has recalled it."""
    HAND_OVER_STAYS = "__HAND_OVER_STAYS"
    """Of this library. On a delayed message that the new broker refused during a hand-over: it is not moved."""

    # requests and replies
    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    MESSAGE_TYPE = "MSG_TYPE"
    CLUSTER = "CLUSTER"

    # set by brokers
    MSG_REGION = "MSG_REGION"
    TRACE_ON = "TRACE_ON"
    MIN_OFFSET = "MIN_OFFSET"
    MAX_OFFSET = "MAX_OFFSET"
    POP_CK = "POP_CK"
    FIRST_POP_TIME = "1ST_POP_TIME"
    INNER_NUM = "INNER_NUM"
    INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
    CRC32 = "__CRC32#"
    CHECKSUM = "__CRC@"
    """Of this library. Checksum over the header, the topic and the properties of a record."""


DELAY_PROPERTIES = (
    Property.DELAY,
    Property.TIMER_DELAY_SEC,
    Property.TIMER_DELAY_MS,
    Property.TIMER_DELIVER_MS,
    Property.START_DELIVER_TIME,
)
"""Properties that request a delay. A message may have one of them."""

BROKER_PROPERTIES = frozenset(
    {
        Property.REAL_TOPIC,
        Property.REAL_QID,
        Property.TIMER_OUT_MS,
        Property.TIMER_ENQUEUE_MS,
        Property.TIMER_DEQUEUE_MS,
        Property.TIMER_ROLL_TIMES,
        Property.TIMER_ROLL_LABEL,
        Property.LEVEL_DELAY_MS,
        Property.REPLACED_LEVEL,
        Property.HAND_OVER_STAYS,
        Property.HAND_OVER_BACK,
        Property.HAND_OVER_RECALLED,
    }
)
"""Properties of a delayed message that only a broker may set."""

INTERNAL_PROPERTIES = BROKER_PROPERTIES | {
    Property.TIMER_DEL_UNIQKEY,  # a delete marker: the timer of this id is never delivered
    Property.PENDING_SINCE,  # the time from which a delay that is postponed counts
    Property.SEQUENCE,  # the number of a sequenced send: later messages up to it are dropped as repeats
    Property.FOLLOWED,  # on an op message: its transaction has ended if this message follows
    Property.TRANSACTION_CHECK_TIMES,  # transaction checks that were sent
    Property.TRANSACTION_PREPARED_QUEUE_OFFSET,  # the half message that this one replaced
    Property.POP_CK,  # state of a delivery by POP
    Property.FIRST_POP_TIME,
    Property.INNER_NUM,  # RocketMQ: the record has this number of messages
    Property.INNER_MULTI_DISPATCH,  # RocketMQ: further queues that the record belongs to
    Property.INNER_MULTI_QUEUE_OFFSET,
    Property.CRC32,  # checksums of one record
    Property.CHECKSUM,
}
"""Properties with a meaning inside a broker. No message of a client or an application has them: `client_properties`."""

ORIGIN_PROPERTIES = frozenset(
    {
        Property.RETRY_TOPIC,
        Property.ORIGIN_MESSAGE_ID,
        Property.DLQ_ORIGIN_TOPIC,
        Property.DLQ_ORIGIN_MESSAGE_ID,
    }
)
"""Properties of a retry or a dead letter: the message that failed. A consumer that cannot send a message back sends a
copy to the retry topic itself (RocketMQ: ``DefaultMQPushConsumerImpl.sendMessageBack``), with these properties. In a
message for any other topic they would give it a false origin."""

PENDING_KEY_PROPERTIES = (
    Property.PENDING_KEY,
    Property.ON_PENDING,
    Property.NO_LATER_THAN,
    Property.ON_PENDING_STRICT,
)
"""Properties with which a send requests that at most one message is pending under a key."""

SPECIAL_PROPERTIES = INTERNAL_PROPERTIES.union(
    DELAY_PROPERTIES, ORIGIN_PROPERTIES, PENDING_KEY_PROPERTIES, {Property.CANCELS}
)
"""Properties that request a delay or a pending key, or that clients may not set, at least not everywhere. Most messages
have no such property."""

RESERVED_PROPERTIES = frozenset(value for name, value in vars(Property).items() if not name.startswith("_"))
"""Names that an application cannot use for its own properties: all names in `Property`."""


KEY_SEPARATOR = " "
"""Separates business keys in the property ``KEYS``. Source: ``MessageConst.KEY_SEPARATOR``."""

_NO_SEQUENCES = (bytes, bytearray, memoryview, Mapping)
_NOT_IN_PROPERTIES = re.compile("[\x01\x02\ud800-\udfff]")
_MAX_APP_ID_LENGTH = 255
_MAX_TIME_MS = 253_402_214_400_000 - 1  # the last day of the year 9999 is left out: it has not begun in all time zones
_OFFSET_MSG_ID = re.compile(r"(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{56})")


class HostAddress(NamedTuple):
    """IP address and port, as a record stores them."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker. Messages of a queue are delivered in order."""

    topic: str
    broker_name: str
    queue_id: int


class SelectedQueue(MessageQueue):
    """The queue that a selector chose for a message. It equals the same `MessageQueue`.

    Attributes:
        select: Selects again, among the queues that the topic has now. A producer calls it when the route has lost this
            queue, since its broker has stopped.
    """

    __slots__ = ("select",)
    select: Callable[[], MessageQueue]

    def __init__(self, select: Callable[[], MessageQueue]) -> None:
        queue = select()
        super().__init__(queue.topic, queue.broker_name, queue.queue_id)
        object.__setattr__(self, "select", select)  # the queue is frozen

    def __eq__(self, other: object) -> bool:
        return (  # first what differs most among the queues of a topic
            isinstance(other, MessageQueue)
            and self.queue_id == other.queue_id
            and self.broker_name == other.broker_name
            and self.topic == other.topic
        )

    __hash__ = MessageQueue.__hash__

    def __repr__(self) -> str:
        return repr(MessageQueue(self.topic, self.broker_name, self.queue_id))


@dataclass(slots=True)
class Message:
    """A message that a producer sends.

    Attributes:
        topic: Name of the topic; `mqtemplate.topics.check_topic` has the rules for names.
        body: The payload as bytes.
        properties: Names and values, set by RocketMQ (`Property`) or by the application.
        flag: A number of the application; brokers store it and do not use it.
    """

    topic: str
    body: bytes
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0

    @property
    def tags(self) -> str | None:
        """Tag of the message; a message has one tag."""
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> str | None:
        """Business keys of the message, separated by spaces."""
        return self.properties.get(Property.KEYS)

    @property
    def transaction_id(self) -> str | None:
        """Id of the transaction; None if the message was not sent in a transaction."""
        is_in_transaction = self.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
        return self.properties.get(Property.UNIQ_KEY) if is_in_transaction else None

    @property
    def delay_level(self) -> int:
        """Delay level that the producer requested, also after the delivery; 0 if none."""
        return parse_number(self.properties.get(Property.DELAY)) or 0

    @property
    def user_properties(self) -> dict[str, str]:
        """Properties of the application."""
        return {name: value for name, value in self.properties.items() if name not in RESERVED_PROPERTIES}


class PackedBody(bytes):
    """A compressed body that could not be decompressed: the bytes as the producer sent them.

    It does not become a payload: the message fails with *reason*.

    Attributes:
        reason: Text of the error.
    """

    reason: str

    def __new__(cls, body: bytes, reason: str) -> Self:
        packed = super().__new__(cls, body)
        packed.reason = reason
        return packed

    def __getnewargs__(self) -> tuple[bytes, str]:  # type: ignore[override]
        """Return the arguments with which a copy, or a pickle, creates it again."""
        return bytes(self), self.reason


class InvisibleTime(Protocol):
    """Time for which other members of a group do not see a message that this one received by POP."""

    def extend(self, duration: str | timedelta | float) -> Awaitable[None]:
        """Let it end this long from now. See `MessageExt.extend`."""


@dataclass(slots=True, kw_only=True)
class MessageExt(Message):
    """A message as the broker stored it. Times are milliseconds since the epoch.

    Attributes:
        physical_offset: Commit log offset of the first byte of its record.
        queue_offset: Its offset in the queue, counted in messages.
        reconsume_times: Number of times that consumers sent it back.
        store_size: Bytes of the whole record.
        invisible_time: Set while a listener by POP has the message; None otherwise.
    """

    broker_name: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_size: int
    sys_flag: int
    body_crc: int
    born_timestamp: int
    born_host: HostAddress
    store_timestamp: int
    store_host: HostAddress
    reconsume_times: int
    prepared_transaction_offset: int
    invisible_time: InvisibleTime | None = field(default=None, repr=False, compare=False)

    def extend(self, duration: str | timedelta | float) -> Awaitable[None]:
        """Request more time for this message: no other member gets it before *duration* from now.

        For handlers of listeners by POP. It also moves the time from which the handler counts as hanging. It waits for
        the broker. In an ``async def`` handler it does not, so that the event loop goes on: ``await
        message.extend("10m")`` waits, and raises what the broker refuses.

        Args:
            duration: ``"10m"``, a timedelta, or a number of seconds.

        Returns:
            What a coroutine can await until the broker has granted the time.

        Raises:
            InvalidReceiptHandleError: The message was delivered again, so another member may have it.
            UnsupportedError: The message was not received by POP, so there is no such time.
            ValueError: *duration* is not a duration.
        """
        if self.invisible_time is None:
            raise UnsupportedError(
                f"message {self.msg_id} was not received by POP, so it has no invisible time; remove extend, or give "
                "the listener request_mode=MessageRequestMode.POP. A listener that pulls can have a longer "
                "consume_timeout"
            )
        return self.invisible_time.extend(duration)

    @property
    def msg_id(self) -> str:
        """Id that the producer created, equal across its retries; without one, the id that the broker created."""
        return self.properties.get(Property.UNIQ_KEY) or self.offset_msg_id

    @property
    def offset_msg_id(self) -> str:
        """Id that the broker created; see the function `offset_msg_id`."""
        return offset_msg_id(self.store_host, self.physical_offset)

    @property
    def message_queue(self) -> MessageQueue:
        """Queue of the message."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def deliver_timestamp(self) -> int | None:
        """Deliver time of a message that was delayed by a timer; None for other messages."""
        deliver_ms = parse_number(self.properties.get(Property.TIMER_DELIVER_MS))
        return deliver_ms if Property.REAL_TOPIC in self.properties else None


@dataclass(frozen=True, slots=True)
class SendSequence:
    """Numbers of the messages of one sequenced send.

    An application, such as a streaming query, writes one version after the other, such as its micro-batches. The tasks
    of a version write one partition each. Messages of a partition have the numbers 0, 1, 2, …

    Attributes:
        app_id: Id of the application, without spaces.
        version: The broker drops messages of a version below the newest one of the application.
        first: Number of the first message.

    Raises:
        MessageError: A value is not allowed.
    """

    app_id: str
    version: int
    partition: int
    first: int = 0

    def __post_init__(self) -> None:
        name = self.app_id
        if not 0 < len(name) <= _MAX_APP_ID_LENGTH or not name.isprintable() or " " in name:
            raise MessageError(
                f"app_id must have 1..{_MAX_APP_ID_LENGTH} printable characters without spaces, got {name[:300]!r}"
            )
        for name, most in (("version", LONG_MAX), ("partition", INT_MAX), ("first", LONG_MAX)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise MessageError(f"{name} of a sequenced send must be 0..{most}, got {value}")

    def after(self, count: int) -> SendSequence:
        """Return the sequence of the messages after the first *count* ones."""
        return SendSequence(self.app_id, self.version, self.partition, self.first + count)


def offset_msg_id(store_host: HostAddress, physical_offset: int) -> str:
    """Return the id that a broker creates: its address and the physical offset, as upper-case hex digits.

    Source: ``MessageDecoder.createMessageId``; 32 digits, 56 with an IPv6 address.
    """
    return f"{_host_hex(store_host)}{physical_offset:016X}"


def offset_msg_ids(store_host: HostAddress, physical_offsets: Sequence[int]) -> str:
    """Return `offset_msg_id` for each of several physical offsets, joined by commas."""
    host = _host_hex(store_host)
    offsets = struct.pack(f">{len(physical_offsets)}q", *physical_offsets)
    return host + offsets.hex(",", 8).upper().replace(",", f",{host}")


def parse_offset_msg_id(msg_id: str) -> tuple[HostAddress, int]:
    """Return the broker address and the physical offset in an offset message id.

    Raises:
        MessageError: *msg_id* is not an offset message id.
    """
    if not _OFFSET_MSG_ID.fullmatch(msg_id):
        raise MessageError(
            f"{msg_id!r} is not an offset message id: those have 32 hex digits, or 56 with an IPv6 address, as in "
            "SendResult.offset_msg_id. Of the ids of a batch pass one; for the id of a producer call "
            "messages_by_key(topic, id, unique=True)"
        )
    ip, port = bytes.fromhex(msg_id[:-24]), int(msg_id[-24:-16], 16)
    family = socket.AF_INET if len(ip) == 4 else socket.AF_INET6
    return HostAddress(socket.inet_ntop(family, ip), port), int(msg_id[-16:], 16)


@lru_cache(maxsize=64)
def _host_hex(host: HostAddress) -> str:
    family = socket.AF_INET6 if ":" in host.ip else socket.AF_INET
    return f"{socket.inet_pton(family, host.ip).hex()}{host.port:08x}".upper()


class _UniqueIds:
    """Generator of message ids in RocketMQ's format: 32 hex digits of address, process, start, time and counter.

    Source: ``MessageClientIDSetter``. In place of the hash code of the Java class loader, which tells two clients of
    one process apart, this generator uses a random number.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start a new series. A forked child process must not create the ids of its parent."""
        self._prefix = f"7F000001{os.getpid() & 0xFFFF:04X}{secrets.randbits(32):08X}"
        self._start_ms = time.time_ns() // 1_000_000 - 86_400_000
        self._stem_ms, self._stem = -1, ""
        self._counter = itertools.count()

    def next(self) -> str:
        """Return a new id."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms != self._stem_ms:
            self._stem = f"{self._prefix}{now_ms - self._start_ms & 0xFFFF_FFFF:08X}"
            # Set last: until then another thread uses the old stem, and the counter keeps its ids unique.
            self._stem_ms = now_ms
        return f"{self._stem}{next(self._counter) & 0xFFFF:04X}"


_unique_ids = _UniqueIds()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_unique_ids.restart)
create_unique_id = _unique_ids.next


def delay_number(name: str, text: str) -> int:
    """Return the number that the property *name* of a delay has.

    Raises:
        DelayError: It is not a number.
    """
    number = parse_number(text)
    if number is None:
        raise DelayError(f"property {name} is {text[:40]!r}, expected a whole number of at most 18 digits")
    return number


def valid_time(time_ms: int) -> int:
    """Return a time (epoch ms) that a client gave, or the nearest one that calendars have: the years 1970 to 9999."""
    return min(max(time_ms, 0), _MAX_TIME_MS)


# --- business keys ------------------------------------------------------------------------------------------


def split_keys(keys: str | None) -> list[str]:
    """Return the business keys in the property ``KEYS``. Only the blank separates them: a tab is part of a key.

    Source: ``MessageConst.KEY_SEPARATOR``, ``IndexService.buildIndex``.
    """
    return [key for key in keys.split(KEY_SEPARATOR) if key] if keys else []


def key_text(key: object) -> str:
    """Return one business key as text: ``12`` is ``"12"``, as in ``keys=12``.

    Raises:
        MessageError: It is empty, has a blank, or is not a single value.
    """
    text = property_text("a key", key)
    if not text or KEY_SEPARATOR in text:
        raise MessageError(f"a key must be one word, got {shown(key)}; call once for each key")
    return text


def joined_keys(keys: object) -> str:
    """Return business keys as RocketMQ stores and indexes them: one text, separated by blanks.

    Args:
        keys: A text with one key or several, another single value, or a sequence of keys.

    Raises:
        MessageError: A key of a sequence is empty or has a blank, or a key is not a single value.
    """
    if type(keys) is str and keys.isalnum():  # what most keys are
        return keys
    if isinstance(keys, str) or not isinstance(keys, Iterable) or isinstance(keys, _NO_SEQUENCES):
        return KEY_SEPARATOR.join(split_keys(property_text("a key", keys)))
    texts = [property_text("a key", key) for key in keys]
    for text in texts:
        if not text or KEY_SEPARATOR in text:
            raise MessageError(f"key {shown(text)} is empty or contains a blank, which separates keys")
    return KEY_SEPARATOR.join(texts)


def property_text(what: str, value: object) -> str:
    """Return a single value as the text of a property: an enum its value, anything else as `str` writes it.

    Args:
        what: Subject of the sentence of an error.

    Raises:
        MessageError: It is not a single value, such as a list or an object without a text of its own, or the text
            cannot be stored.
    """
    if type(value) is str:
        return storable(what, value)
    if isinstance(value, Enum):
        return property_text(what, value.value)
    has_text = isinstance(value, int | float) or type(value).__str__ is not object.__str__
    if not has_text or value is None or isinstance(value, bool) or _is_collection(value):
        raise MessageError(f"{what} must be text, a number or a UUID, got {type(value).__name__} {shown(value)}")
    return storable(what, value)


def storable(what: str, value: object) -> str:
    """Return the text of a value if a property can have it.

    Raises:
        MessageError: The text cannot be stored, or the class of the caller raises an error in place of it.
    """
    try:
        text = str(value)
    except Exception as exc:  # Python itself writes no number of more than 4,300 digits
        raise MessageError(f"{what} has no text: {type(exc).__name__}: {exc}") from exc
    if _NOT_IN_PROPERTIES.search(text):
        raise MessageError(
            f"{what} contains \\x01 or \\x02, which separate properties in a record, or a surrogate, which UTF-8 "
            f"does not have: {shown(text)}"
        )
    return text


def _is_collection(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def copy_properties(properties: Mapping[str, str], *without: str) -> dict[str, str]:
    """Return a copy of *properties* without some of them."""
    return {name: value for name, value in properties.items() if name not in without}
