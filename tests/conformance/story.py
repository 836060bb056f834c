"""What the conformance tests put into a folder, and how they read it with the embedded broker."""

from __future__ import annotations

from typing import NamedTuple

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.store import FlushDiskType

ORDERS = "orders"
BATCHES = "batches"
BIG = "big"
LATER = "later"
MUCH_LATER = "much-later"
IPV6 = "ipv6"
LONG_TOPIC = "%RETRY%" + "long-group-name-" * 12
"""199 characters: more than the one byte of a V1 record can tell."""
READERS = "readers"

LEVELS = "1s 2s 12s 2h"
WINDOW_SLOTS = 6


def settings(port: int, **changes: object) -> EmbeddedSettings:
    """Small files, so that several are met; a short roll window; ids that name the port that RocketMQ listens on."""
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


class Sent(NamedTuple):
    """A message as the sender knows it. *due_ms* is 0 for one that does not wait."""

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
    result = broker.send(message, queue)
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


def read_all(broker: Broker, topic: str) -> list[MessageExt]:
    """All messages of *topic*, queue by queue."""
    found = []
    for queue in broker.queues(topic):
        at = broker.min_offset(queue)
        while at < broker.max_offset(queue):
            result = broker.pull(queue, at)
            found += result.messages
            at = result.next_begin_offset
    return found
