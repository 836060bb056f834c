"""The messages that the conformance tests store, and the embedded broker that reads them."""

from __future__ import annotations

import time
from typing import NamedTuple

from bench.peer.java_client import PeerMessage
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.store.settings import FlushDiskType

ORDERS = "orders"
BATCHES = "batches"
BIG = "big"
DELAYED = "delayed"
FAR_DELAYED = "far-delayed"
IPV6 = "ipv6"
LONG_TOPIC = "%RETRY%" + "long-group-name-" * 12
"""199 characters: more than the one length byte of a V1 record can hold."""
NUMBERED = "numbered"
READERS = "readers"

LEVELS = "1s 2s 8s 2h"
LEVEL_MS = (0, 1_000, 2_000, 8_000, 7_200_000)
WINDOW_SLOTS = 4
"""Slots of one second. A timer beyond one window is rolled once, a timer beyond two windows is rolled twice."""


def settings(port: int, **changes: object) -> EmbeddedSettings:
    """Return settings with small files, so that tests need several, a short roll window, and RocketMQ's port in IDs."""
    values: dict[str, object] = {
        "listen_host": HostAddress("127.0.0.1", port),
        "flush_disk_type": FlushDiskType.ASYNC_FLUSH,
        "mapped_file_size_commit_log": 1 << 20,
        "mapped_file_size_consume_queue": 2_000,
        "mapped_file_size_timer_log": 600,
        "max_hash_slot_num": 100,
        "max_index_num": 700,
        "max_message_size": 100_000,
        "message_delay_level": LEVELS,
        "timer_roll_window_slot": WINDOW_SLOTS,
        "flush_consumer_offset_interval_ms": 200,
    }
    return EmbeddedSettings(**(values | changes))  # type: ignore[arg-type]


NO_SIZES: dict[str, object] = dict.fromkeys(
    (
        "mapped_file_size_commit_log",
        "mapped_file_size_consume_queue",
        "mapped_file_size_timer_log",
        "max_hash_slot_num",
        "max_index_num",
    )
)
"""Changes of `settings` with which the sizes are the folder's."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Sent(NamedTuple):
    """A message as its producer knows it. *due_ms* is 0 for a message without a delay."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    tags: str | None
    keys: str | None
    msg_id: str
    offset_msg_id: str
    user: str | None = None
    due_ms: int = 0


def send(broker: EmbeddedBroker, message: Message, queue_id: int | None = None, delay_ms: int = 0) -> Sent:
    """Send one message with the embedded broker."""
    queue = None if queue_id is None else MessageQueue(message.topic, broker.name, queue_id)
    due_ms = broker.clock.now_ms() + delay_ms if delay_ms else 0
    result = broker.sends.send(message, queue)
    return Sent(
        message.topic,
        result.message_queue.queue_id,
        result.queue_offset,
        message.body,
        message.tags,
        message.keys,
        result.msg_id,
        result.offset_msg_id,
        message.properties.get("user"),
        due_ms,
    )


def send_delayed(broker: EmbeddedBroker, text: str, *, level: int = 0, delay_ms: int = 0) -> Sent:
    """Send one message to `DELAYED` with the embedded broker."""
    option = {"DELAY": str(level)} if level else {"TIMER_DELAY_MS": str(delay_ms)}
    message = Message(DELAYED, text.encode(), {"TAGS": "late", "KEYS": text.replace(" ", "-"), **option})
    return send(broker, message, delay_ms=LEVEL_MS[level] or delay_ms)


def read_all(broker: Broker, topic: str) -> list[MessageExt]:
    """Return all messages of *topic*, queue by queue."""
    found = []
    for queue in broker.queues(topic):
        at = broker.reader.min_offset(queue)
        while at < broker.reader.max_offset(queue):
            result = broker.reader.pull(queue, at)
            found += result.messages
            at = result.next_begin_offset
    return found


def comparable(sent: Sent) -> tuple[object, ...]:
    """Return what both clients must read of a message."""
    position = sent.topic, sent.queue_id, sent.queue_offset
    return *position, sent.body, sent.tags or "", sent.keys, sent.msg_id, sent.user or ""


def as_sent(message: MessageExt | PeerMessage) -> tuple[object, ...]:
    """Return the same of a message that one of them has read."""
    position = message.topic, message.queue_id, message.queue_offset
    user = message.properties.get("user", "")
    return *position, message.body, message.tags or "", message.keys, message.msg_id, user
