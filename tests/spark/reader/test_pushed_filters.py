"""Filters of a query that the source applies. Without Spark's session: a reader gets them as Spark passes them."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.schema import source_schema
from mqtemplate.spark.source import BatchReader, MqTemplateSource

MINUTE_MS = 60_000


def send(broker: EmbeddedBroker, count: int, *, topic: str = "orders", tags: str = "pay", queue_id: int = 0) -> None:
    for _ in range(count):
        broker.send(Message(topic, b"", {"TAGS": tags}), MessageQueue(topic, broker.name, queue_id))


def reader_of(broker: EmbeddedBroker, **options: str) -> BatchReader:
    given = {"store": str(broker.path), "topic": "orders", **options}
    reader = MqTemplateSource({name.lower(): value for name, value in given.items()}).reader(source_schema())
    assert isinstance(reader, BatchReader)
    return reader


def read(reader: BatchReader, *filters: Filter) -> tuple[list[dict[str, Any]], list[Filter]]:
    """Return the rows that the source passes to Spark, and the filters that Spark evaluates afterwards."""
    left = list(reader.pushFilters(list(filters)))
    reader, partitions = pickle.loads(pickle.dumps((reader, reader.partitions())))
    return [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()], left


def positions(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["queueId"], row["queueOffset"]) for row in rows]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("queueId",), 1)], [(1, 0), (1, 1), (1, 2)]),
        ([In(("queueId",), (0, 7))], [(0, 0), (0, 1), (0, 2)]),
        ([GreaterThan(("queueOffset",), 1)], [(0, 2), (1, 2)]),
        ([GreaterThanOrEqual(("queueOffset",), 1), LessThan(("queueOffset",), 2)], [(0, 1), (1, 1)]),
        ([EqualTo(("queueOffset",), 0), EqualTo(("topic",), "orders")], [(0, 0), (1, 0)]),
        ([LessThanOrEqual(("queueOffset",), 0), EqualTo(("brokerName",), "broker-a")], [(0, 0), (1, 0)]),
        ([EqualTo(("queueId",), 9)], []),
        ([EqualTo(("queueOffset",), 99)], []),
    ],
)
def test_only_selected_queues_and_offsets_are_read(
    broker: EmbeddedBroker, filters: list[Filter], expected: list[tuple[int, int]]
) -> None:
    """Spark does not evaluate these filters again."""
    send(broker, 3, queue_id=0)
    send(broker, 3, queue_id=1)

    rows, left = read(reader_of(broker), *filters)

    assert positions(rows) == expected
    assert left == []


def test_only_selected_tags_are_read(broker: EmbeddedBroker) -> None:
    """ "Aa" and "BB" have the same hash. The tags of the options apply as well."""
    for tags in ("Aa", "BB", "pay", "ship"):
        send(broker, 1, tags=tags)
    one, several = EqualTo(("tags",), "Aa"), In(("tags",), ("Aa", "pay"))

    assert [row["tags"] for row in read(reader_of(broker), one)[0]] == ["Aa"]
    assert [row["tags"] for row in read(reader_of(broker), several)[0]] == ["Aa", "pay"]
    assert [row["tags"] for row in read(reader_of(broker, tags="pay || ship"), several)[0]] == ["pay"]
    assert [row["tags"] for row in read(reader_of(broker, sql="TAGS = 'pay'"), several)[0]] == ["pay"]
    assert read(reader_of(broker), one)[1] == [one]


def test_messages_around_the_selected_store_times_are_read(tmp_path: Path) -> None:
    """A broker's clock may be set back, so some more are read, and Spark evaluates the filter again."""
    clock = VirtualClock(start_ms=1_000 * MINUTE_MS)
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        for _ in range(20):
            send(broker, 1)
            clock.move_ms(MINUTE_MS)
        fifth, tenth = (datetime.fromtimestamp(60 * (1_000 + minute), UTC) for minute in (5, 10))
        since, before = GreaterThanOrEqual(("storeTimestamp",), fifth), LessThan(("storeTimestamp",), tenth)

        rows, left = read(reader_of(broker), since, before)

    assert [row["queueOffset"] for row in rows] == list(range(4, 11))
    assert left == [since, before]


def test_messages_of_a_delay_level_are_selected_by_their_tags(broker: EmbeddedBroker) -> None:
    """Their consume queue has the due time in place of the tag's hash."""
    for tags in ("pay", "ship"):
        broker.send(Message("orders", b"", {"TAGS": tags, "DELAY": "5"}))
    pay = EqualTo(("tags",), "pay")

    for reader, filters in (
        (reader_of(broker, topic="SCHEDULE_TOPIC_XXXX"), [pay]),
        (reader_of(broker, topic="SCHEDULE_TOPIC_XXXX", tags="pay"), []),
    ):
        assert [row["tags"] for row in read(reader, *filters)[0]] == ["pay"]


def test_other_filters_are_left_to_spark(broker: EmbeddedBroker) -> None:
    """Other columns, other comparisons, and values of other types."""
    send(broker, 2)
    filters = [
        EqualTo(("keys",), "k"),
        Not(EqualTo(("queueId",), 0)),
        StringStartsWith(("tags",), "p"),
        IsNotNull(("tags",)),
        In(("tags",), ("pay", None)),
        EqualTo(("queueOffset",), 1.5),
        EqualTo(("properties", "TAGS"), "pay"),
    ]

    rows, left = read(reader_of(broker), *filters)

    assert len(rows) == 2
    assert left == filters


def test_a_session_that_passes_no_filters_on_can_read(broker: EmbeddedBroker) -> None:
    """Spark refuses readers with a method for filters there, and recognises it by its function."""
    send(broker, 1)
    reader = reader_of(broker)

    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters
    assert len(read(reader)[0]) == 1
