"""Pending messages as a DataFrame: the same as `pending` and `count_pending`, and changes row by row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.spark import cancel_pending, reschedule_pending
from mqtemplate.spark.pending.reader import create_reader
from mqtemplate.testing import Harness, messages_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def send(broker: EmbeddedBroker, topic: str, key: str, **delay: str) -> str:
    handle = broker.sends.send(Message(topic, b"body", {"KEYS": key, "TAGS": "late", **delay})).handle
    assert handle is not None
    return handle


def view(spark: SparkSession, broker: EmbeddedBroker, **options: str) -> DataFrame:
    return spark.read.format("mqtemplate").options(view="pending", store=str(broker.path), **options).load()


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_the_view_equals_the_pending_messages_of_the_broker(spark: SparkSession, served: EmbeddedBroker) -> None:
    """Levels and timers; what was cancelled or delivered is not in it. Then half of it is cancelled, half moved."""
    handles = [send(served, "orders", f"k{n}", TIMER_DELAY_MS=str(60_000 * (n + 1))) for n in range(20)]
    handles += [send(served, "orders", f"level{n}", DELAY=str(5 + n)) for n in range(5)]
    send(served, "invoices", "other", TIMER_DELAY_MS="90000")
    served.delayed.cancel(handles[3])
    served.delayed.reschedule(handles[4], served.clock.now_ms() + 3_600_000)
    Harness(served).advance("61s")

    rows = view(spark, served).collect()
    orders = view(spark, served, topic="orders")

    listed = served.delayed.pending(PendingQuery(), 1_000).messages
    assert len(rows) == served.delayed.count_pending(PendingQuery()).total == len(listed) > 20
    assert {(row.handle, row.keys, row.tags, row.delayLevel, row.bodySize, row.msgId, row.topic) for row in rows} == {
        (each.handle, each.keys, each.tags, each.delay_level, each.body_size, each.msg_id, each.topic)
        for each in listed
    }
    assert {row.handle: round(row.deliverTime.timestamp() * 1_000) for row in rows} == {
        each.handle: each.deliver_ms for each in listed
    }
    assert orders.count() == served.delayed.count_pending(PendingQuery(topic="orders")).total

    gone = spark.createDataFrame([(handles[3],), (handles[0],), ("no handle",)], "handle string")
    results = cancel_pending(orders.where("delayLevel = 0").select("handle").union(gone), store=str(served.path))
    moved = reschedule_pending(view(spark, served, topic="orders"), delay="2h", broker=served)

    counts = {row.status: row["count"] for row in results.groupBy("status").count().collect()}
    assert counts == {
        "CANCELLED": len([row for row in rows if row.topic == "orders" and not row.delayLevel]) + 1,
        "ALREADY_DELIVERED": 1,
        "ERROR": 1,
    }
    assert {row.status for row in moved.collect()} == {"RESCHEDULED"}
    assert served.delayed.count_pending(PendingQuery(topic="orders")).total == moved.count() > 0
    Harness(served).advance("119m")
    assert {message.keys for message in messages_in(served, "orders")} == {"k0", "level0"}


@pytest.mark.parametrize("delay", [{Property.TIMER_DELAY_MS: "60000"}, {Property.DELAY: "1"}], ids=["timer", "level"])
def test_a_read_of_a_folder_without_an_owner_delivers_nothing(tmp_path: Path, delay: dict[str, str]) -> None:
    """The messages are overdue, and stay pending until a broker opens the folder."""
    store = tmp_path / "store"
    with EmbeddedBroker(store, clock=VirtualClock(start_ms=SystemClock().now_ms() - 3_600_000)) as broker:
        send(broker, "orders", "late", **delay)
        end = broker.engine.store.end_offset
    reader = create_reader({"store": str(store)})

    for _ in range(2):
        rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        assert [row["keys"] for row in rows] == ["late"]

    with EmbeddedBroker(store, clock=VirtualClock()) as broker:
        assert broker.engine.store.end_offset == end
        assert broker.delayed.count_pending(PendingQuery()).total == 1


def test_positions_are_paged_in_the_order_of_their_due_times(served: EmbeddedBroker) -> None:
    """The pages have each message once, also if several are due at one time."""
    import numpy as np

    from mqtemplate.delay.pending_rows import PENDING_DTYPE

    for number in range(50):
        send(served, "orders", f"k{number}", **{Property.TIMER_DELAY_MS: str(1_000 * (1 + number % 3))})
    found: list[tuple[int, int]] = []
    after = (-1, -1)
    while data := served.delayed.pending_positions(PendingQuery(), after, 7):
        page = [(int(row["due_ms"]), int(row["physical_offset"])) for row in np.frombuffer(data, PENDING_DTYPE)]
        found, after = found + page, page[-1]

    assert len(found) == len(set(found)) == 50
    assert found == sorted(found)
