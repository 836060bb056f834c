"""The message: what is sent, and what is received."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "BROKER_PROPERTIES",
    "DELAY_PROPERTIES",
    "RESERVED_PROPERTIES",
    "HostAddress",
    "Message",
    "MessageExt",
    "MessageQueue",
    "Property",
    "copy_properties",
    "create_unique_id",
    "join_keys",
    "offset_msg_id",
    "offset_msg_ids",
]


class Property:
    """Names of the properties that RocketMQ gives a meaning to. Source: ``common: MessageConst``."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    WAIT = "WAIT"
    DELAY = "DELAY"
    UNIQ_KEY = "UNIQ_KEY"
    SHARDING_KEY = "__SHARDINGKEY"
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
    RETRY_TOPIC = "RETRY_TOPIC"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    TRANSACTION_PREPARED = "TRAN_MSG"
    PRODUCER_GROUP = "PGROUP"
    TRANSACTION_ID = "__transactionId__"
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
    TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
    CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    MESSAGE_TYPE = "MSG_TYPE"
    CLUSTER = "CLUSTER"
    INSTANCE_ID = "INSTANCE_ID"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
    LEVEL_DELAY_MS = "__DELAY_MS"
    """Ours, on a message that waits by level: the level's delay (ms) when it was sent. The table may change later."""
    REPLACED_LEVEL = "__STEERED"
    """Ours, on what takes the place of a waiting message that was cancelled or rescheduled: that one's level, 0 for a
    timer."""
    FOLLOWED = "__FOLLOWED"
    """Ours, on the mark that a half message is done: the id of the message next in the log, which takes its place."""


DELAY_PROPERTIES = (
    Property.DELAY,
    Property.TIMER_DELAY_SEC,
    Property.TIMER_DELAY_MS,
    Property.TIMER_DELIVER_MS,
    Property.START_DELIVER_TIME,
)
"""The properties that make a broker keep a message back. A message may have one of them."""

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
    }
)
"""What only a broker may write on a message that waits."""

RESERVED_PROPERTIES: frozenset[str] = frozenset(
    {value for name, value in vars(Property).items() if not name.startswith("_")}
    | {
        "BUYER_ID",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "CLUSTER",
        "CONSUME_START_TIME",
        "CORRELATION_ID",
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "INNER_NUM",
        "MAX_OFFSET",
        "MIN_OFFSET",
        "MSG_REGION",
        "MSG_TYPE",
        "ORIGIN_GROUP",
        "POP_CK",
        "REPLY_TO_CLIENT",
        "TRACE_ON",
        "TRANSACTION_CHECK_TIMES",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TTL",
        "UNIT_MODE",
        "__CRC32#",
        "__CRC@",
    }
)
"""Property names that belong to the broker and its clients; a user's own property must have another name."""


class HostAddress(NamedTuple):
    """Address and port, as a record stores them."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker; order holds within a queue."""

    topic: str
    broker_name: str
    queue_id: int


@dataclass(slots=True)
class Message:
    """What a producer hands to the broker.

    Attributes:
        topic: Where to; see `mqtemplate.topics.check_topic` for what a name may be.
        body: The payload as bytes.
        properties: Text beside the body: RocketMQ's own names (`Property`) and the user's.
        flag: A number of the user's, carried along.
    """

    topic: str
    body: bytes
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0

    @property
    def tags(self) -> str | None:
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> str | None:
        """The business keys, separated by blanks."""
        return self.properties.get(Property.KEYS)

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction it was sent in; None for a message that was sent in none."""
        is_in_transaction = self.properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
        return self.properties.get(Property.UNIQ_KEY) if is_in_transaction else None

    @property
    def delay_level(self) -> int:
        """The level the sender asked for; 0 if none. A delivered message still tells it."""
        text = self.properties.get(Property.DELAY, "0")
        return int(text) if text.lstrip("-").isdecimal() else 0

    @property
    def user_properties(self) -> dict[str, str]:
        """The properties that are the sender's own."""
        return {name: value for name, value in self.properties.items() if name not in RESERVED_PROPERTIES}


@dataclass(slots=True, kw_only=True)
class MessageExt(Message):
    """A message as the broker stores it. Times are milliseconds since the epoch.

    Attributes:
        physical_offset: First byte of its record in the commit log.
        queue_offset: Its place in the queue, counted in messages.
        reconsume_times: How often a consumer has given it back.
        store_size: Bytes of the whole record.
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

    @property
    def msg_id(self) -> str:
        """The sender's id, the same across its retries; the broker's where the sender gave none."""
        return self.properties.get(Property.UNIQ_KEY) or self.offset_msg_id

    @property
    def offset_msg_id(self) -> str:
        return offset_msg_id(self.store_host, self.physical_offset)

    @property
    def message_queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def deliver_timestamp(self) -> int | None:
        """When a delayed message was due; None for one that was not delayed."""
        text = self.properties.get(Property.TIMER_DELIVER_MS)
        return int(text) if text and Property.REAL_TOPIC in self.properties else None


def offset_msg_id(store_host: HostAddress, physical_offset: int) -> str:
    """The id a broker gives: its address and the physical offset, as upper-case hex.

    Source: ``MessageDecoder.createMessageId``; 32 characters, 56 for IPv6.
    """
    return f"{_host_hex(store_host)}{physical_offset:016X}"


def offset_msg_ids(store_host: HostAddress, physical_offsets: Iterable[int]) -> list[str]:
    """`offset_msg_id` for several."""
    host = _host_hex(store_host)
    return [f"{host}{physical_offset:016X}" for physical_offset in physical_offsets]


@lru_cache(maxsize=64)
def _host_hex(host: HostAddress) -> str:
    family = socket.AF_INET6 if ":" in host.ip else socket.AF_INET
    return f"{socket.inet_pton(family, host.ip).hex()}{host.port:08x}".upper()


class _UniqueIds:
    """RocketMQ's client ids: address, process, a number of this start, time, counter; 32 hex digits.

    Source: ``MessageClientIDSetter``. The class loader's hash, which tells two clients of one process
    apart in Java, is a random number here.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new series; a forked child must not repeat its parent's."""
        self._prefix = f"7F000001{os.getpid() & 0xFFFF:04X}{secrets.randbits(32):08X}"
        self._start_ms = time.time_ns() // 1_000_000 - 86_400_000
        self._stem_ms, self._stem = -1, ""
        self._counter = itertools.count()

    def next(self) -> str:
        now_ms = time.time_ns() // 1_000_000
        if now_ms != self._stem_ms:
            self._stem = f"{self._prefix}{now_ms - self._start_ms & 0xFFFF_FFFF:08X}"
            self._stem_ms = now_ms  # last: another thread may use the old stem, which the counter keeps unique
        return f"{self._stem}{next(self._counter) & 0xFFFF:04X}"


_unique_ids = _UniqueIds()
os.register_at_fork(after_in_child=_unique_ids.restart)
create_unique_id = _unique_ids.next


def join_keys(keys: str | Iterable[str]) -> str:
    """Business keys as the one property RocketMQ keeps them in: separated by blanks."""
    return keys if isinstance(keys, str) else " ".join(keys)


def copy_properties(properties: Mapping[str, str], *without: str) -> dict[str, str]:
    """A copy of *properties* that leaves some out."""
    return {name: value for name, value in properties.items() if name not in without}
