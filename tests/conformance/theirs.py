"""What RocketMQ is made to write into a folder, for the tests in which the embedded broker opens it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.store.files.json_files import load_json
from tests.conformance.story import BATCHES, BIG, LATER, LONG_TOPIC, MUCH_LATER, ORDERS, READERS, Sent, settings

__all__ = ["PATIENCE_MS", "Written", "compressed_body", "now_ms", "send_later", "write"]

PATIENCE_MS = 45_000
"""How long is waited for RocketMQ's client. It does much by the clock, 20 s or 30 s apart (queues of a group, routes,
heartbeats), and a busy machine can spoil a first attempt: so patience ends behind the second. `bench.peer.jvm` lets the
client divide queues every second besides."""

LEVEL_MS = (0, 1_000, 2_000, 12_000, 7_200_000)


class Written(NamedTuple):
    """What is in the folder.

    Attributes:
        stored: Messages that did not wait.
        delivered: Messages that waited, and that RocketMQ handed over.
        waiting: Messages that still wait, for some seconds.
        far: Messages that wait for about two hours.
        retried: The body of an order that a consumer of `READERS` gave back; all others were handled.
    """

    stored: list[Sent]
    delivered: list[Sent]
    waiting: list[Sent]
    far: list[Sent]
    retried: bytes


def compressed_body() -> bytes:
    """Longer than 4 KiB, from where on RocketMQ's client compresses."""
    return b"again and again " * 1_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def write(folder: Path, names: NameServer, java: JavaClient, port: int, how: str, **options: object) -> Written:
    """Let RocketMQ fill *folder*, and end it: "stopped" or "killed"."""
    given = broker_options(settings(port)) | {"listenPort": port} | options
    _admit_long_group(folder)
    with RocketMQ(folder, names, given) as broker:
        java.connect()
        stored = _store(java)
        delivered = send_later(java, [("level 1, theirs", {"level": 1}), ("timer, theirs", {"delay_ms": 700})])
        orders = [sent.body for sent in stored if sent.topic == ORDERS]
        assert len(java.consume(READERS, ORDERS, len(orders) - 1, PATIENCE_MS, fail=orders[:1])) == len(orders) - 1
        assert len(java.read(LATER, 2, PATIENCE_MS)) == 2
        broker.wait_for_file("config/consumerOffset.json", _has_all_orders)
        waiting = send_later(
            java,
            [
                ("level 1 waiting", {"level": 1}),
                ("level 3 waiting", {"level": 3}),
                *((f"timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (8_100, 9_000, 9_500, 12_345)),
                ("timer in seconds", {"delay_sec": 10}),
                ("timer at a time", {"deliver_ms": now_ms() + 11_111}),
                ("timer beyond two windows", {"delay_ms": 15_000}),
            ],
        )
        hours = [
            ("far level", {"level": 4}),
            ("far timer", {"delay_ms": 7_000_000}),
            ("far seconds", {"delay_sec": 6_500}),
        ]
        far = send_later(java, hours, MUCH_LATER)
        _recall(java, LATER, 9_700)
        _recall(java, MUCH_LATER, 7_100_000)
        if how == "stopped":
            broker.stop()
        else:
            broker.kill()
    return Written(stored, delivered, waiting, far, orders[0])


def _has_all_orders(table: str) -> bool:
    """Whether the offsets of `READERS` stand behind the five orders of each queue."""
    try:
        offsets = load_json(table)["offsetTable"]
    except ValueError:
        return False  # it is being written
    return bool(offsets.get(f"{ORDERS}@{READERS}") == dict.fromkeys("0123", 5))


def _admit_long_group(folder: Path) -> None:
    """RocketMQ keeps records of a group with a long name, but would not let a client make one."""
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
    packed = [{"topic": BIG, "body": compressed_body(), "keys": "packed"}]
    long = [{"topic": LONG_TOPIC, "body": b"long", "keys": "long-0"}]
    batch = [{"topic": BATCHES, "body": b"in batch %d" % number, "keys": f"batch-{number}"} for number in range(5)]
    sent = _send(java, [*orders, *big, *packed, *long])
    result = java.send_batch(*batch)
    return sent + [
        _sent(message, result | {"queue_offset": result["queue_offset"] + at, "msg_id": own, "offset_msg_id": offset})
        for at, (message, own, offset) in enumerate(
            zip(batch, result["msg_id"].split(","), result["offset_msg_id"].split(","), strict=True)
        )
    ]


def _send(java: JavaClient, messages: list[dict[str, object]]) -> list[Sent]:
    return [_sent(message, result) for message, result in zip(messages, java.send(*messages), strict=True)]


def _sent(message: dict[str, object], result: dict[str, object], due_ms: int = 0) -> Sent:
    properties = message.get("properties", {})
    assert isinstance(properties, dict)
    values = {name: message.get(name) for name in ("topic", "body", "tags", "keys")}
    places = {name: result[name] for name in ("queue_id", "queue_offset", "msg_id", "offset_msg_id")}
    return Sent(**values, **places, user=properties.get("user"), due_ms=due_ms)  # type: ignore[arg-type]


def send_later(java: JavaClient, given: list[tuple[str, dict[str, int]]], topic: str = LATER) -> list[Sent]:
    """Send messages that wait, with RocketMQ's client. A text may come once."""
    sent = []
    for text, option in given:
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
    """Send a message that waits, and take it back."""
    message = {"topic": topic, "body": b"recalled", "keys": "recalled", "delay_ms": delay_ms}
    java.recall(topic, java.send(message)[0]["recall_handle"])
