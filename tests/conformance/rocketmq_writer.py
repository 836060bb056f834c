"""Messages that RocketMQ writes to a store, which the embedded broker opens afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.store.tables import load_json
from tests.conformance.store_contents import (
    BATCHES,
    BIG,
    DELAYED,
    FAR_DELAYED,
    LEVEL_MS,
    LONG_TOPIC,
    ORDERS,
    READERS,
    Sent,
    now_ms,
    settings,
)

TIMEOUT_MS = 45_000
"""Maximum wait for RocketMQ's client.

Some of its intervals are 20 s or 30 s, and on a busy machine the first attempt may fail. So it allows for two attempts.
"""


class Written(NamedTuple):
    """The contents of a store.

    Attributes:
        stored: Messages without a delay.
        delivered: Delayed messages that RocketMQ delivered.
        pending: Delayed messages that are due after some seconds.
        far: Delayed messages that are due after about two hours.
        retried: Body of an order that a consumer of `READERS` sent back. All other orders were consumed.
    """

    stored: list[Sent]
    delivered: list[Sent]
    pending: list[Sent]
    far: list[Sent]
    retried: bytes


def compressed_body() -> bytes:
    """Return a body longer than 4 KiB: RocketMQ's client compresses it."""
    return b"again and again " * 1_000


def write(folder: Path, names: NameServer, java: JavaClient, port: int, how: str, **options: object) -> Written:
    """Let RocketMQ write a store in *folder*, and stop it: "stopped" or "killed"."""
    all_options = broker_options(settings(port)) | {"listenPort": port} | options
    _create_long_group(folder)
    with RocketMQ(folder, names, all_options) as broker:
        java.connect()
        stored = _store(java)
        delivered = send_delayed(java, [("level 1, RocketMQ", {"level": 1}), ("timer, RocketMQ", {"delay_ms": 700})])
        orders = [sent.body for sent in stored if sent.topic == ORDERS]
        assert len(java.consume(READERS, ORDERS, len(orders) - 1, TIMEOUT_MS, fail=orders[:1])) == len(orders) - 1
        assert len(java.read(DELAYED, 2, TIMEOUT_MS)) == 2
        broker.wait_for_file("config/consumerOffset.json", _has_all_orders)
        pending = send_delayed(
            java,
            [
                ("level 1 pending", {"level": 1}),
                ("level 3 pending", {"level": 3}),
                *((f"timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (4_100, 5_000, 5_500, 7_345)),
                ("timer in seconds", {"delay_sec": 6}),
                ("timer at a time", {"deliver_ms": now_ms() + 7_111}),
                ("timer beyond two windows", {"delay_ms": 9_500}),
            ],
        )
        hours = [
            ("far level", {"level": 4}),
            ("far timer", {"delay_ms": 7_000_000}),
            ("far seconds", {"delay_sec": 6_500}),
        ]
        far = send_delayed(java, hours, FAR_DELAYED)
        _recall(java, DELAYED, 6_700)
        _recall(java, FAR_DELAYED, 7_100_000)
        if how == "stopped":
            broker.stop()
        else:
            broker.kill()
    return Written(stored, delivered, pending, far, orders[0])


def _has_all_orders(table: str) -> bool:
    """Return True if the offsets of `READERS` are after the five orders of each queue."""
    try:
        offsets = load_json(table)["offsetTable"]
    except ValueError:
        return False  # RocketMQ is writing the file.
    return bool(offsets.get(f"{ORDERS}@{READERS}") == dict.fromkeys("0123", 5))


def _create_long_group(folder: Path) -> None:
    """Create a group with a long name. RocketMQ accepts it in the file, but not from a client."""
    group = LONG_TOPIC.removeprefix("%RETRY%")
    (folder / "config").mkdir()
    table = {"subscriptionGroupTable": {group: {"groupName": group}}}
    (folder / "config/subscriptionGroup.json").write_text(json.dumps(table))


def _store(java: JavaClient) -> list[Sent]:
    orders = [
        {
            "topic": ORDERS,
            "body": f"örder {number}".encode(),
            "tags": "paid" if number % 2 else "öffen",
            "keys": f"order-{number} all",
            "queue_id": number % 4,
            "properties": {"user": f"héllo {number}"},
        }
        for number in range(20)
    ]
    big = [{"topic": BIG, "body": b"%02d" % number * 1_900, "keys": f"big-{number}"} for number in range(600)]
    compressed = [{"topic": BIG, "body": compressed_body(), "keys": "compressed"}]
    long = [{"topic": LONG_TOPIC, "body": b"long", "keys": "long-0"}]
    batch = [{"topic": BATCHES, "body": b"in batch %d" % number, "keys": f"batch-{number}"} for number in range(5)]
    messages = [*orders, *big, *compressed, *long]
    sent = [_sent(message, result) for message, result in zip(messages, java.send(*messages), strict=True)]
    result = java.send_batch(*batch)
    ids = zip(batch, result["msg_id"].split(","), result["offset_msg_id"].split(","), strict=True)
    return sent + [
        _sent(message, result | {"queue_offset": result["queue_offset"] + at, "msg_id": own, "offset_msg_id": offset})
        for at, (message, own, offset) in enumerate(ids)
    ]


def _sent(message: dict[str, object], result: dict[str, object], due_ms: int = 0) -> Sent:
    properties = message.get("properties", {})
    assert isinstance(properties, dict)
    values = {name: message.get(name) for name in ("topic", "body", "tags", "keys")}
    position = {name: result[name] for name in ("queue_id", "queue_offset", "msg_id", "offset_msg_id")}
    return Sent(**values, **position, user=properties.get("user"), due_ms=due_ms)  # type: ignore[arg-type]


def send_delayed(java: JavaClient, messages: list[tuple[str, dict[str, int]]], topic: str = DELAYED) -> list[Sent]:
    """Send delayed messages with RocketMQ's client. Each text must be unique."""
    sent = []
    for text, option in messages:
        message: dict[str, object] = {
            "topic": topic,
            "body": text.encode(),
            "tags": "late",
            "keys": text.replace(" ", "-"),
        }
        delay_ms = LEVEL_MS[option.get("level", 0)] + option.get("delay_ms", 0) + option.get("delay_sec", 0) * 1_000
        due_ms = option.get("deliver_ms") or now_ms() + delay_ms
        sent.append(_sent(message, java.send(message | option)[0], due_ms))
    return sent


def _recall(java: JavaClient, topic: str, delay_ms: int) -> None:
    """Send a delayed message, and recall it."""
    message = {"topic": topic, "body": b"recalled", "keys": "recalled", "delay_ms": delay_ms}
    java.recall(topic, java.send(message)[0]["recall_handle"])
