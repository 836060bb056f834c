"""Rows of the pending view, built column by column, equal the pending messages that the broker lists. Without a JVM."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the view needs PySpark")

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.spark.pending.reader import create_reader
from mqtemplate.testing import Harness

LONG_TOPIC = "t" * 127


def rows(broker: EmbeddedBroker, **options: str) -> list[dict[str, Any]]:
    reader = create_reader({"view": "pending", "store": str(broker.path), **options})
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    for row in found:
        for name in ("deliverTime", "bornTimestamp", "storeTimestamp"):
            row[name] = round(row[name].timestamp() * 1_000)
    return sorted(found, key=lambda row: row["handle"])


def as_row(message: PendingMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "deliverTime": message.deliver_ms,
        "delayLevel": message.delay_level,
        "tags": message.tags,
        "keys": message.keys,
        "msgId": message.msg_id,
        "bodySize": message.body_size,
        "rollCount": message.roll_count,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "handle": message.handle,
        "pendingKey": message.pending_key,
    }


def listed(broker: EmbeddedBroker, **query: str) -> list[dict[str, Any]]:
    messages = broker.delayed.pending(PendingQuery(**query), 1_000).messages  # type: ignore[arg-type]
    return sorted(map(as_row, messages), key=lambda row: row["handle"])


def fill(broker: EmbeddedBroker, seed: int) -> None:
    """Send levels and timers of all kinds; cancel and move some, and let time pass, so that some are rolled."""
    choose = random.Random(seed)
    handles = []
    for number in range(200):
        properties = {"KEYS": f"k{number} größe", "TAGS": choose.choice(["late", "früh"])}
        for name in choose.sample(sorted(properties), choose.randrange(3)):
            del properties[name]
        if choose.random() < 0.4:
            properties["DELAY"] = str(choose.randrange(5, 19))
        else:
            properties["TIMER_DELAY_MS"] = str(choose.choice([90_000, 3_600_000, 30 * 86_400_000]) + number)
        if choose.random() < 0.2:
            properties[Property.PENDING_KEY] = f"cart-{number}"
        topic = choose.choice(["orders", "invoices", LONG_TOPIC])
        handles.append(broker.sends.send(Message(topic, b"x" * choose.randrange(1, 300), properties)).handle)
    for handle in choose.sample(handles, 20):
        assert handle is not None
        broker.delayed.cancel(handle)
    for handle in choose.sample(handles, 20):
        assert handle is not None
        broker.delayed.reschedule(handle, broker.clock.now_ms() + choose.randrange(1, 86_400_000))


@pytest.mark.parametrize("seed", range(3))
def test_each_column_equals_that_of_the_listed_message(served: EmbeddedBroker, seed: int) -> None:
    fill(served, seed)
    Harness(served).advance("49h")

    assert rows(served) == listed(served) != []
    assert rows(served, topic="orders") == listed(served, topic="orders") != []


def test_large_bodies_are_read_in_several_parts(served: EmbeddedBroker) -> None:
    for number in range(12):
        served.sends.send(Message("orders", bytes(3 << 20), {"TIMER_DELAY_MS": "60000", "KEYS": f"k{number}"}))

    assert rows(served) == listed(served)
    assert len(rows(served)) == 12


def test_a_damaged_record_is_an_error_that_names_the_file(served: EmbeddedBroker) -> None:
    served.sends.send(Message("orders", b"body", {"TIMER_DELAY_MS": "60000"}))
    assert served.path is not None
    (log,) = (served.path / "commitlog").iterdir()
    data = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(data.index(b"body"))
        file.write(b"B")

    with pytest.raises(CorruptRecordError, match="its body does not match its CRC-32") as caught:
        rows(served)
    assert log.name in str(caught.value)
